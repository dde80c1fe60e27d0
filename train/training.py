"""The stage `train`: resolves the dataset version once, then trains, resumes, or finds a finished result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from shardmill.dataset.dataset import Dataset, first_alike, open_dataset, open_pinned
from shardmill.dataset.leases import reading
from shardmill.dataset.verify import verify_present
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.config import SparkConfig, require_uri
from shardmill.jobs.observer import WARNING, Observer
from shardmill.jobs.reach import planted
from shardmill.jobs.run_record import RunRecord
from shardmill.storage import Store, join_uri
from shardmill.stores import open_store
from shardmill.values import DatasetPin
from train.backends.rules import never_unfrozen
from train.config import TrainConfig
from train.contracts.values import TrainResult
from train.initialization.initial import check_initial, pinned
from train.labels import LabelSpec
from train.launching import LAUNCHERS, is_on_spark
from train.planning.changes import AS_USUAL, Again, BegunTraining, resolve_resume
from train.planning.divide import check_undivided, with_room
from train.planning.host_memory import input_bytes
from train.planning.make import keep_plan, plan_of_finished, plan_training, read_plan
from train.planning.memory import look_at_memory
from train.planning.plan import TrainingPlan
from train.planning.preflight import WindowMemory, check_ranks, check_spread, check_trainable, window_memory
from train.planning.trainings import TrainingChoice, choose_training
from train.planning.trial_build import try_build
from train.readers import reader_of
from train.reporting.observer import TrainObserver
from train.reporting.rank_times import RankRow, StragglerWatch
from train.reporting.run_log import RanksLog, RunLog, Sink, StepsLog
from train.reporting.trackers.tracker import GuardedTracker
from train.reporting.tracking import open_trackers, run_id_of
from train.reporting.verdict import FirstSteps, StepTimes, Verdict
from train.restarts import Restart, launch_until_done
from train.results import read_result
from train.strategies import less_work_in, mesh_of
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
    again: Again = AS_USUAL, planned: Callable[[TrainingPlan], object] = lambda plan: None,
) -> TrainOutcome:  # fmt: skip
    """Resolve the dataset version once, and train on it; or resume or skip existing work.

    `version`: what the caller has resolved for the whole run. `fresh_for`: the id of a run that wants a training from
    step 0 even if a result exists; a repeated call resumes it. `again`: how to treat an unfinished training with other
    settings. `planned` gets the plan of a training that begins or is resumed, before its ranks start. Raises UsageError
    (2), IntegrityError (3), StorageError (4), or TrainingError (5) of a failed rank.
    """
    # What can be said before anything starts: names, numbers, places.
    first = plan_training(tree.train, tree.spark)
    check_initial(first.config)
    init_from = pinned(first.config).init_from
    models = open_store(require_uri("models.uri", tree.models.uri))

    # The version: the latest, or the one that `dataset.uri` names. What is unfinished on another one stays as it is.
    choice = _choose(tree, first.with_first_weights(init_from), version, fresh_for)
    choice.report(tree.train, observer)
    dataset = open_pinned(choice.dataset)
    begun = read_plan(models, choice.folders)
    if choice.result is not None:
        plan = plan_of_finished(tree.train, tree.spark, dataset, begun)
        return TrainOutcome(choice.result, models.uri, plan, skipped=True)

    # It resumes as it was begun, and must be trainable in the memory that there is.
    plan = plan_training(tree.train, tree.spark, dataset, begun).with_first_weights(init_from)
    is_new = begun is None and not choice.has_steps(models)
    plan = with_room(plan, tree.spark, dataset) if is_new else plan
    windows = _check(plan, tree, dataset)
    plan = plan.with_window(windows.window_chunks)
    _try_build(plan, tree.spark, choice, models, dataset, observer)
    memory = look_at_memory(
        plan.config,
        dataset,
        tree.spark,
        partial(input_bytes, dataset=dataset),
        begun=begun.memory if begun else None,
        has_begun=choice.has_steps(models),
    )
    plan = plan.with_memory(memory)
    check_undivided(plan, is_new=is_new)
    choice, plan = resolve_resume(models, choice, plan, dataset, again)
    if choice.resumes:
        # It may have the streams of that training.
        check_spread(plan.config, tree.spark)
        windows = _check(plan, tree, dataset)
    again.begin(models.uri, choice.training_dir)
    planned(plan)
    return _launched(_Settled(plan, tree.spark, models, dataset, choice, windows), observer)


def _check(plan: TrainingPlan, tree: TrainTree, dataset: Dataset) -> WindowMemory:
    """Raises UsageError if the dataset cannot be trained on, or its windows exceed the memory budget."""
    check_trainable(plan.config, dataset, tree.gate)
    return window_memory(plan.config, dataset)


@dataclass(frozen=True, slots=True)
class _Settled:
    """The settings with which the ranks are launched."""

    plan: TrainingPlan
    spark: SparkConfig
    models: Store
    dataset: Dataset
    choice: TrainingChoice
    windows: WindowMemory


def _launched(settled: _Settled, observer: TrainObserver) -> TrainOutcome:
    """The ranks train, however often they have to be launched. Raises as `train_model` does."""
    plan, models, dataset, choice = settled.plan, settled.models, settled.dataset, settled.choice
    launcher = LAUNCHERS[plan.config.launcher]
    keep_plan(models, choice.training_dir, plan, settled.spark)
    # The version must not expire meanwhile; the ranks must see the same storage as this process.
    with reading(dataset.store, dataset.pin.version, f"train, in {models.uri},"), planted(models) as nonce:
        # Every shard is present; the ranks verify the bytes of each chunk when they first read it.
        verify_present(dataset)
        _report_plan(choice, plan, dataset, settled.windows, observer)
        _report_memory(plan, observer)
        done = launch_until_done(
            lambda plan: launcher.launch(choice.task(plan.config, nonce), settled.spark, observer),
            plan,
            observer,
            check=partial(check_fewer, dataset, observer),
        )
    _check_published(models, choice)
    return TrainOutcome(done.result, models.uri, plan, skipped=False, restarts=done.restarts)


def check_fewer(dataset: Dataset, observer: TrainObserver, config: TrainConfig) -> None:
    """Before ranks that were lost are done without. Raises UsageError if the others cannot train: their windows are too
    large, or they cannot divide the model."""
    check_ranks(config, dataset)
    if mesh_of(config).num_ranks > mesh_of(config).data_size:
        try_build(config, dataset.manifest.row_schema, observer)


def _try_build(
    plan: TrainingPlan,
    spark: SparkConfig,
    choice: TrainingChoice,
    models: Store,
    dataset: Dataset,
    observer: TrainObserver,
) -> None:
    """Before a cluster is asked for ranks, or ranks divide layers or stages that may not divide. Of other ranks, also
    those that shard it, rank 0 builds and calls the model as soon as a trial would, which is seconds slower for all.

    A training with steps has already been built. Raises as `try_build` does.
    """
    mesh = mesh_of(plan.config)
    is_divided = mesh.num_ranks > mesh.data_size
    if (is_divided or is_on_spark(plan.config.launcher)) and not choice.has_steps(models):
        try_build(plan.config, dataset.manifest.row_schema, observer)


def _check_published(models: Store, choice: TrainingChoice) -> None:
    """The ranks reported success over the network. Only the result in the store proves that they wrote to our `models`,
    and the next call and the export find the training there."""
    if read_result(models, choice.training_dir) is None:
        raise IntegrityError(
            f"the ranks finished, but {join_uri(models.uri, choice.training_dir)} holds no result",
            "driver and executors must see the same storage",
            "set models.uri to a place that all machines reach",
        )


def _report_plan(
    choice: TrainingChoice, plan: TrainingPlan, dataset: Dataset, memory: WindowMemory, observer: TrainObserver
) -> None:
    """Facts to report about a training that now begins or is resumed."""
    config = plan.config
    if plan.chosen_anew:
        observer.event("chosen_anew", {"rank": 0, WARNING: plan.chosen_anew})
    observer.event("plan", {"rank": 0, "chosen": plan.reason, "short": plan.in_short, **memory.as_fields()})
    if never := never_unfrozen(config):
        observer.event("freeze", {"rank": 0, WARNING: never})
    plan.warn(observer)
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


def _report_memory(plan: TrainingPlan, observer: TrainObserver) -> None:
    """Report how a step fits into a rank's memory, if that was examined."""
    fitted = plan.fitted
    if fitted is None or fitted.fit is None:
        return
    chosen = {
        "accumulation_steps": plan.config.accumulation_steps,
        "mixed_precision": plan.config.mixed_precision,
        "activation_checkpointing": plan.config.memory.activation_checkpointing,
    }
    told = WARNING if fitted.fit.choice == "too_large" else "reason"
    observer.event("memory", {"rank": 0, "choice": fitted.fit.choice, **chosen, told: fitted.reason})


