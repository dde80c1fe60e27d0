"""The reference of the command line: every command with its arguments and options, as typer declares them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from pipeline.cli import COMMANDS
from pipeline.cli_options import COMMON_OPTIONS
from scripts.docs_site.markdown import cell, table

HEAD = """# Command line

Every command ends with a documented [exit code](../exit-codes.md). `shardmill COMMAND --help` prints the same as this
page.

## Common options

Most commands take these; the help of a command leaves out those that do nothing there.
"""


def commands() -> str:
    """The page, in Markdown."""
    lines = [HEAD]
    common = {option.name for option in COMMON_OPTIONS.params}
    lines += _params(COMMON_OPTIONS.params, COMMON_OPTIONS.context_class(COMMON_OPTIONS))
    for name, entry in COMMANDS.entries.items():
        for words, command in _flat(name, COMMANDS[name]):
            context = command.context_class(command)
            usage = " ".join(command.collect_usage_pieces(context))
            about = entry.help if words == name else (command.help or "")
            lines += [f"## shardmill {words}", "", cell(about), "", f"    shardmill {words} {usage}", ""]
            lines += _params([each for each in command.params if each.name not in common], context)
    return "\n".join(lines)


def _flat(words: str, command: TyperCommand | TyperGroup) -> Iterator[tuple[str, TyperCommand]]:
    """A command, or those of a group, each with its words."""
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from _flat(f"{words} {name}", inner)  # pyright: ignore[reportArgumentType]  all of ours are typer's
    else:
        yield words, command


def _params(params: Sequence[Any], context: Any) -> list[str]:
    """As `--help` shows them."""
    records = [record for each in params if not each.hidden and (record := each.get_help_record(context))]
    rows = [[f"`{cell(name).removeprefix('* ').strip()}`", cell(about)] for name, about in records]
    return table(["", ""], rows) if rows else []
