"""Measures the upper limit of an ETL: decode, resize and encode in a bare loop of as many processes, without output.

python benchmarks/limit.py --images DIR [--kernel ours|ours_wheels|wheels] [--num-workers 2] [--image-size 256]

`ours` is `process_image` with the native kernel if it is installed, `ours_wheels` without it, `wheels` the calls of
simplejpeg and OpenCV that the peers make. Prints the seconds of the loop, which begins when all processes are ready, as
JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, type=Path)
    parser.add_argument("--kernel", choices=KERNELS, default="ours")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--quality", type=int, default=95)
    arguments = parser.parse_args()
    files = sorted(str(path) for path in arguments.images.glob("*/*"))
    parts = [
        (arguments.kernel, files[place :: arguments.num_workers], arguments.image_size, arguments.quality)
        for place in range(arguments.num_workers)
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.num_workers) as pool:
        pool.starmap(_process_all, [(name, some[:2], size, quality) for name, some, size, quality in parts], 1)
        started = time.perf_counter()
        pool.starmap(_process_all, parts, chunksize=1)
        print(json.dumps({"loop_seconds": time.perf_counter() - started}))


def _process_all(kernel: str, files: list[str], image_size: int, quality: int) -> None:
    KERNELS[kernel](files, image_size, quality)


def _ours(files: list[str], image_size: int, quality: int, *, wheels_only: bool = False) -> None:
    from shardmill.images.process import process_image
    from shardmill.kernel import resolve_kernel
    from shardmill.options import NormalizeOptions
    from shardmill.values import ImageSample, SourceImage

    kernel = "wheels" if wheels_only else resolve_kernel("auto")
    options = NormalizeOptions(kernel=kernel, image_size=image_size, jpeg_quality=quality)
    for file in files:
        data = Path(file).read_bytes()
        assert isinstance(process_image(SourceImage(file, len(data)), data, options), ImageSample)


def _wheels(files: list[str], image_size: int, quality: int) -> None:
    import cv2
    from peers.common import transform_file

    cv2.setNumThreads(1)
    for file in files:
        transform_file(file, image_size, quality)


def _ours_wheels(files: list[str], image_size: int, quality: int) -> None:
    _ours(files, image_size, quality, wheels_only=True)


KERNELS = {"ours": _ours, "ours_wheels": _ours_wheels, "wheels": _wheels}

if __name__ == "__main__":
    main()
