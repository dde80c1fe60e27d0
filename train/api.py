"""The contracts of a training: what a backend, its learner, a strategy, its member, a launcher and a reader promise.

`Backend` and `Learner`: one framework, and a model in it. `Strategy`, `Member` and `SharedModel`: how ranks share a
training, and one of them in its running world. `Launcher`: how ranks start. `TrainReader`, `Epoch` and `Batches`: what
reads the train split. Each has a registry of those that there are, in `train/backends`, `train/strategies`,
`train/launching` and `train/readers`. The loop of a rank (train/rank/worker.py) uses nothing but these.

Outside a backend, an image is a NumPy array, state is a list of NumPy arrays, and the tensors that pass between ranks
are lists that nothing but the backend and its strategies look into.

Shape legend: N batch, H height, W width, C channels, K outputs (classes, or numbers of a label), D length of a layer's
output.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

import numpy as np

from train.contracts.mesh import Mesh
from train.contracts.world import Role

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from shardmill.dataset.dataset import Dataset
    from shardmill.jobs.config import SparkConfig
    from shardmill.loader.reader import ReaderSeconds
    from shardmill.values import Batch, Cursor
    from train.backends.model_spec import ModelSpec
    from train.checkpoints.arrays import ArrayLike, WeightFile
    from train.checkpoints.checkpoint import SavedFiles
    from train.config import TrainConfig
    from train.contracts.mesh import DataIndex
    from train.contracts.task import WorkerTask
    from train.contracts.values import Reporter, StepOutcome, TrainResult
    from train.contracts.world import World
    from train.reporting.observer import TrainObserver

Predict = Callable[[np.ndarray], np.ndarray]
"""images_NHWC uint8 -> predictions_NK float32: probabilities of classes, or the numbers that labels are."""


PredictWithLayer = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""images_NHWC uint8 -> predictions_NK as `Predict` gives them, and the output of a layer, flat: layer_ND float32."""


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """Loads the model of an export with the output of one of its layers."""

    file: str
    """The file or folder of an export that `load` reads."""
    load: Callable[[Path, str], PredictWithLayer]
    """(that file or folder, name of the layer). Raises UsageError if there is none of that name."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The functions inside an export."""

    predictions: Predict
    outputs: Predict
    """Inputs of the loss: the logits behind probabilities if the export contains them, else the predictions."""
    outputs_are_logits: bool


SumInStep = Callable[[Any, str], Any]
"""(float64 tensor, a name equal on all ranks) -> its sum over all ranks; called inside the forward and the backward
pass, on every rank in the same order. In a compiled step each has a name of its own."""


class StatePart(Enum):
    """The three parts of a learner's state."""

    WEIGHTS = "trainable weights, or, with `train.ema_decay`, their averages; equal on all ranks between steps"
    OPTIMIZER = "optimizer state, and the trainable weights if WEIGHTS are averages; equal on all ranks between steps"
    OWN = "moving statistics and states of random generators: each rank has its own"


def moving_statistics(own: Sequence[np.ndarray]) -> list[int]:
    """Which arrays of `StatePart.OWN` are averages over batches, which ranks can average again: the floating ones."""
    return [place for place, array in enumerate(own) if "float" in array.dtype.name]


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """All weights of a model, without optimizer and generators, by the names that files give them."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of whole arrays, also if this rank holds a part."""
    head: tuple[str, ...]
    """The names of the last layer's."""
    arrays: Callable[[], dict[str, np.ndarray]]
    """-> copies of what they are now; only if this rank holds all of them."""
    assign: Callable[[Mapping[str, ArrayLike]], None]
    """Gives some of them new values, of which this rank's are read."""


