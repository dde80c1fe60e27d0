"""Fits the model of scaling (train/strategies/network.py) to this machine, and predicts layouts that it has not seen.

    .venv/bin/python -m benchmarks.scaling_fit --rounds 12

On 2 and 4 ranks it measures allreduces, gathers and scatters of several sizes, and from them fits latency and bandwidth
of a message. Then steps: of every rank for itself, all at the same time (the computation), and of the strategies below.
What steps of 2 and 4 ranks take beyond both is what a rank does around its collectives, such as copying weights into
one tensor and back: fitted as well, by call and by byte. Steps of 3 ranks, and of shards in two copies on 2 x 2, are
held back: they are predicted from the fits and from computations alone, and compared. All ranks share this machine's
processors, so a message of N ranks on P processors takes max(1, N / P) times as long. Two clocks: the wall, and the CPU
time of all ranks together, which other work on the machine changes least. Each rank has one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.coupled_ranks import no_training, random_batch
from benchmarks.results import hardware
from benchmarks.training_step import SPEC, SilentReporter
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.values import DatasetPin
from train.backends import BACKENDS
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.task import WorkerTask
from train.contracts.values import Reporter, TrainResult
from train.contracts.world import World
from train.launching import LAUNCHERS
from train.planning.make import plan_training
from train.reporting.observer import GlobalStep
from train.strategies import STRATEGIES
from train.strategies.network import Group, Link, all_gather, reduce_scatter, ring_allreduce

SIZES = tuple(4 * 4**power for power in range(6, 12, 1))
"""Bytes of collectives: 16 KiB to 16 MiB."""
LOCAL_BATCH_SIZE = 8
MODEL = "vit_tiny"
ROUNDS = "SHARDMILL_BENCHMARK_ROUNDS"
FORMULAS = {"all_reduce": ring_allreduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter}
LAYOUTS: dict[str, dict[str, Any]] = {
    "torch_ddp, 2 ranks": {"strategy": "torch_ddp", "num_workers": 2},
    "torch_ddp, 4 ranks": {"strategy": "torch_ddp", "num_workers": 4},
    "torch_fsdp, 2 ranks": {"strategy": "torch_fsdp", "num_workers": 2},
    "torch_fsdp, 4 ranks": {"strategy": "torch_fsdp", "num_workers": 4},
    "torch_ddp, 3 ranks": {"strategy": "torch_ddp", "num_workers": 3},
    "torch_fsdp, 3 ranks": {"strategy": "torch_fsdp", "num_workers": 3},
    "torch_fsdp, 2 x 2": {"strategy": "torch_fsdp", "num_workers": 4, "mesh": {"data": 2}},
}
HELD_BACK = ("torch_ddp, 3 ranks", "torch_fsdp, 3 ranks", "torch_fsdp, 2 x 2")


def measure(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """On each rank: `train.launching.rank.Worker`."""
    import torch

    from train.backends.torch.collectives import Moved, traced

    config = task.config
    BACKENDS["torch"].start(world, config.seed)
    torch.set_num_threads(1)

    build = partial(BACKENDS["torch"].build, config, SPEC)

    by_itself = TrainConfig(strategy="single", model=MODEL, optimizer="adam")
    alone = STRATEGIES["single"].join(
        World(), by_itself, partial(BACKENDS["torch"].build, by_itself, SPEC), SilentReporter()
    )
    alone.start({}, 0, "")
    member = STRATEGIES[config.strategy].join(world, config, build, SilentReporter())
    member.start({}, 0, "")
    batch = random_batch(LOCAL_BATCH_SIZE, world.rank)
    total = config.global_batch_size
    contestants: dict[str, Callable[[], object]] = {
        "alone": lambda: alone.train_step(batch, LOCAL_BATCH_SIZE, None),
        "step": lambda: member.train_step(batch, total, None),
    }
    if config.strategy == "torch_ddp":
        contestants |= collectives(world.world_size)
    moved = Moved()
    member.train_step(batch, total, None)
    with traced(moved.add):
        member.train_step(batch, total, None)
    alone.train_step(batch, LOCAL_BATCH_SIZE, None)
    for number in range(int(os.environ[ROUNDS])):
        for name, run in contestants.items():
            reporter.doing(Activity(f"{name} {number}"))
            member.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            num_runs = 1 if name in ("alone", "step") else 4
            for _ in range(num_runs):
                run()
            cpu = (time.process_time() - cpu_start) / num_runs
            member.barrier()
            wall = (time.perf_counter() - start) / num_runs
            reporter.event("timed", {"rank": world.rank, "what": name, "number": number, "wall": wall, "cpu": cpu})
    reporter.event("moved", {"rank": world.rank, "calls": json.dumps(moved.calls)})
    member.barrier()
    member.close()
    return no_training(task, world)


def collectives(world_size: int) -> dict[str, Callable[[], object]]:
    """`KIND BYTES` -> a call."""
    import torch
    import torch.distributed as dist

    calls: dict[str, Callable[[], object]] = {}
    for size in SIZES:
        numbers = size // 4 // 12 * 12
        whole, part = torch.ones(numbers), torch.ones(numbers // world_size)
        calls[f"all_reduce {size}"] = lambda whole=whole: dist.all_reduce(whole)
        calls[f"all_gather {size}"] = lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part)
        calls[f"reduce_scatter {size}"] = lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole)
    return calls


@dataclass
class Figures:
    """A driver's observer."""

    times: dict[tuple[str, str, int], list[float]] = field(default_factory=dict)
    """(clock, what, round) -> of each rank."""
    calls: list[tuple[str, int]] = field(default_factory=list)
    """Kind and bytes of each collective of a step, on rank 0."""

    def step(self, step: GlobalStep) -> None:
        return

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if name == "timed":
            for clock in ("wall", "cpu"):
                key = clock, str(fields["what"]), int(fields["number"] or 0)
                self.times.setdefault(key, []).append(float(fields[clock] or 0))
        if name == "moved" and fields["rank"] == 0:
            self.calls = json.loads(str(fields["calls"]))

    @property
    def exchanges(self) -> list[tuple[str, int]]:
        """Those that there is a formula for: no barrier."""
        return [(kind, num_bytes) for kind, num_bytes in self.calls if kind in FORMULAS]

    def seconds(self, clock: str, what: str) -> float:
        """Median of the rounds: of the slowest rank, or of all ranks' CPU time divided by their number."""
        of_rank = max if clock == "wall" else statistics.mean
        return statistics.median(
            of_rank(each) for (of, name, _), each in self.times.items() if (of, name) == (clock, what)
        )


