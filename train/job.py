"""Train on a dataset version, export the model, promote it. Also `spark-submit train/job.py`.

spark-submit train/job.py --config FILE [--set SECTION.NAME=VALUE]... [--until train|export|promote]
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # spark-submit puts this file's folder first, where `values` or `config` would hide other people's modules.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from shardmill.dataset.open import open_dataset, open_pinned
from shardmill.dataset.verify import verify_present
from shardmill.dataset.versions import split_version
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.config import load_tree, require_uri
from shardmill.jobs.observer import Observer
from shardmill.jobs.reach import planted
from shardmill.jobs.run_files import StageRecord, dataset_section
from shardmill.jobs.run_job import job_parser, run_job
from shardmill.jobs.run_record import RunRecord
from shardmill.storage import join_uri
from shardmill.stores import open_store
from shardmill.values import DatasetPin
from train.config import TrainTree
from train.launching import LAUNCHERS
from train.observer import TrainObserver
from train.preflight import check_trainable, window_memory
from train.published.export import export_training
from train.published.exported import Export
from train.published.promote import Promotion, promote_export
from train.run_log import RunLog, StepsLog
from train.strategies import find_strategy
from train.trainings import TrainingChoice, choose_training, read_result
from train.values import TrainResult

STAGES = ("train", "export", "promote")
SUMMARY_SECTIONS = ("dataset", "train", "evaluation", "export", "promotion")
"""What training adds to a run's summary."""


@dataclass(frozen=True, slots=True)
class TrainOutcome:
    """A finished training."""

    result: TrainResult
    models_uri: str
    skipped: bool
    """True if it had finished before, on the same dataset version with the same settings."""
    seconds: float
    """Of this call; the training's own time over all attempts is `result.seconds`."""


@dataclass(frozen=True, slots=True)
class ExportOutcome:
    """An export of a training."""

    export: Export
    models_uri: str
    skipped: bool
    """True if it existed already."""
    seconds: float


def train_model(
    tree: TrainTree, observer: TrainObserver, version: DatasetPin | None = None, *, fresh_for: str = ""
) -> TrainOutcome:
    """Resolve the dataset version once, and train on it; or go on with, or skip, what is there already.

    `version` is the one that the caller has resolved for the whole run. `fresh_for` is the id of a run that wants a
    training from step 0 whatever there is; asking again for the same run goes on with that training.

    Raises UsageError (2), IntegrityError (3), StorageError (4), or TrainingError (5), that of the first failed rank.
    """
    started = time.monotonic()

    # What can be said before anything starts: names, numbers, places.
    launch = LAUNCHERS[tree.train.launcher]
    find_strategy(tree.train.strategy, tree.train.num_workers)
    models = open_store(require_uri("models.uri", tree.models.uri))

    # The version: the latest, or the one that `dataset.uri` names. What is unfinished on another one stays as it is.
    choice = _choose(tree, version, fresh_for)
    choice.report(tree.train, observer)
    if choice.result is not None:
        return TrainOutcome(choice.result, models.uri, True, time.monotonic() - started)

    # It must be trainable and every shard present; the ranks verify the bytes of each chunk when they first read it.
    dataset = open_pinned(choice.dataset)
    check_trainable(tree.train, dataset)
    memory = window_memory(tree.train, dataset)
    verify_present(dataset)
    observer.event("plan", {"rank": 0, **memory.as_fields()})

    # Train, on ranks that see the same storage as this process.
    with planted(models) as nonce:
        result = launch(choice.task(tree.train, nonce), tree.spark, observer)
    # The ranks reported success over the network. Only the result in the store proves that they wrote to our `models`,
    # and the next call and the export find the training there.
    if read_result(models, choice.training_dir) is None:
        raise IntegrityError(
            f"the ranks finished, and {join_uri(models.uri, choice.training_dir)} holds no result",
            "driver and executors must see the same storage",
            "set models.uri to a place that all machines reach",
        )
    return TrainOutcome(result, models.uri, False, time.monotonic() - started)


def train_in_run(
    tree: TrainTree, run: RunRecord, observer: Observer, version: DatasetPin | None, *, fresh: bool
) -> TrainOutcome:
    """`train_model` with its events, and its steps if they are recorded, among the files of a run."""
    steps = StepsLog(run.store, f"{run.folder}/steps.jsonl") if tree.train.record_samples else None
    with closing(RunLog(observer, steps)) as log:
        return train_model(tree, log, version, fresh_for=run.run_id if fresh else "")


def finished_training(tree: TrainTree, version: DatasetPin | None = None) -> TrainOutcome:
    """The training that `train_model` would skip. Raises UsageError if it has not finished yet."""
    choice = _choose(tree, version)
    if choice.result is None:
        raise UsageError(
            f"no finished training of this config on {choice.dataset.uri}@{choice.dataset.version}",
            "expected one to export",
            "repeat the --set options of the run, or give its runs/ID/config.toml; or run `shardmill train` first",
        )
    return TrainOutcome(choice.result, open_store(tree.models.uri).uri, True, 0.0)


def export_model(tree: TrainTree, outcome: TrainOutcome, run_id: str) -> ExportOutcome:
    """Export a finished training, once. Raises TrainingError if its predictions differ from the model's."""
    started = time.monotonic()
    export, skipped = export_training(outcome.models_uri, tree.train, outcome.result, run_id)
    return ExportOutcome(export, outcome.models_uri, skipped, time.monotonic() - started)