class Learner(Protocol):
    """A model whose variables exist, with its loss and its optimizer."""

    config_sha256: str
    """Digest of the built model before any step: two factories that build the same model have the same digest."""
    outputs_are_logits: bool
    follows_schedule: bool
    """False if the optimizer of a compiled user model keeps the learning rate that it was compiled with."""

    export_backend: str
    """The backend that exports this kind of model, from the same arrays."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        ...

    def gradients(self, batch: Batch, global_weight: int, share_of_streams: float) -> list[Any]:
        """This rank's addends, as tensors: one gradient per weight, then (loss, number correct) as one float32 pair.

        The objective is the mean over the GLOBAL batch, of which `global_weight` is the number of samples: summed over
        all ranks, the addends are its gradient exactly. `share_of_streams` is this rank's part of the regularisation
        losses, which belong to no sample.
        """
        ...

    def are_finite(self, addends: list[Any]) -> bool:
        """Whether `apply` would find their loss and the norm of their gradient finite."""
        ...

    def apply(self, sums: list[Any], learning_rate: float | None) -> StepOutcome:
        """Update the weights by the summed addends, unless the loss or the gradient is not finite.

        `learning_rate`: what the schedule says; None to leave it to the optimizer.
        """
        ...

    def outputs(self, images_NHWC: np.ndarray) -> np.ndarray:
        """uint8 images -> the model's outputs_NK in inference mode, float32."""
        ...

    def arrays(self, part: StatePart) -> list[np.ndarray]:
        """A part of the state, in an order that the model's configuration fixes: copies, which no step changes."""
        ...

    def assign(self, part: StatePart, arrays: Sequence[np.ndarray], source: str) -> None:
        """Take over what `arrays` gave. Raises UsageError, before any assignment, if number, shapes or types differ.

        Averages become the model's weights, too, until `StatePart.OPTIMIZER` is assigned.
        """
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Inside it the model has the averages of its weights (`train.ema_decay`), and must not be trained."""
        ...

    def read_weights(self, file: WeightFile) -> Mapping[str, ArrayLike]:
        """Name -> array of a file of weights. Raises UsageError for an invalid file; runs nothing in it."""
        ...

    def named_weights(self, like: Collection[str] = ()) -> NamedWeights:
        """The model's weights; where a framework has several ways to name them, as `like` names some."""
        ...

    def freeze(self) -> None:
        """From now on, updates do not change the weights of `train.freeze`, until `train.unfreeze_epoch`."""
        ...

    def unfreeze(self) -> None:
        """From now on, updates change these weights again, and the optimizer starts anew.

        Adam corrects its means by the number of steps: with that of the first epochs and without their gradients it
        would change what was frozen several times as fast as the learning rate says.
        """
        ...

    def reseed(self, rank: int) -> None:
        """Let each rank's random layers draw numbers of their own, after all were given rank 0's generators."""
        ...

    def weights_sha256(self) -> str:
        """Over shape, type and bytes of all weights in the model's own order; not of generators."""
        ...

    def predictions(self, images_NHWC: np.ndarray) -> np.ndarray:
        """uint8 images -> what `Predict` gives, by the same operations as in training."""
        ...

    def check_exportable(self) -> None:
        """Raises UsageError if the model that was built cannot be exported; changes nothing."""
        ...

    def write_served(self, folder: Path) -> None:
        """The trained model with standardization and class names inside, as `Backend.load_served` reads it.

        One that gives logits carries them beside its predictions.
        """
        ...

    def write_portable(self, folder: Path, images_NHWC: np.ndarray, max_abs_diff: float) -> str:
        """A file in the framework's own format, if one loads again and agrees. -> what its reader must know."""
        ...


class Recording(Protocol):
    """Records the computations of this process, with times, in the format of the framework's own tools."""

    def step(self, global_step: int) -> AbstractContextManager[None]:
        """Marks one training step in it."""
        ...

    def stop(self) -> None:
        """Stop recording and complete its files."""
        ...


class Backend(Protocol):
    """One framework."""

    served: str
    """The folder of an export that holds the form that `load_served` reads."""
    layer_output: str
    """`package.module:object`: the `LayerOutput` of its exports."""
    recomputes_sync_batch_norm: bool
    """Whether activation checkpointing works with `train.sync_batch_norm`: a block may sum its moments twice."""

    def start(self, world: World, seed: int) -> None:
        """Threads for this rank's share of the node, seeds, deterministic kernels."""
        ...

    def build(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        *,
        materialized: bool = True,
        sum_in_step: SumInStep | None = None,
    ) -> Learner:
        """Build the model that `train.model` names, with fresh weights from `train.seed`. Raises UsageError if it does
        not fit.

        `materialized`: false if the weights of rank 0 will be given to it, which has tried the model, too. It may have
        shapes alone then. `sum_in_step`: what batch norms add up their moments with, if `train.sync_batch_norm` is set.
        """
        ...

    def load_served(self, folder: Path) -> ServedModel:
        """Load the model of an export."""
        ...

    def record(self, folder: Path) -> Recording:
        """Begin to record into files of `folder`; a process records one thing at a time."""
        ...


