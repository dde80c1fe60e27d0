"""The stage `train`: resolves the dataset version once, then trains, resumes, or finds a finished result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from shardmill.dataset.leases import reading
from shardmill.dataset.verify import verify_present
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.observer import WARNING, Observer
from shardmill.jobs.reach import planted
from shardmill.jobs.run_record import RunRecord
from shardmill.storage import Store, join_uri
from shardmill.values import DatasetPin
from train.backends.rules import never_unfrozen
from train.checkpoints.checkpoint import refuse_beside_living
from train.contracts.values import TrainResult
from train.labels import LabelSpec
from train.planning.checks import check, window_memory
from train.planning.plan import TrainingPlan, keep_plan, plan_training
from train.planning.resume import DEFAULT_RESUME, BegunTraining, ResumePolicy
from train.planning.trainings import FoundTraining, TrainingChoice, as_carried_out, find_training
from train.planning.trial_build import try_build
from train.readers import reader_of
from train.reporting.observer import TrainObserver
from train.reporting.rank_times import RankRow, StragglerWatch
from train.reporting.run_log import RanksLog, RunLog, Sink, StepsLog
from train.reporting.trackers.tracker import GuardedTracker
from train.reporting.tracking import open_trackers
from train.reporting.verdict import FirstSteps, StepTimes, Verdict
from train.restarts import Restart, launch_until_done
from train.results import read_result
from train.strategies import less_work_in
from train.tree import TrainTree


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """A finished training."""

    result: TrainResult
    models_uri: str
    plan: TrainingPlan
    """The plan of this call, executed or not."""
    skipped: bool
    """True if it had finished before, on the same dataset version with the same settings."""
    verdict: Verdict | None = None
    """Verdict on the speed of this call's steps; None if there were too few."""
    rank_times: tuple[RankRow, ...] = ()
    """Times of this call's steps."""
    restarts: tuple[Restart, ...] = ()
    """Restarts of this call."""
    mlflow_run_id: str = ""
    """Id of the run at the MLflow server; empty if there is none."""
    exchange: str = ""
    """Share of the exchange between ranks in a step, and whether several ranks pay off; empty if there was only one
    rank.
    """


def train_model(
    tree: TrainTree, observer: TrainObserver, version: DatasetPin | None = None, *, fresh_for: str = "",
    again: ResumePolicy = DEFAULT_RESUME, planned: Callable[[TrainingPlan], object] = lambda plan: None,
) -> TrainOutcome:  # fmt: skip
    """Resolve the dataset version once, and train on it; or resume or skip existing work.

    `version`: what the caller has resolved for the whole run. `fresh_for`: the id of a run that wants a training from
    step 0 even if a result exists; a repeated call resumes it. `again`: how to treat an unfinished training with other
    settings. `planned` gets the plan of a training that begins or is resumed, before its ranks start. Raises UsageError
    (2), IntegrityError (3), StorageError (4), TrainingError (5) of a failed rank, or CommitConflict (6) if another
    process is at work on it.
    """
    # What is unfinished on another version stays as it is.
    found = find_training(tree, version, fresh_for)
    found.choice.report(tree.train, observer)
    if found.choice.result is not None:
        return _skipped(found, found.choice.result)
    refuse_beside_living(found.models, found.choice.training_dir)

    # It resumes as it was begun, and must be trainable in the memory that there is.
    choice, plan = plan_training(found, again, observer)
    models, dataset, launcher = found.models, plan.setup.of_dataset, plan.setup.launcher
    again.begin(models.uri, choice.training_dir)
    planned(plan)
    keep_plan(models, choice.training_dir, plan)
    # The version must not expire meanwhile; the ranks must see the same storage as this process.
    with reading(dataset.store, dataset.pin.version, f"train, in {models.uri},"), planted(models) as nonce:
        # Every shard is present; the ranks verify the bytes of each chunk when they first read it.
        verify_present(dataset)
        _report(choice, plan, observer)
        # The ranks train, however often they have to be launched.
        done = launch_until_done(
            lambda plan: launcher.launch(choice.task(plan.config, nonce), tree.spark, observer),
            plan,
            observer,
            check=partial(check_fewer, observer=observer),
        )
    _check_published(models, choice)
    return TrainOutcome(done.result, models.uri, plan, skipped=False, restarts=done.restarts)


def _skipped(found: FoundTraining, result: TrainResult) -> TrainOutcome:
    plan = TrainingPlan(as_carried_out(found.setup, found.begun))
    return TrainOutcome(result, found.models.uri, plan, skipped=True)


def check_fewer(plan: TrainingPlan, observer: TrainObserver) -> None:
    """Before ranks that were lost are done without. Raises UsageError if the others cannot train: their windows are too
    large, or they cannot divide the model."""
    setup = check(plan.setup, of_ranks=True)
    if setup.divides_model:
        try_build(setup, setup.of_dataset.manifest.row_schema, observer)


