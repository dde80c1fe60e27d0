"""One process = one rank: the whole training, from the pinned dataset to the result, read top to bottom.

Every rank runs this same story. Rank 0 alone reports events and writes markers and the result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from shardmill.checksummed import with_checksum
from shardmill.dataset.dataset import open_pinned
from shardmill.dataset.manifest import Manifest
from shardmill.errors import TrainingError
from shardmill.ids import format_sample_id
from shardmill.jobs.observer import WARNING
from shardmill.loader.reader import BatchReader, read_epoch
from shardmill.storage import join_uri
from shardmill.stores import open_store
from shardmill.values import Batch
from train.api import Backend, Learner, StatePart, SumInStep, moving_statistics
from train.backends import BACKENDS
from train.backends.model_spec import model_spec
from train.backends.rules import freeze, step_activity
from train.checkpoints.checkpoint import Attempt, CheckpointFolder, FoundCheckpoint, TrainingIdentity, claim_attempt
from train.checkpoints.checkpoint_writer import CheckpointWriter
from train.contracts.activities import Activity, during, each_announced, reading
from train.contracts.row_source import evaluation_spec, row_source
from train.contracts.task import WorkerTask
from train.contracts.values import (
    EXCHANGED_FILES,
    RESULT,
    BestEpoch,
    EarlyStop,
    EpochRecord,
    Evaluation,
    ModelIdentity,
    Progress,
    Reporter,
    StepOutcome,
    TimeSpent,
    TrainResult,
    from_json,
    has_not_learned,
    to_json,
)
from train.contracts.world import World, alone
from train.identity import settings_that_matter
from train.metrics.evaluate import evaluate_batches, scores_by, write_confusion
from train.models.user import check_source, inputs_hint
from train.rank.initialize import initialize
from train.rank.session import (
    Session,
    load_best,
    report_checkpoint,
    resume,
    save,
    save_last,
    step_report,
    stop,
)
from train.readers import reader_of
from train.readers.planned import Epochs
from train.reporting.profiling import StepProfiler
from train.strategies import find_strategy


def run_worker(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """Train, or resume, as one rank of `world`; every rank returns the same metrics but for its own times.

    Raises UsageError, IntegrityError, StorageError or TrainingError; nothing half-done is visible then.
    """
    config, session = task.config, _join(task, world, reporter)
    member, attempt = session.member, session.checkpoints.attempt

    with session.writer, session.profiler:
        # Resume from the last complete checkpoint, if there is one; all ranks then start with equal variables.
        found = resume(session, begin=initialize)
        progress = session.epochs.resumed(found.marker.progress) if found else Progress()
        last_checkpoint = found.path if found else ""
        session.stopwatch.lap()

        # Epochs: steps, then validation, then a checkpoint that holds what was validated.
        while progress.cursor.epoch < config.epochs and not progress.early_stop.stopped:
            progress = _train_steps(session, progress, last_checkpoint)
            progress = _finish_epoch(session, progress)
            progress, last_checkpoint = save(session, progress)
        progress, last_checkpoint = save_last(session, progress, last_checkpoint)

    # The weights that count, and their metrics on data that no decision has seen.
    caution = _caution(session, progress)
    best = load_best(session, None if caution else progress.best, last_checkpoint)
    result = replace(_result(session, progress, best, last_checkpoint, found), caution=caution)
    if member.rank == 0:
        attempt.publish(f"{task.training_dir}/{RESULT}", with_checksum(to_json(result)))

    # Leave together: if one rank failed, its own error must reach the driver before its peers report a lost connection.
    member.barrier()
    member.close()
    return result


def _join(task: WorkerTask, world: World, reporter: Reporter) -> Session:
    """The owners, the data and the model; the ranks have met when it returns."""
    config = task.config

    # The owners: one of all framework code, one of how ranks share the work.
    backend = BACKENDS[config.backend]
    strategy = find_strategy(config.strategy, world.world_size)
    backend.start(world, config.seed)

    # The data: the version that the driver pinned.
    dataset = open_pinned(task.dataset)
    manifest = dataset.manifest
    plan_spec = config.plan_spec(dataset)

    # The model and its optimizer, with fresh variables, as a member of the world; from here on the ranks communicate.
    built = partial(_build, backend, task, manifest, world, reporter)
    files_uri = join_uri(task.models_uri, f"{task.training_dir}/{EXCHANGED_FILES}")
    member = strategy.join(replace(world, files_uri=files_uri), config, built, reporter)
    model = ModelIdentity(task.model_source_sha256, member.learner.config_sha256)
    # From now on an older attempt, should one still be alive, publishes nothing more.
    store = open_store(task.models_uri)
    number = claim_attempt(store, task.training_dir, world.world_size).number if member.rank == 0 else 0
    attempt = Attempt(store, task.training_dir, int(member.broadcast_bytes(str(number).encode())))
    checkpoints = CheckpointFolder(attempt, config.checkpoint.keep)
    return Session(
        task=task,
        dataset=dataset,
        epochs=Epochs(reader_of(config), dataset, config, member.data),
        streams=member.data.streams,
        member=member,
        checkpoints=checkpoints,
        identity=TrainingIdentity(task.dataset, plan_spec.fingerprint, model, settings_that_matter(config)),
        world=world,
        reporter=reporter,
        writer=CheckpointWriter(
            checkpoints, member, reporter, world.exchange_aside if member.shares_checkpoints else alone
        ),
        profiler=StepProfiler(task, world.rank, reporter),
    )


def _result(
    session: Session, progress: Progress, best: BestEpoch | None, last_checkpoint: str, found: FoundCheckpoint | None
) -> TrainResult:
    task, member = session.task, session.member
    with member.learner.averaged():
        weights_sha256, evaluation = member.learner.weights_sha256(), evaluate_finally(session)
    return TrainResult(
        dataset=task.dataset,
        training_dir=task.training_dir,
        exported="best" if best else "last",
        weights_epoch=best.epoch if best else progress.cursor.epoch - 1,
        checkpoint=best.checkpoint if best else last_checkpoint,
        last_checkpoint=last_checkpoint,
        continued_from=task.continues,
        model=session.identity.model,
        strategy=task.config.strategy,
        export_backend=member.learner.export_backend,
        world_size=task.config.num_workers,
        num_epochs=progress.cursor.epoch,
        num_steps=session.global_step(progress),
        seconds=progress.spent.total,
        images_per_second=progress.cursor.epoch * session.epochs.num_rows / progress.spent.total,
        time_shares=progress.spent.shares(),
        final_loss_hex=progress.last_loss_hex,
        weights_sha256=weights_sha256,
        stopped_early=progress.early_stop.stopped,
        resumed_from=found.marker.progress.cursor if found else None,
        history=progress.history,
        evaluation=evaluation,
        num_skipped_steps=progress.skipped.total,
        num_overflowed_steps=progress.num_overflowed,
        placement=session.world.placement,
        mixed_precision=task.config.mixed_precision,
    )


def _caution(session: Session, progress: Progress) -> str:
    """Why no epoch is the best one, if all that were validated only guess and the training has learned; else empty."""
    best, chance, history = progress.best, session.chance, progress.history
    if best is None or not best.is_guessing or chance is None or not chance.has_learned(history):
        return ""
    caution = chance.caution(history)
    exported = (
        "no epoch is the best one: the weights of the last epoch are exported, and the gate will not promote them"
    )
    session.event("guessing", {"epoch": history[-1].epoch, WARNING: f"{caution}; {exported}"})
    return caution


def _build(
    backend: Backend,
    task: WorkerTask,
    manifest: Manifest,
    world: World,
    reporter: Reporter,
    *,
    materialized: bool = True,
    sum_in_step: SumInStep | None = None,
) -> Learner:
    check_source(task.config.model, task.model_source_sha256)
    spec = model_spec(manifest, task.config)
    learner = backend.build(task.config, spec, materialized=materialized, sum_in_step=sum_in_step)
    if world.rank == 0:
        # Now, not after hours of training.
        with during(reporter, Activity("a trial of the export")):
            learner.check_exportable()
    return learner


def _train_steps(session: Session, progress: Progress, last_checkpoint: str) -> Progress:
    """The rest of the running epoch: a batch, a step of all members, a report; a checkpoint every N steps.

    `last_checkpoint`: where all that was trained so far is, if anything was.
    """
    member = session.member
    epoch, first_step = progress.cursor.epoch, progress.cursor.step
    freeze(member.learner, session.task.config, progress.cursor)
    plan, lap, activity = session.epochs[epoch], session.stopwatch.lap, step_activity(session.task.config, epoch)
    with member.batches(plan, progress.cursor) as reader:
        batches = each_announced(session.reporter, session.epochs.reading, reader)
        checkpoint_seconds = 0.0
        for step in range(first_step, plan.num_steps):
            if not session.world.may_begin(session.global_step(progress)):
                raise stop(session, progress, last_checkpoint)
            if session.profiler.begin(session.global_step(progress)):
                progress = progress.after_time(TimeSpent(other=lap()))
            batch = next(batches)
            input_wait = lap()

            num_rows, state_before = plan.num_rows_of_step(step), local_state(session)
            with during(session.reporter, activity), session.profiler.step(session.global_step(progress)):
                done = member.train_step(batch, num_rows, session.learning_rate(progress))
            outcome, batch = done.outcome, done.batch or batch
            if not outcome.is_applied:
                skip_batch(session, progress, batch, outcome, num_rows, state_before)
            # What the member did not count as something else is computation.
            compute = lap() - done.allreduce_seconds - done.input_wait_seconds
            input_wait += done.input_wait_seconds
            spent = TimeSpent(input_wait=input_wait, compute=compute, allreduce=done.allreduce_seconds)
            if outcome.is_applied:
                progress = progress.after_step(outcome, num_rows, spent)
            else:
                progress = progress.after_skip(num_rows, spent)
            # Reported before its checkpoint is written: a step that a resumed run will not repeat must be on record.
            spent = replace(spent, checkpoint=checkpoint_seconds)
            read = reader.take_seconds()
            session.reporter.step(step_report(session, batch, outcome.loss, progress, spent, read))
            session.profiler.end(session.global_step(progress))
            progress = progress.after_time(TimeSpent(other=lap()))

            # Written by another thread, the last one may be there by now. The epoch's end writes its own.
            report_checkpoint(session)
            checkpoint_seconds, last_checkpoint = 0.0, ""
            every = session.epochs.checkpoint_every_steps
            if every and session.global_step(progress) % every == 0 and step + 1 < plan.num_steps:
                before = progress.spent.checkpoint
                progress, last_checkpoint = save(session, progress)
                checkpoint_seconds = progress.spent.checkpoint - before
    return progress


def _finish_epoch(session: Session, progress: Progress) -> Progress:
    """Make the ranks' models equal, validate, and decide whether to stop and which epoch is the best."""
    config, manifest = session.task.config, session.dataset.manifest
    session.member.average_moving_statistics()
    validation = None
    if "validation" in manifest.splits:
        # Best epoch and early stop follow from these metrics. All ranks must decide alike, so all use rank 0's bits.
        with session.member.learner.averaged():
            here = evaluate_split(session, "validation").without_classes()
        validation = from_json(Evaluation, session.member.broadcast_bytes(to_json(here)))
    progress = progress.after_time(TimeSpent(other=session.stopwatch.lap()))
    num_rows = max(1, session.epochs.num_rows - progress.skipped.num_rows)
    record = EpochRecord(
        epoch=progress.cursor.epoch,
        num_steps=session.epochs.num_steps,
        train_loss=progress.loss_sum / num_rows,
        train_accuracy=None if session.labels.are_numbers else progress.num_correct / num_rows,
        learning_rate=session.member.learner.learning_rate,
        seconds=progress.epoch_seconds,
        validation=validation,
    )
    early_stop = EarlyStop()
    if config.early_stop_epochs and validation:
        early_stop = progress.early_stop.after_epoch(validation.loss, config.early_stop_epochs)
    fields: dict[str, str | int | float] = {
        "epoch": record.epoch,
        "train_loss": record.train_loss,
        "learning_rate": record.learning_rate,
        "seconds": record.seconds,
    }
    if record.train_accuracy is not None:
        fields["train_accuracy"] = record.train_accuracy
    if validation:
        fields |= {"validation_loss": validation.loss, f"validation_{validation.metric.name}": validation.metric_value}
    session.event("epoch", fields)
    if early_stop.stopped:
        session.event("early_stop", {"epoch": record.epoch, "epochs_since_best": early_stop.epochs_since_best})
    is_guessing = session.chance is not None and session.chance.is_all((*progress.history, record))
    checkpoint = session.checkpoints.path_of(session.global_step(progress))
    after = progress.after_epoch(record, early_stop, checkpoint, is_guessing=is_guessing)
    if has_not_learned(after.history):
        stuck = f"the loss has not fallen by the end of epoch {record.epoch + 1} (now {record.train_loss:.4f})"
        warning = f"{stuck}: change train.learning_rate{inputs_hint(config)}"
        session.event("loss_stuck", {"epoch": record.epoch, "train_loss": record.train_loss, WARNING: warning})
    return after


