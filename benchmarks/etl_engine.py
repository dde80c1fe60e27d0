"""A whole ETL job on one engine beside its limit: the same kernels in a bare loop of as many processes, no pipeline.

python benchmarks/etl_engine.py --images DIR [--copies 40] [--image-size 256] [--engine local] [--rounds 3]

Each round runs both on fresh copies of the images; the limit reads, decodes, resizes and encodes and keeps nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from shardmill.images.process import process_image
from shardmill.jobs.config import DatasetConfig, SparkConfig
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, SourceImage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, type=Path)
    parser.add_argument("--copies", type=int, default=40, help="distinct files made of each image")
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--jpeg-quality", type=int, default=95)
    parser.add_argument("--engine", default="local")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=None)
    arguments = parser.parse_args()
    num_workers = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        files = distinct_copies(arguments.images, Path(folder) / "images", arguments.copies)
        options = NormalizeOptions(image_size=arguments.image_size, jpeg_quality=arguments.jpeg_quality)
        kind = f"{arguments.image_size} px, quality {arguments.jpeg_quality}"
        print(f"{len(files):,} JPEGs -> {kind}, {num_workers} processes")
        ratios = []
        for number in range(arguments.rounds):
            ours = seconds_of_job(Path(folder), options, arguments.engine)
            limit = seconds_of_limit(files, options, num_workers)
            ratios.append(limit / ours)
            rates = f"{arguments.engine} {len(files) / ours:,.0f} images/s, limit {len(files) / limit:,.0f} images/s"
            print(f"round {number + 1}: {rates}, {ratios[-1]:.0%} of it", flush=True)
        print(f"median: {statistics.median(ratios):.0%} of the limit")


def distinct_copies(images: Path, folder: Path, num_copies: int) -> list[Path]:
    """Files that differ by a comment segment, in one folder per class."""
    made = []
    for source in sorted(images.glob("*.JPEG")) + sorted(images.glob("*.jpg")):
        data = source.read_bytes()
        target = folder / source.stem.split("_")[0]
        target.mkdir(parents=True, exist_ok=True)
        for number in range(num_copies):
            comment = f"copy {number}".encode()
            file = target / f"{source.stem}_{number}.jpg"
            file.write_bytes(data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + data[2:])
            made.append(file)
    if not made:
        sys.exit(f"no JPEG files in {images}")
    return made


def seconds_of_job(folder: Path, options: NormalizeOptions, engine: str) -> float:
    """From the listing to the commit, checksums included."""
    shutil.rmtree(folder / "dataset", ignore_errors=True)
    config = EtlConfig(engine=engine, image_size=options.image_size, jpeg_quality=options.jpeg_quality)
    tree = EtlTree(
        source=SourceConfig(uri=str(folder / "images")),
        dataset=DatasetConfig(uri=str(folder / "dataset")),
        etl=config,
        spark=SparkConfig(),
    )
    started = time.perf_counter()
    build_dataset(tree, run_id="benchmark")
    return time.perf_counter() - started


def seconds_of_limit(files: list[Path], options: NormalizeOptions, num_workers: int) -> float:
    """The kernels alone, in processes that are started before the clock is."""
    parts = [(files[place::num_workers], options) for place in range(num_workers)]
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        pool.map(_process_all, [(part[:2], options) for part, options in parts])
        started = time.perf_counter()
        pool.map(_process_all, parts, chunksize=1)
        return time.perf_counter() - started


def _process_all(part: tuple[list[Path], NormalizeOptions]) -> None:
    files, options = part
    for file in files:
        data = file.read_bytes()
        outcome = process_image(SourceImage(file.name, len(data)), data, options)
        assert isinstance(outcome, ImageSample)


if __name__ == "__main__":
    main()
