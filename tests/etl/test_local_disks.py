"""Local disk usage of a machine that writes shards: bounded for a dataset of any size."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from etl.engines import ENGINES
from tests.lab.commands import BIN, ENVIRONMENT
from tests.lab.datasets import write_images
from tests.lab.scale import in_drills
from tests.services.marked import MARK, end_marked, marked

_NUM_IMAGES, _OF_A_UNIT, _IMAGE_BYTES = 144, 8, 256 * 256 * 3
_NUM_WORKERS = 2


def bytes_below(folder: Path, mark: str = "") -> int:
    """Of its files; with those that processes with the mark still have open, and nobody can see."""
    paths = [os.path.join(directory, name) for directory, _, names in os.walk(folder) for name in names]
    for descriptors in (f"/proc/{pid}/fd" for pid in (marked(mark) if mark else ())):
        # It may have ended.
        with suppress(OSError):
            paths += [f"{descriptors}/{number}" for number in os.listdir(descriptors)]
    found: dict[int, int] = {}
    for path in paths:
        with suppress(OSError):
            if not path.startswith("/proc/") or os.readlink(path).startswith(str(folder)):
                status = os.stat(path)
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


@pytest.mark.starts("program")
@pytest.mark.parametrize("engine", ["local", *in_drills(*(name for name in ENGINES if name not in ("auto", "local")))])
def test_local_disks_hold_no_more_than_the_units_under_way(engine: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=_NUM_IMAGES, image_size=256)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    settings = {
        "etl.engine": engine, "etl.image_size": 256, "etl.encoding": "raw", "etl.unit_min_images": _OF_A_UNIT,
        "spark.master": f"local[{_NUM_WORKERS}]", "etl.num_workers": _NUM_WORKERS,
    }  # fmt: skip
    chosen = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [str(BIN / "shardmill"), "etl", str(tmp_path / "images"), "--workdir", str(tmp_path / "work")]
    mark = f"disks-{secrets.token_hex(8)}"
    java = f"-Djava.io.tmpdir={scratch}"
    own = {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch), "JAVA_TOOL_OPTIONS": java, MARK: mark}
    said, peak = tmp_path / "said", 0
    try:
        with said.open("w") as output:
            job = subprocess.Popen([*command, *chosen], env={**ENVIRONMENT, **own}, stdout=output, stderr=output)
        while job.poll() is None:
            peak = max(peak, bytes_below(scratch, mark))
            time.sleep(0.01)
    finally:
        end_marked(mark)
    assert job.returncode == 0, said.read_text()[-3000:]
    assert bytes_below(tmp_path / "work" / "dataset" / "shards") > _NUM_IMAGES * _IMAGE_BYTES
    assert 0 < peak < 2 * _NUM_WORKERS * _OF_A_UNIT * _IMAGE_BYTES, f"{peak:,} bytes of scratch"
