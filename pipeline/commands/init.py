"""The command `init`: a commented config file to start from."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli_options import Common, command
from pipeline.output.printing import print_result
from shardmill.errors import UsageError


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
    print_result(common, {"file": file}, [(each,) for each in (words[:1] if every_key else words)])
