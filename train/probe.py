"""What one rank's step costs on this machine, measured on made-up images in a process of its own.

That process is `python -m train.probe PARENT`: its task comes on stdin, its answer is the last line of stdout.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np

from shardmill.jobs.process import SAFE_PATH, Scratch, python_path
from shardmill.parent_death import die_with_parent
from shardmill.values import Batch
from train.backends import BACKENDS
from train.backends.backend import ModelSpec, StatePart
from train.config import TrainConfig
from train.launching.faults import Failure, FaultKind, RankFault, error_of, failure_of
from train.strategies.strategy import NO_ECHO
from train.values import from_json, to_json
from train.world import World

# The first compiles; of the others the median counts.
NUM_STEPS = 6
ANSWER = b"shardmill-probe:"


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """What is measured."""

    config: TrainConfig
    """Without `auto`."""
    spec: ModelSpec
    local_batch_size: int
    ranks_per_node: int
    """Ranks that will share this machine's cores."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step of one rank took; bytes are those of this machine's memory, which on a CPU is all there is."""

    num_weights: int
    weights_bytes: int
    """Of what gradients change, which is also the size of all gradients, and of one exchange."""
    state_bytes: int
    """Weights, gradients, optimizer and the rank's own state."""
    work_bytes: int
    """What a step takes beyond the state: images, activations, scratch. Peak of the process less that before it."""
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What the process writes: one of the two."""

    cost: StepCost | None = None
    failure: Failure | None = None


def probe(task: ProbeTask) -> StepCost:
    """Measure it. Raises the error that building the model raises (UsageError), else TrainingError."""
    scratch = Scratch()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "train.probe", str(os.getpid())],
            env={**os.environ, "PYTHONPATH": python_path(), **SAFE_PATH, "TMPDIR": str(scratch.path)},
            input=to_json(task),
            capture_output=True,
            check=False,
        )
    finally:
        scratch.remove()
    lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    answer = from_json(Answer, lines[-1].removeprefix(ANSWER)) if lines else Answer()
    if answer.cost is not None:
        return answer.cost
    tail = done.stderr.decode(errors="replace")[-4000:]
    kind = FaultKind.FAILED if answer.failure else FaultKind.KILLED
    fault = RankFault(kind, 0, "the probe", 0.0, "", None, answer.failure, done.returncode, tail)
    raise error_of(fault)


def measure(task: ProbeTask) -> StepCost:
    """In this process, with a fresh framework."""
    config = task.config
    backend = BACKENDS[config.backend]
    backend.start(World(ranks_per_node=task.ranks_per_node), config.seed)
    learner = backend.build(config, task.spec)
    sizes = {part: sum(array.nbytes for array in learner.arrays(part)) for part in StatePart}
    batch = _made_up(task)
    before_bytes = _peak_bytes()
    seconds = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        learner.apply(learner.gradients(batch, task.local_batch_size, 1.0), None)
        seconds.append(time.perf_counter() - started)
    return StepCost(
        num_weights=sum(array.size for array in learner.arrays(StatePart.WEIGHTS)),
        weights_bytes=sizes[StatePart.WEIGHTS],
        state_bytes=sum(sizes.values()) + sizes[StatePart.WEIGHTS],
        work_bytes=max(0, _peak_bytes() - before_bytes - sizes[StatePart.WEIGHTS]),
        step_seconds=statistics.median(seconds[1:]),
    )


def _made_up(task: ProbeTask) -> Batch:
    rng, num_rows = np.random.default_rng(0), task.local_batch_size
    images_NHWC = rng.integers(0, 256, (num_rows, *task.spec.image_shape_HWC), dtype=np.uint8)
    spec = task.spec.labels
    shape = (num_rows,) if spec.kind == "float" else (num_rows, spec.num_outputs)
    labels = rng.integers(0, spec.num_outputs, num_rows) if spec.kind == "class" else np.zeros(shape, np.float32)
    return Batch(images_NHWC, labels, np.ones(num_rows, np.float32), np.arange(num_rows), 0, 0)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Measure what stdin asks for, and print the answer after whatever a user's model prints."""
    die_with_parent(int(sys.argv[1]), 1)
    task = from_json(ProbeTask, sys.stdin.buffer.read())
    try:
        answer = Answer(cost=measure(task))
    except (Exception, SystemExit) as error:
        # A user's factory may raise anything.
        answer = Answer(failure=failure_of(error, NO_ECHO))
    sys.stdout.buffer.write(b"\n" + ANSWER + to_json(answer) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