def _check_published(models: Store, choice: TrainingChoice) -> None:
    """The ranks reported success over the network. Only the result in the store proves that they wrote to our `models`,
    and the next call and the export find the training there."""
    if read_result(models, choice.training_dir) is None:
        raise IntegrityError(
            f"the ranks finished, but {join_uri(models.uri, choice.training_dir)} holds no result",
            "driver and executors must see the same storage",
            "set models.uri to a place that all machines reach",
        )


def _report(choice: TrainingChoice, plan: TrainingPlan, observer: TrainObserver) -> None:
    """Facts about a training that now begins or is resumed."""
    config, setup, dataset = plan.config, plan.setup, plan.setup.of_dataset
    if setup.chosen_anew:
        observer.event("chosen_anew", {"rank": 0, WARNING: setup.chosen_anew})
    windows = window_memory(setup).as_fields()
    observer.event(
        "plan", {"rank": 0, "chosen": setup.reason, "short": setup.in_short, "dataset": dataset.pin.uri, **windows}
    )
    if never := never_unfrozen(config):
        observer.event("freeze", {"rank": 0, WARNING: never})
    setup.warn(observer)
    if (moves := config.augmentation.moves) and LabelSpec.of(dataset.manifest).are_numbers:
        moved = (
            f"train.augment moves what images show ({', '.join(moves)}), but numeric labels stay unchanged, which is "
            "wrong for positions, angles and directions; switch these options off if labels are such numbers"
        )
        observer.event("augment", {"rank": 0, WARNING: moved})
    if choice.resumes:
        observer.event("changed", {"rank": 0, "path": choice.resumes, "changes": "; ".join(choice.changes)})
    if limits := reader_of(config).limits(config, dataset):
        observer.event("reader", {"rank": 0, "reader": config.reader, WARNING: limits})
    # How a step fits into a rank's memory, if that was examined.
    if plan.fitted is not None and (fit := plan.fitted.fit) is not None:
        chosen = {
            "accumulation_steps": config.accumulation_steps,
            "mixed_precision": config.mixed_precision,
            "activation_checkpointing": config.memory.activation_checkpointing,
        }
        told = WARNING if fit.choice == "too_large" else "reason"
        observer.event("memory", {"rank": 0, "choice": fit.choice, **chosen, told: plan.fitted.reason})


def train_in_run(
    tree: TrainTree, run: RunRecord, observer: Observer, version: DatasetPin | None, again: ResumePolicy
) -> TrainOutcome:
    """`train_model` with what a run keeps of it, and a verdict on its speed.

    Events, what ranks print, and steps if they are recorded, are files of the run; scalars go to its trackers.
    """

    def warn(sentence: str) -> None:
        observer.event("train.log_refused", {"rank": 0, WARNING: sentence})

    times, first_steps = StepTimes(), FirstSteps(observer.event)
    sinks: list[Sink] = [times, first_steps, RanksLog(run.store, f"{run.folder}/ranks.log", warn)]
    if tree.train.record_samples:
        sinks.append(StepsLog(run.store, f"{run.folder}/steps.jsonl", warn))
    trackers: dict[str, GuardedTracker] = {}
    with closing(RunLog(observer, sinks)) as log:

        def track(plan: TrainingPlan) -> None:
            trackers.update(open_trackers(plan.config, run, observer))
            log.add(StragglerWatch(observer.event, less_work_in(plan.config)), *trackers.values())

        again = replace(again, begun=BegunTraining(run.store, f"{run.folder}/training.begun"))
        fresh_for = run.run_id if again.fresh else ""
        outcome = train_model(tree, log, version, fresh_for=fresh_for, again=again, planned=track)
        placement = outcome.result.placement
        verdict = times.verdict(outcome.plan.config, placement)
        if verdict is not None:
            log.event("verdict", {"rank": 0, "bound": verdict.bound, "sentence": verdict.sentence})
        for tracker in trackers.values():
            tracker.finish()
    mlflow_run_id = trackers["mlflow"].run_id if "mlflow" in trackers else ""
    rows, weighed = times.rows(placement), first_steps.reason
    return replace(outcome, rank_times=rows, verdict=verdict, exchange=weighed, mlflow_run_id=mlflow_run_id)


def finished_training(tree: TrainTree, version: DatasetPin | None = None) -> TrainOutcome:
    """The training that `train_model` would skip. Raises UsageError if it has not finished yet."""
    found = find_training(tree, version)
    choice = found.choice
    if choice.result is None:
        raise UsageError(
            f"no finished training of this config on {choice.dataset.uri}@{choice.dataset.version}",
            "expected one to export",
            "repeat the --set options of the run, or give its runs/ID/config.toml; or run `shardmill train` first",
        )
    return _skipped(found, choice.result)
