"""The strategy of local updates: a rank updates its own replica several times per step, then replicas are averaged.

McMahan et al., arXiv:1602.05629; Stich, arXiv:1805.09767. A step of the loop is one round: a rank cuts its share of the
global batch into `local_steps` microbatches and applies an update after each. Then weights, and what the optimizer
remembers of them, become their mean over ranks, weighted by samples: between two steps all ranks are equal, so
checkpoints are those of other replicas.

Silos exchange weights as numbered files in the models' store; rank 0 ends each round without lost silos.

<training dir>/silos/<attempt>/00000012/
    begun-00003         silo 3 works on its part of round 12
    silo-00003.npz      its weights
    mean.npz            rank 0's: the mean weights of those that came in time; only the newest stay
    told                rank 0's last file of this number: what it told all silos
<training dir>/silos/<attempt>/back/back-00003      silo 3 was away and catches up: the running round waits for it

Collectives of Horovod and Gloo end with the first peer that is lost, so weights do not travel by them. The driver would
have to hold the weights of all silos at once; the store is there anyway, holds what a silo missed until it comes back,
and needs no connection between silos. Every silo goes through the same numbers in the same order, rank 0 ahead of them.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.versions import split_version
from shardmill.errors import TrainingError, UsageError
from shardmill.registry import install_hint
from shardmill.stores import open_store
from shardmill.values import Batch
from train.api import Build, Learner, Member, MemberStep, StatePart, Strategy, moving_statistics
from train.backends.rules import microbatches_of
from train.checkpoints.arrays import dump_arrays, load_arrays
from train.checkpoints.checkpoint import SavedFiles
from train.config import TrainConfig
from train.contracts.activities import Activity, Stopwatch, during, waiting
from train.contracts.mesh import DataIndex, Mesh, SiloIndex
from train.contracts.values import Reporter, StepOutcome
from train.contracts.world import World
from train.strategies import STRATEGIES
from train.strategies.collective import AnnouncedCollective, Collective
from train.strategies.horovod import HOROVOD, HorovodCollective
from train.strategies.options import LocalSgdOptions, silos_of
from train.strategies.replicated import ReplicatedMember
from train.strategies.torch_ddp import TORCH_DDP, TorchCollective


def check_local_sgd(config: TrainConfig) -> None:
    """`train.api.Strategy.check`."""
    if silos_of(config):
        _check_silos(config)
    _check_updates(config)
    entry = STRATEGIES.entries["horovod"]
    if not silos_of(config) and config.backend == "keras" and (missing := entry.missing_packages()):
        raise UsageError(
            f"train.strategy = 'local_sgd' with the backend 'keras' needs {', '.join(missing)}",
            "whose collectives average the weights",
            install_hint(entry.extra),
        )
    if config.mixed_precision == "float16":
        raise UsageError(
            "train.mixed_precision = 'float16' with train.strategy = 'local_sgd'",
            "each rank would skip different steps and scale its loss by a different factor",
            "set train.mixed_precision = 'bfloat16'",
        )


def _check_updates(config: TrainConfig) -> None:
    local_steps = config.options(LocalSgdOptions).local_steps
    share = Mesh.of(config).smallest_share(config.global_batch_size)
    if config.num_accumulated * local_steps > share:
        raise UsageError(
            f"train.accumulation_steps = {config.accumulation_steps} times train.local_sgd.local_steps = {local_steps}",
            f"expected at most {share}, the samples of a step that the rank with the fewest streams has",
            "lower one of them, or raise train.global_batch_size",
        )


def _check_silos(config: TrainConfig) -> None:
    silos = silos_of(config)
    if len(silos) != config.num_workers:
        raise UsageError(
            f"train.local_sgd.silos names {len(silos)} datasets, and train.num_workers = {config.num_workers}",
            "expected one for each rank",
            f"set train.num_workers = {len(silos)}",
        )
    unnamed = [uri for uri in silos if split_version(uri)[1] is None]
    if unnamed:
        raise UsageError(
            f"train.local_sgd.silos names {', '.join(unnamed)} without a version",
            "a training needs fixed versions, and other ranks may not be able to read a silo's dataset",
            f"write, for example, {unnamed[0]}@1",
        )
    if config.max_restarts or config.reader == "petastorm":
        raise UsageError(
            f"train.local_sgd.silos with train.max_restarts = {config.max_restarts}, train.reader = {config.reader!r}",
            "each rank reads its own dataset with the reader 'shardmill', and no other rank can take over its rows",
            (
                "set train.max_restarts = 0 and train.reader = 'shardmill'; the training continues without a lost "
                "silo anyway"
            ),
        )
    if config.ema_decay:
        raise UsageError(
            f"train.ema_decay = {config.ema_decay} with train.local_sgd.silos",
            "a silo sends only its weights, once per round",
            "remove train.ema_decay",
        )


POLL_SECONDS = 0.05
# Older means are deleted; a silo that is further behind continues with the next one that exists.
MEANS_KEPT = 3
BACK = "back/back-"
# Through a store that may have to repeat its requests.
EXCHANGING = Activity("exchanging weights with the other silos")

Arrays = list[np.ndarray]
"""The file of a silo: its metrics, then its weights."""


@dataclass(frozen=True, slots=True)
class Round:
    """The result of a round."""

    metrics: np.ndarray
    """Their sum over the silos that took part."""
    weights: Arrays
    """The mean; empty if this silo is so far behind that the mean has been deleted."""


class SiloMailbox:
    """`train.strategies.collective.Collective` of silos. All values except weights are those of rank 0."""

    def __init__(self, world: World, timeout_seconds: float, reporter: Reporter) -> None:
        self._store = open_store(world.files_uri)
        self._rank, self._world_size = world.rank, world.world_size
        self._timeout_seconds = timeout_seconds
        self._reporter = reporter
        if world.rank == 0:
            # Files of killed attempts.
            for file in list(self._store.list("")):
                self._store.delete(file.path)
        [of_rank_0, *_] = world.exchange(secrets.token_hex(4).encode())
        self._folder = of_rank_0.decode()
        self._number = -1
        self._present = set(range(1, self._world_size))

    def average(self, compute: Callable[[], Arrays]) -> Round:
        """One round. `compute` gives the silo's metrics, of which the first is its number of samples, and weights.

        It is not called if the round is over already: this silo was away.
        """
        with during(self._reporter, EXCHANGING) as step:
            return self._average(partial(self._computed, step, compute))

    def _computed(self, step: Activity, compute: Callable[[], Arrays]) -> Arrays:
        with during(self._reporter, step):
            return compute()

    def _average(self, compute: Callable[[], Arrays]) -> Round:
        self._number += 1
        if self._rank == 0:
            contributions = {0: compute()}
            contributions |= self._collect(contributions[0])
            metrics, mean = mean_of([contributions[rank] for rank in sorted(contributions)])
            self._store.put(self._path("mean.npz"), dump_arrays(mean))
            self._store.put(self._path("told"), dump_arrays([metrics]))
            self._forget_old_means()
            return Round(metrics, mean)
        if self._store.stat(self._path("told")) is None:
            self._store.put(self._path(f"begun-{self._rank:05d}"), b"begun\n")
            self._store.put(self._path(f"silo-{self._rank:05d}.npz"), dump_arrays(compute()))
        else:
            self._store.put(f"{self._folder}/{BACK}{self._rank:05d}", b"back\n")
        [metrics] = load_arrays(self._wait_until_told())
        try:
            return Round(metrics, load_arrays(self._store.read(self._path("mean.npz"))))
        except FileNotFoundError:
            return Round(metrics, [])

    def sum_tensors(self, tensors: list[object]) -> list[object]:
        raise AssertionError("gradients do not leave a silo")

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        [of_rank_0] = load_arrays(self.broadcast_bytes(dump_arrays([array])))
        return of_rank_0

    def broadcast_bytes(self, data: bytes) -> bytes:
        self._number += 1
        if self._rank:
            return self._wait_until_told()
        self._store.put(self._path("told"), data)
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [self.broadcast_bytes(data)]

    def barrier(self) -> None:
        """Nobody waits for silos that may be lost."""
        return

    def close(self) -> None:
        """Rank 0 deletes all files when the remaining silos have read the last ones."""
        self._number += 1
        if self._rank:
            self._store.put(self._path(f"bye-{self._rank:05d}"), b"bye\n")
            return
        deadline_seconds = time.monotonic() + self._timeout_seconds
        while self._present - self._arrived("bye-") and time.monotonic() < deadline_seconds:
            self._wait("the other silos' end")
        for file in list(self._store.list(self._folder)):
            self._store.delete(file.path)

    def _collect(self, own: Arrays) -> dict[int, Arrays]:
        """The parts of the silos that took part in the last round, or have begun this one, and are in time."""
        deadline_seconds = time.monotonic() + self._timeout_seconds
        while True:
            arrived = self._arrived("silo-")
            expected = self._present | self._arrived("begun-") | self._ranks_of(BACK)
            if not expected - arrived or time.monotonic() > deadline_seconds:
                break
            self._wait("the other silos' weights")
        parts = {rank: load_arrays(self._store.read(self._path(f"silo-{rank:05d}.npz"))) for rank in arrived}
        parts = {rank: part for rank, part in parts.items() if _fits(part, own)}
        for rank in sorted(self._present ^ parts.keys()):
            name = "silo_back" if rank in parts else "silo_missing"
            self._reporter.event(name, {"silo": rank, "message": self._number, "taking_part": len(parts) + 1})
        for rank in self._ranks_of(BACK):
            self._store.delete(f"{self._folder}/{BACK}{rank:05d}")
        self._present = set(parts)
        return parts

    def _arrived(self, kind: str) -> set[int]:
        return self._ranks_of(f"{self._number:08d}/{kind}")

    def _ranks_of(self, kind: str) -> set[int]:
        """The ranks that have put such a file."""
        folder, _, start = kind.partition("/")
        names = [file.path.rpartition("/")[2] for file in self._store.list(f"{self._folder}/{folder}")]
        return {int(name.removeprefix(start).partition(".")[0]) for name in names if name.startswith(start)}

    def _wait_until_told(self) -> bytes:
        while self._store.stat(self._path("told")) is None:
            self._wait("the coordinator's answer")
        return self._store.read(self._path("told"))

    def _wait(self, what: str) -> None:
        with during(self._reporter, waiting(what)):
            time.sleep(POLL_SECONDS)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{self._number:08d}/{name}"

    def _forget_old_means(self) -> None:
        number = self._number - MEANS_KEPT
        for file in list(self._store.list(f"{self._folder}/{number:08d}")) if number >= 0 else []:
            if not file.path.endswith("/told"):
                self._store.delete(file.path)


def mean_of(parts: Sequence[Arrays]) -> tuple[np.ndarray, Arrays]:
    """(sum of the metrics, mean of the weights by number of samples); the first part is rank 0's."""
    metrics = np.sum([part[0] for part in parts], axis=0)
    num_samples = metrics[0]
    if not num_samples:
        # All silos with remaining samples are absent, so no weights have changed.
        return metrics, parts[0][1:]
    means = []
    for place in range(1, len(parts[0])):
        mean = sum(part[place].astype(np.float64) * (part[0][0] / num_samples) for part in parts)
        means.append(np.asarray(mean).astype(parts[0][place].dtype))
    return metrics, means


