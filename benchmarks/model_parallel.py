"""Compares steps of sharded models, ours and hand-written ones: CPU and wall time, state of a rank, bytes exchanged.

    .venv/bin/python -m benchmarks.model_parallel --rounds 20
    .venv/bin/python -m benchmarks.model_parallel --strategies tensor_parallel --model vit_base --ranks 4

Both train the same vision transformer from the same weights with Adam on the same batches, which are in memory; by hand
is what PyTorch's guides show (benchmarks/model_parallel_by_hand.py). The two take turns in the same processes, in
rounds of a few steps that all ranks begin together. CPU time is that of all ranks, with PyTorch's threads: other work
on the machine changes it least. Ours also computes the norm of the gradients, counts right answers and checks that all
is finite. Losses of the two must agree.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from benchmarks.coupled_ranks import no_training, random_batch
from benchmarks.results import hardware
from benchmarks.training_step import SPEC, SilentReporter
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.values import DatasetPin
from train.api import StatePart
from train.backends import BACKENDS
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.task import WorkerTask
from train.contracts.values import Reporter, TrainResult
from train.contracts.world import World
from train.launching import LAUNCHERS
from train.planning.checks import check
from train.planning.setup import resolve
from train.reporting.observer import GlobalStep
from train.strategies import STRATEGIES

STEPS_OF_ROUND = 3
SETTINGS = "SHARDMILL_BENCHMARK_SETTINGS"
TITLE = (
    "| | CPU of a step: ours | by hand | ratio | wall: ours | by hand | ratio | state of a rank: ours | by hand | "
    "exchanged in a step: ours | by hand |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def measure(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """On each rank: `train.launching.rank.Worker`."""
    from benchmarks.model_parallel_by_hand import BY_HAND, state_bytes
    from train.backends.torch.backend import TorchLearner
    from train.backends.torch.collectives import Moved, traced

    config, settings = task.config, json.loads(os.environ[SETTINGS])
    BACKENDS["torch"].start(world, config.seed)
    built: list[tuple[TorchLearner, Any]] = []

    def build(*, materialized: bool = True, sum_in_step: Any = None) -> Any:
        learner = cast("TorchLearner", BACKENDS["torch"].build(config, SPEC))
        # Before it is divided. All ranks build it from the same seed, materialized.
        built.append((learner, copy.deepcopy(learner.module)))
        return learner

    member = STRATEGIES[config.strategy].join(world, config, build, SilentReporter())
    [(learner, model)] = built
    member.start({}, 0, "")
    held, optimizer, by_hand = BY_HAND[config.strategy](model)
    batch = random_batch(config.global_batch_size // member.data.count, member.data.index)
    contestants: dict[str, Callable[[], float]] = {
        "ours": lambda: member.train_step(batch, config.global_batch_size, 1e-3).outcome.loss,
        "by hand": lambda: by_hand(batch),
    }
    moved = {name: Moved() for name in contestants}
    losses: dict[str, list[float]] = {name: [] for name in contestants}
    for name, step in contestants.items():
        # Warm, then counted.
        losses[name].append(step())
        with traced(moved[name].add):
            losses[name].append(step())
    for number in range(settings["rounds"]):
        reporter.doing(Activity(f"round {number}"))
        order = list(contestants.items())
        for name, step in order if number % 2 else order[::-1]:
            member.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(STEPS_OF_ROUND):
                step()
            member.barrier()
            seconds = (time.perf_counter() - start, time.process_time() - cpu_start)
            fields = dict(zip(("wall", "cpu"), (each / STEPS_OF_ROUND for each in seconds), strict=True))
            reporter.event("round", {"rank": world.rank, "contestant": name, "number": number, **fields})
    ours_bytes = sum(each.nbytes for part in (StatePart.WEIGHTS, StatePart.OPTIMIZER) for each in learner.arrays(part))
    for name, num_bytes in (("ours", ours_bytes), ("by hand", state_bytes(held, optimizer))):
        sums = member.sum_array(_array(losses[name])) / world.world_size
        fields = {"contestant": name, "state": num_bytes, "losses": " ".join(f"{each:.6f}" for each in sums)}
        reporter.event("held", {"rank": world.rank, **fields, **moved[name].bytes_by_kind})
    member.barrier()
    member.close()
    return no_training(task, world)


def _array(values: list[float]) -> Any:
    import numpy as np

    return np.array(values)


@dataclass
class Figures:
    """A driver's observer."""

    rounds: dict[tuple[str, str, int], list[float]] = field(default_factory=dict)
    """(contestant, clock, round) -> of each rank."""
    held: dict[str, list[Mapping[str, FieldValue]]] = field(default_factory=dict)

    def step(self, step: GlobalStep) -> None:
        return

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if name == "round":
            for clock in ("wall", "cpu"):
                key = str(fields["contestant"]), clock, int(fields["number"] or 0)
                self.rounds.setdefault(key, []).append(float(fields[clock] or 0))
        if name == "held":
            self.held.setdefault(str(fields["contestant"]), []).append(fields)

    def seconds(self, contestant: str, clock: str) -> list[float]:
        """By round: the CPU time of all ranks, the wall time of the slowest."""
        together = sum if clock == "cpu" else max
        return [
            together(each) for (name, of, _), each in sorted(self.rounds.items()) if (name, of) == (contestant, clock)
        ]

    def row(self, title: str) -> str:
        cells = [title]
        for clock in ("cpu", "wall"):
            ours, by_hand = self.seconds("ours", clock), self.seconds("by hand", clock)
            ratio = statistics.median(one / other for one, other in zip(ours, by_hand, strict=True))
            cells += [f"{1e3 * statistics.median(each):.0f} ms" for each in (ours, by_hand)] + [f"{ratio:.3f}"]
        for names in (("state",), ("all_reduce", "all_gather", "reduce_scatter", "send")):
            for contestant in ("ours", "by hand"):
                # The ranks of a group hold and send equal amounts, to a few numbers.
                most = max(sum(int(each.get(name) or 0) for name in names) for each in self.held[contestant])
                cells.append(f"{most / 1e6:.1f} MB")
        return f"| {' | '.join(cells)} |\n"


