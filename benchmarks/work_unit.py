"""Measures what a work unit costs over its bare kernels: one process, no Spark, alternating runs."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import simplejpeg

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.plan import plan_build
from etl.units.units import read_unit
from etl.units.write_unit import write_unit
from shardmill.jobs.config import DatasetConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", required=True, type=Path)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = EtlConfig(image_size=arguments.image_size)
        source, dataset = SourceConfig(uri=str(arguments.images)), DatasetConfig(uri=folder)
        plan = plan_build(EtlTree(source=source, dataset=dataset, etl=config), run_id="benchmark")
        units = (read_unit(plan.task.listing, unit, config.seed) for unit in plan.units)
        files = [(arguments.images / image.key).read_bytes() for images in units for image in images]
        jpegs = [data for data in files if data[:2] == b"\xff\xd8"]

        def ours() -> None:
            for unit in plan.units:
                write_unit(unit, plan.task)

        def limit() -> None:
            for data in jpegs:
                _bare_kernels(data, arguments.image_size)

        rounds = [(_seconds(ours), _seconds(limit)) for _ in range(arguments.rounds)]
    print(f"{len(files)} images -> {arguments.image_size} px, {arguments.rounds} paired rounds, one process")
    print(f"write_unit    {1e3 * statistics.median(a for a, _ in rounds) / len(files):.2f} ms/image (median)")
    print(f"bare kernels  {1e3 * statistics.median(b for _, b in rounds) / len(jpegs):.2f} ms/image (median)")
    ratios = sorted(limit_seconds / our_seconds for our_seconds, limit_seconds in rounds)
    print(f"of the limit  {statistics.median(ratios):.0%} (rounds: {', '.join(f'{ratio:.0%}' for ratio in ratios)})")


def _bare_kernels(data: bytes, image_size: int) -> None:
    pixels_HWC = simplejpeg.decode_jpeg(data, "RGB")
    height, width = pixels_HWC.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    crop_HWC = pixels_HWC[top : top + side, left : left + side]
    image_HWC = cv2.resize(crop_HWC, (image_size, image_size), interpolation=cv2.INTER_AREA)
    simplejpeg.encode_jpeg(image_HWC, quality=90, colorsubsampling="444")


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    cv2.setNumThreads(1)
    main()
