"""The strategy of local updates: a rank updates its own replica several times per step, then replicas are averaged.

McMahan et al., arXiv:1602.05629; Stich, arXiv:1805.09767. A step of the loop is one round: a rank cuts its share of the
global batch into `local_steps` microbatches and applies an update after each. Then weights, and what the optimizer
remembers of them, become their mean over ranks, weighted by samples: between two steps all ranks are equal, so
checkpoints are those of other replicas.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shardmill.dataset.open import open_dataset
from shardmill.errors import TrainingError, UsageError
from shardmill.values import Batch
from train.backends.backend import Learner, StatePart
from train.backends.microbatches import microbatches_of
from train.checkpoints.checkpoint import SavedFiles
from train.config import TrainConfig
from train.contracts.mesh import DataIndex, Mesh
from train.contracts.step_outcome import StepOutcome
from train.contracts.stopwatch import Stopwatch
from train.contracts.values import Reporter
from train.contracts.world import Gather, World, alone
from train.strategies.collective import AnnouncedCollective, Collective
from train.strategies.horovod import HOROVOD, HorovodCollective
from train.strategies.local_sgd_check import check_local_sgd
from train.strategies.member import Member, MemberStep, SiloIndex
from train.strategies.options import LocalSgdOptions, silos_of
from train.strategies.replicated import ReplicatedMember
from train.strategies.silo_mailbox import SiloMailbox
from train.strategies.strategy import Strategy
from train.strategies.torch_ddp import TORCH_DDP, TorchCollective

COLLECTIVE_OF_BACKEND: dict[str, Callable[[World], Collective]] = {"keras": HorovodCollective, "torch": TorchCollective}


@dataclass(frozen=True, slots=True)
class LocalRound:
    """One rank's updates of a round."""

    num_samples: float
    loss_sum: float
    """Sum of each sample's loss at its own update."""
    num_correct: float
    gradient_norm: float
    """The largest."""
    is_applied: bool
    """False if one of them was not finite; the rest of the round was left out then."""

    def figures(self) -> np.ndarray:
        """Everything, as float64 that can be added up over ranks."""
        return np.array([self.loss_sum, self.num_correct, self.gradient_norm, not self.is_applied], np.float64)


def local_round(learner: Learner, batch: Batch, num_steps: int, learning_rate: float | None) -> LocalRound:
    """Update the learner by the mean gradient of each of `num_steps` microbatches of `batch` that has samples."""
    num_samples, loss_sum, num_correct, gradient_norm = 0.0, 0.0, 0.0, 0.0
    for microbatch in _microbatches_with_samples(batch, num_steps):
        here = float(microbatch.weights_N.sum())
        outcome = learner.apply(learner.gradients(microbatch, round(here), 1.0), learning_rate)
        num_samples += here
        loss_sum += outcome.loss * here
        num_correct += outcome.num_correct
        gradient_norm = max(gradient_norm, outcome.gradient_norm)
        if not outcome.is_applied:
            return LocalRound(num_samples, outcome.loss, num_correct, outcome.gradient_norm, False)
    return LocalRound(num_samples, loss_sum, num_correct, gradient_norm, True)


def _microbatches_with_samples(batch: Batch, num_steps: int) -> Iterator[Batch]:
    """Without microbatches of padding alone: momentum, moments, weight decay and regularisation losses would change
    the weights without a sample."""
    return (each for each in microbatches_of(batch, num_steps) if each.weights_N.any())


class LocalSgdMember(ReplicatedMember):
    """A replica that differs from the others within a step, and only then."""

    def __init__(
        self,
        learner: Learner,
        collective: Collective,
        data: DataIndex,
        gather_aside: Gather,
        local_steps: int,
    ) -> None:
        super().__init__(learner, collective, data, gather_aside)
        self._local_steps = local_steps

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        done = local_round(self.learner, batch, self._local_steps, learning_rate)
        stopwatch = Stopwatch()
        loss_sum, num_correct, norms, num_failed = self._collective.sum_array(done.figures()).tolist()
        # If a rank could not apply an update, all stop here together; what the others applied is in no checkpoint.
        outcome = StepOutcome(loss_sum / global_weight, num_correct, norms / self.world_size, num_failed == 0)
        if outcome.is_applied and self.world_size > 1:
            parts = (StatePart.WEIGHTS, StatePart.OPTIMIZER)
            # All of them before any is assigned: with `ema_decay` the averages of the weights stand in for these until
            # the optimizer's part, which has the weights themselves, is assigned as well.
            means = [self._mean(part, done.num_samples / global_weight) for part in parts]
            for part, arrays in zip(parts, means, strict=True):
                self.learner.assign(part, arrays, "the mean over all ranks")
        return MemberStep(outcome, stopwatch.lap())

    def own_gradient_is_finite(self, batch: Batch, global_weight: int) -> bool:
        # By the weights as its own updates of the round have left them.
        microbatches = _microbatches_with_samples(batch, self._local_steps)
        gradients = (self.learner.gradients(each, len(each.weights_N), 1.0) for each in microbatches)
        return all(map(self.learner.are_finite, gradients))

    def _mean(self, part: StatePart, weight_here: float) -> list[np.ndarray]:
        """The mean over ranks of a part of the state.

        Scalars in float64, in which the mean of equal ones is what they were. Integers count updates: a rank whose last
        microbatches were padding has made fewer, and the mean is rounded.
        """
        arrays = self.learner.arrays(part)
        tensors = [place for place, array in enumerate(arrays) if array.ndim and array.dtype.kind == "f"]
        others = [place for place in range(len(arrays)) if place not in tensors]
        for places, kind in ((tensors, np.float32), (others, np.float64)):
            if not places:
                continue
            mine = np.concatenate([arrays[place].ravel().astype(kind) for place in places])
            means = self._collective.sum_array(mine * kind(weight_here))
            for place in places:
                array = arrays[place]
                mean = means[: array.size] if array.dtype.kind == "f" else np.rint(means[: array.size])
                arrays[place] = mean.astype(array.dtype).reshape(array.shape)
                means = means[array.size :]
        return arrays


