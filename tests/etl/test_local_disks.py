"""What lies on a machine's own disk while it makes shards: what is under way, whatever the size of the dataset."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from etl.engines import ENGINES
from tests.pipeline.command import ENVIRONMENT
from tests.support import write_images

_NUM_IMAGES, _OF_A_UNIT, _IMAGE_BYTES = 144, 8, 256 * 256 * 3
_NUM_WORKERS = 2


def bytes_below(folder: Path) -> int:
    found = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            # It may be gone by now.
            with suppress(OSError):
                found += os.stat(os.path.join(directory, name)).st_blocks * 512
    return found


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "auto"])
def test_local_disks_hold_no_more_than_the_units_under_way(engine: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=_NUM_IMAGES, image_size=256)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    settings = {
        "etl.engine": engine, "etl.image_size": 256, "etl.encoding": "raw", "etl.unit_min_images": _OF_A_UNIT,
        "spark.master": f"local[{_NUM_WORKERS}]",
    }  # fmt: skip
    chosen = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [
        sys.executable,
        "-m",
        "pipeline.cli",
        "etl",
        str(tmp_path / "images"),
        "--workdir",
        str(tmp_path / "work"),
    ]
    own = {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch)}
    said, peak = tmp_path / "said", 0
    with said.open("w") as output:
        job = subprocess.Popen([*command, *chosen], env={**ENVIRONMENT, **own}, stdout=output, stderr=output)
    while job.poll() is None:
        peak = max(peak, bytes_below(scratch))
        time.sleep(0.01)
    assert job.returncode == 0, said.read_text()[-3000:]
    assert bytes_below(tmp_path / "work" / "dataset" / "shards") > _NUM_IMAGES * _IMAGE_BYTES
    assert 0 < peak < 2 * _NUM_WORKERS * _OF_A_UNIT * _IMAGE_BYTES, f"{peak:,} bytes of scratch"