def run(settings: Mapping[str, Any]) -> Figures:
    num_ranks = settings["num_workers"]
    # One bucket: nothing is exchanged beside the backward pass, which shares its processors anyway.
    whole = {"bucket_bytes": 2**30} if settings["strategy"] == "torch_ddp" else {}
    sizes = {"global_batch_size": LOCAL_BATCH_SIZE * num_ranks, "optimizer": "adam"}
    config = TrainConfig.model_validate({**settings, **whole, **sizes, "model": MODEL, "launcher": "local"})
    figures = Figures()
    with tempfile.TemporaryDirectory() as scratch:
        task = WorkerTask(
            plan_training(config, SparkConfig()).config, DatasetPin(Path(scratch).as_uri(), 1, ""), scratch, "t", ""
        )
        LAUNCHERS["local"].launch(task, SparkConfig(), figures, worker="benchmarks.scaling_fit:measure")
    return figures


def shared(clock: str, num_ranks: int) -> float:
    """How many times as long a rank takes, because others use its processor; CPU time does not change by that."""
    return max(1.0, num_ranks / len(os.sched_getaffinity(0))) if clock == "wall" else 1.0


def fit(found: Mapping[str, Figures], clock: str) -> dict[str, Link]:
    """Latency and bandwidth by kind of collective, from 2 and 4 ranks: least squares of relative differences."""
    links = {}
    for kind, formula in FORMULAS.items():
        rows, ones = [], []
        for num_ranks in (2, 4):
            figures = found[f"torch_ddp, {num_ranks} ranks"]
            for size in SIZES:
                seconds = figures.seconds(clock, f"{kind} {size}")
                # The two numbers that the formula multiplies.
                unit = [formula(group(num_ranks, Link(*each)), size) for each in ((1.0, float("inf")), (0.0, 1.0))]
                rows.append([each * shared(clock, num_ranks) / seconds for each in unit])
                ones.append(1.0)
        (latency, per_byte), *_ = np.linalg.lstsq(np.array(rows), np.array(ones), rcond=None)
        links[kind] = Link(max(0.0, float(latency)), 1 / max(1e-15, float(per_byte)))
    return links