def evaluate_split(session: Session, split: str) -> Evaluation:
    """Every rank reads the same streams as in training, each in stored order, and adds up its part of the sums."""
    dataset, learner = session.dataset, session.member.learner
    reporter, evaluating = session.reporter, Activity(f"the evaluation on {split}", repeats=True)

    def outputs_of(images_NHWC: np.ndarray) -> np.ndarray:
        with during(reporter, evaluating):
            return learner.outputs(images_NHWC)

    # A silo that may not read the pinned dataset adds nothing.
    with _opened(session, split) if session.streams else nullcontext(()) as read:
        batches = each_announced(reporter, reading(f"reading a batch of the split {split}", dataset.store), read)
        return evaluate_batches(
            scores_by(outputs_of, session.labels.kind, learner.outputs_are_logits),
            batches if session.member.data.is_first else map(_without_rows, batches),
            split,
            session.labels,
            session.member,
        )


def _opened(session: Session, split: str) -> BatchReader[Batch]:
    dataset, config, evaluated = session.dataset, session.task.config, session.evaluated
    spec = evaluation_spec(dataset, config, split)
    if split not in evaluated:
        # Room in memory is for one.
        evaluated.clear()
        evaluated[split] = row_source(config, dataset, spec, session.streams, config.augment.unchanged)
    return read_epoch(evaluated[split], dataset.plan_epoch(spec, 0))