def _fits(part: Arrays, own: Arrays) -> bool:
    """Whether a silo's weights can be averaged with rank 0's: of the same shapes, and finite."""
    shapes = [(each.shape, each.dtype) for each in part]
    return shapes == [(each.shape, each.dtype) for each in own] and all(np.isfinite(each).all() for each in part)


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

    def metrics(self) -> np.ndarray:
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
        local_steps: int,
    ) -> None:
        super().__init__(learner, collective, data)
        self._local_steps = local_steps

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        done = local_round(self.learner, batch, self._local_steps, learning_rate)
        stopwatch = Stopwatch()
        loss_sum, num_correct, norms, num_failed = self._collective.sum_array(done.metrics()).tolist()
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
    """A silo: it reads a dataset of its own, and nothing of it travels but weights, and metrics of a round."""

    shares_checkpoints = False

    def __init__(self, learner: Learner, mailbox: SiloMailbox, data: SiloIndex, local_steps: int) -> None:
        super().__init__(learner, mailbox, data)
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
            return [np.array([done.num_samples, *done.metrics()]), *self._travelling()]

        done = self._mailbox.average(compute)
        if done.weights:
            self._take_mean(done.weights)
        num_samples, loss_sum, num_correct, norms, _ = done.metrics.tolist()
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
        return [*self.learner.arrays(StatePart.WEIGHTS), *(own[place] for place in moving_statistics(own))]

    def _take_mean(self, arrays: list[np.ndarray]) -> None:
        own = self.learner.arrays(StatePart.OWN)
        places = moving_statistics(own)
        num_weights = len(arrays) - len(places)
        self.learner.assign(StatePart.WEIGHTS, arrays[:num_weights], "the mean of the silos")
        if places:
            for place, array in zip(places, arrays[num_weights:], strict=True):
                own[place] = array
            self.learner.assign(StatePart.OWN, own, "the mean of the silos")


def join_local_sgd(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
    """`train.api.Join`."""
    if silos_of(config):
        return join_silos(world, config, build, reporter)
    data = Mesh.of(config).data_index(world.rank)
    learner = build()
    collective = AnnouncedCollective(COLLECTIVE_OF_BACKEND[config.backend], world, reporter)
    return LocalSgdMember(learner, collective, data, config.options(LocalSgdOptions).local_steps)


def join_silos(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
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
    """`train.api.Strategy.may_lose`: all silos but the one that coordinates."""
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
