"""Measures what decoding at a reduced scale saves on large photos, and how far its pixels are from full decoding."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from workloads import BIG_HEIGHT, BIG_WIDTH, enlarged

from shardmill.images.normalize import choose_reduction, normalize, reduced_length
from shardmill.images.process import process_image
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, SourceImage
from tests.shardmill.images.reference import psnr, ssim

SIZES, MODES = (24, 32, 48, 64, 96, 100, 112, 128, 160, 192), ("crop", "pad", "stretch")
BIG_SIZE = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", required=True, type=Path, help="a folder of JPEGs")
    parser.add_argument("--num-big", type=int, default=5, help="photos that are enlarged to 12 megapixels")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    files = [path.read_bytes() for path in sorted(arguments.images.rglob("*")) if path.is_file()]
    jpegs = [data for data in files if data[:2] == b"\xff\xd8"]
    _print_fidelity(jpegs)
    _print_speed([enlarged(data) for data in jpegs[: arguments.num_big]], arguments.rounds)


def _print_fidelity(jpegs: Sequence[bytes]) -> None:
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for data in jpegs:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        for size in SIZES:
            for mode in MODES:
                options = NormalizeOptions.model_validate({"image_size": size, "resize_mode": mode})
                scale = choose_reduction(height, width, options)
                if scale > 1:
                    found[scale].append(_compare(data, scale, options))
    print("scale  cases   PSNR least   1 %   5 %  median   SSIM least   1 %  median")
    for scale, pairs in sorted(found.items()):
        decibels, similarities = np.array(pairs).T
        low, one, five, median = np.quantile(decibels, (0, 0.01, 0.05, 0.5))
        s_low, s_one, s_median = np.quantile(similarities, (0, 0.01, 0.5))
        print(
            f"1/{scale}  {len(pairs):7d}  {low:10.1f} {one:5.1f} {five:5.1f} {median:7.1f}"
            f"   {s_low:10.4f} {s_one:.4f} {s_median:.4f}"
        )


def _compare(data: bytes, scale: int, options: NormalizeOptions) -> tuple[float, float]:
    whole_HWC = simplejpeg.decode_jpeg(data, "RGB")
    height, width = (reduced_length(length, scale) for length in whole_HWC.shape[:2])
    reduced_HWC = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width)
    exact_HWC, image_HWC = normalize(whole_HWC, options), normalize(reduced_HWC, options)
    return psnr(image_HWC, exact_HWC), ssim(image_HWC, exact_HWC)


def _print_speed(photos: Sequence[bytes], rounds: int) -> None:
    options = NormalizeOptions(image_size=BIG_SIZE)
    scale = choose_reduction(BIG_HEIGHT, BIG_WIDTH, options)

    def ours() -> None:
        for data in photos:
            outcome = process_image(SourceImage(key="x.jpg", size_bytes=len(data)), data, options)
            assert isinstance(outcome, ImageSample)

    def whole() -> None:
        for data in photos:
            pixels_HWC = simplejpeg.decode_jpeg(data, "RGB")
            simplejpeg.encode_jpeg(normalize(pixels_HWC, options), options.jpeg_quality, colorsubsampling="444")

    pairs = [(_cpu_seconds(ours), _cpu_seconds(whole)) for _ in range(rounds)]
    size_kb = sum(map(len, photos)) // len(photos) // 1000
    print(
        f"\n{len(photos)} photos of {BIG_WIDTH}x{BIG_HEIGHT}, {size_kb} kB on average -> {BIG_SIZE} px, scale 1/{scale}"
    )
    for name, seconds in zip(("process_image", "bare kernels, whole image"), zip(*pairs, strict=True), strict=True):
        print(f"{name:26} {1e3 * statistics.median(seconds) / len(photos):6.1f} ms/image (median of {rounds})")
    ratios = sorted(whole_seconds / our_seconds for our_seconds, whole_seconds in pairs)
    print(
        f"faster by                  {statistics.median(ratios):.2f} ({', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    )


def _cpu_seconds(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


if __name__ == "__main__":
    cv2.setNumThreads(1)
    main()
