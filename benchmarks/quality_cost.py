"""What the statistics of `inspect --quality` cost the ETL: work units with and without them, in turns.

python benchmarks/quality_cost.py --images DIR [--image-size 256] [--rounds 15]

Without them, the functions that measure an image return a constant. One process, CPU time of whole units: read,
decode, normalize, measure, encode, digest, publish. What a build does besides (listing, commit, Spark) is left out,
and would make the share smaller. The last column is the measuring of each image alone, right after it was normalized:
the least of its rounds, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import cv2
from results import hardware

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.plan import plan_build
from etl.units.units import WorkUnit
from etl.units.write_unit import Decoders, write_unit
from shardmill.images import process
from shardmill.jobs.config import DatasetConfig
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, Rejection, SourceImage

MEASURES = {"luma": None, "laplacian_square_sum": 1, "difference_hash": 1}
"""The functions of `shardmill.images.look`, and what replaces their answers."""


class HereDecoder:
    """Decodes in this process, whose CPU time is measured."""

    def decode(
        self, images: Iterable[tuple[SourceImage, bytes]], options: NormalizeOptions
    ) -> Iterator[tuple[SourceImage, ImageSample | Rejection]]:
        for source, data in images:
            yield source, process.process_image(source, data, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, type=Path)
    parser.add_argument("--image-size", type=int, nargs="+", default=[64, 224, 256])
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    cv2.setNumThreads(1)
    print(f"{hardware()}; CPU time, the least of {given.rounds} rounds of each unit")
    print("| image size | images | ms an image without | with | cost | the measuring alone, ms | of that without |")
    print("|---|---|---|---|---|---|---|")
    for size in given.image_size:
        without, cells = measured(given.images, size, given.rounds)
        alone = alone_ms(given.images, size, given.rounds)
        print(f"| {size} | {' | '.join(cells)} | {alone:.3f} | {alone / without:.1%} |", flush=True)


@contextmanager
def without_measures() -> Iterator[None]:
    """`process_image` measures nothing meanwhile."""
    kept = {name: getattr(process, name) for name in MEASURES}
    for name, value in MEASURES.items():
        setattr(process, name, lambda _, value=value: value)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(process, name, function)


def alone_ms(images: Path, size: int, rounds: int) -> float:
    """Of an image, in the mean."""
    options, least = EtlConfig(image_size=size).normalize_options(), []
    for path in sorted(each for each in images.rglob("*") if each.is_file()):
        image_HWC = process.normalize(process.decode_image(path.read_bytes(), options)[1].pixels_HWC, options)
        of_rounds = []
        for _ in range(rounds):
            started = time.perf_counter()
            luma_HW = process.luma(image_HWC)
            process.laplacian_square_sum(luma_HW)
            process.difference_hash(luma_HW)
            of_rounds.append(time.perf_counter() - started)
        least.append(min(of_rounds))
    return 1e3 * sum(least) / len(least)


def measured(images: Path, size: int, rounds: int) -> tuple[float, list[str]]:
    """Milliseconds of an image without, and cells of a row."""
    with tempfile.TemporaryDirectory() as folder:
        source, dataset = SourceConfig(uri=str(images)), DatasetConfig(uri=folder)
        plan = plan_build(EtlTree(source=source, dataset=dataset, etl=EtlConfig(image_size=size)), run_id="benchmark")

        def seconds(unit: WorkUnit, with_measures: bool) -> float:
            with nullcontext() if with_measures else without_measures():
                started = time.process_time()
                write_unit(unit, plan.task, Decoders(HereDecoder(), HereDecoder()))
                return time.process_time() - started

        least = {(unit.index, which): math.inf for unit in plan.units for which in (True, False)}
        for number in range(rounds):
            # Who begins changes, because a machine becomes faster and slower.
            order = (True, False) if number % 2 else (False, True)
            for unit in plan.units:
                for which in order:
                    least[unit.index, which] = min(least[unit.index, which], seconds(unit, which))
        num_images = plan.listing.num_images
    without, with_them = (
        1e3 * sum(value for (_, which), value in least.items() if which == asked) / num_images
        for asked in (False, True)
    )
    return without, [f"{num_images:,}", f"{without:.3f}", f"{with_them:.3f}", f"{with_them / without - 1:+.1%}"]


if __name__ == "__main__":
    main()