class SiloMember(ReplicatedMember):
    """A silo: it reads a dataset of its own, and nothing of it travels but weights, and figures of a round."""

    def __init__(self, learner: Learner, mailbox: SiloMailbox, data: SiloIndex, local_steps: int) -> None:
        super().__init__(learner, mailbox, data, alone)
        self._mailbox = mailbox
        self._silo = data
        self._local_steps = local_steps

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        stopwatch = Stopwatch()
        compute_seconds = 0.0

        def compute() -> list[np.ndarray]:
            nonlocal compute_seconds
            done = local_round(self.learner, batch, self._local_steps, learning_rate)
            if not done.is_applied:
                raise TrainingError(
                    f"silo {self.rank} ({self._silo.uri}): loss {done.loss_sum}, gradient norm {done.gradient_norm}",
                    "expected finite numbers",
                    "lower train.learning_rate, or set train.gradient_clip_norm",
                )
            compute_seconds = stopwatch.lap()
            return [np.array([done.num_samples, *done.figures()]), *self._travelling()]

        done = self._mailbox.average(compute)
        if done.weights:
            self._take_mean(done.weights)
        num_samples, loss_sum, num_correct, norms, _ = done.figures.tolist()
        # As if the silos that are away had done as the others did.
        seen = max(num_samples, 1.0)
        outcome = StepOutcome(loss_sum / seen, num_correct / seen * global_weight, norms, True)
        return MemberStep(outcome, stopwatch.lap())

    def average_moving_statistics(self) -> None:
        """Averages nothing here: the statistics are sent with the weights."""
        return

    def state_files(self) -> dict[str, list[np.ndarray]]:
        """The state of a silo's optimizer stays in the silo, and is lost with it."""
        return super().state_files() if self.rank == 0 else {}

    def files_to_resume(self, saved: SavedFiles) -> list[str]:
        return super().files_to_resume(saved) if self.rank == 0 else []

    def start(self, files: Mapping[str, bytes], saved_world_size: int, source: str) -> None:
        # No silo but rank 0 has a file of its own.
        super().start(files, 0, source)

    def _travelling(self) -> list[np.ndarray]:
        own = self.learner.arrays(StatePart.OWN)
        return [*self.learner.arrays(StatePart.WEIGHTS), *(own[place] for place in self.learner.moving_statistics())]

    def _take_mean(self, arrays: list[np.ndarray]) -> None:
        places = self.learner.moving_statistics()
        num_weights = len(arrays) - len(places)
        self.learner.assign(StatePart.WEIGHTS, arrays[:num_weights], "the mean of the silos")
        if places:
            own = self.learner.arrays(StatePart.OWN)
            for place, array in zip(places, arrays[num_weights:], strict=True):
                own[place] = array
            self.learner.assign(StatePart.OWN, own, "the mean of the silos")


def join_local_sgd(world: World, config: TrainConfig, build: Callable[[], Learner], reporter: Reporter) -> Member:
    """`train.strategies.strategy.Join`."""
    if silos_of(config):
        return join_silos(world, config, build, reporter)
    data = Mesh.of(config).data_index(world.rank)
    learner = build()
    collective = AnnouncedCollective(COLLECTIVE_OF_BACKEND[config.backend], world, reporter)
    return LocalSgdMember(learner, collective, data, world.exchange_aside, config.options(LocalSgdOptions).local_steps)


def join_silos(world: World, config: TrainConfig, build: Callable[[], Learner], reporter: Reporter) -> Member:
    """Join as a silo. Each silo learns the sizes of all, which determine its share of samples in a round."""
    uri = silos_of(config)[world.rank]
    manifest = open_dataset(uri).manifest
    if "train" not in manifest.splits:
        raise UsageError(f"the silo {uri} has no train split", "expected one", "raise etl.split_fractions.train there")
    learner = build()
    rows = world.exchange(str(manifest.splits["train"].num_rows).encode())
    mailbox = SiloMailbox(world, config.options(LocalSgdOptions).silo_timeout_seconds, reporter)
    # A silo's steps are over its own rows. Of the pinned dataset, the first one evaluates on all.
    evaluated = range(config.num_streams if world.rank == 0 else 0)
    data = SiloIndex(world.rank, world.world_size, evaluated, config.num_streams, uri, tuple(map(int, rows)))
    return SiloMember(learner, mailbox, data, config.options(LocalSgdOptions).local_steps)


def ranks_that_may_be_lost(config: TrainConfig) -> frozenset[int]:
    """`train.strategies.strategy.Strategy.may_lose`: all silos but the one that coordinates."""
    return frozenset(range(1, config.num_workers)) if silos_of(config) else frozenset()


LOCAL_SGD = Strategy(
    backends=("keras", "torch"),
    synchronous=False,
    exact_resume=True,
    max_world_size=None,
    join=join_local_sgd,
    check=check_local_sgd,
    may_lose=ranks_that_may_be_lost,
    secondary_error=re.compile(f"{HOROVOD.secondary_error.pattern}|{TORCH_DDP.secondary_error.pattern}", re.IGNORECASE),
)
