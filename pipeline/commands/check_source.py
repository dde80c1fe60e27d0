"""`shardmill check-source`: what a build would reject, as a table, a document and an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from pipeline.cli_options import Common, SourceArgument, command
from pipeline.config import load_pipeline, require
from pipeline.output.inspection import rejection_document, rejection_rows, size_document
from pipeline.output.printing import print_result
from pipeline.output.progress import RunProgress
from shardmill.errors import ShardmillError
from shardmill.jobs.observer import SilentObserver
from shardmill.jobs.process import report_error

if TYPE_CHECKING:
    from etl.checks.source_check import SourceCheck
    from pipeline.output.printing import Rows


@command("run_id")
def check_source(context: typer.Context, source_or_config: SourceArgument) -> None:
    common: Common = context.obj
    found, error = check_source_stage(source_or_config, common)
    print_result(common, check_document(found), check_rows(found), title="check-source")
    if error is not None:
        # The table, or the document with --json, has been printed; an error's own document would be a second one.
        raise typer.Exit(report_error(error, debug=common.debug))


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


def check_document(found: SourceCheck) -> dict[str, Any]:
    """The document that `check-source --json` prints."""
    return {
        "num_listed": found.num_listed,
        "num_accepted": found.num_accepted,
        "num_rejected": len(found.rejections),
        "by_class": found.by_class,
        "by_split": found.by_split,
        "source_sizes": size_document(found.sizes),
        "by_reason": found.by_reason,
        "by_note": found.by_note,
        "warnings": list(found.warnings),
        "broken_limit": None if found.limit is None else f"etl.{found.limit.key}",
        "rejections": [rejection_document(each) for each in found.rejections],
    }


def check_rows(found: SourceCheck) -> Rows:
    """The counts, what accepted images are, their notes and warnings, then every rejected input with its reason."""
    counts = f"{found.num_listed:,} listed, {found.num_accepted:,} accepted, {len(found.rejections):,} rejected"
    notes = ", ".join(f"{note} {times:,}" for note, times in found.by_note.items())
    splits = ", ".join(f"{split} {times:,}" for split, times in found.by_split.items())
    sides = (f"{side}: {times:,}" for side, times in size_document(found.sizes)["longer_side"].items())
    return [
        ("inputs", counts, ""),
        ("classes", found.described_classes, ""),
        ("splits", splits or "none", ""),
        ("longer side in pixels", ", ".join(sides) or "none", ""),
        ("stored as", str(found.inferred["image"]), ""),
        ("notes", notes or "none", ""),
        *(("warning", warning, "") for warning in found.warnings),
        *rejection_rows([rejection_document(each) for each in found.rejections]),
    ]