def promote_model(tree: TrainTree, outcome: ExportOutcome, run_id: str, *, require: bool = False) -> Promotion:
    """Make an export the current one if the gate lets it; with `require`, raises GateNotPassed (9) if not."""
    return promote_export(outcome.models_uri, outcome.export, tree.gate, run_id, require=require)


def train_record(outcome: TrainOutcome, tree: TrainTree) -> StageRecord:
    """What a training adds to a run's summary and report."""
    result = outcome.result
    plain = TypeAdapter(TrainResult).dump_python(result, mode="json")
    return StageRecord(
        stage="train",
        status="skipped" if outcome.skipped else "done",
        sections={
            "dataset": dataset_section(result.dataset, open_pinned(result.dataset).manifest),
            "train": {
                "strategy": result.strategy,
                "strategy_reason": "set by train.strategy",
                "launcher": tree.train.launcher,
                "world_size": result.world_size,
                "epochs": result.num_epochs,
                "steps": result.num_steps,
                "seconds": result.seconds,
                "images_per_second": result.images_per_second,
                "time_shares": plain["time_shares"],
                "final_loss_hex": result.final_loss_hex,
                "weights_sha256": result.weights_sha256,
                "stopped_early": result.stopped_early,
                "resumed_from": plain["resumed_from"],
                "exported": result.exported,
                "weights_epoch": result.weights_epoch,
                "continued_from": result.continued_from,
                "training_dir": result.training_dir,
            },
            "evaluation": evaluation_section(plain["evaluation"]),
        },
        detail={"history": plain["history"], "evaluation": plain["evaluation"]},
    )


def export_record(outcome: ExportOutcome) -> StageRecord:
    """What an export adds to a run's summary."""
    export = outcome.export
    section = {
        "number": export.number,
        "path": join_uri(outcome.models_uri, export.record.artifact_dir),
        "parity_max_abs_diff": export.record.parity_max_abs_diff,
        "parity_num_images": export.record.parity_num_images,
        "keras_note": export.record.keras_note,
        "weights_sha256": export.record.weights_sha256,
    }
    status = "skipped" if outcome.skipped else "done"
    return StageRecord(stage="export", status=status, sections={"export": section})


def promotion_record(promotion: Promotion) -> StageRecord:
    """What the gate's decision adds to a run's summary."""
    section = {
        "models": promotion.models_uri,
        "decision": promotion.gate.decision,
        "reason": promotion.gate.reason,
        "previous": promotion.previous,
        "current": promotion.current,
        "published": promotion.is_published,
        "candidate_accuracy": promotion.gate.candidate_accuracy,
        "current_accuracy": promotion.gate.current_accuracy,
    }
    status = "skipped" if promotion.gate.decision == "already_current" else "done"
    return StageRecord(stage="promote", status=status, sections={"promotion": section})


def evaluation_section(evaluation: dict[str, Any] | None) -> dict[str, Any] | None:
    """The figures of an evaluation that a summary holds; None if there was no split to evaluate on."""
    if evaluation is None:
        return None
    return {name: evaluation[name] for name in ("split", "num_samples", "loss", "accuracy", "top5_accuracy")}


def main() -> int:
    """The command line of `spark-submit train/job.py`: one JSON line on stdout for each stage. -> the exit code."""
    arguments = _parse_arguments()

    def job(run: RunRecord, observer: Observer) -> None:
        below = {"models": {"uri": f"{arguments.workdir}/models"}}
        tree = load_tree(TrainTree, arguments.config, tuple(arguments.set), below)

        trained = run.stage(
            "train",
            lambda: train_in_run(tree, run, observer, _named_version(tree, arguments), fresh=arguments.fresh),
            lambda outcome: train_record(outcome, tree),
        )
        if arguments.until == "train":
            return
        exported = run.stage("export", lambda: export_model(tree, trained, run.run_id), export_record)
        if arguments.until == "export":
            return
        run.stage(
            "promote",
            lambda: promote_model(tree, exported, run.run_id, require=arguments.require),
            promotion_record,
        )

    return run_job(job, arguments.workdir, arguments.run_id, sections=SUMMARY_SECTIONS, debug=arguments.debug)


def _parse_arguments() -> argparse.Namespace:
    parser = job_parser("Train on a dataset version, export the model, promote it.")
    parser.add_argument("--dataset-version", type=int, help="the version, as an earlier stage resolved it")
    parser.add_argument("--until", choices=STAGES, default="promote", help="the last stage to run")
    parser.add_argument("--require", action="store_true", help="exit 9 if the gate is not passed")
    parser.add_argument("--fresh", action="store_true", help="train again although a result exists")
    return parser.parse_args()


def _named_version(tree: TrainTree, arguments: argparse.Namespace) -> DatasetPin | None:
    if not arguments.dataset_version:
        return None
    return open_dataset(f"{split_version(tree.dataset.uri)[0]}@{arguments.dataset_version}").pin


def _choose(tree: TrainTree, version: DatasetPin | None = None, fresh_for: str = "") -> TrainingChoice:
    # A run passes the version that it has resolved: one committed meanwhile must not split it between two datasets.
    version = version or open_dataset(require_uri("dataset.uri", tree.dataset.uri)).pin
    return choose_training(open_store(require_uri("models.uri", tree.models.uri)), tree.train, version, fresh_for)


if __name__ == "__main__":
    sys.exit(main())
