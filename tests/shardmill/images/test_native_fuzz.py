"""The native kernel reads and writes nothing outside of its buffers, whatever the bytes: it runs under sanitizers."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.scale import usually

pytest.importorskip("shardmill_native", reason="the native kernel is not built (scripts/setup.sh says why)")
_NATIVE = Path(__file__).parents[3] / "native"
_SANITIZE = "-fsanitize=address,undefined"


@pytest.mark.drill
def test_damaged_input_breaks_no_rule_of_c(tmp_path: Path):
    compiler = shutil.which("gcc")
    libraries = [_library(compiler, name) for name in ("asan", "ubsan")] if compiler else []
    if not all(Path(library).is_absolute() for library in libraries) or not libraries:
        pytest.skip("gcc with libasan and libubsan is needed")
    shutil.copytree(_NATIVE, tmp_path / "native", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    flags = {"CC": str(compiler), "CFLAGS": f"{_SANITIZE} -fno-sanitize-recover=all -g -O1", "LDFLAGS": _SANITIZE}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "built")]
    subprocess.run(build, cwd=tmp_path / "native", env={**os.environ, **flags}, check=True)
    seed, count = random.SystemRandom().randrange(1 << 32), usually(100_000, 1_000_000)
    print(f"seed {seed}")
    # The sanitizers' libraries must come before Python's; what Python keeps until its end is no leak.
    environment = {**os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    script = Path(__file__).parent / "fuzz_native.py"
    ended = subprocess.run(
        [sys.executable, script, tmp_path / "built", str(seed), str(count)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert f"{count} damaged inputs" in ended.stdout and " 0 decoded" not in ended.stdout


def _library(compiler: str, name: str) -> str:
    found = subprocess.run([compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True)
    return found.stdout.strip()
