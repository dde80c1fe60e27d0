"""The first half of `make demo`: writes its images into ./demo-work, where `shardmill run` then works."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pipeline.demo import WORKDIR
from pipeline.demo.data import write_demo_images
from shardmill.errors import UsageError
from shardmill.jobs.process import report_error

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
        shutil.rmtree(Path(WORKDIR, name), ignore_errors=True)
    sys.stderr.write(f"{write_demo_images(Path(WORKDIR, 'images')).words}\n")


def main() -> int:
    """Prepare; returns the exit code."""
    try:
        prepare()
    except (Exception, KeyboardInterrupt) as error:  # the outermost frame: one line, and the error's code
        return report_error(error, debug=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
