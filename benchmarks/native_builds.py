"""Compares two builds of the native kernel, call by call in one process: what the limited API costs, say.

python benchmarks/native_builds.py BEFORE.so AFTER.so [--rounds 15]

Each call is small, so that what surrounds the work inside shows. Builds take turns, and every other round is in reverse
order; a round's ratio is that of its pair, by the CPU clock of this process, and the median counts.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import cv2
import numpy as np
from results import hardware

from shardmill.formats.tf_example import encode_example
from shardmill.formats.tfrecord import frame

NUM_RECORDS = 500
NAMES = (b"image/encoded", b"image/class/label", b"image/sample_id")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs=2, type=Path, metavar="BUILD.so")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    before, after = map(_load, arguments.builds)
    print(f"{hardware()}\n{before.KERNEL_ID}, {after.KERNEL_ID}")
    for (title, calls, old), (_, _, new) in zip(_work(before), _work(after), strict=True):
        seconds = []
        for number in range(arguments.rounds):
            pair = {}
            for work in (new, old) if number % 2 else (old, new):
                started = time.process_time()
                for _ in range(calls):
                    work()
                pair[work] = (time.process_time() - started) / calls
            seconds.append((pair[old], pair[new]))
        ratios = sorted(new_seconds / old_seconds for old_seconds, new_seconds in seconds)
        medians = [1e6 * statistics.median(each) for each in zip(*seconds, strict=True)]
        print(
            f"{title}: {medians[0]:.2f}, {medians[1]:.2f} us a call; ratio {statistics.median(ratios):.3f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def _load(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("shardmill_native", str(path.resolve()))
    spec = importlib.util.spec_from_loader("shardmill_native", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _work(native: ModuleType) -> list[tuple[str, int, Callable[[], object]]]:
    """What is called, how often a round, and the call."""
    pixels_HWC = np.random.default_rng(3).integers(0, 256, (32, 32, 3), np.uint8)
    jpeg = cv2.imencode(".jpg", pixels_HWC)[1].tobytes()
    features = {"image/encoded": jpeg, "image/class/label": 3, "image/sample_id": 7, "image/width": 32}
    chunk = frame(encode_example(features)) * NUM_RECORDS
    places = np.array([[0, 0, 32, 32, number * pixels_HWC.size] for number in range(NUM_RECORDS)])
    target, is_done = np.empty(NUM_RECORDS * pixels_HWC.size, np.uint8), np.empty(NUM_RECORDS, np.uint8)
    slots, starts = np.zeros((2, NUM_RECORDS), np.int64)
    stops = np.full(NUM_RECORDS, 64, np.int64)
    rows, shrunk_HWC = np.empty(NUM_RECORDS * 64, np.uint8), np.empty((16, 16, 3), np.uint8)
    return [
        (f"find_values, {NUM_RECORDS} records", 300, lambda: native.find_values(chunk, NAMES)),
        (f"copy_slices, {NUM_RECORDS} rows", 3_000, lambda: native.copy_slices([chunk], slots, starts, stops, rows)),
        (
            f"decode_jpegs, {NUM_RECORDS} of 32 x 32",
            5,
            lambda: native.decode_jpegs([jpeg] * NUM_RECORDS, pixels_HWC.shape, places, target, is_done),
        ),
        ("shrink_jpeg, 32 x 32", 3_000, lambda: native.shrink_jpeg(jpeg, shrunk_HWC, (32, 32), 1, (0, 0, 32, 32))),
        ("channel_sums, 32 x 32", 100_000, lambda: native.channel_sums(pixels_HWC)),
        ("find_segments", 100_000, lambda: native.find_segments(jpeg, 64)),
    ]


if __name__ == "__main__":
    main()
