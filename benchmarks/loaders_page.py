"""Writes the results of `loaders.py` as tables, next to the goals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from loader_contestants import BATCH_SIZE, CONTESTANTS, NUM_THREADS
from loader_data import WORKLOADS, Workload
from results import Results

PEERS = tuple(name for name, contestant in CONTESTANTS.items() if contestant.is_peer)
LIMITS = ("limit", "limit_copy_2", "limit_copy")
"""Shares are of these."""


@dataclass(frozen=True)
class Aim:
    """A ratio of two contestants, at least; without another one, images/s."""

    text: str
    workload: str
    ours: str
    others: tuple[str, ...]
    """The one that comes nearest counts."""
    least: float


def print_tables(results: Results, workload: Workload) -> None:
    """What the newest call measured of a workload."""
    calls = results.calls(workload.name, workload.num_images)
    newest = results.of_call(calls[0]) if calls else results
    print(
        "\n".join([f"\n{workload.name}: {workload.title}\n", *_table(newest, workload), "", *_aims(newest, workload)])
    )


def page(results: Results) -> str:
    """All workloads as Markdown: who is the fastest, how it was measured, the aims, and each workload's tables."""
    workloads = [each for each in WORKLOADS.values() if results.sizes(each.name)]
    summary = "\n".join(_summary(results, workload) for workload in workloads)
    parts = [_HEAD.format(threads=NUM_THREADS, batch=BATCH_SIZE, summary=summary)]
    parts += [line for workload in WORKLOADS.values() for line in _aims(results, workload)]
    for workload in workloads:
        parts += ["", f"## {workload.title[0].upper()}{workload.title[1:]} (`{workload.name}`)"]
        for call in results.calls(workload.name, workload.num_images):
            parts += [f"\nMeasured {_when(call)}, {workload.num_images:,} images; {results.hardware_of(call)}.\n"]
            parts += _table(results.of_call(call), workload)
    return "\n".join(parts) + "\n"


def _when(call: str) -> str:
    return f"on {call[:10]} at {call[11:16]} UTC" if call else "on 2026-11-26, before calls were told apart"


def _compared(results: Results, workload: Workload, ours: str, others: tuple[str, ...]) -> tuple[Results, str] | None:
    """Of the others, each in the newest call that measured it beside ours, the one that comes nearest to it."""
    size, found = workload.num_images, []
    calls = [results.of_call(call) for call in results.calls(workload.name, size)]
    for other in others:
        ratios = ((call.ratio(workload.name, size, ours, other), call) for call in calls)
        found += [(ratio, call, other) for ratio, call in ratios if ratio is not None][:1]
    return min(found, key=lambda each: each[0])[1:] if found else None


def _summary(results: Results, workload: Workload) -> str:
    """A row: our Parquet reader and the fastest peer."""
    cells = [f"{workload.title} (`{workload.name}`)", "", "", ""]
    if compared := _compared(results, workload, "parquet", PEERS):
        call, peer = compared
        cells[1:] = [
            _rate_and_share(call, workload, "parquet"),
            f"{CONTESTANTS[peer].title}: {_rate_and_share(call, workload, peer)}",
            f"**{call.ratio(workload.name, workload.num_images, 'parquet', peer):.2f}**",
        ]
    num_peers = sum(bool(results.seconds(workload.name, workload.num_images, name)) for name in PEERS)
    return f"| {' | '.join(cells)} | {num_peers} |"


def _rate_and_share(results: Results, workload: Workload, name: str) -> str:
    share, rate = _share(results, workload, name), f"{_rate(results, workload, name):,.0f}"
    return rate if share is None else f"{rate} ({share:.0%} of the limit)"


def _rate(results: Results, workload: Workload, name: str) -> float:
    return workload.num_images / statistics.median(results.seconds(workload.name, workload.num_images, name))


def _share(results: Results, workload: Workload, name: str) -> float | None:
    """Of the limit with as many threads."""
    threads = CONTESTANTS[name].num_threads
    for limit in LIMITS:
        if CONTESTANTS[limit].num_threads == threads and results.seconds(workload.name, workload.num_images, limit):
            return results.ratio(workload.name, workload.num_images, name, limit)
    return None


def _table(results: Results, workload: Workload) -> Iterator[str]:
    """One row for each contestant of one call: the limits and ours first, then the peers, the fastest first."""
    measured = results.runs.get((workload.name, workload.num_images), {})
    ours = [name for name in ("parquet", "parquet_wheels") if name in measured]
    heads = ["of the limit", *(f"{_SHORT[name]} / it" for name in ours)]
    yield "| | images/s | " + " | ".join(heads) + " | rounds | MB in all |"
    yield "|---|---|" + "---|" * (len(heads) + 2)
    peers = sorted(
        (name for name in PEERS if name in measured),
        key=lambda name: statistics.median(results.seconds(workload.name, workload.num_images, name) or [math.inf]),
    )
    for name in [*(name for name in CONTESTANTS if name in measured and name not in PEERS), *peers]:
        yield _row(results, workload, name, ours)


