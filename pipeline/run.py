"""The story: a folder of images becomes a dataset version, a trained model, an export, a decision and a report.

Every stage detects whether its result exists already for the same inputs, so that the same command continues after any
failure where it stopped. Stages pass values to each other; what each did is in the run's record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.config import require
from pipeline.preflight import refuse_what_cannot_work
from pipeline.stages import build, evaluate, export, open_run, promote, report, report_if_failed, setting, train, verify

if TYPE_CHECKING:
    from pipeline.cli_options import Common


def run_pipeline(
    source_or_config: str, common: Common, *, replace_source: bool = False, fresh: bool = False
) -> dict[str, Any]:
    """The whole pipeline; returns the summary. Raises the ShardmillError of the stage that could not go on.

    `fresh`: train again although a result exists.
    """
    with open_run(source_or_config, common) as run, report_if_failed(run):
        require(run.tree, "source", "dataset")

        # What cannot work is said before anything costs time, and so is what was inferred.
        refuse_what_cannot_work(run.tree, common.workdir)
        run.progress.say(setting(run.tree, common.workdir))

        # Images to a committed dataset version, and a check that it keeps every rule.
        pin = build(run, replace_source=replace_source, will_train=True).pin
        verify(run, f"{pin.uri}@{pin.version}", deep=False).raise_if_failed()

        # Train on it, and turn the final weights into a model that others can load.
        trained = train(run, pin, fresh=fresh)
        exported = export(run, trained)

        # How good is it, and is it good enough to become the current model?
        evaluate(run, exported)
        promote(run, exported)

        # One page to look at.
        report(run)
    return run.record.summary