def _without_rows(batch: Batch) -> Batch:
    """For a member whose model answers together with that of another, who counts them."""
    return replace(batch, weights_N=np.zeros_like(batch.weights_N))


def evaluate_finally(session: Session) -> Evaluation | None:
    """The metrics on data that no decision has seen; None if there is no such split.

    Rank 0 alone has those of each class, and writes to a file how the classes were confused.
    """
    split = session.dataset.manifest.evaluation_split
    if split is None:
        return None
    evaluation = evaluate_split(session, split)
    if session.member.rank != 0:
        return evaluation.without_classes()
    if evaluation.confused is not None:
        write_confusion(session.checkpoints.store, session.task.training_dir, evaluation.confused)
    return replace(evaluation, confused=None)


MAX_NAMED_SAMPLES = 5


def local_state(session: Session) -> list[np.ndarray]:
    """Copy the state that a forward pass changes by itself (moving statistics), if the batch may be skipped."""
    if session.task.config.non_finite.action == "stop":
        return []
    own = session.member.learner.arrays(StatePart.OWN)
    return own if moving_statistics(own) else []


def skip_batch(
    session: Session,
    progress: Progress,
    batch: Batch,
    outcome: StepOutcome,
    num_rows: int,
    state_before: list[np.ndarray],
) -> None:
    """All ranks call it after a step that was not applied: continue as if its batch did not exist, if that is allowed.

    `num_rows`: of the global batch. `state_before`: that of `local_state`. Raises TrainingError that names samples and
    the way out.
    """
    config, cursor, learner = session.task.config, progress.cursor, session.member.learner
    if state_before:
        learner.assign(StatePart.OWN, state_before, "the step before")
    what = _what_happened(session, progress, batch, outcome, num_rows)
    in_a_row = progress.skipped.in_a_row
    if config.non_finite.action == "stop" or in_a_row == config.non_finite.max_skipped_in_a_row:
        raise TrainingError(
            what + (f"; as were {in_a_row} updates just before it" if in_a_row else ""),
            "expected finite numbers",
            f"lower train.learning_rate, or set train.gradient_clip_norm or train.warmup_steps{inputs_hint(config)}",
        )
    fields = {"epoch": cursor.epoch, "step": cursor.step, "skipped_steps": progress.skipped.total + 1}
    # One warning is enough; the summary counts.
    session.event("step_skipped", {**fields, ("reason" if progress.skipped.total else WARNING): what})


