"""The commands `config show`, what a config resolves to, and `init`, a commented file to start from."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from pipeline.cli_options import Common, command
from pipeline.output.printing import print_table
from shardmill.errors import UsageError


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


@command("workdir", "run_id")
def init(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to write; it must not exist.")
    ] = "shardmill.toml",
    every_key: Annotated[bool, typer.Option("--all", help="Write all keys, not only the most common ones.")] = False,
) -> None:
    from pipeline.config_file import FIRST_KEYS, commented_toml
    from pipeline.tree import PipelineTree
    from shardmill.jobs.config import load_tree

    common: Common = context.obj
    tree = load_tree(PipelineTree, None, common.overrides)
    uris = {"source.uri": tree.source.uri, "dataset.uri": tree.dataset.uri}
    todo = "".join(f"set {name}, " for name, uri in uris.items() if not uri)
    try:
        with open(file, "x", encoding="utf-8") as target:
            target.write(commented_toml(tree, None if every_key else FIRST_KEYS))
    except FileExistsError:
        raise UsageError(f"{file} exists already", "expected a new name", "shardmill init OTHER.toml") from None
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}", "expected a writable location") from None
    words = [f"wrote {file}; {todo}then: shardmill run {file}", "all keys: shardmill config show, or init --all"]
    print_table(common, {"file": file}, [(each,) for each in (words[:1] if every_key else words)])
