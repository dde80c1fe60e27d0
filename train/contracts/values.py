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
    """The metric by which models on labels of one kind are compared."""

    name: str
    """The field of `Evaluation`."""
    words: str
    """Words for people."""
    higher_is_better: bool

    def reaches(self, value: float, limit: float) -> bool:
        return value >= limit if self.higher_is_better else value <= limit

    def limit_after(self, before: float, max_regression: float) -> float:
        """The worst metric that counts as no regression; of errors, which have a unit, it is relative."""
        return before - max_regression if self.higher_is_better else before * (1 + max_regression)


_ERROR = Metric("mean_absolute_error", "mean absolute error", higher_is_better=False)
METRICS: dict[LabelKind, Metric] = {
    "class": Metric("accuracy", "accuracy", higher_is_better=True),
    "multi_label": Metric("mean_average_precision", "mean average precision", higher_is_better=True),
    "float": _ERROR,
    "float_vector": _ERROR,
}


@dataclass(frozen=True, slots=True)
class MetricsOfClass:
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
    """Exact metrics over one split: every sample counted once, at any world size."""

    split: str
    num_samples: int
    loss: float
    """Negative log-likelihood of the labels; of numbers the mean squared error."""
    accuracy: float | None
    """Samples whose class is right; of several classes an image the answers (yes or no) that are; None for numbers."""
    top5_accuracy: float | None
    """None with at most five classes, because all would be in the first five."""
    per_class: tuple[MetricsOfClass, ...]
    label_kind: LabelKind = "class"
    mean_average_precision: float | None = None
    """For several classes per image: the mean over the classes that occur."""
    mean_absolute_error: float | None = None
    """For numeric labels."""
    confused: Confusion | None = None
    """None if it is stored separately (`train.metrics.evaluate.write_confusion`), or unknown."""

    @property
    def metric(self) -> Metric:
        """The metric by which models are compared."""
        return METRICS[self.label_kind]

    @property
    def metric_value(self) -> float:
        """Value of the metric."""
        return getattr(self, self.metric.name)

    def without_classes(self) -> Evaluation:
        """The metrics that do not grow with the number of classes, for a history of many epochs."""
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
    """Without its per-class metrics."""


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


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Seconds of the training loop on this rank since step 0, over all attempts; the parts add up to all of it."""

    input_wait: float = 0.0
    compute: float = 0.0
    allreduce: float = 0.0
    checkpoint: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        return self.input_wait + self.compute + self.allreduce + self.checkpoint + self.other

    def plus(self, more: TimeSpent) -> TimeSpent:
        return TimeSpent(
            self.input_wait + more.input_wait,
            self.compute + more.compute,
            self.allreduce + more.allreduce,
            self.checkpoint + more.checkpoint,
            self.other + more.other,
        )

    def shares(self) -> TimeShares:
        total = self.total or 1.0
        return TimeShares(
            self.input_wait / total,
            self.compute / total,
            self.allreduce / total,
            self.checkpoint / total,
            self.other / total,
        )


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """The state of early stopping between epochs."""

    best_validation_loss: float | None = None
    epochs_since_best: int = 0
    stopped: bool = False

    def after_epoch(self, validation_loss: float, patience_epochs: int) -> EarlyStop:
        """The state after one more epoch; `stopped` once `patience_epochs` in a row were no better than the best."""
        if self.best_validation_loss is None or validation_loss < self.best_validation_loss:
            return EarlyStop(validation_loss, 0, False)
        epochs_since_best = self.epochs_since_best + 1
        return EarlyStop(self.best_validation_loss, epochs_since_best, epochs_since_best >= patience_epochs)


@dataclass(frozen=True, slots=True)
class BestEpoch:
    """The epoch with the lowest validation loss so far, the first of equal ones, and where its weights are.

    One whose metric is that of guessing only counts as long as there is no other: a low loss then means nothing.
    """

    epoch: int
    validation_loss: float
    checkpoint: str
    """Relative to the models' root."""
    is_guessing: bool = False

    def is_behind(self, validation_loss: float, is_guessing: bool) -> bool:
        return (is_guessing, validation_loss) < (self.is_guessing, self.validation_loss)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Steps whose update was left out because their loss or gradient was not finite."""

    total: int = 0
    """Since step 0."""
    in_a_row: int = 0
    """Up to now."""
    num_rows: int = 0
    """Samples of such steps in the running epoch."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything between two steps but the variables. The sums are those of the running epoch so far."""

    cursor: Cursor = field(default_factory=lambda: Cursor(0, 0))
    loss_sum: float = 0.0
    """Sum over steps of the loss times the number of samples."""
    num_correct: float = 0.0
    epoch_seconds: float = 0.0
    last_loss_hex: str = (0.0).hex()
    spent: TimeSpent = TimeSpent()
    early_stop: EarlyStop = EarlyStop()
    best: BestEpoch | None = None
    """Best epoch; None before the end of the first epoch, and without a validation split."""
    history: tuple[EpochRecord, ...] = ()
    skipped: Skipped = Skipped()
    num_overflowed: int = 0
    """Steps since step 0 that changed nothing but the scale of the loss (`StepOutcome.overflowed`)."""

    def after_step(self, outcome: StepOutcome, num_rows: int, spent: TimeSpent) -> Progress:
        """One more step of `num_rows` samples is done."""
        return replace(
            self,
            cursor=Cursor(self.cursor.epoch, self.cursor.step + 1),
            loss_sum=self.loss_sum + outcome.loss * num_rows,
            num_correct=self.num_correct + outcome.num_correct,
            last_loss_hex=outcome.loss.hex(),
            skipped=replace(self.skipped, in_a_row=0),
            num_overflowed=self.num_overflowed + outcome.overflowed,
        ).after_time(spent)

    def after_skip(self, num_rows: int, spent: TimeSpent) -> Progress:
        """One more step is over, and its update was left out."""
        before = self.skipped
        return replace(
            self,
            cursor=Cursor(self.cursor.epoch, self.cursor.step + 1),
            skipped=Skipped(before.total + 1, before.in_a_row + 1, before.num_rows + num_rows),
        ).after_time(spent)

    def at_epoch_start(self) -> Progress:
        """The running epoch is to be done again from its start; the weights keep what they have learned of it."""
        return replace(
            self,
            cursor=Cursor(self.cursor.epoch, 0),
            loss_sum=0.0,
            num_correct=0.0,
            epoch_seconds=0.0,
            skipped=replace(self.skipped, num_rows=0),
        )

    def after_time(self, spent: TimeSpent) -> Progress:
        """More time of this epoch has gone."""
        return replace(self, epoch_seconds=self.epoch_seconds + spent.total, spent=self.spent.plus(spent))

    def after_epoch(
        self, record: EpochRecord, early_stop: EarlyStop, checkpoint: str, *, is_guessing: bool = False
    ) -> Progress:
        """The running epoch is done; its weights will be in `checkpoint`."""
        best, validation = self.best, record.validation
        if validation is not None and (best is None or best.is_behind(validation.loss, is_guessing)):
            best = BestEpoch(record.epoch, validation.loss, checkpoint, is_guessing)
        return Progress(
            cursor=Cursor(self.cursor.epoch + 1, 0),
            last_loss_hex=self.last_loss_hex,
            spent=self.spent,
            early_stop=early_stop,
            best=best,
            history=(*self.history, record),
            skipped=replace(self.skipped, num_rows=0),
            num_overflowed=self.num_overflowed,
        )


