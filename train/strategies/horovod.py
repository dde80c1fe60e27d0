"""The Horovod strategy: one process per rank, gradients summed by ONE grouped allreduce per step.

One group, because its tensors are fused in a fixed order: the default per-tensor `DistributedGradientTape` fuses
whatever is ready and gave 5 different sums in 12 identical calls at 3 ranks, one group gave 1 (docs/decisions).
Horovod's own `broadcast_object` and `allgather_object` are not used: they unpickle what arrives over the network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardmill.errors import TrainingError
from shardmill.values import Batch
from train.backends.backend import Learner, SumInStep
from train.config import TrainConfig
from train.contracts.mesh import DataIndex
from train.contracts.values import Reporter
from train.contracts.world import Gather, World
from train.strategies.collective import AnnouncedCollective
from train.strategies.horovod_rendezvous import GLOO_ADDRESS, meeting
from train.strategies.member import MemberStep
from train.strategies.replicated import ReplicatedMember, replicated
from train.strategies.strategy import GLOO_LOST_PEER, Strategy

if TYPE_CHECKING:
    from train.backends.keras.backend import KerasLearner

TIMELINE = "horovod_timeline.json"


class HorovodCollective:
    """Horovod's TensorFlow binding."""

    def __init__(self, world: World, compression: str = "none", bucket_bytes: int = 0, profiled: bool = False) -> None:
        if bucket_bytes:
            # Read once, when Horovod starts its thread.
            os.environ["HOROVOD_FUSION_THRESHOLD"] = str(bucket_bytes)
        if profiled:
            # Likewise: `timeline` may begin one later.
            os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
        import horovod.tensorflow as hvd

        self._hvd = hvd
        self._is_compressed = compression == "fp16"
        self._meeting = ExitStack()
        # If Horovod itself has started this process (`horovod_spark`), it has also said where the others are.
        if world.world_size > 1 and GLOO_ADDRESS not in os.environ:
            os.environ.update(self._meeting.enter_context(meeting(world)))
        hvd.init()
        if (hvd.rank(), hvd.size()) != (world.rank, world.world_size):
            raise TrainingError(
                f"Horovod made this process rank {hvd.rank()} of {hvd.size()}",
                f"the launcher said rank {world.rank} of {world.world_size}",
                "start all ranks with one of shardmill's launchers",
            )
        self._rank: int = world.rank

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        # Inside a compiled function ranks know an operation by its name: one of our own, which no trace counts up.
        if not self._is_compressed:
            return self._hvd.grouped_allreduce(tensors, op=self._hvd.Sum, name="gradients", ignore_name_scope=True)
        import tensorflow as tf

        # A loss of a thousand samples should not be told in sixteen bits; a group has one type.
        *gradients, figures = tensors
        halves: list[Any] = self._hvd.grouped_allreduce(
            [tf.cast(each, tf.float16) for each in gradients], op=self._hvd.Sum, name="halves", ignore_name_scope=True
        )
        summed = self._hvd.allreduce(figures, op=self._hvd.Sum, name="figures", ignore_name_scope=True)
        return [*(tf.cast(each, tf.float32) for each in halves), summed]

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(self._hvd.grouped_allreduce([array], op=self._hvd.Sum)[0])

    def broadcast_bytes(self, data: bytes) -> bytes:
        size = int(self._hvd.broadcast(np.array([len(data)], dtype=np.int64), root_rank=0).numpy()[0])
        mine = np.frombuffer(data, dtype=np.uint8) if self._rank == 0 else np.zeros(size, dtype=np.uint8)
        # An empty tensor cannot be broadcast.
        return self._hvd.broadcast(mine, root_rank=0).numpy().tobytes() if size else b""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = self._hvd.allgather(np.array([len(data)], dtype=np.int64)).numpy()
        joined = self._hvd.allgather(np.frombuffer(data, dtype=np.uint8)).numpy()
        stops = np.cumsum(sizes)
        return [joined[stop - size : stop].tobytes() for size, stop in zip(sizes, stops, strict=True)]

    def barrier(self) -> None:
        self._hvd.allreduce(np.zeros(1, dtype=np.float32), op=self._hvd.Sum)

    def close(self) -> None:
        self._hvd.shutdown()
        self._meeting.close()


class HorovodMember(ReplicatedMember):
    """A replica whose step is one compiled function, with the group in it."""

    def __init__(
        self,
        learner: Learner,
        collective: AnnouncedCollective,
        data: DataIndex,
        gather_aside: Gather,
    ) -> None:
        super().__init__(learner, collective, data, gather_aside)
        # The only backend that this strategy runs with.
        self._keras_learner = cast("KerasLearner", learner)
        self._sum = collective.sum_inside()
        self._keras_learner.sum_by(self._sum)
        self._sums_moments = False

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        if self._sums_moments:
            self._sum.expect_others()
        outcome = self._keras_learner.whole_step(batch, global_weight, self.data.fraction, learning_rate)
        return MemberStep(outcome, self._sum.seconds)

    def sum_moments_by(self, sum_in_step: SumInStep, reporter: Reporter) -> None:
        super().sum_moments_by(sum_in_step, reporter)
        self._sums_moments = True


@contextmanager
def timeline(folder: Path) -> Iterator[None]:
    """Horovod's own, for Perfetto and Chrome: when the ranks agreed on each exchange, and how long it took."""
    import horovod.tensorflow as hvd

    # The others tell it.
    if hvd.rank() != 0:
        yield
        return
    hvd.start_timeline(str(folder / TIMELINE))
    # Not `finally`: it returns when Horovod's thread has written the end, which is never once that has failed.
    yield
    hvd.stop_timeline()


def join_horovod(world: World, config: TrainConfig) -> HorovodCollective:
    """`train.strategies.replicated.JoinCollective`."""
    return HorovodCollective(world, config.compression, config.bucket_bytes, bool(config.log.profile_steps))


def _sum_in_step(tensor: Any, name: str) -> Any:
    """`SumInStep`: inside a compiled function ranks know an operation by its name, whatever scope it is in."""
    import horovod.tensorflow as hvd

    return hvd.allreduce(tensor, op=hvd.Sum, name=name, ignore_name_scope=True)


HOROVOD = Strategy(
    backends=("keras",),
    synchronous=True,
    exact_resume=True,
    syncs_batch_norm=True,
    leaves_out_batches=True,
    max_world_size=None,
    join=replicated(join_horovod, _sum_in_step, HorovodMember),
    timeline=timeline,
    # The binding's operations do not take bfloat16.
    compressions=("none", "fp16"),
    secondary_error=re.compile(
        r"HorovodInternalError|Horovod has been shut down|Horovod(Grouped)?(Allreduce|Allgather|Broadcast|Barrier)"
        rf"|{GLOO_LOST_PEER}",
        re.IGNORECASE,
    ),
)