def group(num_ranks: int, link: Link) -> Group:
    return Group(num_ranks, num_ranks, link, link)


@dataclass(frozen=True)
class Around:
    """What a rank does itself for each of its collectives."""

    seconds_per_call: float
    seconds_per_byte: float

    def of(self, figures: Figures) -> float:
        calls = figures.exchanges
        return len(calls) * self.seconds_per_call + sum(size for _, size in calls) * self.seconds_per_byte


def fit_around(found: Mapping[str, Figures], links: Mapping[str, Link], clock: str) -> Around:
    """From the layouts that are not held back: least squares of relative differences; neither number is negative."""
    rows, rest = [], []
    for name, settings in LAYOUTS.items():
        if name in HELD_BACK:
            continue
        figures = found[name]
        step = figures.seconds(clock, "step")
        share = shared(clock, settings["num_workers"]) / step
        rows.append([each.of(figures) * share for each in (Around(1, 0), Around(0, 1))])
        rest.append((step - figures.seconds(clock, "alone") - exchange(settings, figures, links, clock)) / step)
    columns, target = np.array(rows), np.array(rest)
    both, *_ = np.linalg.lstsq(columns, target, rcond=None)
    if (both >= 0).all():
        return Around(*both.tolist())
    ones = [max(0.0, float(each @ target / (each @ each))) for each in columns.T]
    fits = [Around(ones[0], 0.0), Around(0.0, ones[1])]
    errors = [
        float(np.square(columns @ [each.seconds_per_call, each.seconds_per_byte] - target).sum()) for each in fits
    ]
    return fits[int(np.argmin(errors))]


def exchange(settings: Mapping[str, Any], figures: Figures, links: Mapping[str, Link], clock: str) -> float:
    """Each of the counted collectives by the fit."""
    num_ranks, copies, seconds = settings["num_workers"], settings.get("mesh", {}).get("data", 1), 0.0
    for kind, num_bytes in figures.exchanges:
        # Loss and norm are summed over all ranks, gradients of shards over their copies.
        of_copies = copies > 1 and num_bytes > 1000
        ranks = (copies if kind == "all_reduce" else num_ranks // copies) if of_copies else num_ranks
        seconds += FORMULAS[kind](group(ranks, links[kind]), num_bytes) * shared(clock, num_ranks)
    return seconds


def predicted(
    settings: Mapping[str, Any], figures: Figures, links: Mapping[str, Link], around: Around, clock: str
) -> float:
    """Computation as measured at so many ranks; collectives, and the work around them, by the fits."""
    own = around.of(figures) * shared(clock, settings["num_workers"])
    return figures.seconds(clock, "alone") + exchange(settings, figures, links, clock) + own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    os.environ[ROUNDS] = str(given.rounds)
    sys.stdout.write(f"{hardware()}; load {os.getloadavg()[0]:.1f}; {MODEL}, {LOCAL_BATCH_SIZE} images a rank\n\n")
    found = {}
    for name, settings in LAYOUTS.items():
        found[name] = run(settings)
        sys.stderr.write(f"{name}: {len(found[name].calls)} collectives\n")
    for clock in ("wall", "cpu"):
        links = fit(found, clock)
        for kind, link in links.items():
            latency, rate = 1e6 * link.latency_seconds, link.bytes_per_second / 1e9
            sys.stdout.write(f"{clock}, {kind}: {latency:.0f} us a message, {rate:.2f} GB/s\n")
        around = fit_around(found, links, clock)
        sys.stdout.write(
            f"{clock}, around a collective: {1e6 * around.seconds_per_call:.0f} us, "
            f"{1e9 * around.seconds_per_byte:.2f} ns a byte\n"
        )
        sys.stdout.write("\n| layout | computes | step | predicted | off by |\n|---|---|---|---|---|\n")
        for name, settings in LAYOUTS.items():
            figures = found[name]
            step, guess = figures.seconds(clock, "step"), predicted(settings, figures, links, around, clock)
            held = " (held back)" if name in HELD_BACK else ""
            sys.stdout.write(
                f"| {name}{held} | {1e3 * figures.seconds(clock, 'alone'):.0f} ms | {1e3 * step:.0f} ms | "
                f"{1e3 * guess:.0f} ms | {guess / step - 1:+.1%} |\n"
            )
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
