"""`make bundle`: our packages as one ZIP for `spark-submit --py-files`, the same bytes for the same files.

Any Python 3 runs it, with nothing installed. What is imported from elsewhere must be in the nodes' environment.
"""

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shardmill", "etl", "train", "pipeline")
# The oldest that a ZIP can tell.
TIME = (1980, 1, 1, 0, 0, 0)


def write_bundle(path: Path) -> int:
    """Write it; returns the number of files in it, modules and what lies beside them alike."""
    files = sorted(
        file for package in PACKAGES for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith(".")
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not compressed: what compression gives depends on the release of zlib.
    unfinished = path.with_suffix(".tmp")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as bundle:
        for file in files:
            entry = zipfile.ZipInfo(str(file.relative_to(ROOT)), TIME)
            entry.external_attr = 0o644 << 16
            bundle.writestr(entry, file.read_bytes())
    unfinished.replace(path)
    return len(files)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    sys.stdout.write(f"{target}: {write_bundle(target)} files, {target.stat().st_size} bytes\n")
