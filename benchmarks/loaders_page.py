"""Writes the results of `loaders.py` as tables, next to the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from loader_contestants import BATCH_SIZE, CONTESTANTS, NUM_THREADS
from loader_data import WORKLOADS, Workload
from results import Results

PEERS = tuple(name for name, contestant in CONTESTANTS.items() if contestant.is_peer)


@dataclass(frozen=True)
class Aim:
    """A ratio of two contestants, at least; without another one, images/s."""

    text: str
    workload: str
    ours: str
    others: tuple[str, ...]
    """The fastest of these counts."""
    least: float


def print_tables(results: Results, workload: Workload) -> None:
    print(
        "\n".join([f"\n{workload.name}: {workload.title}\n", *_table(results, workload), "", *_aims(results, workload)])
    )


def page(results: Results) -> str:
    """All workloads as Markdown."""
    measured = f"{results.hardware}; on {results.measured_on}." if results.runs else "Not measured yet."
    parts = [_HEAD.format(threads=NUM_THREADS, batch=BATCH_SIZE, measured=measured)]
    for workload in WORKLOADS.values():
        if results.sizes(workload.name):
            parts += [f"## {workload.title[0].upper()}{workload.title[1:]} (`{workload.name}`)", ""]
            parts += [*_table(results, workload), ""]
    parts += ["## Aims", "", "| aim | measured | |", "|---|---|---|"]
    parts += [line for workload in WORKLOADS.values() for line in _aims(results, workload)]
    return "\n".join(parts) + "\n"


def _table(results: Results, workload: Workload) -> Iterator[str]:
    """One row for each contestant, with the shares of the limits that this workload has."""
    measured = results.runs.get((workload.name, workload.num_images), {})
    limits = [name for name in CONTESTANTS if name.startswith("limit") and name in measured]
    ours = [name for name in ("parquet", "parquet_wheels") if name in measured]
    heads = [*(f"/ {name}" for name in limits), *(f"{name} / it" for name in ours)]
    yield f"{workload.num_images:,} images.\n"
    yield "| | images/s | rounds | MB in all | " + " | ".join(heads) + " |"
    yield "|---|---|---|---|" + "---|" * len(heads)
    for name in CONTESTANTS:
        if name in measured:
            yield _row(results, workload, name, limits, ours)


def _row(results: Results, workload: Workload, name: str, limits: list[str], ours: list[str]) -> str:
    size = workload.num_images
    rounds = results.runs[workload.name, size][name]
    title = " ".join([CONTESTANTS[name].title, rounds[-1].version]).strip()
    faults = sorted({each.fault for each in rounds if each.fault})
    seconds = results.seconds(workload.name, size, name)
    if not seconds:
        return f"| {title} | failed: {'; '.join(faults)} |"
    shares = [results.ratio(workload.name, size, name, limit) for limit in limits]
    ratios = [results.ratio(workload.name, size, own, name) for own in ours]
    cells = [
        title + (f" ({'; '.join(faults)})" if faults else ""),
        f"{size / statistics.median(seconds):,.0f}",
        " ".join(f"{size / each:,.0f}" for each in sorted(seconds, reverse=True)),
        f"{max(each.total_peak_mb for each in rounds):,.0f}",
        *("" if ratio is None else f"{ratio:.2f}" for ratio in [*shares, *ratios]),
    ]
    return f"| {' | '.join(cells)} |"


def _aims(results: Results, workload: Workload) -> Iterator[str]:
    for aim in AIMS:
        if aim.workload == workload.name:
            measured = _measured(results, workload, aim)
            verdict = "not measured" if measured is None else "met" if measured >= aim.least else "NOT met"
            yield f"| {aim.workload}: {aim.text} | {'' if measured is None else f'{measured:,.2f}'} | {verdict} |"


def _measured(results: Results, workload: Workload, aim: Aim) -> float | None:
    if not aim.others:
        seconds = results.seconds(workload.name, workload.num_images, aim.ours)
        return workload.num_images / statistics.median(seconds) if seconds else None
    fastest = results.fastest(workload.name, workload.num_images, aim.others)
    return results.ratio(workload.name, workload.num_images, aim.ours, fastest) if fastest else None


AIMS = (
    Aim("parquet / limit: at least 0.92", "full256", "parquet", ("limit",), 0.92),
    Aim("tfrecord / parquet: 0.95", "full256", "tfrecord", ("parquet",), 0.95),
    Aim("parquet / fastest peer: 1", "full256", "parquet", PEERS, 1.0),
    Aim("torch_loader / batches: 0.97", "full256", "torch", ("parquet",), 0.97),
    Aim("tf_dataset / batches: 0.97", "full256", "tensorflow", ("parquet",), 0.97),
    Aim("jax_loader / batches: 0.97", "full256", "jax", ("parquet",), 0.97),
    Aim("parquet / fastest peer: 1.25", "crop224", "parquet", PEERS, 1.25),
    Aim("parquet, wheels only / fastest peer: 1", "crop224", "parquet_wheels", PEERS, 1.0),
    Aim("torch_loader / batches: 0.97", "crop224", "torch", ("parquet",), 0.97),
    Aim("tf_dataset / batches: 0.97", "crop224", "tensorflow", ("parquet",), 0.97),
    Aim("jax_loader / batches: 0.97", "crop224", "jax", ("parquet",), 0.97),
    Aim("parquet, 1 thread: 700,000 images/s", "raw32", "parquet_1", (), 700_000),
    Aim("parquet / copy out of RAM, 1 thread each: 0.8", "raw224", "parquet_1", ("limit_copy",), 0.8),
    Aim("parquet / copy out of RAM, 2 threads each: 0.8", "raw224", "parquet", ("limit_copy_2",), 0.8),
)

_HEAD = """# Loaders beside their peers

    python benchmarks/loaders.py --images DIR --scratch DIR --rounds 5 --page docs/benchmarks/loaders.md

Shuffled uint8 batches of {batch} images, {threads} threads or worker processes unless a row says otherwise. Each
contestant runs in a process of its own, which reads one epoch to warm up, then whole epochs, two and four seconds at
least; the page cache is warm. A round runs each once, every other round in reverse order. Rates are medians of the
rounds; shares of a limit and ratios are medians of the rounds' own. The limit decodes the same stored bytes from memory
into batches that are used again, by a thread for each processor, and does nothing else; for raw pixels it copies them.

All read the same stored bytes: shardmill and petastorm from its Parquet shards, tf.data from its TFRecord shards,
others from files or from their own format, converted once. Peers that take a function get simplejpeg and OpenCV's
linear filter, as shardmill takes it unless a side shrinks to two thirds. Random crops have torchvision's distribution.

{measured}
"""