def run(strategy: str, model: str, num_ranks: int, batch_size: int) -> Figures:
    config = TrainConfig.model_validate(
        {
            "strategy": strategy, "model": model, "launcher": "local", "num_workers": num_ranks, "optimizer": "adam",
            "global_batch_size": batch_size,
        }
    )  # fmt: skip
    plan = check(resolve(config, SparkConfig()))
    figures = Figures()
    with tempfile.TemporaryDirectory() as scratch:
        task = WorkerTask(plan.config, DatasetPin(Path(scratch).as_uri(), 1, ""), scratch, "t", "")
        LAUNCHERS["local"].launch(task, SparkConfig(), figures, worker="benchmarks.model_parallel:measure")
    ours, by_hand = (str(figures.held[name][0]["losses"]) for name in ("ours", "by hand"))
    # Of the same weights, and after one update.
    for one, other in zip(ours.split(), by_hand.split(), strict=True):
        assert abs(float(one) - float(other)) < 1e-4 * float(other), (strategy, ours, by_hand)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="torch_fsdp,tensor_parallel")
    parser.add_argument("--model", default="vit_small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="global")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    os.environ[SETTINGS] = json.dumps({"rounds": given.rounds})
    sys.stdout.write(
        f"{hardware()}; load {os.getloadavg()[0]:.1f}; {given.model}, {given.ranks} ranks, global batch "
        f"{given.batch_size}, medians of {given.rounds} rounds of {STEPS_OF_ROUND} steps\n\n{TITLE}"
    )
    for strategy in given.strategies.split(","):
        figures = run(strategy, given.model, given.ranks, given.batch_size)
        sys.stdout.write(figures.row(f"`{strategy}`"))
        for name, held in figures.held.items():
            sys.stderr.write(f"{strategy}, {name}: {dict(held[0])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