def _what_happened(session: Session, progress: Progress, batch: Batch, outcome: StepOutcome, num_rows: int) -> str:
    """Describe what happened, and for which samples: evaluates the model on this batch once more."""
    cursor, member = progress.cursor, session.member
    is_bad_N = ~np.isfinite(member.learner.outputs(batch.images_NHWC)).all(axis=1) & (batch.weights_N > 0)
    here = _names(batch, np.flatnonzero(is_bad_N)) if member.data.is_first else ()
    bad = [each for of_rank in member.gather_bytes(json.dumps(here).encode()) for each in json.loads(of_rank)]
    samples = f"the model's outputs are not finite for {len(bad)} samples: {', '.join(bad[:MAX_NAMED_SAMPLES])}"
    if not bad:
        samples = f"the model's outputs are finite for every sample; {_what_gradients_show(session, batch, num_rows)}"
    return (
        f"loss {outcome.loss}, gradient norm {outcome.gradient_norm} at epoch {cursor.epoch}, step {cursor.step} "
        f"(global step {session.global_step(progress)}); the update was not applied; {samples}"
    )


@dataclass(frozen=True, slots=True)
class OwnGradient:
    """A rank's findings about its part of a step."""

    is_finite: bool
    bad: tuple[str, ...]
    """Samples whose gradient by itself is not finite; the first `MAX_NAMED_SAMPLES`."""
    num_samples: int
    first: tuple[str, ...]
    """First names among all its samples."""