def _row(results: Results, workload: Workload, name: str, ours: list[str]) -> str:
    size = workload.num_images
    rounds = results.runs[workload.name, size][name]
    title = " ".join([CONTESTANTS[name].title, rounds[-1].version]).strip()
    faults = sorted({each.fault for each in rounds if each.fault})
    seconds = results.seconds(workload.name, size, name)
    if not seconds:
        return f"| {title} | failed: {'; '.join(faults)} |"
    ratios = [_share(results, workload, name), *(results.ratio(workload.name, size, own, name) for own in ours)]
    cells = [
        title + (f" ({'; '.join(faults)})" if faults else ""),
        f"{_rate(results, workload, name):,.0f}",
        *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        " ".join(f"{size / each:,.0f}" for each in sorted(seconds, reverse=True)),
        f"{max(each.total_peak_mb for each in rounds):,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _aims(results: Results, workload: Workload) -> Iterator[str]:
    for aim in AIMS:
        if aim.workload == workload.name:
            measured = _measured(results, workload, aim)
            verdict = "not measured" if measured is None else "met" if measured >= aim.least else "NOT met"
            figure = "" if measured is None else f"{measured:,.0f}" if measured > 1_000 else f"{measured:.2f}"
            yield f"| {aim.workload}: {aim.text} | {figure} | {verdict} |"


def _measured(results: Results, workload: Workload, aim: Aim) -> float | None:
    """A ratio, or images/s; None if it was not measured."""
    if aim.others:
        compared = _compared(results, workload, aim.ours, aim.others)
        return compared and compared[0].ratio(workload.name, workload.num_images, aim.ours, compared[1])
    for call in map(results.of_call, results.calls(workload.name, workload.num_images)):
        if call.seconds(workload.name, workload.num_images, aim.ours):
            return _rate(call, workload, aim.ours)
    return None


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

How many images a second a loader gives to a training loop, from a dataset on the local disk. Below, shardmill's Parquet
reader and, of the peers that were measured in the same rounds, the one that came nearest; all figures are images/s.

| what is read | shardmill | fastest peer | shardmill / it | peers measured |
|---|---|---|---|---|
{summary}

## How it is measured

    python benchmarks/loaders.py --images DIR --scratch DIR --rounds 5 --page docs/benchmarks/loaders.md

Shuffled uint8 batches of {batch} images, {threads} threads or worker processes unless a row says otherwise. Each
contestant runs in a process of its own, which reads one epoch to warm up, then whole epochs, two and four seconds at
least; the page cache is warm. A round runs each once, every other round in reverse order. Rates are medians of the
rounds; shares of the limit and ratios are medians of the rounds' own. Each table holds what one call measured; figures
of different calls are never compared. The limit decodes the same stored bytes from memory into batches that are used
again, by a thread for each processor, and does nothing else; for raw pixels it copies them.

All read the same stored bytes: shardmill, Ray Data and petastorm's make_batch_reader from its Parquet shards, tf.data
from its TFRecord shards, others from files or from their own format, converted once. Peers that take a function get
simplejpeg and OpenCV's linear filter, as shardmill takes it unless a side shrinks to two thirds; FFCV and DALI decode,
crop and resize with their own code. Random crops have torchvision's distribution. Shuffles differ: ImageFolder, SPDL,
DALI, grain, LanceDB and FFCV draw from all rows, shardmill, MosaicML and litdata from windows of shards; tf.data,
webdataset and Ray Data shuffle files and a buffer of 2,000 rows, petastorm row groups and the rows in them.

Raw pixels: FFCV maps one file and checks nothing. shardmill reads each chunk into memory of its own and verifies its
CRC-32C; those of the windows that end an epoch stay for the next one (at 32 px, all of them).
`benchmarks/raw_read_cost.py` on the Intel machine, processor time of one thread for an image of 224 px: read and hash
40 us, with the copy into a batch 61; a mapped file that is hashed, 47; the copy alone 20. So no verified read comes
near 0.8 of the copy; the Parquet pages take another 8 us. Mapping is not used: a file that is cut while it is mapped
ends the process by a signal, where now an error names the shard.

FFCV is built from source and needs `libopencv-dev` and `libturbojpeg0-dev`; without them it is left out.

## Aims

| aim | measured | |
|---|---|---|"""

_SHORT = {"parquet": "Parquet", "parquet_wheels": "wheels only"}
