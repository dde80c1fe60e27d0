"""The plan of a training: the settings as configured, and the choices made where they are open.

A plan is made once, in the driver, by `train.planning.make.plan_training`; everything after it reads the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardmill.jobs.observer import WARNING
from shardmill.words import counted
from train.config import TrainConfig
from train.contracts.mesh import axes_in_words
from train.strategies import STRATEGIES, mesh_of

if TYPE_CHECKING:
    from shardmill.jobs.observer import Observer
    from train.planning.memory import Fitted, Memory


WITHOUT_AXIS = {"fsdp": "no weights are sharded", "tensor": "no layer is divided", "pipeline": "there are no stages"}


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing that the config leaves open, or that follows from it."""

    name: str
    """The setting, or what it decides."""
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Ranks, strategy, launcher, backend, streams, and, once the memory was looked at, microbatches and precision."""

    asked: TrainConfig
    """The config as the user wrote it."""
    spread: TrainConfig
    """The config with all decisions that do not depend on memory."""
    strategy_reason: str
    launcher_reason: str
    ranks_reason: str = ""
    """Empty if `train.num_workers` is set."""
    streams_reason: str = ""
    """Reason of `train.num_streams`."""
    numbers: tuple[str, ...] = ()
    """Observed facts: devices, places, data; empty if nothing was left to choose."""
    memory: Memory | None = None
    """Memory of this training, for any number of ranks; None if it was not examined yet."""
    fitted: Fitted | None = None
    """Its consequence for these ranks."""
    chosen_anew: str = ""
    """Why the training does not resume as it was begun; most often empty."""

    @property
    def config(self) -> TrainConfig:
        """The config that ranks receive: `asked` with every decision filled in."""
        return self.fitted.config if self.fitted else self.spread

    @property
    def named_by(self) -> TrainConfig:
        """The settings that name the training: streams and a window that were left open name none, however they are
        chosen for however many ranks."""
        return self.spread.model_copy(update={"num_streams": self.asked.num_streams, "reading": self.asked.reading})

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Each with its reason."""
        config, set_by_user = self.config, "set"
        of_memory = self.fitted.reason if self.fitted and self.fitted.reason else "as configured"
        backend = "set" if self.asked.backend != "auto" else "the strategy and the model's source"
        return (
            Decision("train.num_workers", str(config.num_workers), self.ranks_reason or set_by_user),
            Decision("train.num_streams", str(config.num_streams), self.streams_reason or set_by_user),
            Decision("train.strategy", config.strategy, self.strategy_reason),
            Decision("train.launcher", config.launcher, self.launcher_reason),
            Decision("train.backend", config.backend, backend),
            Decision("train.accumulation_steps", str(config.accumulation_steps), of_memory),
            Decision("train.mixed_precision", config.mixed_precision, of_memory),
            Decision("train.memory.activation_checkpointing", config.memory.activation_checkpointing, of_memory),
            Decision("train.init_from", config.init_from or "fresh weights", "named by the hash of its file"),
        )

    @property
    def reason(self) -> str:
        """Why so many ranks, this strategy and this launcher, and the numbers that were looked at, for people."""
        of_ranks = f"{counted(self.spread.num_workers, 'rank')}: {self.ranks_reason}; " if self.ranks_reason else ""
        of_strategy = f"{self.spread.strategy}: {self.strategy_reason}"
        looked_at = f" ({'; '.join(self.numbers)})" if self.numbers else ""
        return f"{of_ranks}{of_strategy}; {self.spread.launcher}: {self.launcher_reason}{looked_at}"

    @property
    def shares_nothing(self) -> str:
        """Why a strategy whose ranks share a model has one rank, if nobody has asked for one; else empty."""
        if self.asked.num_workers or self.spread.num_workers > 1 or not self.spread.needs_module:
            return ""
        return (
            f"train.strategy = {self.spread.strategy!r} has one rank, which holds the whole model "
            f"({self.ranks_reason}): set train.num_workers, or sizes of train.mesh, to share it"
        )

    @property
    def lacks(self) -> str:
        """What a strategy with several ranks does not share because they left an axis of its mesh one rank, if nobody
        has asked for one; else empty."""
        config = self.spread
        sizes = mesh_of(config).sizes
        missing = [
            axis for axis in STRATEGIES[config.strategy].axes if sizes[axis] == 1 and self.asked.mesh.sizes[axis] != 1
        ]
        if not missing or config.num_workers == 1:
            return ""
        [axis, *_] = missing
        return (
            f"train.strategy = {config.strategy!r} on {config.num_workers} ranks has the mesh "
            f"{axes_in_words(sizes)}, so that {WITHOUT_AXIS[axis]}: set train.mesh.{axis} = 2 or more, or another "
            "train.num_workers"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What ranks do not share although the strategy promises it."""
        return tuple(told for told in (self.shares_nothing, self.lacks) if told)

    def warn(self, observer: Observer) -> None:
        """Each as an event of the run."""
        if self.shares_nothing:
            observer.event("one_rank", {"rank": 0, WARNING: self.shares_nothing})
        if self.lacks:
            observer.event("undivided", {"rank": 0, WARNING: self.lacks})

    @property
    def in_short(self) -> str:
        """Summarize the choice with its main reason, for people."""
        num_ranks = self.spread.num_workers
        ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
        # Numbers come behind the colon.
        why = self.ranks_reason or self.strategy_reason.partition(": ")[0]
        return f"{self.spread.strategy} on {ranks} by {self.spread.launcher} ({why})"

    def with_ranks(self, num_workers: int, reason: str) -> TrainingPlan:
        """Another number of them."""
        return replace(self._with_spread(num_workers=num_workers), ranks_reason=reason)

    def with_streams(self, num_streams: int, reason: str) -> TrainingPlan:
        """Another number of streams."""
        return replace(self._with_spread(num_streams=num_streams), streams_reason=reason)

    def with_window(self, window_chunks: int) -> TrainingPlan:
        """With the shuffle window of a training that begins, or of one that is resumed."""
        return self._with_spread(reading=self.spread.reading.model_copy(update={"window_chunks": window_chunks}))

    def with_strategy(self, strategy: str, reason: str) -> TrainingPlan:
        """Another strategy."""
        return replace(self._with_spread(strategy=strategy), strategy_reason=reason)

    def with_launcher(self, launcher: str, reason: str) -> TrainingPlan:
        """Another launcher."""
        return replace(self._with_spread(launcher=launcher), launcher_reason=reason)

    def with_first_weights(self, init_from: str) -> TrainingPlan:
        """`train.init_from` with the hash of its file, which names the training."""
        return self._with_spread(init_from=init_from)

    def with_memory(self, memory: Memory) -> TrainingPlan:
        """Add the resulting microbatches, precision and recomputation."""
        return replace(self, memory=memory, fitted=memory.fitted(self.spread))

    def after_loss(self, num_workers: int) -> TrainingPlan:
        """The same training by fewer ranks, after some were lost. Which machine has which rank now is the launcher's
        choice, so `train.rank_weights` would meet other machines."""
        return self._with_spread(num_workers=num_workers, rank_weights=())

    def _with_spread(self, **changes: object) -> TrainingPlan:
        """With other settings, and what follows from them for the memory of a rank."""
        spread = self.spread.model_copy(update=changes)
        return replace(self, spread=spread, fitted=self.memory.fitted(spread) if self.memory else None)
