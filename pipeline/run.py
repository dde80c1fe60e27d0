"""The story: a folder of images becomes a dataset version, a trained model, an export, a decision and a report.

Every stage detects whether its result exists already for the same inputs, so that the same command continues after any
failure where it stopped. Stages pass values to each other; what each did is in the run's record.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from etl.config import EtlTree
from etl.job import build_dataset, stage_record
from pipeline.cli_options import Common
from pipeline.config import require
from pipeline.preflight import FirstSetup, check_one_process, refuse_what_cannot_work, setting
from pipeline.report.write import report_record, write_report
from pipeline.running import Run, open_run, verify_record
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.formats.rows import RowSchema
from shardmill.jobs.observer import WARNING
from shardmill.jobs.run_files import RunState, failed_stage, write_stage_record
from train.planning.checks import check_schema
from train.planning.resume import DEFAULT_RESUME, ResumePolicy
from train.planning.trial_build import try_build
from train.published.announce import announce
from train.published.evaluation import evaluate_on, evaluation_record
from train.published.export import export_record, export_training
from train.published.gate import promote_export, promotion_record
from train.reporting.run_log import RunLog
from train.stage_record import train_record
from train.training import train_in_run
from train.tree import TrainTree


def run_pipeline(
    source_or_config: str, common: Common, *, replace_source: bool = False, again: ResumePolicy = DEFAULT_RESUME
) -> dict[str, Any]:
    """The whole pipeline; returns the summary. Raises the ShardmillError of the stage that failed."""
    with open_run(source_or_config, common) as run, report_if_failed(run):
        require(run.tree, "source", "dataset")
        check_one_process(run.tree)
        etl, train, progress = run.tree.part(EtlTree), run.tree.part(TrainTree), run.progress

        # What cannot work is said before anything costs time, and so is what was inferred.
        first = refuse_what_cannot_work(run.tree, common.workdir)
        progress.say(setting(run.tree, first, common.workdir))

        # Images to a committed dataset version. The rest of this run works on it, even if another one is committed.
        # The listing tells whether the labels are what the training asks for, and what its model is to be built for,
        # which takes seconds: it is tried if the ETL has work.
        build = partial(build_dataset, etl, run_id=run.id, observer=progress, replace_source=replace_source)
        check_labels = partial(check_schema, train.train, train.gate)
        before_work = partial(_try_build, run, first)
        built = run.stage(
            "etl",
            lambda: build(check_labels=check_labels, before_work=before_work),
            lambda outcome: stage_record(outcome, etl),
        )
        uri = f"{built.pin.uri}@{built.pin.version}"

        # Does it keep every rule? Never skipped, because this looks for what changed without a commit.
        verified = run.stage(
            "verify",
            lambda: verify_dataset(open_dataset(uri), on_shard=progress.shard_verified),
            verify_record,
        )
        verified.raise_if_failed()

        # Train on it, and turn the final weights into a model that others can load.
        trained = run.stage("train", lambda: train_in_run(train, run.record, progress, built.pin, again), train_record)
        models, result = trained.models_uri, trained.result
        exported = run.stage("export", lambda: export_training(models, train.train, result, run.id), export_record)

        # How good is it, and is it good enough to become the current model?
        run.stage(
            "evaluate",
            lambda: evaluate_on(models, exported.export, run.tree.dataset.uri, is_new=not exported.skipped),
            evaluation_record,
        )
        gate = run.tree.gate
        run.stage(
            "promote",
            lambda: announce(promote_export(models, exported.export, gate, run.id), gate, progress),
            promotion_record,
        )

        # One page to look at.
        run.stage("report", lambda: write_page(run, run.record.state_so_far()), report_record)
    return run.record.summary


def _try_build(run: Run, first: FirstSetup, schema: RowSchema) -> None:
    """Whether the training's model builds for these images; the ETL calls it, and takes no longer for it."""
    with run.record.aside():
        try_build(first.setup, schema, RunLog(run.progress))


@contextmanager
def report_if_failed(run: Run) -> Iterator[None]:
    """Write the report of a run that fails, too: it shows what was refused, and how far the run came."""
    try:
        yield
    except Exception as error:
        if not run.record.ended:
            # Refused before any stage: there is nothing to show.
            raise
        failed = failed_stage("run", error)
        try:
            path = write_page(run, RunState("failed", failed.exit_code, failed.error))
            write_stage_record(run.record.workdir, run.id, report_record(path))
        except Exception as problem:  # the run's own error is the one that counts
            run.record.event("report.warning", {WARNING: f"no report could be written: {problem}"})
        else:
            run.progress.say(f"report: {path}")
        raise


def write_page(run: Run, state: RunState) -> str:
    """The report of what this run has recorded so far; returns its URI."""
    return write_report(run.record.workdir, run.id, run.record.summarize(state))
