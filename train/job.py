"""Train on a dataset version, export the model, promote it: `spark-submit train/job.py`.

spark-submit train/job.py --config FILE [--set SECTION.NAME=VALUE]... [--until train|export|promote]
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # spark-submit puts this file's folder first, where `settings` or `config` would hide other people's modules.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from shardmill.applications import put_applications_first

    put_applications_first()

import argparse

from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.versions import at_version
from shardmill.jobs.config import load_tree
from shardmill.jobs.observer import Observer
from shardmill.jobs.run_record import RunRecord, job_parser, run_job
from shardmill.jobs.spark import as_submitted, spark_application
from shardmill.values import DatasetPin
from train.launching.spark_slots import SLOT_SETTINGS
from train.planning.resume import ResumePolicy
from train.published.export import export_record, export_training
from train.published.gate import promote_export, promotion_record
from train.stage_record import train_record
from train.training import train_in_run
from train.tree import TrainTree

STAGES = ("train", "export", "promote")
SUMMARY_SECTIONS = ("dataset", "train", "evaluation", "export", "promotion")
"""Sections that training adds to a run's summary."""


def main() -> int:
    """The command line of `spark-submit train/job.py`: one JSON line on stdout for each stage. -> the exit code."""
    arguments = _parse_arguments()

    @spark_application()
    def job(run: RunRecord, observer: Observer) -> None:
        below = {"models": {"uri": f"{arguments.workdir}/models"}}
        tree = load_tree(TrainTree, arguments.config, tuple(arguments.set), below)
        run.name_dataset(tree.dataset.uri)
        # From here on the section says what holds.
        tree = tree.model_copy(update={"spark": as_submitted(tree.spark, SLOT_SETTINGS)})

        again = ResumePolicy(arguments.fresh, tuple(arguments.allow_change))
        trained = run.stage(
            "train",
            lambda: train_in_run(tree, run, observer, _named_version(tree, arguments), again),
            train_record,
        )
        if arguments.until == "train":
            return
        exported = run.stage(
            "export",
            lambda: export_training(trained.models_uri, tree.train, trained.result, run.run_id),
            export_record,
        )
        if arguments.until == "export":
            return
        run.stage(
            "promote",
            lambda: promote_export(
                exported.models_uri, exported.export, tree.gate, run.run_id, require=arguments.require
            ),
            promotion_record,
        )

    return run_job(
        job, arguments.workdir, arguments.run_id, command="train", sections=SUMMARY_SECTIONS, debug=arguments.debug
    )


def _parse_arguments() -> argparse.Namespace:
    parser = job_parser("Train on a dataset version, export the model, promote it.")
    parser.add_argument("--dataset-version", type=int, help="the version, as an earlier stage resolved it")
    parser.add_argument("--until", choices=STAGES, default="promote", help="the last stage to run")
    parser.add_argument("--require", action="store_true", help="exit 9 if the gate is not passed")
    parser.add_argument("--fresh", action="store_true", help="train again although a result exists")
    parser.add_argument("--allow-change", action="append", default=[], metavar="NAME", help="train.NAME may differ")
    return parser.parse_args()


def _named_version(tree: TrainTree, arguments: argparse.Namespace) -> DatasetPin | None:
    if not arguments.dataset_version:
        return None
    return open_dataset(at_version(tree.dataset.uri, arguments.dataset_version)).pin


if __name__ == "__main__":
    sys.exit(main())