# Fewer say nothing: a small model's loss often rises before it falls.
MIN_STEPS_TO_JUDGE = 20


def has_not_learned(history: tuple[EpochRecord, ...]) -> bool:
    """Whether the loss has not fallen since the first epoch.

    Judged once: at the end of the second epoch, or of the first later one with `MIN_STEPS_TO_JUDGE` steps behind it.
    """
    *earlier, last = history
    num_steps_before = sum(record.num_steps for record in earlier)
    was_judged = len(earlier) > 1 and num_steps_before >= MIN_STEPS_TO_JUDGE
    if not earlier or was_judged or num_steps_before + last.num_steps < MIN_STEPS_TO_JUDGE:
        return False
    is_good = last.train_accuracy is not None and last.train_accuracy >= 0.9
    return last.train_loss > 0.995 * earlier[0].train_loss and not is_good


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of one update, equal on every rank."""

    loss: float
    num_correct: float
    """Samples whose class is right; of several classes an image the share that is, summed; 0 for numbers."""
    gradient_norm: float
    """Global norm before clipping."""
    is_applied: bool
    """False if loss or gradients were not finite, which is a fault; nothing was changed then."""
    overflowed: bool = False
    """The gradients of a scaled loss (float16) were not finite: no fault, as the next ones have a smaller scale; no
    weight was changed."""
