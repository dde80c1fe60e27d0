"""The state of a rank while it trains, saved to a checkpoint and restored from one.

Why a resume is exact: batches follow from (epoch, step), so a checkpoint holds only the cursor, weights, optimizer and
each rank's generators and moving statistics, all copied between the same two steps on every rank. Ranks must agree on
one checkpoint before any of them loads it: rank 0 proposes, every rank verifies its own files, and one damaged file
makes all of them try the next older one. Ranks that chose by themselves could start from different steps and hang, or
average two trainings. Own state is loaded after the broadcast, because the broadcast overwrites it. The marker is
written last and contains each file's SHA-256, so a kill at any time leaves either a complete checkpoint or none.

`Chance` tells the session when validation is no better than guessing although the training has learned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from shardmill.dataset.dataset import Dataset
from shardmill.errors import IntegrityError, StorageError
from shardmill.ids import format_sample_id
from shardmill.jobs.observer import WARNING
from shardmill.jobs.process import Terminated, asked_to_end
from shardmill.loader.reader import ReaderSeconds
from shardmill.loader.row_source import RowSource
from shardmill.values import Batch
from train.api import Member
from train.checkpoints.checkpoint import (
    CheckpointFolder,
    FoundCheckpoint,
    TrainingIdentity,
    check_resumable,
    complete_checkpoints,
    delete_checkpoint,
    open_checkpoint,
)
from train.checkpoints.checkpoint_writer import CheckpointWriter, Moment
from train.contracts.activities import Stopwatch
from train.contracts.task import WorkerTask
from train.contracts.values import BestEpoch, EpochRecord, Progress, Reporter, StepReport, TimeSpent, from_json, to_json
from train.contracts.world import World
from train.labels import LabelSpec
from train.readers.planned import Epochs
from train.reporting.profiling import StepProfiler
from train.schedules import learning_rate_at

if TYPE_CHECKING:
    from shardmill.dataset.manifest import Manifest, SplitInfo


@dataclass(frozen=True, slots=True)
class Session:
    """The objects that stay the same from the first step to the last."""

    task: WorkerTask
    dataset: Dataset
    epochs: Epochs
    streams: range
    """The logical streams that this rank owns."""
    member: Member
    checkpoints: CheckpointFolder
    identity: TrainingIdentity
    world: World
    reporter: Reporter
    writer: CheckpointWriter
    profiler: StepProfiler
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    evaluated: dict[str, RowSource] = field(default_factory=dict)
    """What the evaluations of a split read from, one after the other; of one split at most."""

    @property
    def labels(self) -> LabelSpec:
        return LabelSpec.of(self.dataset.manifest)

    @property
    def chance(self) -> Chance | None:
        return Chance.of(self.dataset.manifest)

    def global_step(self, progress: Progress) -> int:
        return progress.cursor.epoch * self.epochs.num_steps + progress.cursor.step

    def learning_rate(self, progress: Progress) -> float | None:
        """Learning rate of the next step by the schedule; None if the learner has its own."""
        if not self.member.learner.follows_schedule:
            return None
        return learning_rate_at(self.task.config, self.global_step(progress), self.epochs.num_steps)

    def event(self, name: str, fields: dict[str, str | int | float]) -> None:
        """Report an event, once for all ranks."""
        if self.member.rank == 0:
            self.reporter.event(name, fields)


def resume(session: Session, begin: Callable[[Session], None]) -> FoundCheckpoint | None:
    """Load the newest checkpoint whose required files are all intact, and give all ranks the same variables.

    A training without a checkpoint of its own begins at the end of the shorter training that it continues, if there
    is one, and otherwise with the variables that rank 0 has after `begin`.
    """
    found, files = _choose_checkpoint(session)
    if found:
        session.member.start(files, found.marker.world_size, f"the checkpoint {found.path}")
    else:
        begin(session)
        session.member.start({}, 0, "")
    # Only to allocate the memory, which the copy for the first checkpoint reuses.
    session.writer.copy_state()
    if found:
        cursor = found.marker.progress.cursor
        fields = {"path": found.path, "epoch": cursor.epoch, "step": cursor.step, "world_size": found.marker.world_size}
        session.event("resumed", {**fields, "global_step": found.marker.global_step})
    return found


def _choose_checkpoint(session: Session) -> tuple[FoundCheckpoint | None, dict[str, bytes]]:
    """The checkpoint that all ranks resume from, if any, and the files of it that this rank needs, by name.

    Rank 0 proposes the newest; each rank reads its own files and verifies them as it reads. If any of them is damaged,
    all ranks try the next older one together: no other rank reads that file, so the problem is gathered from all.
    """
    member, store = session.member, session.checkpoints.store
    candidates = _candidates(session) if member.rank == 0 else iter(())
    while True:
        proposed = next(candidates, None)
        proposal = member.broadcast_bytes(to_json(proposed) if proposed else b"")
        if not proposal:
            return None, {}
        found = from_json(FoundCheckpoint, proposal)
        check_resumable(found, session.identity, session.task.allowed if found.path == session.task.continues else ())
        files: dict[str, bytes] = {}
        problem = ""
        try:
            saved = found.files(store)
            files = {name: saved.read(name) for name in member.files_to_resume(saved)}
        except IntegrityError as error:
            problem = str(error)
        # As JSON, because Horovod cannot gather tensors that are empty on every rank.
        problems = [json.loads(each) for each in member.gather_bytes(json.dumps(problem).encode())]
        if not any(problems):
            return found, files
        session.event("checkpoint_discarded", {"path": found.path, "reason": "; ".join(filter(None, problems))})
        if member.rank == 0 and found.path != session.task.continues:
            # It must not count among those to keep. What belongs to the shorter training is not ours to delete.
            delete_checkpoint(store, found.path)


def _candidates(session: Session) -> Iterator[FoundCheckpoint]:
    """Yield rank 0's candidates: the training's own checkpoints, newest first, then the one that it continues."""
    checkpoints, continues = session.checkpoints, session.task.continues

    def report_discarded(path: str, reason: str) -> None:
        session.event("checkpoint_discarded", {"path": path, "reason": reason})

    yield from complete_checkpoints(checkpoints.store, checkpoints.training_dir, report_discarded)
    if continues:
        try:
            yield open_checkpoint(checkpoints.store, continues)
        except IntegrityError as error:
            report_discarded(continues, str(error))


def save(session: Session, progress: Progress) -> tuple[Progress, str]:
    """Begin to write a checkpoint of the current state. -> progress with the time it cost here, and its path.

    The training only waits if the previous checkpoint is still being written. If the store refuses, a warning is logged
    and all ranks continue with the existing checkpoints.
    """
    wait_for_checkpoint(session)
    global_step = session.global_step(progress)
    moment = Moment(
        path=session.checkpoints.path_of(global_step),
        files=session.writer.copy_state(),
        identity=session.identity,
        progress=progress,
        global_step=global_step,
        world_size=session.member.world_size,
    )
    session.writer.begin(moment)
    return progress.after_time(TimeSpent(checkpoint=session.stopwatch.lap())), moment.path


def report_checkpoint(session: Session) -> None:
    """Report the checkpoint that was begun, if it is complete or refused by now."""
    if not session.writer.is_writing:
        wait_for_checkpoint(session)


def wait_for_checkpoint(session: Session) -> None:
    """Wait until no checkpoint is being written, and report the last one."""
    written = session.writer.take()
    if written is None:
        return
    moment = written.moment
    cursor, step = moment.progress.cursor, moment.global_step
    fields = {"path": moment.path, "epoch": cursor.epoch, "step": cursor.step, "global_step": step}
    fields |= {"seconds": written.seconds}
    if written.problem:
        warning = (
            f"no checkpoint at global step {step}: {written.problem}; the training continues with the previous one"
        )
        session.event("checkpoint_failed", {**fields, WARNING: warning})
    else:
        session.event("checkpoint", fields)


def save_last(session: Session, progress: Progress, last_checkpoint: str) -> tuple[Progress, str]:
    """The checkpoint that a result names, written now unless it is `last_checkpoint`. Raises StorageError."""
    progress, path, problem = _completed(session, progress, last_checkpoint)
    if problem:
        raise StorageError(
            f"the last checkpoint of {session.task.training_dir} could not be written: {problem}",
            "a finished training needs it",
            "free space or repair the storage, then run the same command again: it resumes from the last complete one",
        )
    return progress, path


def stop(session: Session, progress: Progress, last_checkpoint: str) -> Terminated:
    """A signal has come: all ranks are before the same step, write a checkpoint there and leave. -> what to raise.

    `last_checkpoint`: that of this very moment, if one was begun already.
    """
    how = "nothing was trained yet"
    if session.global_step(progress):
        progress, path, problem = _completed(session, progress, last_checkpoint)
        how = problem or f"checkpoint {path}"
    session.member.barrier()
    session.member.close()
    cursor = progress.cursor
    # Counted from 1, as progress is shown.
    step, epoch = f"{cursor.step + 1}/{session.epochs.num_steps}", f"{cursor.epoch + 1}/{session.task.config.epochs}"
    where = f"before step {step} of epoch {epoch} (after {session.global_step(progress)} steps)"
    return asked_to_end(f"stopped {where}; {how}")


def _completed(session: Session, progress: Progress, last_checkpoint: str) -> tuple[Progress, str, str]:
    """A checkpoint of this moment, which is `last_checkpoint` unless that is empty or was refused. -> why it is not
    there, or ''."""
    wait_for_checkpoint(session)
    path, refused = last_checkpoint, session.writer.refused
    if not path or path in refused:
        progress, path = save(session, progress)
        wait_for_checkpoint(session)
    progress = progress.after_time(TimeSpent(checkpoint=session.stopwatch.lap()))
    return progress, path, refused.get(path, "")


def load_best(session: Session, best: BestEpoch | None, last_checkpoint: str) -> BestEpoch | None:
    """Give all ranks the weights of the best epoch, if `train.export` wants them. -> it; None if the last ones count.

    Raises IntegrityError if its checkpoint is damaged.
    """
    if best is None or session.task.config.export == "last":
        return None
    if best.checkpoint == last_checkpoint:
        return best
    store = session.checkpoints.store
    saved = open_checkpoint(store, best.checkpoint).files(store)
    files = {name: saved.read(name) for name in session.member.weight_files(saved)}
    session.member.take_weights(files, f"the checkpoint {best.checkpoint}")
    return best


def step_report(
    session: Session, batch: Batch, loss: float, progress: Progress, spent: TimeSpent, read: ReaderSeconds
) -> StepReport:
    """Report the step that `progress` has just counted; `spent` contains the checkpoint written just before it."""
    return StepReport(
        rank=session.member.rank,
        epoch=progress.cursor.epoch,
        step=progress.cursor.step - 1,
        num_steps=session.epochs.num_steps,
        loss_hex=loss.hex(),
        sample_ids=_recorded_sample_ids(session, batch),
        seconds={
            "input_wait": spent.input_wait,
            "compute": spent.compute,
            "allreduce": spent.allreduce,
            "checkpoint": spent.checkpoint,
            "total": spent.total,
            **asdict(read),
        },
    )


def _recorded_sample_ids(session: Session, batch: Batch) -> tuple[str, ...]:
    if not (session.task.config.record_samples and session.member.data.is_first):
        return ()
    return tuple(format_sample_id(sample_id) for sample_id in batch.sample_ids_N[batch.weights_N > 0].tolist())


# Fewer validation samples say nothing.
MIN_SAMPLES = 30


NUM_STANDARD_ERRORS = 2


# Of the way from guessing to no mistake: what a training must have gone to have learned anything.
LEARNED_SHARE = 0.1


# Labels that are numbers: what must be left at most of the first epoch's loss.
LEARNED_LOSS = 0.5


@dataclass(frozen=True, slots=True)
class Chance:
    """Metrics of a model that knows class frequencies and ignores the images."""

    train_accuracy: float
    validation_metric: float
    """Validation metric of guessing; metrics within two standard errors (`validation_limit`) are not better."""
    validation_limit: float

    @classmethod
    def of(cls, manifest: Manifest) -> Chance | None:
        """Compute the chance metrics. None without enough validation samples, or if any guess would be right there."""
        validation, kind = manifest.splits.get("validation"), manifest.row_schema.label_kind
        if validation is None or validation.num_rows < MIN_SAMPLES:
            return None
        if kind not in ("class", "multi_label"):
            return cls(0.0, 0.0, 0.0)
        shares, trained = _shares(validation), _shares(manifest.splits["train"])
        if kind == "class":
            metric, accuracy = max(shares), max(trained)
        else:
            occurring = [share for share in shares if share] or [1.0]
            metric = math.fsum(occurring) / len(occurring)
            accuracy = math.fsum(max(share, 1 - share) for share in trained) / len(trained)
        limit = metric + NUM_STANDARD_ERRORS * math.sqrt(metric * (1 - metric) / validation.num_rows)
        return cls(accuracy, metric, limit) if limit < 1 else None

    def is_all(self, history: Sequence[EpochRecord]) -> bool:
        """Whether the last epoch's validation is no better; for numbers, than the training before its first epoch."""
        validation = history[-1].validation
        if validation is None:
            return False
        if not validation.metric.higher_is_better:
            return validation.loss >= history[0].train_loss
        return validation.metric_value <= self.validation_limit

    def has_learned(self, history: Sequence[EpochRecord]) -> bool:
        """Whether the training is better than that by far."""
        first, last = history[0], history[-1]
        if last.train_accuracy is None:
            return last.train_loss <= LEARNED_LOSS * first.train_loss
        return last.train_accuracy >= self.train_accuracy + LEARNED_SHARE * (1 - self.train_accuracy)

    def caution(self, history: Sequence[EpochRecord]) -> str:
        """Describe for people that the last epoch's validation is no better."""
        last = history[-1]
        assert last.validation is not None
        metric = last.validation.metric
        if last.train_accuracy is None:
            guess, reached = (
                f"the loss {history[0].train_loss:.4g} of the first epoch",
                f"a loss of {last.train_loss:.4g}",
            )
            found = f"loss {last.validation.loss:.4g}"
        else:
            guess, reached = f"guessing ({self.validation_metric:.4f})", f"an accuracy of {last.train_accuracy:.4f}"
            found = f"{metric.words} {last.validation.metric_value:.4f}"
        return (
            f"the validation {found} after epoch {last.epoch + 1} is no better than {guess}, although the training "
            f"has reached {reached}: moving statistics of batch norms may lag behind (more epochs, smaller batches or "
            "a smaller momentum), or the model has overfitted"
        )


def _shares(split: SplitInfo) -> list[float]:
    return [count / split.num_rows for count in split.class_counts]
