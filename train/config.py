"""The section `train` of the config, and values derived from it by arithmetic.

Here are the keys that most people change, and those on which other people's scripts rely. Others are declared beside
what they set, and are sections here: those of one strategy, launcher, reader, optimizer or schedule in the class that
its registry entry names (`options`), those of memory, reading, checkpoints, metrics, ... in `train/settings.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from shardmill.augment.options import AugmentOptions
from shardmill.entry_options import with_options_of
from shardmill.epoch_plan import num_streams_for, window_bytes_within
from shardmill.registry import OneOf, load_object
from train.settings import (
    DEFAULTED,
    DURATION,
    EXECUTION,
    RESUMABLE,
    CacheConfig,
    CheckpointConfig,
    LogConfig,
    MemoryConfig,
    MeshConfig,
    NonFiniteConfig,
    ReadingConfig,
    WatchConfig,
)

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.epoch_plan import PlanSpec

SHA256_OF_FILE = "#sha256="
"""Separator in `train.init_from`, as the driver passes it to the ranks: the hash of the file follows."""

_WithOptions = with_options_of(
    "train.strategies:STRATEGIES",
    "train.launching:LAUNCHERS",
    "train.readers:READERS",
    "train.optimizers:OPTIMIZERS",
    "train.schedules:SCHEDULES",
)


class TrainConfig(_WithOptions):
    """How a model is trained. The important keys come first; settings of a single entry have their own section."""

    model: Annotated[str, OneOf("train.models:MODELS")] = "small_cnn"
    """The model: a name, or your own factory as `package.module:function` (see `standardize`)."""
    epochs: Annotated[int, DURATION] = Field(default=10, ge=1)
    """Passes over the train split; each uses every sample exactly once. Raising it continues a finished training."""
    global_batch_size: int = Field(default=64, ge=1)
    """Samples of one optimizer step, summed over all ranks."""
    accumulation_steps: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Number of microbatches into which a rank splits its share of a step, so that it needs the memory of one;
    gradients are exchanged once per step. 0: as few as memory allows (docs/training/memory.md)."""
    init_from: Annotated[str, DEFAULTED] = ""
    """Initial weights: a `.keras`, `.weights.h5`, `.h5`, `.safetensors`, `.pt` or `.pth` file, an export `MODELS@N`, or
    the folder of a checkpoint of shards. A last layer for different classes is initialized randomly. Changing the file
    starts a new run."""
    freeze: Annotated[tuple[str, ...], DEFAULTED] = ()
    """Weights that are not trained: `all_but_head` (all except the last layer), or name patterns such as `conv*`."""
    unfreeze_epoch: Annotated[int, DEFAULTED] = Field(default=0, ge=0)
    """Epoch, counted from 0, from which frozen weights are trained too, with a new optimizer state; 0: never."""
    num_workers: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Number of ranks (training processes); 0: chosen from the GPUs or executors (docs/auto.md)."""
    rank_weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], EXECUTION] = ()
    """Relative speed of each rank, in rank order. A slow rank gets fewer of the `num_streams` streams (at least one);
    global batches stay the same. Empty: equal shares."""
    strategy: Annotated[str, OneOf("train.strategies:STRATEGIES", also=("auto",)), EXECUTION] = "auto"
    """How ranks share the training; docs/auto.md says how `auto` chooses."""
    compression: Annotated[Literal["none", "fp16", "bf16"], DEFAULTED] = "none"
    """How gradients are sent between ranks: uncompressed, or in 16-bit."""
    bucket_bytes: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """`horovod` and `torch_ddp` only: bytes of gradients that are exchanged at a time. 0: 128 MiB under `horovod`
    (Horovod's default); under `torch_ddp` 4 MiB on CPUs and 25 MiB on GPUs."""
    backend: Annotated[str, OneOf("train.backends:BACKENDS", also=("auto",))] = "auto"
    """The framework; `auto` chooses it by the strategy and the model."""
    launcher: Annotated[str, OneOf("train.launching:LAUNCHERS", also=("auto",)), EXECUTION] = "auto"
    """How ranks are started. `auto`: one rank in this process; several on the Spark cluster, if there is one, or
    locally."""
    devices: Annotated[Literal["auto", "cpu", "gpu"], EXECUTION] = "auto"
    """Devices of the ranks; each rank has its own. `auto` uses GPUs if there are any and the framework is built for
    them."""
    format: Annotated[str, OneOf("shardmill.formats:SHARD_FORMATS", also=("auto",)), EXECUTION] = "auto"
    """Which of the dataset's formats to read; `auto` prefers Parquet."""
    reader: Annotated[str, OneOf("train.readers:READERS"), DEFAULTED] = "shardmill"
    """The reader of the train split; evaluation always reads every sample once."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights, the order of samples and augmentation."""
    num_streams: int = Field(default=0, ge=0)
    """Logical streams of the epoch plan: the maximum number of ranks, and a divisor of the global batch. 0: the
    smallest divisor that is at least 8 and at least the number of ranks; a resumed training keeps its number."""
    standardize: bool = True
    """Pass `(x - mean) / std` to the model, per channel of the train split, as float32; false: pixels from 0 to 255."""
    augment: Annotated[AugmentOptions, RESUMABLE] = AugmentOptions()
    """Random changes to training images."""
    reading: ReadingConfig = ReadingConfig()
    """Threads and memory for the input."""
    cache: CacheConfig = CacheConfig()
    """Where ranks keep chunks of a remote dataset."""
    memory: MemoryConfig = MemoryConfig()
    """How much memory a step may take."""
    mesh: MeshConfig = MeshConfig()
    """How ranks divide one model, if the strategy shards it."""
    watch: WatchConfig = WatchConfig()
    """How long the driver waits for ranks."""
    non_finite: NonFiniteConfig = NonFiniteConfig()
    """What happens to a batch whose loss or gradient is not finite."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Which checkpoints are kept."""
    log: LogConfig = LogConfig()
    """Where metrics are sent, and which steps are profiled."""

    optimizer: Annotated[str, OneOf("train.optimizers:OPTIMIZERS", also=("auto",))] = "auto"
    """`auto` uses the optimizer of a compiled user model with its own learning rate, and Adam otherwise."""
    learning_rate: Annotated[float, RESUMABLE] = Field(default=1e-3, gt=0)
    """Learning rate after the warm-up; see `learning_rate_batch_size`."""
    learning_rate_batch_size: Annotated[int, RESUMABLE] = Field(default=0, ge=0)
    """If n > 0, scale the learning rate by global_batch_size / n (linear scaling, arXiv:1706.02677); 0: no scaling."""
    warmup_steps: Annotated[int, RESUMABLE] = Field(default=0, ge=0)
    """Number of steps over which the learning rate rises linearly."""
    schedule: Annotated[str, OneOf("train.schedules:SCHEDULES"), RESUMABLE] = "cosine"
    """How the learning rate changes after the warm-up."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = "auto"
    """`sgd` only; `auto`: 0.9."""
    weight_decay: Annotated[Annotated[float, Field(ge=0)] | Literal["auto"], RESUMABLE] = "auto"
    """`adamw`: each step shrinks weights by this times the learning rate; `auto`: 0.05. `sgd`: the factor of
    L2 regularization; `auto`: 0.0001. Biases, norms and position embeddings are excluded."""
    ema_decay: Annotated[float, DEFAULTED] = Field(default=0.0, ge=0, lt=1)
    """Decay of an exponential moving average (EMA) of the weights, for example 0.999; evaluation and export use EMA
    weights. The first updates use a smaller decay. 0 switches it off."""
    sync_batch_norm: Annotated[bool, DEFAULTED] = False
    """Compute the moments of batch norms over the whole global batch: over all ranks and without padding."""
    gradient_clip_norm: Annotated[float, RESUMABLE] = Field(default=0.0, ge=0)
    """Clip gradients to this global norm; 0 switches it off."""
    loss: Literal["auto", "softmax", "sigmoid", "squared_error"] = "auto"
    """`auto` uses the loss of a compiled user model, and otherwise the one that fits the labels: softmax
    cross-entropy for one class per image, sigmoid cross-entropy for several, the squared error for numbers."""
    model_outputs: Literal["auto", "logits", "probabilities"] = "auto"
    """What your own model returns for classes; `auto` follows a compiled loss, or otherwise examines the outputs."""
    label_smoothing: Annotated[float, RESUMABLE] = Field(default=0.0, ge=0, lt=1)
    """Share of each label that is spread over all classes (for several classes per image, over yes and no of each)."""
    class_weights: Annotated[Literal["balanced"] | dict[str, Annotated[float, Field(gt=0)]], RESUMABLE, DEFAULTED] = (
        Field(default_factory=dict)
    )
    """Weight of each class in the loss, by name; other classes have weight 1. `balanced`: inverse frequency, so that
    all classes have the same total weight. Evaluation metrics are not weighted."""
    mixed_precision: Literal["off", "bfloat16", "float16", "auto"] = "off"
    """Precision of the computation; weights stay float32. `auto`: off, or bfloat16 if memory is too small."""
    early_stop_epochs: Annotated[int, RESUMABLE] = Field(default=0, ge=0)
    """Stop after this many epochs without an improvement of the validation loss; 0 switches it off."""
    export: Annotated[Literal["best", "last"], DURATION] = "best"
    """Weights that are evaluated and exported: of the epoch with the lowest validation loss (if there is one), or the
    last."""

    checkpoint_every_steps: Annotated[int, EXECUTION] = Field(default=200, ge=0)
    """Steps between checkpoints. One is always written at the end of an epoch; 0: only there."""
    record_samples: Annotated[bool, EXECUTION] = False
    """Write `steps.jsonl`: loss and sample ids of every step."""
    max_restarts: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Number of times that a training that loses ranks (killed, without heartbeats, or hanging) resumes without them
    from its last complete checkpoint. A fault that occurs again at the same step ends the training.
    """
    nics: Annotated[tuple[str, ...], EXECUTION] = ()
    """Network interfaces for the ranks' traffic; empty: the one by which a rank reaches the driver (with
    `horovod_spark`, Horovod chooses). If several are given, `horovod_spark` uses all of them, other launchers the
    first."""

    def plan_spec(self, dataset: Dataset, streams_of_ranks: Sequence[range] = ()) -> PlanSpec:
        """The plan of every epoch: the same at every world size, because its streams and its window are decided once.

        `streams_of_ranks`: as the mesh shares them out, from which the window follows as long as it is open. Raises
        ValueError as long as nothing has decided how many streams there are."""
        if not self.num_streams:
            raise ValueError("train.num_streams is still open: plan the training first")
        window_chunks = self.reading.window_chunks
        if not window_chunks and not streams_of_ranks:
            streams_of_ranks = load_object("train.strategies:mesh_of")(self).streams
        spec = dataset.plan_spec(
            "train",
            seed=self.seed,
            global_batch_size=self.global_batch_size,
            num_streams=self.num_streams,
            window_bytes=0
            if window_chunks
            else window_bytes_within(self.reading.window_budget_bytes, streams_of_ranks),
        )
        return replace(spec, window_chunks=window_chunks or spec.window_chunks)

    def num_streams_at(self, num_readers: int) -> int:
        """Return the configured number of streams, or the default for so many ranks that read their own rows (0: for
        one).
        """
        return self.num_streams or num_streams_for(self.global_batch_size, max(1, num_readers))

    @property
    def num_ranks_asked(self) -> int:
        """`num_workers`, or as many as have a weight; 1 if that is left open."""
        return self.num_workers or len(self.rank_weights) or 1

    @property
    def needs_module(self) -> bool:
        """Whether the strategy takes `nn.Module`s only; `auto` may still choose one that takes any model."""
        return self.strategy != "auto" and load_object("train.strategies:STRATEGIES")[self.strategy].needs_module

    @property
    def augmentation(self) -> AugmentOptions:
        """`augment`, with `auto` resolved."""
        return self.augment.model_copy(update={"random_flip": self.augment.flips})

    @property
    def num_accumulated(self) -> int:
        """Microbatches into which a rank splits its share of a step, and whose gradients it adds up. A pipeline splits
        each of them again (`train.pipeline_parallel.num_microbatches`)."""
        return max(1, self.accumulation_steps)

    @property
    def base_learning_rate(self) -> float:
        """After linear scaling (Goyal et al., arXiv:1706.02677): proportional to the global batch, if asked for."""
        if self.learning_rate_batch_size == 0:
            return self.learning_rate
        return self.learning_rate * self.global_batch_size / self.learning_rate_batch_size

    @model_validator(mode="after")
    def _batch_fits_streams(self) -> Self:
        if self.num_streams and self.global_batch_size % self.num_streams:
            raise ValueError(
                f"train.global_batch_size = {self.global_batch_size} to be a multiple of "
                f"train.num_streams = {self.num_streams}; nearest: "
                f"{max(1, round(self.global_batch_size / self.num_streams)) * self.num_streams}"
            )
        return self
