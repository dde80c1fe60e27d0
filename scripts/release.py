"""`make release`: what is published, in dist/: sdist, wheels, an SBOM of the lock file, and the SHA-256 of each.

Both are built twice, from copies of the tracked files in two folders, and must have the same bytes; times in them are
those of the last commit. It needs uv, a C compiler and libjpeg-turbo's headers; its tools are the group `release` of
pyproject.toml, in the versions of uv.lock.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SBOM = "shardmill.cdx.json"
MACHINES = ("x86_64", "aarch64")
"""Of the kernel's wheels; that of another machine than this one needs its compiler and libjpeg-turbo here."""


def release(dist: Path) -> list[Path]:
    """Build, check and compare; then the files are in `dist`, in place of those of an earlier call."""
    with tempfile.TemporaryDirectory(prefix="shardmill-release-") as scratch:
        first, second = (build(Path(scratch) / name) for name in ("a", "longer-name"))
        digests = [_digests(first), _digests(second)]
        if digests[0] != digests[1]:
            different = sorted(name for name, _ in digests[0].items() ^ digests[1].items())
            raise SystemExit(f"not the same bytes in two builds: {', '.join(dict.fromkeys(different))}")
        _tool("twine", "check", "--strict", *first.glob("*.whl"), *first.glob("*.tar.gz"))
        sums = "".join(f"{digest}  {name}\n" for name, digest in digests[0].items())
        (first / "SHA256SUMS").write_text(sums, encoding="utf-8")
        dist.mkdir(parents=True, exist_ok=True)
        for pattern in ("shardmill*.whl", "shardmill*.tar.gz"):
            for old in dist.glob(pattern):
                old.unlink()
        return [Path(shutil.copy(file, dist)) for file in sorted(first.iterdir())]


def build(folder: Path) -> Path:
    """What is published, in a folder inside of `folder`."""
    source, out = folder / "source", folder / "out"
    for file in _run("git", "ls-files", "-z").split("\0"):
        if (ROOT / file).is_file():
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, source / file)
    _run("uv", "build", "--quiet", *_constraints(folder), "--out-dir", out, source)
    machines = [machine for machine in MACHINES if machine == platform.machine() or cross_compiler(machine)]
    for machine in machines:
        _build_kernel(machine, source / "native", out, folder / machine)
    (out / SBOM).write_text(_sbom(machines), encoding="utf-8")
    # uv ignores what it builds for git.
    (out / ".gitignore").unlink(missing_ok=True)
    return out


def cross_compiler(machine: str) -> str | None:
    """The path of Debian's compiler for another machine, whose libjpeg-turbo stands in `/usr/lib/MACHINE-linux-gnu`."""
    return shutil.which(f"{machine}-linux-gnu-gcc")


def _build_kernel(machine: str, source: Path, out: Path, folder: Path) -> None:
    """The kernel's wheel with its libjpeg-turbo, for every glibc that it can run on."""
    # Paths of this machine are in debug sections and, through them, in the build's id.
    flags = {"CFLAGS": "-g0", "LDFLAGS": "-Wl,--build-id=none,--strip-all"}
    repair: tuple[str | Path, ...] = ("auditwheel", "repair", "--wheel-dir", out)
    if machine != platform.machine():
        compiler = str(cross_compiler(machine))
        flags |= {"CC": compiler, "LDSHARED": f"{compiler} -shared", "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
        repair += ("--ldpaths", f"/usr/lib/{machine}-linux-gnu")
    command = ("uv", "build", "--quiet", "--wheel", "--python", "3.11", *_constraints(folder))
    _run(*command, "--out-dir", folder / "kernel", source, environment=flags)
    _tool(*repair, *(folder / "kernel").glob("*.whl"))


def _constraints(folder: Path) -> tuple[str, Path]:
    """Build backends as they are locked, too."""
    folder.mkdir(exist_ok=True)
    file = folder / "constraints.txt"
    exported = _run("uv", "export", "--quiet", "--frozen", "--only-group", "release", "--no-hashes")
    file.write_text(exported, encoding="utf-8")
    return "--build-constraints", file


def _sbom(machines: Iterable[str]) -> str:
    """What the lock file installs with every extra that has no other build of a package, and what the kernel's wheels
    for these machines hold, as CycloneDX.
    """
    arguments = (
        "--frozen",
        "--no-dev",
        "--extra",
        "all",
        "--format",
        "cyclonedx1.5",
        "--preview-features",
        "sbom-export",
    )
    sbom = json.loads(_run("uv", "export", "--quiet", *arguments))
    del sbom["serialNumber"]
    sbom["components"] += [_libjpeg_turbo(machine) for machine in machines]
    sbom["metadata"]["timestamp"] = datetime.fromtimestamp(int(_epoch()), UTC).isoformat()
    return json.dumps(sbom, indent=1, ensure_ascii=False) + "\n"


def _libjpeg_turbo(machine: str) -> dict[str, Any]:
    """The component that `auditwheel` has put into the kernel's wheel, in the version of its header."""
    compiler = "cc" if machine == platform.machine() else str(cross_compiler(machine))
    defined = _run(compiler, "-E", "-dM", "-x", "c", "-include", "stdio.h", "-include", "jpeglib.h", "/dev/null")
    found = re.search(r"^#define LIBJPEG_TURBO_VERSION (\S+)$", defined, re.MULTILINE)
    assert found is not None, f"no LIBJPEG_TURBO_VERSION in the jpeglib.h of {compiler}"
    return {
        "type": "library",
        "bom-ref": f"libjpeg-turbo-{machine}",
        "name": "libjpeg-turbo",
        "version": found[1],
        "description": f"inside of the wheel of shardmill-native for {machine}",
        "licenses": [{"license": {"id": each}} for each in ("IJG", "BSD-3-Clause", "Zlib")],
    }


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def _epoch() -> str:
    return os.environ.get("SOURCE_DATE_EPOCH") or _run("git", "log", "-1", "--format=%ct").strip()


def _tool(*command: str | Path) -> None:
    _run("uv", "run", "--quiet", "--isolated", "--frozen", "--only-group", "release", *command)


def _run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    times = {} if command[0] == "git" else {"SOURCE_DATE_EPOCH": _epoch()}
    # Where scripts/setup.sh puts it if there was none.
    own = Path.home() / ".cache/shardmill/uv/bin"
    inherited = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True,
        env={**inherited, **times, **(environment or {}), "PATH": f"{os.environ['PATH']}:{own}"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    for path in release(Path(sys.argv[1])):
        sys.stdout.write(f"{path}: {path.stat().st_size} bytes\n")
