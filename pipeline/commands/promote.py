"""The command `promote`: an export becomes the current model, through the gate or by its number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import Common, command
from pipeline.commands.stage import export_of_run, print_stage
from pipeline.config import load_for_models
from pipeline.running import Run, open_run
from shardmill.dataset.versions import split_version
from shardmill.errors import UsageError

if TYPE_CHECKING:
    from train.published.decision import Promotion


@command()
def promote(
    context: typer.Context,
    models: Annotated[
        str, typer.Argument(metavar="MODELS[@N]", help="Models folder or URI, one export of it, or a TOML file.")
    ],
    rollback: Annotated[bool, typer.Option("--rollback", help="Make the previous model current again.")] = False,
    require_promotion: Annotated[bool, typer.Option("--require", help="Exit 9 if the gate is not passed.")] = False,
    replace_current: Annotated[
        bool, typer.Option("--replace-current", help="Promote even if no comparison is possible.")
    ] = False,
) -> None:
    from train.published.announce import announce
    from train.published.gate import promotion_record
    from train.reporting.mlflow_client import check_registry

    common: Common = context.obj
    uri, number = split_version(models)
    named = {
        "@N": number is not None,
        "--rollback": rollback,
        "--require, --replace-current": require_promotion or replace_current,
    }
    if sum(named.values()) > 1:
        raise UsageError(
            f"{' and '.join(name for name, is_given in named.items() if is_given)} exclude each other",
            "expected only one of them",
        )
    if models.startswith("models:/"):
        raise UsageError(
            f"promote {models}",
            "expected the models folder or URI: its promotions register models, not the reverse",
            f"`shardmill lineage {models}` names the export; promote that MODELS@N",
        )
    flags = {"require": require_promotion, "replace_current": replace_current}
    with open_run(models, common, load=load_for_models) as run:
        is_config, gate = uri.endswith(".toml"), run.tree.gate
        check_registry(gate.registry)
        run.stage(
            "promote",
            lambda: announce(
                _promoted(run, number, rollback=rollback, is_config=is_config, **flags), gate, run.progress
            ),
            promotion_record,
        )
    print_stage(common, run)


def _promoted(
    run: Run, number: int | None, *, rollback: bool, is_config: bool, require: bool, replace_current: bool
) -> Promotion:
    """Through the gate (a config's export, or the newest one of a models URI), by its number, or back."""
    from train.published.exported import newest_export, require_exports
    from train.published.gate import promote_export
    from train.published.promote import choose_export, roll_back

    models_uri = run.tree.models.uri
    if not is_config:
        # A folder of images, say: whatever is asked for, it is not in there.
        require_exports(models_uri)
    if rollback:
        return roll_back(models_uri, run.id)
    if number is not None:
        return choose_export(models_uri, number, run.id)
    candidate = export_of_run(run).export if is_config else newest_export(models_uri)
    return promote_export(
        models_uri, candidate, run.tree.gate, run.id, require=require, replace_current=replace_current
    )
