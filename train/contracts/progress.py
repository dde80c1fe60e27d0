"""The position of a training: a frozen value that changes with every step and is stored in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from shardmill.values import Cursor
from train.contracts.values import EpochRecord, TimeShares

if TYPE_CHECKING:
    from train.contracts.step_outcome import StepOutcome


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

    One whose figure is that of guessing only counts as long as there is no other: a low loss then means nothing.
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
