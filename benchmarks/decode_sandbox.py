"""Measures what the decoding child process costs per image: the same photographs in-process and through the sandbox."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardmill.images.process import process_image
from shardmill.images.sandbox import DecodeSandbox
from shardmill.options import NormalizeOptions
from shardmill.values import SourceImage


@dataclass(frozen=True)
class Cost:
    """Milliseconds per image."""

    clock: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", required=True, type=Path)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--num-images", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    options = NormalizeOptions(image_size=arguments.image_size)
    paths = sorted(path for path in arguments.images.rglob("*") if path.is_file())[: arguments.num_images]
    files = [(SourceImage(path.name, path.stat().st_size), path.read_bytes()) for path in paths]

    with DecodeSandbox() as sandbox:

        def in_process() -> None:
            for source, data in files:
                process_image(source, data, options)

        def sandboxed() -> None:
            for source, data in files:
                sandbox.process(source, data, options)

        sandboxed()  # starts the child
        rounds = [(_cost(in_process, len(files)), _cost(sandboxed, len(files))) for _ in range(arguments.rounds)]
    print(f"{len(files)} images -> {arguments.image_size} px, {arguments.rounds} paired rounds")
    for name, costs in zip(("in this process", "sandbox"), zip(*rounds, strict=True), strict=True):
        clock, cpu = statistics.median(c.clock for c in costs), min(c.cpu for c in costs)
        print(f"{name:16} {clock:.2f} ms/image by the clock (median), {cpu:.2f} ms CPU of both processes (least)")
    bare, whole = (min(cost.cpu for cost in costs) for costs in zip(*rounds, strict=True))
    clocks = statistics.median(whole.clock / bare.clock for bare, whole in rounds)
    print(f"the sandbox adds {whole / bare - 1:.1%} CPU, {clocks - 1:.1%} by the clock (median of paired rounds)")


def _cost(work: Callable[[], None], num_images: int) -> Cost:
    clock, cpu = time.perf_counter(), _cpu_seconds()
    work()
    return Cost(1e3 * (time.perf_counter() - clock) / num_images, 1e3 * (_cpu_seconds() - cpu) / num_images)


def _cpu_seconds() -> float:
    """Of this process and of its living children, which `os.times` counts only when they have ended."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return time.process_time() + sum(time.clock_gettime(~int(child) << 3 | 2) for child in children)


if __name__ == "__main__":
    main()