def train_in_run(
    tree: TrainTree, run: RunRecord, observer: Observer, version: DatasetPin | None, again: Again
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
    rows, weighed, mlflow_run_id = times.rows(placement), first_steps.reason, run_id_of(trackers, "mlflow")
    return replace(outcome, rank_times=rows, verdict=verdict, exchange=weighed, mlflow_run_id=mlflow_run_id)


def finished_training(tree: TrainTree, version: DatasetPin | None = None) -> TrainOutcome:
    """The training that `train_model` would skip. Raises UsageError if it has not finished yet."""
    plan = plan_training(tree.train, tree.spark)
    choice = _choose(tree, plan.with_first_weights(pinned(plan.config).init_from), version)
    if choice.result is None:
        raise UsageError(
            f"no finished training of this config on {choice.dataset.uri}@{choice.dataset.version}",
            "expected one to export",
            "repeat the --set options of the run, or give its runs/ID/config.toml; or run `shardmill train` first",
        )
    models, dataset = open_store(tree.models.uri), open_pinned(choice.dataset)
    done = plan_of_finished(tree.train, tree.spark, dataset, read_plan(models, choice.folders))
    return TrainOutcome(choice.result, models.uri, done, skipped=True)


def _choose(tree: TrainTree, plan: TrainingPlan, version: DatasetPin | None, fresh_for: str = "") -> TrainingChoice:
    # A run passes the version that it has resolved: one committed meanwhile must not split it between two datasets.
    version = version or open_dataset(require_uri("dataset.uri", tree.dataset.uri)).pin
    # An expiry or a rollback makes a version and changes no row: what was trained on those rows is not trained again.
    same_rows = first_alike(version)
    models = open_store(require_uri("models.uri", tree.models.uri))
    return choose_training(models, plan.named_by, same_rows, fresh_for)
