"""The frozen values that pass between the driver, the launchers and the ranks of a training."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeVar

from pydantic import TypeAdapter

from shardmill.jobs.observer import Observer
from shardmill.values import Cursor, DatasetPin, LabelKind
from train.contracts.activities import ReportsActivity
from train.contracts.world import RankDevices

Value = TypeVar("Value")
# In the folder of a training: its `TrainResult`, what classes it confused, and folders of what ranks leave for each
# other and for tools.
RESULT = "result.json"
CONFUSION = "confusion.json"
EXCHANGED_FILES = "silos"
PROFILES = "profiles"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The identity of a model beyond its name: the source of its factory, and the configuration of the built model.

    The driver knows only the source, because it builds nothing. The configuration is compared when a training is
    resumed or exported: it also shows what the source does not (another layer library, a setting that it reads).
    """

    source_sha256: str
    """Digest of the factory's own source; empty for shardmill's models."""
    config_sha256: str
    """Digest of the built model's configuration."""

    def differences(self, now: ModelIdentity) -> list[str]:
        """One phrase for each part that differs in `now`."""
        found = []
        if self.source_sha256 != now.source_sha256:
            found.append(f"source of train.model: then SHA-256 {self.source_sha256}, now {now.source_sha256}")
        if self.config_sha256 != now.config_sha256:
            found.append(f"built model: then configuration {self.config_sha256}, now {now.config_sha256}")
        return found


@dataclass(frozen=True, slots=True)
class Metric:
    """The figure by which models on labels of one kind are compared."""

    name: str
    """The field of `Evaluation`."""
    words: str
    """Words for people."""
    higher_is_better: bool

    def reaches(self, figure: float, limit: float) -> bool:
        return figure >= limit if self.higher_is_better else figure <= limit

    def limit_after(self, before: float, max_regression: float) -> float:
        """The worst figure that counts as no regression; of errors, which have a unit, it is relative."""
        return before - max_regression if self.higher_is_better else before * (1 + max_regression)