@dataclass(frozen=True, slots=True)
class MemberStep:
    """One step as a member saw it."""

    outcome: StepOutcome
    allreduce_seconds: float
    """Time spent in the exchange with other ranks; the rest was computation."""
    input_wait_seconds: float = 0.0
    """Time spent waiting for rows that another process reads."""
    batch: Batch | None = None
    """The batch of the step, if another process has read it."""


class Member(Protocol):
    """Every rank calls each method at the same place of the loop; those that exchange data return together."""

    rank: int
    world_size: int
    data: DataIndex
    learner: Learner
    reads_its_weights: bool
    """Whether it reads its own part of `train.init_from`. If not, rank 0 reads all, and `start` gives it to all."""
    shares_checkpoints: bool
    """Whether ranks write a checkpoint together, and agree on it; otherwise rank 0 has all of it."""

    def batches(self, epoch: Epoch, cursor: Cursor) -> Batches:
        """Yield the remaining batches of `epoch` from `cursor` on, as this member has them."""
        ...

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        """One update of the model by the global batch, of which this member has `batch`."""
        ...

    def own_gradient_is_finite(self, batch: Batch, global_weight: int) -> bool:
        """Whether what this member would add to a step of these rows is finite. No weight changes; moving statistics
        and random generators do."""
        ...

    def average_moving_statistics(self) -> None:
        """After an epoch: give all members the same moving statistics."""
        ...

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """The sum over all members, in the array's own type."""
        ...

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes in rank order; not all of them may be empty."""
        ...

    def barrier(self) -> None:
        """Return when every member has arrived."""
        ...

    def close(self) -> None:
        """Leave the world."""
        ...

    def state_files(self) -> dict[str, list[np.ndarray]]:
        """This member's part of a checkpoint: what goes into which file. Later steps do not change the arrays."""
        ...

    def files_to_resume(self, saved: SavedFiles) -> list[str]:
        """The files of a checkpoint that this member needs, whichever strategy has written it."""
        ...

    def start(self, files: Mapping[str, bytes], saved_world_size: int, source: str) -> None:
        """Begin with the state in `files` (those of `files_to_resume`; none for fresh weights), alike on all members.

        Raises UsageError if they hold the state of another model.
        """
        ...

    def weight_files(self, saved: SavedFiles) -> list[str]:
        """The files of a checkpoint that this member needs for `take_weights`."""
        ...

    def take_weights(self, files: Mapping[str, bytes], source: str) -> None:
        """Exchange the model's weights for those in `files`, on all members."""
        ...


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankState:
    """Of the rank that holds most."""

    weights: Mapping[str, Shape]
    """By the name of a trainable weight: the shape of what the rank keeps of it, and has gradients of. One of which
    it keeps nothing is left out."""
    updated: Mapping[str, Shape]
    """Likewise: the part whose optimizer state it has."""
    module: Any
    """What its forward pass computes with; of its tensors only the shapes exist."""
    gathered_bytes: int = 0
    """What it has of other ranks' elements during the forward and the backward pass."""
    update_bytes: int = 0
    """What it needs behind the backward pass, to exchange gradients or updated weights; activations are gone by then.
    """
    activation_share: float = 1.0
    """Of the activations of `module`, the part that it has at a time."""


def replicated_state(config: TrainConfig, module: Any) -> RankState:
    """Of ranks that have the whole model each."""
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters() if each.requires_grad}
    return RankState(shapes, shapes, module)