def _what_gradients_show(session: Session, batch: Batch, num_rows: int) -> str:
    """Of which samples the gradient is not finite, as far as that can be found out by computing it again."""
    member = session.member
    mine = _search(session, batch, num_rows)
    gathered = member.gather_bytes(to_json(mine) if member.data.is_first else b"null")
    ranks = {rank: from_json(OwnGradient, each) for rank, each in enumerate(gathered) if each != b"null"}
    found = {rank: each for rank, each in ranks.items() if not each.is_finite}
    bad = [name for each in found.values() for name in each.bad]
    if bad:
        is_cut = any(len(each.bad) == MAX_NAMED_SAMPLES for each in found.values())
        number = f"{'at least ' if is_cut else ''}{len(bad)} {'sample' if len(bad) == 1 else 'samples'}"
        return f"the gradient of {number} by itself is not finite: {', '.join(bad[:MAX_NAMED_SAMPLES])}"
    if found:
        return "; ".join(
            f"the gradient of the {each.num_samples} samples of rank {rank} is not finite, that of each by itself is: "
            f"{', '.join(each.first)}{', ...' if each.num_samples > len(each.first) else ''}"
            for rank, each in found.items()
        )
    return (
        "recomputed, the gradient of every rank is finite too: the cause is their sum or the random numbers of "
        "that step"
    )


def _search(session: Session, batch: Batch, num_rows: int) -> OwnGradient:
    """Halve this rank's rows where their gradient is not finite, down to single ones.

    All ranks compute equally often: layers that are synchronized exchange data in every step.
    """
    member = session.member
    local_state = member.learner.arrays(StatePart.OWN) if session.task.config.non_finite.action == "skip" else []
    rows = np.flatnonzero(batch.weights_N > 0)
    is_finite = member.own_gradient_is_finite(batch, num_rows)
    undecided = [] if is_finite else _halves(rows)
    bad: list[int] = []
    while member.sum_array(np.array([len(undecided)], np.int64))[0]:
        part = undecided.pop() if undecided else rows[:0]
        # Repeated up to the same shape, so that nothing is compiled again; without any, all.
        some = batch.take(np.resize(part, len(batch.weights_N))) if len(part) else batch
        part_is_finite = member.own_gradient_is_finite(some, num_rows)
        if len(part) == 1 and not part_is_finite:
            bad.append(int(part[0]))
        elif not part_is_finite:
            undecided += _halves(part)
        if len(bad) == MAX_NAMED_SAMPLES:
            undecided = []
    if local_state:
        member.learner.assign(StatePart.OWN, local_state, "the step before")
    return OwnGradient(is_finite, _names(batch, bad), len(rows), _names(batch, rows[:MAX_NAMED_SAMPLES]))


def _halves(rows: np.ndarray) -> list[np.ndarray]:
    """The first one last."""
    return [half for half in reversed(np.array_split(rows, 2)) if len(half)]


def _names(batch: Batch, rows: Sequence[int] | np.ndarray) -> tuple[str, ...]:
    return tuple(format_sample_id(batch.sample_ids_N[row].item()) for row in rows)
