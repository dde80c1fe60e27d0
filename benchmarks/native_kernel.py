"""Compares the optional native kernel with the wheels: pixels, speed of the kernel, and speed of whole jobs.

python benchmarks/native_kernel.py --images DIR [--num-images 5000] [--rounds 3] [--image-size 256] [--quality 95]

Ratios are of a round's pair, and their median counts. The kernels alone are timed by the CPU clock of this process,
image by image in turns. A whole job is `shardmill etl` on the local engine from the start of its process to its end,
every other round in reverse order; `--num-images 0` leaves it out. Progress is on standard error.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from contestants import CONTESTANTS, NUM_WORKERS, Job
from results import hardware
from whole_process import Usage, run_measured
from workloads import WORKLOADS, find_photos

from shardmill.images.jpeg import decode_jpeg
from shardmill.images.normalize import normalize
from shardmill.images.process import process_image
from shardmill.kernel import NATIVE_ID
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, Rejection, SourceImage
from tests.shardmill.images.reference import normalize_reference, psnr, ssim

Kernels = dict[str, NormalizeOptions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, type=Path, help="a folder of photographs (JPEG)")
    parser.add_argument(
        "--num-images", type=int, default=5_000, help="of a whole job: distinct copies of the photographs"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--quality", type=int, default=95)
    parser.add_argument("--scratch", type=Path, help="keeps the images for the next call; otherwise they are made anew")
    arguments = parser.parse_args()
    if not NATIVE_ID:
        raise SystemExit("the native kernel is not installed: `make setup` says why")
    photos = find_photos(arguments.images)
    jpegs = [photo.read_bytes() for photo in photos]
    print(
        f"{hardware()}\n{NATIVE_ID}; {len(jpegs)} photographs -> {arguments.image_size} px, quality {arguments.quality}"
    )
    kernels = {
        name: NormalizeOptions(kernel=name, image_size=arguments.image_size, jpeg_quality=arguments.quality)
        for name in ("wheels", "native")
    }
    _print_fidelity(jpegs, kernels)
    for title, work in (("decode and shrink", _decode), ("process_image", _process)):
        _print_ratio(title, "ms CPU an image", [_in_turns(work, jpegs, kernels) for _ in range(arguments.rounds)])
    if arguments.num_images:
        with tempfile.TemporaryDirectory(prefix="native-kernel-", dir=arguments.scratch) as folder:
            images = WORKLOADS["photos"].files(photos, arguments.scratch or Path(folder), arguments.num_images)
            job = Job(images, Path(folder) / "out", arguments.image_size, arguments.quality)
            _print_jobs(job, arguments.num_images, arguments.rounds)


def _print_fidelity(jpegs: list[bytes], kernels: Kernels) -> None:
    """Against the exact box of the decoded pixels, and against each other."""
    size = kernels["wheels"].image_size
    found: dict[str, list[tuple[float, float]]] = {"wheels": [], "native": [], "native against wheels": []}
    most_levels = 0
    for data in jpegs:
        images = {name: _decode(data, options) for name, options in kernels.items()}
        decoded_HWC = decode_jpeg(data, NormalizeOptions(resize_mode="none")).pixels_HWC
        exact_HWC = normalize_reference(decoded_HWC, size, "crop")
        for name, image_HWC in images.items():
            found[name].append((psnr(image_HWC, exact_HWC), ssim(image_HWC, exact_HWC)))
        wheels_HWC = images["wheels"].astype(np.float64)
        found["native against wheels"].append((psnr(images["native"], wheels_HWC), ssim(images["native"], wheels_HWC)))
        most_levels = max(most_levels, int(np.abs(images["native"] - wheels_HWC).max()))
    for name, pairs in found.items():
        decibels, similarities = (np.array(column) for column in zip(*pairs, strict=True))
        print(
            f"{name:22} PSNR least {decibels.min():.1f}, median {np.median(decibels):.1f} dB; "
            f"SSIM least {similarities.min():.5f}"
        )
    print(f"native against wheels  at most {most_levels} level(s) apart")


def _decode(data: bytes, options: NormalizeOptions) -> np.ndarray:
    return normalize(decode_jpeg(data, options).pixels_HWC, options)


def _process(data: bytes, options: NormalizeOptions) -> ImageSample | Rejection:
    return process_image(SourceImage("x.jpg", len(data)), data, options)


def _in_turns(
    work: Callable[[bytes, NormalizeOptions], object], jpegs: list[bytes], kernels: Kernels
) -> dict[str, float]:
    """CPU milliseconds that an image takes with each kernel."""
    seconds = dict.fromkeys(kernels, 0.0)
    for number, data in enumerate(jpegs):
        for name in list(kernels)[:: -1 if number % 2 else 1]:
            started = time.process_time()
            work(data, kernels[name])
            seconds[name] += time.process_time() - started
    return {name: 1e3 * total / len(jpegs) for name, total in seconds.items()}


def _print_jobs(job: Job, num_images: int, rounds: int) -> None:
    clock: list[dict[str, float]] = []
    cpu: list[dict[str, float]] = []
    for number in range(rounds):
        usages = {name: _run_job(job, name) for name in ("wheels", "native")[:: -1 if number % 2 else 1]}
        clock.append({name: 1e3 * usage.wall_seconds / num_images for name, usage in usages.items()})
        cpu.append({name: 1e3 * usage.cpu_seconds / num_images for name, usage in usages.items()})
    title = f"whole job, {num_images:,} images, {NUM_WORKERS} processes"
    _print_ratio(title, "ms an image", clock)
    _print_ratio(title, "ms CPU an image", cpu)


def _run_job(job: Job, kernel: str) -> Usage:
    shutil.rmtree(job.out, ignore_errors=True)
    contestant = CONTESTANTS[{"native": "local", "wheels": "local_wheels"}[kernel]]
    log = Path(tempfile.gettempdir()) / f"native-kernel-{kernel}.log"
    usage = run_measured(contestant.command(job), contestant.process_environment, 900.0, log)
    print(f"{kernel}: {usage.wall_seconds:.1f} s, {usage.cpu_seconds:.1f} s CPU", file=sys.stderr, flush=True)
    return usage


def _print_ratio(title: str, unit: str, rounds: list[dict[str, float]]) -> None:
    wheels, native = (statistics.median(each[name] for each in rounds) for name in ("wheels", "native"))
    ratios = [each["wheels"] / each["native"] for each in rounds]
    print(
        f"{title}: wheels {wheels:.3f}, native {native:.3f} {unit}; ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}, {len(rounds)} rounds)",
        flush=True,
    )


if __name__ == "__main__":
    main()
