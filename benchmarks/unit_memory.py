"""Measures a worker's peak memory while it writes a unit of large photographs that keep their size.

python benchmarks/unit_memory.py --images FOLDER [--listed 25600] [--shard-max-mb 128] [--encoding jpeg] [--archives]

Few photographs are made and listed under many names, of which one unit is written; an archive holds all of them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import simplejpeg
from workloads import find_photos

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.plan import plan_build
from etl.units.units import decode_task, decode_unit, encode_task, encode_unit
from etl.units.write_unit import Decoders, write_unit
from shardmill.images.annotations import MAKE_MASK
from shardmill.images.sandbox import OwnProcessDecoder
from shardmill.jobs.config import DatasetConfig

_NUM_DISTINCT, _HEIGHT, _WIDTH = 40, 1536, 2048
_NUM_ARCHIVES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, type=Path, help="a folder of JPEGs")
    parser.add_argument("--listed", type=int, default=25_600)
    parser.add_argument("--shard-max-mb", type=int, default=128)
    parser.add_argument("--encoding", default="jpeg")
    parser.add_argument("--archives", action="store_true", help="in ZIP files, which are not read in a unit's order")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = _photos(find_photos(arguments.images), Path(folder) / "photos")
        make = _archived if arguments.archives else _linked
        source = make(names, Path(folder) / "source", arguments.listed)
        limit = arguments.shard_max_mb * 1_000_000
        config = EtlConfig(resize_mode="none", encoding=arguments.encoding, shard_max_bytes=limit)
        dataset = DatasetConfig(uri=f"{folder}/dataset")
        plan = plan_build(EtlTree(source=source, dataset=dataset, etl=config), run_id="benchmark")
        unit = max(plan.units, key=lambda unit: unit.num_images)
        for name, data in (("task", encode_task(plan.task)), ("unit", encode_unit(unit))):
            (Path(folder) / name).write_bytes(data)
        mean = plan.listing.source_bytes / plan.num_images / 1e6
        print(
            f"{plan.num_images:,} images of {mean:.2f} MB, {len(plan.units):,} units; of the largest one:", flush=True
        )
        subprocess.run([sys.executable, __file__, "--write", folder], check=True)


def _photos(photos: Sequence[Path], folder: Path) -> list[Path]:
    """Three megapixels with a sensor's grain, some 2 MB each."""
    folder.mkdir()
    made = []
    for number, photo in enumerate(photos[:_NUM_DISTINCT]):
        big_HWC = cv2.resize(simplejpeg.decode_jpeg(photo.read_bytes(), "RGB"), (_WIDTH, _HEIGHT)).astype(np.int16)
        grain_HWC = np.random.RandomState(number).randint(-12, 13, big_HWC.shape, dtype=np.int16)
        pixels_HWC = np.clip(big_HWC + grain_HWC, 0, 255).astype(np.uint8)
        made.append(folder / f"{number}.jpg")
        made[-1].write_bytes(simplejpeg.encode_jpeg(pixels_HWC, 90, colorsubsampling="420"))
    return made


def _linked(photos: Sequence[Path], folder: Path, num_names: int) -> SourceConfig:
    (folder / "any").mkdir(parents=True)
    for number, photo in zip(range(num_names), itertools.cycle(photos), strict=False):
        os.link(photo, folder / "any" / f"{number:06d}.jpg")
    return SourceConfig(uri=str(folder))


def _archived(photos: Sequence[Path], folder: Path, num_names: int) -> SourceConfig:
    folder.mkdir()
    for place in range(_NUM_ARCHIVES):
        with zipfile.ZipFile(folder / f"{place}.zip", "w") as archive:
            for number in range(place, num_names, _NUM_ARCHIVES):
                archive.write(photos[number % len(photos)], f"any/{number:06d}.jpg")
    return SourceConfig(uri=str(folder), kind="zip")


def _write(folder: Path) -> None:
    """Write one unit as a worker does, and print what that took."""
    task, unit = decode_task((folder / "task").read_bytes()), decode_unit((folder / "unit").read_bytes())
    pa.table({"": [0]})  # Arrow imports pandas now
    idle = _status_bytes("VmRSS")
    limits = task.config.decode_limits()
    decoders = Decoders(OwnProcessDecoder(limits), OwnProcessDecoder(limits, MAKE_MASK))
    result = write_unit(unit, task, decoders)  # pyright: ignore[reportArgumentType]
    sizes = [shard.size_bytes for shard in result.shards]
    stored, largest = sum(sizes) / 1e6, max(sizes) / 1e6
    print(f"{unit.num_images} images in {len(sizes)} shards of {stored:,.0f} MB, the largest {largest:,.0f} MB")
    print(f"memory {idle / 1e6:,.0f} MB idle, {_status_bytes('VmHWM') / 1e6:,.0f} MB at the most")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        _write(Path(sys.argv[2]))
    else:
        main()
