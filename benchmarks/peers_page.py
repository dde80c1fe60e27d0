"""Writes the results of `etl_peers.py` as tables, next to the goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from contestants import CONTESTANTS, NUM_WORKERS
from results import Results
from workloads import WORKLOADS

WRITERS = ("webdataset", "mds", "litdata")
"""Peers that write what a function of the user's gives them."""
PEERS = (*WRITERS, "img2dataset", "daft", "ray", "plain_spark")


@dataclass(frozen=True)
class Aim:
    """A ratio of the issue, and how it is measured."""

    text: str
    workload: str
    least: float
    measured: Callable[[Results], float | None]


def print_tables(results: Results, workload: str) -> None:
    print("\n".join([*_tables(results, workload), "", *_aims(results, workload)]))


def page(results: Results) -> str:
    """All workloads as Markdown."""
    parts = [_HEAD.format(num_workers=NUM_WORKERS, hardware=results.hardware, day=results.measured_on)]
    for name, workload in WORKLOADS.items():
        if results.sizes(name):
            parts += [f"## {workload.title[0].upper()}{workload.title[1:]}", *_tables(results, name), ""]
    parts += ["## Aims", "", "| aim | measured | |", "|---|---|---|"]
    parts += [line for name in WORKLOADS for line in _aims(results, name)]
    return "\n".join(parts) + "\n"


def _tables(results: Results, workload: str) -> Iterator[str]:
    for size in results.sizes(workload):
        yield f"\n{size:,} images. Ratios: how many times as fast shardmill is on its engine local, and on Spark.\n"
        yield "| | seconds | images/s | rounds | CPU s per 1,000 | MB a worker | MB in all | local / it | spark / it |"
        yield "|---|---|---|---|---|---|---|---|---|"
        contestants = results.runs[workload, size]
        for name in CONTESTANTS:
            if name in contestants:
                yield _row(results, workload, size, name)
    rates = {name: rate for name in CONTESTANTS if (rate := results.slope(workload, name)) is not None}
    if rates:
        yield "\nImages a second between the smallest and the largest size, without the start:\n"
        yield "| | images/s | local / it | spark / it |"
        yield "|---|---|---|---|"
        for name, rate in rates.items():
            ours = " | ".join(f"{rates[own] / rate:.2f}" if own in rates else "" for own in ("local", "spark"))
            yield f"| {CONTESTANTS[name].title} | {rate:,.0f} | {ours} |"


def _row(results: Results, workload: str, size: int, name: str) -> str:
    rounds = results.runs[workload, size][name]
    title = " ".join([CONTESTANTS[name].title, rounds[-1].version]).strip()
    measured = [each for each in rounds if each.wall_seconds is not None]
    faults = sorted({each.fault for each in rounds if each.fault})
    if not measured:
        return f"| {title} | failed: {'; '.join(faults)} |"
    seconds = sorted(each.seconds for each in measured if each.seconds is not None)
    middle = statistics.median(seconds)
    ratios = (results.ratio(workload, size, own, name) for own in ("local", "spark"))
    cells = [
        title + (f" ({'; '.join(faults)})" if faults else ""),
        f"{middle:.1f}",
        f"{size / middle:,.0f}",
        " ".join(f"{each:.1f}" for each in seconds),
        f"{1000 * statistics.median(each.cpu_seconds for each in measured) / size:.2f}",
        f"{max(each.worker_peak_mb for each in measured):,.0f}",
        f"{max(each.total_peak_mb for each in measured):,.0f}",
        *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
    ]
    return f"| {' | '.join(cells)} |"


def _aims(results: Results, workload: str) -> Iterator[str]:
    for aim in AIMS:
        if aim.workload != workload:
            continue
        measured = aim.measured(results)
        verdict = "not measured" if measured is None else "met" if measured >= aim.least else "NOT met"
        yield f"| {aim.workload}: {aim.text} | {'' if measured is None else f'{measured:.2f}'} | {verdict} |"


def _largest(workload: str, ours: str, *others: str) -> Callable[[Results], float | None]:
    """The ratio to the fastest of the others at the largest size at which all have figures."""

    def ratio(results: Results) -> float | None:
        for size in reversed(results.sizes(workload)):
            fastest = results.fastest(workload, size, others)
            if fastest and (found := results.ratio(workload, size, ours, fastest)) is not None:
                return found
        return None

    return ratio


def _slope(ours: str, other: str) -> Callable[[Results], float | None]:
    def ratio(results: Results) -> float | None:
        own, theirs = results.slope("photos", ours), results.slope("photos", other)
        return None if own is None or theirs is None else own / theirs

    return ratio


def _memory_left(results: Results) -> float | None:
    """600 MB / the largest worker of ours anywhere."""
    runs = (rounds for contestants in results.runs.values() for name, rounds in contestants.items() if name == "local")
    peaks = [each.worker_peak_mb for rounds in runs for each in rounds if each.worker_peak_mb]
    return 600 / max(peaks) if peaks else None


AIMS = (
    Aim("local / limit: at least 0.85", "photos", 0.85, _largest("photos", "local", "limit")),
    Aim(
        "local, wheels only / limit of these: 0.85", "photos", 0.85, _largest("photos", "local_wheels", "limit_wheels")
    ),
    Aim("local, wheels only / img2dataset: 2", "photos", 2.0, _largest("photos", "local_wheels", "img2dataset")),
    Aim("local, wheels only / fastest peer writer: 1.2", "photos", 1.2, _largest("photos", "local_wheels", *WRITERS)),
    Aim("local / local, wheels only: 1.25", "photos", 1.25, _largest("photos", "local", "local_wheels")),
    Aim("local / img2dataset: 2.5", "photos", 2.5, _largest("photos", "local", "img2dataset")),
    Aim("local / fastest peer writer: 1.5", "photos", 1.5, _largest("photos", "local", *WRITERS)),
    Aim("spark, slope / the limit's: 0.85", "photos", 0.85, _slope("spark", "limit")),
    Aim("spark / plain Spark: 4", "photos", 4.0, _largest("photos", "spark", "plain_spark")),
    Aim("spark / Daft: 1.5", "photos", 1.5, _largest("photos", "spark", "daft")),
    Aim("600 MB / the largest worker of local: 1", "photos", 1.0, _memory_left),
    Aim("local / img2dataset: 3", "big", 3.0, _largest("big", "local", "img2dataset")),
    Aim("local / fastest peer: 2", "small", 2.0, _largest("small", "local", *PEERS)),
)

_HEAD = """# The ETL beside its peers

    python benchmarks/etl_peers.py --images DIR --workload photos --num-images 5000,20000 --scratch /tmp/peers
    python benchmarks/etl_peers.py --images DIR --workload big|small --rounds 3 --scratch /tmp/peers

Whole jobs, from the start of the process to its end: images in folders of classes -> squares, JPEG of quality 95, in
shards with labels; {num_workers} processes each. shardmill checks and records everything that it always does. The
limit is its own `process_image` in a bare loop that keeps nothing, timed without the start of its processes; so are the
peers' kernels. Peers that take a function get the fastest one that wheels allow (simplejpeg, OpenCV's area filter, JPEG
4:4:4); img2dataset has its own (OpenCV, 4:2:0). Copies of a photograph differ by a comment. Each contestant's images
were counted afterwards. Memory of processes that share pages counts them for each.

{hardware}; on {day}. Medians of the rounds; ratios are medians of the rounds' own.
"""
