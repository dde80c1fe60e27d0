"""The first half of `make demo`: writes its images into ./demo-work, where `shardmill run` then works."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pipeline.demo.data import write_demo_images
from shardmill.errors import UsageError
from shardmill.jobs.process import report_error

WORKDIR = Path("demo-work")
CONFIG = Path("examples/demo.toml")
# Only what a demo makes is removed: the folder may hold files of the user, too.
LEFTOVERS = ("images", "dataset", "runs", "models")


def prepare() -> None:
    """An empty ./demo-work with fresh images. Raises UsageError outside the repository's root."""
    if not CONFIG.is_file():
        raise UsageError(
            f"no {CONFIG} in {Path.cwd()}", "expected the root of the repository", "cd there, or make demo"
        )
    for name in LEFTOVERS:
        shutil.rmtree(WORKDIR / name, ignore_errors=True)
    images = write_demo_images(WORKDIR / "images")
    sys.stderr.write(
        f"demo: {images.num_digits:,} real digits and {len(images.odd_files)} odd files in {images.folder}; "
        f"{images.num_accepted:,} of {images.num_files:,} should become samples\n"
    )


def main() -> int:
    """Prepare; returns the exit code."""
    try:
        prepare()
    except (Exception, KeyboardInterrupt) as error:  # the outermost frame: one line, and the error's code
        return report_error(error, debug=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