def num_bytes(shapes: Iterable[Shape]) -> int:
    """Of float32, which weights are."""
    return 4 * sum(map(math.prod, shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedModel:
    """Facts of a strategy whose ranks hold parts of an `nn.Module`, or of its optimizer's state."""

    axes: tuple[str, ...]
    """The axes of `train.mesh` that it has beside `data`. If sizes are left open, the first has all ranks that the
    others leave (`train.contracts.mesh.Mesh.along`)."""
    rank_state: Callable[[TrainConfig, Any], RankState]
    """(config, module on PyTorch's device `meta`) -> what the rank that holds most has of it. Called in a
    process that stands for one rank of as many as there are, and exchanges nothing
    (train/backends/torch/meta_device.py). Raises as `check_learner` does."""
    check_learner: Callable[[TrainConfig, Any], None] = lambda config, learner: None
    """Raises UsageError for a learner whose module its ranks cannot divide; called by the process that tries a model
    (train/planning/trial_build.py). `join` refuses the same, for a training that nobody has tried."""
    is_for_large_models: bool = False
    """`auto` chooses it if one device does not hold the model: of several such, in the order of the registry, the first
    whose ranks do."""


class Build(Protocol):
    """Builds the learner of a rank."""

    def __call__(self, *, materialized: bool = True, sum_in_step: SumInStep | None = None) -> Learner:
        """`Backend.build`."""
        ...


class Join(Protocol):
    """Called once on every rank, when the backend runs and before any variable exists."""

    def __call__(self, world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
        """Build the learner in the scope that the strategy needs, and connect to the other ranks.

        Raises what `build` raises, before any rank waits for another.
        """
        ...


def all_members(config: TrainConfig) -> tuple[Role, ...]:
    """`train.num_workers` ranks, all with the role MEMBER."""
    return (Role.MEMBER,) * config.num_workers


def _none_serves(task: WorkerTask, world: World, reporter: Reporter) -> NoReturn:
    raise AssertionError(
        f"rank {world.rank} has the role {world.role}, but with this strategy every process runs the training loop"
    )


MATCHES_NOTHING = re.compile(r"(?!)")
"""Matches nothing, because a rank without peers has no secondary errors."""
GLOO_LOST_PEER = r"gloo::|gloo/transport|Connection (closed|reset) by peer"
"""Errors of Gloo's C++ code, which several strategies use."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to distribute a training over ranks; the shared tests check what it declares."""

    backends: tuple[str, ...]
    """Supported backends; the first one is the default for a model that any of them could train."""
    synchronous: bool
    """All ranks apply the same update at the same step."""
    exact_resume: bool
    """A resumed training at the same world size ends with the same bits as one that never stopped."""
    max_world_size: int | None
    """Largest world size, or None if only `train.num_streams` bounds it."""
    join: Join
    devices_per_rank: Literal["one", "all"] = "one"
    """How many GPUs a rank uses: one, or an equal share of all visible GPUs of its host."""
    can_skip_batches: bool = False
    """A batch can be skipped without a trace (`train.non_finite`), because it only changes the learner's state."""
    secondary_error: re.Pattern[str] = MATCHES_NOTHING
    """Matches an error, or the last output, of a rank that only lost its peer: the cause is another rank's fault."""
    check: Callable[[TrainConfig], None] = lambda config: None
    """Raises UsageError for settings that it does not support, without importing a framework."""
    compressions: tuple[str, ...] = ("none",)
    """Supported values of `train.compression`."""
    less_work: str = "give it less work with train.rank_weights, or remove it"
    """What a user does for a rank that is slower than the others."""
    syncs_batch_norm: bool = False
    """It can sum moments of batch norms over ranks inside a step (`train.sync_batch_norm`)."""
    recomputes: bool = True
    """Its step may compute activations twice (`train.memory.activation_checkpointing`): no variable changes within."""
    may_lose: Callable[[TrainConfig], frozenset[int]] = lambda config: frozenset()
    """The ranks that may be lost once training has begun, because the others continue without them. A global step does
    not wait for them: it is what the other ranks report."""
    roles: Callable[[TrainConfig], tuple[Role, ...]] = all_members
    """The role of each rank's process; those that run the training loop come first."""
    serve: Callable[[WorkerTask, World, Reporter], NoReturn] = _none_serves
    """Run by a process without the training loop until the driver ends it; raises any error."""
    timeline: Callable[[Path], AbstractContextManager[None]] = lambda folder: nullcontext()
    """Records the exchange during `train.log.profile_steps` into a file of that folder, if supported."""
    reads_all: bool = False
    """One process reads all rows and hands them out."""
    shared_model: SharedModel | None = None
    """How its ranks hold one `nn.Module` together; a Keras model is refused. None: each has the whole model."""

    @property
    def needs_module(self) -> bool:
        """Whether its ranks hold parts of an `nn.Module`."""
        return self.shared_model is not None

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of `train.mesh` that it has beside `data`."""
        return self.shared_model.axes if self.shared_model else ()

    def mesh(self, config: TrainConfig) -> Mesh:
        """The axes along which its ranks divide a training. Raises UsageError for numbers that do not divide."""
        return Mesh.one_reader(config) if self.reads_all else Mesh.along(config, self.axes)

    def rank_state(self, config: TrainConfig, module: Any) -> RankState:
        """`SharedModel.rank_state`."""
        return self.shared_model.rank_state(config, module) if self.shared_model else replicated_state(config, module)

    def check_learner(self, config: TrainConfig, learner: Any) -> None:
        """`SharedModel.check_learner`."""
        if self.shared_model:
            self.shared_model.check_learner(config, learner)

    def allows_world_size(self, world_size: int) -> bool:
        return world_size >= 1 and (self.max_world_size is None or world_size <= self.max_world_size)


class Launch(Protocol):
    """Starts the ranks of a task and waits for them; `worker` names what each rank runs, as `module:function`."""

    def __call__(
        self, task: WorkerTask, spark: SparkConfig, observer: TrainObserver, worker: str = ...
    ) -> TrainResult: ...


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way to start ranks, and what is known of it before any rank starts."""

    launch: Launch
    check: Callable[[int, SparkConfig], None] = lambda world_size, spark: None
    """(world size, section `spark`): raises UsageError if so many ranks cannot start, as far as that is known."""
    strategies: tuple[str, ...] | None = None
    """Strategies whose ranks it can start; None: all, because ranks meet through their driver."""
    ranks_here: Callable[[int, SparkConfig], int] = lambda world_size, spark: 0
    """(world size, section `spark`) -> how many of the ranks run on this machine and share its cores."""
    starts_again: bool = True
    """Whether it can start fewer ranks after some were lost (`train.max_restarts`)."""
    assigns_devices: Callable[[SparkConfig], bool] = lambda spark: False
    """(section `spark`) -> whether what starts the ranks gives them devices, so that this machine's do not count."""
    in_this_process: bool = False
    """The one rank runs in the process of the command."""
    started_by_others: bool = False
    """The processes exist already: each of them runs this command (torchrun, SLURM, MPI, Kubernetes)."""
    chooses_nics: bool = False
    """It passes all of `train.nics` to its ranks on every host, even if no rank runs here."""
    starts_helpers: bool = True
    """It can start more processes than the loop uses: the workers and servers of a strategy with a chief."""
    outlives_ranks: bool = False
    """Its job continues without a lost rank, if the strategy does (`Strategy.may_lose`)."""


class TrainReader(Protocol):
    """One way to read the train split."""

    is_exact: bool
    """Every sample exactly once an epoch, the same at every world size, and resumed at any step."""

    follows_plan: bool
    """The epoch plan shares its rows out, among any number of ranks that the streams allow."""

    def check(self, config: TrainConfig, dataset: Dataset) -> None:
        """Raises UsageError, before anything starts, for a dataset or a number of ranks that it cannot read for."""
        ...

    def limits(self, config: TrainConfig, dataset: Dataset) -> str:
        """Describe the limits of this training's epochs, with numbers; empty if there are none."""
        ...

    def epochs(self, dataset: Dataset, config: TrainConfig, data: DataIndex) -> Callable[[int], Epoch]:
        """What opens an epoch by its number, for the member with this share of the data.

        It may keep memory from one epoch for the next; nothing is read before an epoch is.
        """
        ...


class Batches(Protocol):
    """A rank's batches of an epoch, one a step, in order. A context manager: leaving it joins what reads ahead."""

    def __enter__(self) -> Batches: ...

    def __exit__(self, *exception: object) -> None: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def take_seconds(self) -> ReaderSeconds:
        """Return the working time since the last call."""
        ...


class Epoch(Protocol):
    """One pass over the train split, with as many steps on every rank."""

    @property
    def num_steps(self) -> int: ...

    @property
    def num_rows(self) -> int:
        """Samples that all ranks together read."""
        ...

    def num_rows_of_step(self, step: int) -> int:
        """Samples of a step on all ranks, without padding."""
        ...

    def read(self, first_step: int) -> Batches:
        """The rest of it from `first_step`, which is 0 unless the reader is exact."""
        ...
