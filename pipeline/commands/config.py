"""The command `config show`: what a config resolves to."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from pipeline.cli_options import Common, command


@command("run_id")
def show(
    context: typer.Context,
    source_or_config: Annotated[str, typer.Argument(metavar="SOURCE_OR_CONFIG", help="A folder or TOML file.")] = "",
) -> None:
    from pipeline.config import load_pipeline, without_secrets
    from pipeline.config_file import to_toml

    common: Common = context.obj
    tree = without_secrets(load_pipeline(source_or_config or None, common.overrides, common.workdir))
    if common.json:
        sys.stdout.write(json.dumps(tree.model_dump(mode="json"), indent=2) + "\n")
    else:
        sys.stdout.write(to_toml(tree, with_choices=True))


show.help = "Print the config with all defaults, as TOML; `auto` stays `auto`."
config = TyperGroup(name="config", commands={"show": show}, no_args_is_help=True)
