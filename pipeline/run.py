"""The story: a folder of images becomes a dataset version, a trained model, an export, a decision and a report.

Every stage finds out by itself whether its result is there already for the same inputs, so that the same command after
any failure goes on where it stopped. Stages hand each other values; what each did is in the run's record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.config import require
from pipeline.preflight import refuse_what_cannot_work
from pipeline.stages import (
    build,
    evaluation_record,
    open_run,
    report_record,
    reported_if_it_fails,
    run_export,
    setting,
    train,
    verify,
)
from shardmill.jobs.events import write_summary

if TYPE_CHECKING:
    from pipeline.cli_options import Common


def run_pipeline(
    source_or_config: str, common: Common, *, replace_source: bool = False, fresh: bool = False
) -> dict[str, Any]:
    """The whole pipeline; returns the summary. Raises the ShardmillError of the stage that could not go on.

    `fresh`: train again although a result exists.
    """
    from pipeline.report import write_report
    from train.job import export_model, promote_model, promotion_record

    with open_run(source_or_config, common, is_single_stage=False) as run, reported_if_it_fails(run):
        require(run.tree, "source", "dataset")
        train_tree = run.tree.train_tree()

        # What cannot work is said before anything costs time, and so is what was inferred.
        refuse_what_cannot_work(run.tree, common.workdir)
        run.progress.say(setting(run.tree, common.workdir))

        # Images to a committed dataset version, and a look at whether it keeps every rule.
        pin = build(run, replace_source=replace_source, will_train=True)
        report = verify(run, f"{pin.uri}@{pin.version}", deep=False)
        report.raise_if_failed()

        # Train on it, and turn the final weights into a model that others can load.
        trained = train(run, pin, fresh=fresh)
        exported = run_export(run, lambda: export_model(train_tree, trained, run.id))

        # How good is it, and is it good enough to become the current model?
        run.stage("evaluate", lambda: evaluation_record(run, exported))
        run.stage("promote", lambda: promotion_record(promote_model(train_tree, exported, run.id)))

        # One page to look at.
        run.stage("report", lambda: report_record(run, write_report))
    return write_summary(common.workdir, run.id, 0)
