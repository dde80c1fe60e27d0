"""Compares the optional native kernel with the wheels: pixels, speed of the kernel, and speed of whole jobs; and
photographs with a colour profile (Adobe RGB) with the same ones without it.

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
from dataclasses import replace
from pathlib import Path

import numpy as np
from contestants import CONTESTANTS, NUM_WORKERS, Job, prepare
from results import hardware
from whole_process import Usage, run_measured
from workloads import WORKLOADS, find_photos

from shardmill.images.jpeg import decode_jpeg, find_end, read_header, strip_metadata
from shardmill.images.normalize import normalize
from shardmill.images.process import process_image
from shardmill.kernel import NATIVE_ID
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, Rejection, SourceImage
from tests.shardmill.images.make import rgb_profile, with_profile
from tests.shardmill.images.reference import normalize_reference, psnr, ssim

Kernels = dict[str, NormalizeOptions]
# What is compared: for each side the same photographs.
Sides = dict[str, list[tuple[bytes, NormalizeOptions]]]


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
    by_kernel = {name: [(data, options) for data in jpegs] for name, options in kernels.items()}
    by_profile = _with_and_without_profile(jpegs, kernels["native"])
    for title, work in (("decode and shrink", _decode), ("process_image", _process)):
        for sides in (by_kernel, by_profile):
            _print_ratio(title, "ms CPU an image", [_in_turns(work, sides) for _ in range(arguments.rounds)])
    if arguments.num_images:
        prepare(CONTESTANTS["local"])
        with tempfile.TemporaryDirectory(prefix="native-kernel-", dir=arguments.scratch) as folder:
            scratch, out = arguments.scratch or Path(folder), Path(folder) / "out"
            images = WORKLOADS["photos"].files(photos, scratch, arguments.num_images)
            job = Job(images, out, arguments.image_size, arguments.quality)
            jobs = {"wheels": (job, "local_wheels"), "native": (job, "local")}
            _print_jobs(jobs, arguments.num_images, arguments.rounds)
            jobs = {
                name: (replace(job, images=_written(side, Path(folder) / name, arguments.num_images)), "local")
                for name, side in by_profile.items()
            }
            _print_jobs(jobs, arguments.num_images, arguments.rounds)


def _written(side: list[tuple[bytes, NormalizeOptions]], folder: Path, num_images: int) -> Path:
    folder.mkdir()
    for number, (data, _) in enumerate(side):
        (folder / f"{number % 100}_{number}.jpg").write_bytes(data)
    return WORKLOADS["photos"].files(find_photos(folder), folder, num_images)


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


def _with_and_without_profile(jpegs: list[bytes], options: NormalizeOptions) -> Sides:
    """The photographs in colour that shrink, without other metadata."""
    sides: Sides = {"profile": [], "no profile": []}
    for data in jpegs:
        header = read_header(data, options)
        if header.num_components == 3 and min(header.height, header.width) > options.image_size:
            bare = strip_metadata(data, header, find_end(data, header.scan_start))
            sides["profile"].append((with_profile(bare, rgb_profile()), options))
            sides["no profile"].append((bare, options))
    return sides


def _in_turns(work: Callable[[bytes, NormalizeOptions], object], sides: Sides) -> dict[str, float]:
    """CPU milliseconds that an image takes on each side."""
    seconds = dict.fromkeys(sides, 0.0)
    num_images = len(next(iter(sides.values())))
    for number in range(num_images):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            started = time.process_time()
            work(*sides[name][number])
            seconds[name] += time.process_time() - started
    return {name: 1e3 * total / num_images for name, total in seconds.items()}


def _print_jobs(jobs: dict[str, tuple[Job, str]], num_images: int, rounds: int) -> None:
    clock: list[dict[str, float]] = []
    cpu: list[dict[str, float]] = []
    for number in range(rounds):
        usages = {name: _run_job(*jobs[name]) for name in list(jobs)[:: -1 if number % 2 else 1]}
        clock.append({name: 1e3 * usage.wall_seconds / num_images for name, usage in usages.items()})
        cpu.append({name: 1e3 * usage.cpu_seconds / num_images for name, usage in usages.items()})
    title = f"whole job, {num_images:,} images, {NUM_WORKERS} processes"
    _print_ratio(title, "ms an image", clock)
    _print_ratio(title, "ms CPU an image", cpu)


def _run_job(job: Job, engine: str) -> Usage:
    shutil.rmtree(job.out, ignore_errors=True)
    contestant = CONTESTANTS[engine]
    log = Path(tempfile.gettempdir()) / f"native-kernel-{engine}.log"
    usage = run_measured(contestant.command(job), contestant.process_environment, 900.0, log)
    print(f"{engine}: {usage.wall_seconds:.1f} s, {usage.cpu_seconds:.1f} s CPU", file=sys.stderr, flush=True)
    return usage


def _print_ratio(title: str, unit: str, rounds: list[dict[str, float]]) -> None:
    """The first round ran in the order that the sides are named in."""
    first, second = rounds[0]
    medians = {name: statistics.median(each[name] for each in rounds) for name in (first, second)}
    ratios = [each[first] / each[second] for each in rounds]
    print(
        f"{title}: {first} {medians[first]:.3f}, {second} {medians[second]:.3f} {unit}; "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(rounds)} rounds)",
        flush=True,
    )


if __name__ == "__main__":
    main()
