"""Measures the cost of one rank's step on this machine, with random images in a separate process."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardmill.errors import TrainingError
from shardmill.values import Batch
from train.api import Learner, StatePart
from train.backends import BACKENDS
from train.backends.model_spec import ModelSpec, synthetic_batch
from train.config import TrainConfig
from train.contracts.values import to_json
from train.contracts.world import World
from train.launching.devices import CUDA_VARIABLE
from train.launching.rank_failures import FIX
from train.launching.side_process import Question, answer, ask

# The first compiles; of the others the median counts.
NUM_STEPS = 6
NUM_STEPS_OF_FEW_IMAGES = 2
# If bytes are measured: what more images need follows from what few and these need.
NUM_PROBED_IMAGES = 8
NUM_PROBED_STEPS = 2
# Of a single image there are no statistics: PyTorch's batch norms refuse it.
FEW_IMAGES = 2
# Of freed blocks below 32 MiB glibc keeps many or few, by the order in which sizes came: a peak was up to twice of what
# a step holds. So they go back at once, which takes time (mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD).
EXACT_PEAK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """The step to measure."""

    config: TrainConfig
    """Without `auto`."""
    spec: ModelSpec
    local_batch_size: int
    ranks_per_node: int
    """Ranks that will share this machine's cores."""
    num_steps: int = NUM_STEPS
    for_memory: bool = False
    """Bytes are wanted, not seconds: on the CPU, whose memory is seen, also if there is a GPU."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one step of one rank; bytes are those of this machine's memory, the only memory on a CPU."""

    num_weights: int
    """All of the model's."""
    model_bytes: int
    """Likewise."""
    weights_bytes: int
    """Size of the trainable weights, which equals that of all gradients."""
    state_bytes: int
    """Weights, gradients, optimizer and the rank's own state."""
    work_bytes: int
    """Memory of a step beyond the state: images, activations, scratch. Peak of the process minus the value
    before it.
    """
    step_seconds: float
    process_bytes: int
    """The process itself before its first step: framework, weights, optimizer."""
    image_bytes: int
    """Part of `work_bytes` per image computed at a time."""
    base_bytes: int
    """The other part, which does not grow with the images."""


def probe(task: ProbeTask) -> StepCost:
    """Measure it. Raises the error that building the model raises (UsageError), else TrainingError."""
    environment = {CUDA_VARIABLE: "-1", **EXACT_PEAK} if task.for_memory else {}
    question = Question("train.planning.probe", to_json(task), environment, timeout_seconds=None)
    return ask(question, StepCost, lambda how: TrainingError(f"the process that probed a step {how}", fix=FIX))


def measure(task: ProbeTask) -> StepCost:
    """Measure in this process, with a fresh framework."""
    config = task.config
    backend = BACKENDS[config.backend]
    backend.start(World(ranks_per_node=task.ranks_per_node), config.seed)
    learner = backend.build(config, task.spec)
    sizes = {part: sum(array.nbytes for array in learner.arrays(part)) for part in StatePart}
    model = learner.named_weights().arrays().values()
    # From here on the peak is that of what comes; building a model may take more than it leaves.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before_bytes = _peak_bytes()
    num_few = min(FEW_IMAGES * config.num_accumulated, task.local_batch_size)
    few = synthetic_batch(task.spec, num_few)
    _steps(learner, few, NUM_STEPS_OF_FEW_IMAGES)
    of_few_bytes = _peak_bytes() - before_bytes
    seconds = _steps(learner, synthetic_batch(task.spec, task.local_batch_size), task.num_steps)
    work_bytes = max(0, _peak_bytes() - before_bytes - sizes[StatePart.WEIGHTS])
    num_images, num_few = (-(-num // config.num_accumulated) for num in (task.local_batch_size, num_few))
    grown_bytes = _peak_bytes() - before_bytes - of_few_bytes
    image_bytes = max(math.prod(task.spec.image_shape_HWC) * 4, grown_bytes // max(1, num_images - num_few))
    return StepCost(
        num_weights=sum(array.size for array in model),
        model_bytes=sum(array.nbytes for array in model),
        weights_bytes=sizes[StatePart.WEIGHTS],
        state_bytes=sum(sizes.values()) + sizes[StatePart.WEIGHTS],
        work_bytes=work_bytes,
        step_seconds=statistics.median(seconds[1:]),
        process_bytes=before_bytes,
        image_bytes=image_bytes,
        base_bytes=max(0, work_bytes - image_bytes * num_images),
    )


def _steps(learner: Learner, batch: Batch, num_steps: int) -> list[float]:
    """-> the seconds of each."""
    seconds = []
    for _ in range(num_steps):
        started = time.perf_counter()
        learner.apply(learner.gradients(batch, len(batch.weights_N), 1.0), None)
        seconds.append(time.perf_counter() - started)
    return seconds


def _peak_bytes() -> int:
    """Not `ru_maxrss`, which a process begins with its parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    answer(ProbeTask, measure)
