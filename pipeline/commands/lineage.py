"""The command `lineage`: where a model is, and what it was made of."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli_options import command
from pipeline.output.printing import print_result
from shardmill.calls.results import Lineage, TrainedOn
from shardmill.errors import ShardmillError
from shardmill.storage import join_uri

if TYPE_CHECKING:
    from shardmill.values import DatasetPin
    from train.contracts.values import Evaluation


@command("run_id", "workdir", "overrides")
def lineage(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Models folder or URI, one export of it, or models:/NAME@ALIAS."),
    ],
) -> None:
    found = describe_lineage(model)
    print_result(context.obj, found, found.model)


def describe_lineage(model: str) -> Lineage:
    """From the export back to the images. Raises UsageError if there is no such model."""
    from pipeline.config import absolute_uri, existing_models
    from shardmill.stores import open_store
    from train.published.exported import read_export, read_history
    from train.published.predict import exact_name

    exact = exact_name(absolute_uri(existing_models(model)))
    uri, _, number = exact.rpartition("@")
    record = read_export(uri, int(number)).record
    history = read_history(open_store(uri))
    is_current = history.current is not None and history.current.export == int(number)
    return Lineage(
        model=exact,
        artifacts=join_uri(uri, record.artifact_dir),
        weights_sha256=record.weights_sha256,
        is_current=None if history.damage else is_current,
        damage=history.damage,
        decisions=tuple(
            f"{each.decision} by run {each.run_id}, {each.created_at}: {each.reason}"
            for each in history.readable
            if each.export == int(number)
        ),
        architecture=record.model,
        evaluation=_metrics(record.evaluation),
        training=join_uri(uri, record.training_dir),
        checkpoint=join_uri(uri, record.checkpoint),
        run_id=record.run_id,
        dataset=_dataset(record.dataset, record.content_digest, record.layout_digest),
    )


def _metrics(found: Evaluation | None) -> dict[str, Any] | None:
    return found and {"split": found.split, "num_samples": found.num_samples, found.metric.name: found.metric_value}


def _dataset(pin: DatasetPin, content_digest: str, layout_digest: str) -> TrainedOn:
    """The version, and, as far as it is still there, what it was made of."""
    from shardmill.dataset.dataset import open_pinned

    named = TrainedOn(
        uri=f"{pin.uri}@{pin.version}",
        manifest_sha256=pin.manifest_sha256,
        content_digest=content_digest,
        layout_digest=layout_digest,
    )
    try:
        manifest = open_pinned(pin).manifest
    except (ShardmillError, OSError) as error:
        return replace(named, problem=str(error))
    return replace(
        named,
        operation=manifest.operation,
        created_at=manifest.created_at,
        run_id=manifest.run_id,
        source=", ".join(each.described for each in (manifest.source, *manifest.other_sources)),
        num_images=manifest.counts.accepted,
        num_rejected=manifest.counts.rejected,
    )
