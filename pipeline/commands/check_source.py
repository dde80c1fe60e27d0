"""`shardmill check-source`: what a build would reject, as a table, a document and an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from pipeline.cli_options import Common, SourceArgument, command
from pipeline.config import load_pipeline, require
from pipeline.output.printing import end_after_output, print_table
from pipeline.output.progress import RunProgress
from shardmill.dataset.inspection import SourceFindings, rejected_inputs, rejection_rows, size_document
from shardmill.errors import ShardmillError
from shardmill.jobs.observer import SilentObserver

if TYPE_CHECKING:
    from etl.checks.source_check import SourceCheck
    from shardmill.result import Rows


@command("run_id")
def check_source(context: typer.Context, source_or_config: SourceArgument) -> None:
    common: Common = context.obj
    found, error = check_source_stage(source_or_config, common)
    findings = findings_of(found)
    rows = check_rows(findings, found.described_classes, str(found.inferred["image"]))
    print_table(common, findings.document(), rows, title="check-source")
    if error is not None:
        end_after_output(common, error)


def check_source_stage(source_or_config: str, common: Common) -> tuple[SourceCheck, ShardmillError | None]:
    """Return the findings, and the error with which `etl` would end because of them. Raises errors that `etl` would
    raise earlier.
    """
    from etl.checks.source_check import check_source_images
    from etl.config import EtlTree

    tree = load_pipeline(source_or_config, common.overrides, common.workdir)
    require(tree, "source", "dataset")
    with RunProgress(SilentObserver(), num_epochs=0) as progress:
        found = check_source_images(tree.part(EtlTree), run_id=common.run_id, observer=progress)
    limit = found.limit
    if limit is None:
        return found, None
    num_counted = sum(map(limit.counts, found.rejections))
    return found, limit.kind(
        f"{num_counted} of {found.num_listed} inputs {limit.verb}",
        f"etl.{limit.key} allows {getattr(tree.etl, limit.key):g}: `shardmill etl` would not publish a version",
        limit.fix,
    )


def findings_of(found: SourceCheck) -> SourceFindings:
    return SourceFindings(
        num_listed=found.num_listed,
        num_accepted=found.num_accepted,
        num_rejected=len(found.rejections),
        by_class=found.by_class,
        by_split=found.by_split,
        source_sizes=size_document(found.sizes),
        by_reason=found.by_reason,
        by_note=found.by_note,
        warnings=found.warnings,
        broken_limit=None if found.limit is None else f"etl.{found.limit.key}",
        rejections=rejected_inputs(found.rejections),
    )


def check_rows(found: SourceFindings, classes: str, stored_as: str) -> Rows:
    """The counts, what accepted images are, their notes and warnings, then every rejected input with its reason."""
    counts = f"{found.num_listed:,} listed, {found.num_accepted:,} accepted, {found.num_rejected:,} rejected"
    notes, splits, sides = (
        ", ".join(f"{name}{mark} {times:,}" for name, times in each.items()) or "none"
        for each, mark in (
            (found.by_note, ""), (found.by_split, ""), (found.source_sizes["longer_side"], ":")
        )
    )  # fmt: skip
    return [
        ("inputs", counts, ""),
        ("classes", classes, ""),
        ("splits", splits, ""),
        ("longer side in pixels", sides, ""),
        ("stored as", stored_as, ""),
        ("notes", notes, ""),
        *(("warning", warning, "") for warning in found.warnings),
        *rejection_rows(found.rejections),
    ]
