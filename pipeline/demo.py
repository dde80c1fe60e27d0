"""`make demo`: write the demo's images into ./demo-work, then run the pipeline on them like any user."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pipeline.cli import app
from pipeline.ending import run_app
from shardmill.errors import UsageError

WORKDIR = Path("demo-work")
CONFIG = Path("examples/demo.toml")
# Only what a demo makes is removed: the folder may hold files of the user, too.
LEFTOVERS = ("images", "dataset", "runs", "models")


def prepare() -> None:
    """An empty ./demo-work with fresh images. Raises UsageError outside the repository's root."""
    from pipeline.demo_data import write_demo_images

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


def main() -> None:
    """Prepare, then become `shardmill run examples/demo.toml --workdir demo-work`."""
    sys.argv = ["shardmill", "run", str(CONFIG), "--workdir", str(WORKDIR), *sys.argv[1:]]
    run_app(app, prepare)


if __name__ == "__main__":
    main()