_ERROR = Metric("mean_absolute_error", "mean absolute error", higher_is_better=False)
METRICS: dict[LabelKind, Metric] = {
    "class": Metric("accuracy", "accuracy", higher_is_better=True),
    "multi_label": Metric("mean_average_precision", "mean average precision", higher_is_better=True),
    "float": _ERROR,
    "float_vector": _ERROR,
}


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One class in an evaluation; precision and recall are 0 if nothing was predicted or present.

    Of several classes an image, one counts as predicted from a probability of 0.5.
    """

    name: str
    num_samples: int
    precision: float
    recall: float
    average_precision: float | None = None
    """For several classes per image; None without a sample of this class."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """An image that the model took for another class; both by the numbers of `Confusion`."""

    sample_id: int
    true: int
    predicted: int
    confidence: float
    """The probability of the predicted class, to six places."""


@dataclass(frozen=True, slots=True)
class Confusion:
    """The cells of the confusion matrix that are not 0, row by row.

    Classes are numbers in the order of the dataset's class names; predicted may also be the number behind the last one,
    which stands for all classes that the dataset does not have.
    """

    true: tuple[int, ...]
    predicted: tuple[int, ...]
    num_samples: tuple[int, ...]
    mistakes: tuple[Mistake, ...] = ()
    """Some of them, the most confident first."""

    def most_frequent(self, limit: int) -> Confusion:
        """The fullest cells."""
        cells = sorted(zip(self.num_samples, self.true, self.predicted, strict=True), key=lambda cell: -cell[0])
        chosen = sorted((true, predicted, number) for number, true, predicted in cells[:limit])
        true, predicted, num_samples = zip(*chosen, strict=True) if chosen else ((), (), ())
        return Confusion(true, predicted, num_samples, self.mistakes)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Exact figures over one split: every sample counted once, at any world size."""

    split: str
    num_samples: int
    loss: float
    """Negative log-likelihood of the labels; of numbers the mean squared error."""
    accuracy: float | None
    """Samples whose class is right; of several classes an image the answers (yes or no) that are; None for numbers."""
    top5_accuracy: float | None
    """None with at most five classes, because all would be in the first five."""
    per_class: tuple[ClassFigures, ...]
    label_kind: LabelKind = "class"
    mean_average_precision: float | None = None
    """For several classes per image: the mean over the classes that occur."""
    mean_absolute_error: float | None = None
    """For numeric labels."""
    confused: Confusion | None = None
    """None if it is stored separately (`train.evaluation.evaluate.write_confusion`), or unknown."""

    @property
    def metric(self) -> Metric:
        """The figure by which models are compared."""
        return METRICS[self.label_kind]

    @property
    def figure(self) -> float:
        """Value of the metric."""
        return getattr(self, self.metric.name)

    def without_classes(self) -> Evaluation:
        """The figures that do not grow with the number of classes, for a history of many epochs."""
        return replace(self, per_class=(), confused=None)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One finished epoch: a point of the curves in the report."""

    epoch: int
    num_steps: int
    train_loss: float
    train_accuracy: float | None
    """Training accuracy, defined as `Evaluation.accuracy`."""
    learning_rate: float
    seconds: float
    validation: Evaluation | None
    """Without its per-class figures."""


@dataclass(frozen=True, slots=True)
class TimeShares:
    """Shares of the training time, which add up to 1, on rank 0."""

    input_wait: float = 0.0
    compute: float = 0.0
    allreduce: float = 0.0
    checkpoint: float = 0.0
    other: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a finished training; stored beside its checkpoints as `RESULT`."""

    dataset: DatasetPin
    training_dir: str
    exported: Literal["best", "last"]
    """The exported weights: those of the best epoch, or of the last."""
    weights_epoch: int
    """The epoch after which they were saved, counted from 0."""
    checkpoint: str
    """Relative to the models' root: the checkpoint that holds those weights."""
    last_checkpoint: str
    """Checkpoint at which the training ended, and from which a longer one continues."""
    continued_from: str
    """Last checkpoint of the shorter training that this one continued; empty for none."""
    model: ModelIdentity
    strategy: str
    world_size: int
    num_epochs: int
    num_steps: int
    seconds: float
    images_per_second: float
    time_shares: TimeShares
    final_loss_hex: str
    weights_sha256: str
    """Digest of the weights in `checkpoint`."""
    stopped_early: bool
    resumed_from: Cursor | None
    history: tuple[EpochRecord, ...]
    evaluation: Evaluation | None
    """Evaluation on the test split, or on validation if there is no test split; None if there is neither. Its per-class
    values exist only on rank 0.
    """
    num_skipped_steps: int = 0
    """Number of steps whose update was skipped because loss or gradient was not finite."""
    num_overflowed_steps: int = 0
    """Number of steps that were skipped because the loss scale was too large for float16."""
    export_backend: str = "keras"
    """The backend that exports this model."""
    placement: tuple[RankDevices, ...] = ()
    """Hosts and devices of the last attempt's ranks, in rank order."""
    caution: str = ""
    """Why the gate must not let this model pass by itself; most often empty."""
    mixed_precision: str = "off"
    """The precision that it was computed in, as `train.mixed_precision` names it."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of a rank after each step."""

    rank: int
    epoch: int
    step: int
    num_steps: int
    """Steps of the whole epoch."""
    loss_hex: str
    """The global loss, equal on every rank."""
    sample_ids: tuple[str, ...] = ()
    """This rank's share of the global batch in order, as 16 hex digits; empty unless `train.record_samples`."""
    seconds: dict[str, float] = field(default_factory=dict)
    """This step's `input_wait`, `compute` and `allreduce` seconds on this rank, those of the `checkpoint` written just
    before it, and their `total`; beside them what the reader's threads worked meanwhile, in `fetch` and in `decode`."""


BEFORE_CHECKPOINT = "storing.progress"
"""The event that comes before a checkpoint counts, when all steps that it stands for have been told."""
OUTPUT = "output"
"""The event with whole lines, `text`, of what the process of a rank prints; the run's `ranks.log` has them."""


class Reporter(Observer, ReportsActivity, Protocol):
    """Sends a rank's reports to its driver: events (`resumed`, `epoch`, `early_stop`, ...), steps, and its activity.

    Launchers give each rank one.
    """

    def step(self, report: StepReport) -> None:
        """One step is done."""
        ...


def to_json(value: object) -> bytes:
    """A value of this module as JSON."""
    return _adapter(type(value)).dump_json(value)


def from_json(kind: type[Value], data: bytes | str) -> Value:
    """The value of type `kind` that `to_json` wrote."""
    return _adapter(kind).validate_json(data)


@functools.cache
def _adapter(kind: type[Value]) -> TypeAdapter[Value]:
    """Building one takes 10 ms, far longer than what it does."""
    return TypeAdapter(kind)
