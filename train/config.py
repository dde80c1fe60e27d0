"""The section `train` of the config, and what follows from it by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shardmill.epoch_plan import streams_by_weight, streams_of_rank
from shardmill.options import AugmentOptions
from shardmill.registry import OneOf
from shardmill.section import Section
from train.written_forms import Host, ServerUri, StepRange

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.epoch_plan import PlanSpec


@dataclass(frozen=True, slots=True)
class Resume:
    """What a change of a setting means for a training that was begun; without one it makes another training."""

    meaning: str


HOW = Resume("it decides how a training is done, not which numbers come out: it may differ between two attempts")
LENGTH = Resume("the name of a training's folder says it (train/trainings.py): a longer one may go on from a shorter")
LATER = Resume("it came after trainings that do not name it: at its default it makes no difference")
SAFE = Resume("steps to come use it, what a checkpoint holds does not depend on it: `--allow-change` may change it")

SHA256_OF_FILE = "#sha256="
"""In `train.init_from`, as the driver gives it to the ranks: the hash of the file follows."""

_IN_EVERY_RECORD = ("augment", "early_stop_epochs", "momentum", "schedule_step_factor", "weight_decay")
"""No config file that a person writes names all of them."""


class TrainConfig(Section):
    """How a model is trained. The important keys come first."""

    model: Annotated[str, OneOf("train.models:MODELS")] = "small_cnn"
    """What is trained: a name, or your own factory as `package.module:function` (see `standardize`)."""
    epochs: Annotated[int, LENGTH] = Field(default=10, ge=1)
    """Passes over the train split; each uses every sample exactly once. Raised later, a finished training goes on."""
    global_batch_size: int = Field(default=64, ge=1)
    """Samples of one optimizer step, summed over all ranks."""
    accumulation_steps: Annotated[int, HOW] = Field(default=0, ge=0)
    """A rank computes its share of a step in so many parts, in the memory of one; gradients are exchanged once. 0: as
    few as its memory takes (docs/training/memory.md), most often one."""
    memory_budget_bytes: Annotated[int, HOW] = Field(default=0, ge=0)
    """What a rank may use of its GPU's, or its host's, memory; 0: all of it, shared equally by the host's ranks."""
    local_steps: Annotated[int, LATER] = Field(default=1, ge=1)
    """`local_sgd`: each rank cuts its share of a step into so many parts and updates its own weights after each, before
    weights are averaged. To keep the batch of an update, multiply `global_batch_size` by as much."""
    silos: Annotated[tuple[str, ...], LATER] = ()
    """`local_sgd`: for each rank the dataset version that it trains on, as `uri@N`; no image leaves it.
    `dataset.uri` then gives the classes, the standardization, and what rank 0 evaluates on."""
    silo_timeout_seconds: Annotated[float, HOW] = Field(default=60.0, gt=0)
    """How long rank 0 waits in a round for silos that took part in the last; then the round goes on without them."""
    init_from: Annotated[str, LATER] = ""
    """Trained weights to begin with: a `.keras`, `.weights.h5`, `.h5`, `.safetensors`, `.pt` or `.pth` file, or
    `MODELS@N`, an export. A last layer for other classes stays fresh. Another file makes another training."""
    freeze: Annotated[tuple[str, ...], LATER] = ()
    """Weights that are not trained: `all_but_head` (the last layer), or patterns of their names such as `conv*`."""
    unfreeze_epoch: Annotated[int, LATER] = Field(default=0, ge=0)
    """They are trained from this epoch on, counted from 0, with an optimizer that begins anew; 0: never."""
    num_workers: Annotated[int, HOW] = Field(default=0, ge=0)
    """Ranks: training processes; 0: as many as `auto` finds GPUs or hosts for (docs/training/auto.md)."""
    rank_weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], HOW] = ()
    """Relative speed of each rank, in rank order: a slow one gets fewer of the `num_streams` (at least one), and the
    global batches stay the same. Empty for equal shares."""
    strategy: Annotated[str, OneOf("train.strategies:STRATEGIES", also=("auto",)), HOW] = "auto"
    """How ranks share the training; docs/training/auto.md says how `auto` chooses."""
    parameter_servers: Annotated[int, HOW] = Field(default=1, ge=1)
    """`parameter_server` only: processes that hold the variables, beside `num_workers` workers and a chief."""
    local_devices: Annotated[int, HOW] = Field(default=0, ge=0)
    """`mirrored` only: over how many devices of its process a batch is split; 0: all GPUs there are, else one CPU.
    Without GPUs the CPU counts as so many devices, which gains no speed."""
    compression: Annotated[Literal["none", "fp16", "bf16", "powersgd"], LATER] = "none"
    """How gradients travel between ranks: as they are; in sixteen bits, which is another training; or (`torch_ddp`) as
    matrices of a low rank, what is lost being added to the next step's (arXiv:1905.13727)."""
    powersgd_rank: Annotated[int, LATER] = Field(default=2, ge=1)
    """`compression = "powersgd"` only: that rank. More is nearer to the gradient, and more to send."""
    bucket_bytes: Annotated[int, HOW] = Field(default=0, ge=0)
    """`horovod` and `torch_ddp` only: gradients are exchanged in groups of about so many bytes; 0: 128 MiB under
    Horovod, its own default; under `torch_ddp` 4 MiB on CPUs and 25 on GPUs."""
    backend: Annotated[str, OneOf("train.backends:BACKENDS", also=("auto",))] = "auto"
    """The framework; `auto` follows from strategy and model."""
    launcher: Annotated[str, OneOf("train.launching:LAUNCHERS", also=("auto",)), HOW] = "auto"
    """How ranks start; `auto`: one in this process, several on the Spark cluster of `spark.master`, else here."""
    devices: Annotated[Literal["auto", "cpu", "gpu"], HOW] = "auto"
    """What ranks compute on, each on a device of its own: `auto` takes GPUs if there are some and the framework was
    built for them."""
    format: Annotated[str, OneOf("shardmill.formats:SHARD_FORMATS", also=("auto",)), HOW] = "auto"
    """Which of the dataset's formats to read; `auto` takes Parquet if there is a choice."""
    reader: Annotated[str, OneOf("train.readers:READERS"), LATER] = "shardmill"
    """What reads the train split; evaluation always reads every sample once."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Decides initial weights, order and augmentation."""
    num_streams: int = Field(default=8, ge=1)
    """Logical streams of the epoch plan: the largest world size, and a divisor of the global batch."""
    standardize: bool = True
    """The model gets `(x - mean) / std`, per channel of the train split, as float32; false: the pixels' 0 to 255."""
    augment: Annotated[AugmentOptions, SAFE] = AugmentOptions()
    """Random changes to training images."""

    optimizer: Annotated[str, OneOf("train.optimizers:OPTIMIZERS", also=("auto",))] = "auto"
    """`auto` uses the optimizer of a compiled user model with its own learning rate, and Adam otherwise."""
    learning_rate: Annotated[float, SAFE] = Field(default=1e-3, gt=0)
    """At `learning_rate_batch_size` samples a step."""
    learning_rate_batch_size: Annotated[int, SAFE] = Field(default=0, ge=0)
    """With n > 0 the learning rate is scaled by global_batch_size / n (linear scaling, arXiv:1706.02677); 0: no."""
    warmup_steps: Annotated[int, SAFE] = Field(default=0, ge=0)
    """The learning rate rises linearly over these steps."""
    schedule: Annotated[str, OneOf("train.schedules:SCHEDULES"), SAFE] = "cosine"
    """What the learning rate does after the warm-up."""
    schedule_step_epochs: Annotated[int, SAFE] = Field(default=30, ge=1)
    """`step`: multiply by `schedule_step_factor` every so many epochs."""
    schedule_step_factor: Annotated[float, SAFE] = Field(default=0.1, gt=0, le=1)
    """`step`: the factor."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | Literal["auto"] = "auto"
    """`sgd` only; `auto`: 0.9."""
    weight_decay: Annotated[Annotated[float, Field(ge=0)] | Literal["auto"], SAFE] = "auto"
    """`adamw`: the share, times the learning rate, by which a step shrinks weights; `auto`: 0.05. `sgd`: the factor of
    L2 regularization; `auto`: 0.0001. Biases, norms and position embeddings are left alone."""
    recipe_version: Annotated[int, LATER] = Field(default=2, ge=1, le=2)
    """1: the rules of trainings that began before 2 existed, which continue by them (docs/training/optimization.md)."""
    ema_decay: Annotated[float, LATER] = Field(default=0.0, ge=0, lt=1)
    """Evaluate and export moving averages of the weights, which keep this share of themselves at each update (less in
    the first ones), for instance 0.999; 0 switches it off."""
    sync_batch_norm: Annotated[bool, LATER] = False
    """Batch norms take the moments of the whole global batch: over all ranks, and without padding."""
    gradient_clip_norm: Annotated[float, SAFE] = Field(default=0.0, ge=0)
    """Clip gradients to this global norm; 0 switches it off."""
    loss: Literal["auto", "softmax", "sigmoid", "squared_error"] = "auto"
    """`auto` uses the loss of a compiled user model, and otherwise what fits the labels: softmax cross-entropy for one
    class an image, sigmoid cross-entropy for several, the squared error for numbers."""
    model_outputs: Literal["auto", "logits", "probabilities"] = "auto"
    """What a model of your own gives for classes; `auto` follows a compiled loss, else looks at the model's outputs."""
    label_smoothing: Annotated[float, SAFE] = Field(default=0.0, ge=0, lt=1)
    """Share of each label spread over all classes; of several classes an image, over yes and no of each."""
    class_weights: Annotated[Literal["balanced"] | dict[str, Annotated[float, Field(gt=0)]], SAFE, LATER] = Field(
        default_factory=dict
    )
    """How much the loss of a class counts, by its name; those that are not named count 1. `balanced`: the rarer a
    class, the more, so that all together count alike. Figures of evaluation are not weighted."""
    mixed_precision: Literal["off", "bfloat16", "float16", "auto"] = "off"
    """Compute precision; weights stay float32. `auto`: off, but bfloat16 if memory is too short for that."""
    activation_checkpointing: Annotated[Literal["off", "on", "auto"], HOW] = "auto"
    """Keep for the backward pass what goes into a block of layers, and compute the rest again: less memory, more time.
    `auto`: if nothing else makes a step fit."""
    early_stop_epochs: Annotated[int, SAFE] = Field(default=0, ge=0)
    """Stop after so many epochs without a better validation loss; 0 switches it off."""
    export: Annotated[Literal["best", "last"], LENGTH] = "best"
    """Evaluate and export the weights of the epoch with the lowest validation loss, if that is known, or the last."""

    on_non_finite: Annotated[Literal["stop", "skip"], HOW] = "stop"
    """A batch whose loss or gradient is not finite: stop before the update, or leave that update out and count it."""
    max_skipped_in_a_row: Annotated[int, HOW] = Field(default=3, ge=1)
    """`on_non_finite = "skip"`: more batches than so many one after the other stop the training."""
    checkpoint_every_steps: Annotated[int, HOW] = Field(default=200, ge=0)
    """Also at every epoch's end; 0 for only there."""
    keep_checkpoints: Annotated[int, HOW] = Field(default=2, ge=2)
    """How many of the newest checkpoints stay."""
    record_samples: Annotated[bool, HOW] = False
    """Write `steps.jsonl`: loss and sample ids of every step."""
    tensorboard: Annotated[bool, HOW] = True
    """Write scalars for TensorBoard (`tensorboard --logdir WORKDIR/runs`)."""
    mlflow_uri: Annotated[ServerUri, HOW] = ""
    """Likewise at this MLflow tracking server, for instance `http://HOST:5000`; one that is away is a warning."""
    profile_steps: Annotated[StepRange, HOW] = ""
    """Record what every rank computes in the steps FIRST:STOP, for instance `10:15` (STOP is not among them; counted
    from 0 over all epochs), into `profiles` of the training's folder. These steps are slower. Empty: none."""
    window_budget_bytes: int = Field(default=256_000_000, ge=1)
    """Memory for the shuffle windows of one rank. The window follows from it and `num_streams` (at least one chunk),
    never from `num_workers`; what each rank then needs is checked before anything starts."""
    prefetch_bytes: Annotated[int, HOW] = Field(default=64_000_000, ge=1)
    """Bound of the queue of decoded batches in each rank."""
    reader_threads: Annotated[int, HOW] = Field(default=2, ge=1)
    """Threads in each rank that read, verify, decode and augment."""
    silent_seconds: Annotated[float, HOW] = Field(default=55.0, gt=0)
    """A rank is lost, and the job ends, after so long without heartbeats, or in what ranks repeat: a step, reading a
    batch (and 10 times the longest so far, a straggler is spared). Elsewhere one without progress is named."""
    progress_timeout_seconds: Annotated[float, HOW] = Field(default=600.0, gt=0)
    """Elsewhere a rank without progress has this long (likewise), and before its first step `start_timeout_seconds`
    as well. If it is less than `silent_seconds`, or than what a store may take for a batch, it counts there, too."""
    start_timeout_seconds: Annotated[float, HOW] = Field(default=300.0, gt=0)
    """All ranks must have started within this time."""
    max_restarts: Annotated[int, HOW] = Field(default=0, ge=0)
    """How often a training that loses ranks (killed, silent, without progress) goes on without them from its last
    complete checkpoint; a fault that comes again at the same step ends it."""
    stop_timeout_seconds: Annotated[float, HOW] = Field(default=25.0, gt=0)
    """On SIGTERM: how long the ranks may take to end their step and write a checkpoint, before they are ended as they
    are. Less than what a scheduler waits before it kills (30 s on Kubernetes)."""
    attach_host: Annotated[Host, HOW] = ""
    """`attach`: where the others call rank 0; empty for what the starter says (MASTER_ADDR, SLURM's first node)."""
    attach_port: Annotated[int, HOW] = Field(default=29610, ge=1, le=65535)
    """`attach`: on which port."""
    nics: Annotated[tuple[str, ...], HOW] = ()
    """Network interfaces for the ranks' traffic; empty for the one by which a rank reaches the driver (`horovod_spark`:
    Horovod chooses). Of several, `horovod_spark` uses all, other launchers the first."""

    def plan_spec(self, dataset: Dataset) -> PlanSpec:
        """The plan of every epoch: the same at every world size, because nothing in it depends on `num_workers`."""
        return dataset.plan_spec(
            "train",
            seed=self.seed,
            global_batch_size=self.global_batch_size,
            num_streams=self.num_streams,
            window_budget_bytes=self.window_budget_bytes,
        )

    def streams_of(self, rank: int, world_size: int) -> range:
        """The logical streams that a rank reads."""
        if len(self.rank_weights) == world_size:
            return streams_by_weight(self.rank_weights, self.num_streams)[rank]
        return streams_of_rank(rank, world_size, self.num_streams)

    def smallest_share(self, world_size: int) -> int:
        """Samples of a step that the rank with the fewest streams has."""
        fewest_streams = min(len(self.streams_of(rank, world_size)) for rank in range(world_size))
        return fewest_streams * (self.global_batch_size // self.num_streams)

    @property
    def is_first_recipe(self) -> bool:
        """Whether this is a training of the time before `recipe_version`, or one by its rules."""
        return self.recipe_version == 1

    @property
    def augmentation(self) -> AugmentOptions:
        """`augment`, with what `auto` stands for. In the first recipe all images were mirrored."""
        always = self.is_first_recipe and self.augment.random_flip == "auto"
        return self.augment.model_copy(update={"random_flip": always or self.augment.flips})

    @property
    def num_named(self) -> int:
        """Ranks that this config names one by one, by their silos or weights."""
        return len(self.silos or self.rank_weights)

    @property
    def num_parts(self) -> int:
        """In which a rank computes its share of a step."""
        return max(1, self.accumulation_steps)

    @property
    def base_learning_rate(self) -> float:
        """After linear scaling (Goyal et al., arXiv:1706.02677): proportional to the global batch, if asked for."""
        if self.learning_rate_batch_size == 0:
            return self.learning_rate
        return self.learning_rate * self.global_batch_size / self.learning_rate_batch_size

    @model_validator(mode="before")
    @classmethod
    def _recipe_of_a_record(cls, given: Any) -> Any:
        # The `config.toml` of a run names every setting; of a run before there were recipes, this one is missing.
        names: set[str] = {*given} if isinstance(given, dict) else set()
        is_record = "recipe_version" not in names and names.issuperset(_IN_EVERY_RECORD)
        return {**given, "recipe_version": 1} if is_record else given

    @model_validator(mode="after")
    def _batch_fits_streams(self) -> Self:
        if self.global_batch_size % self.num_streams:
            raise ValueError(
                f"train.global_batch_size = {self.global_batch_size} to be a multiple of "
                f"train.num_streams = {self.num_streams}; nearest: "
                f"{max(1, round(self.global_batch_size / self.num_streams)) * self.num_streams}"
            )
        world_size = self.num_workers or self.num_named or 1
        if world_size > self.num_streams:
            raise ValueError(
                f"train.num_workers = {world_size} to be at most train.num_streams = {self.num_streams}; "
                f"each rank owns at least one stream: raise train.num_streams, which starts a new run"
            )
        if self.rank_weights and len(self.rank_weights) != world_size:
            raise ValueError(
                f"train.rank_weights = {list(self.rank_weights)} to have one weight for each of train.num_workers = "
                f"{world_size} ranks; set train.num_workers = {len(self.rank_weights)}"
            )
        if self.num_parts * self.local_steps > (share := self.smallest_share(world_size)):
            raise ValueError(
                f"train.accumulation_steps = {self.accumulation_steps} times train.local_steps = {self.local_steps} to "
                f"be at most {share}, the samples of a step that the rank with the fewest streams has"
            )
        return self
