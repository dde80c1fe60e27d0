"""Options and error handling that all commands share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperArgument, TyperCommand

from pipeline.output.ending import end_with_failure
from shardmill.errors import ShardmillError
from shardmill.jobs.run_files import DEFAULT_WORKDIR


@dataclass(frozen=True, slots=True)
class Common:
    """The options that every command takes."""

    overrides: tuple[str, ...]
    workdir: str
    run_id: str
    """Run id from --run-id, or a new one."""
    is_run_named: bool
    json: bool
    debug: bool
    command: str = ""
    """The command that takes them."""


SourceArgument = Annotated[
    str, typer.Argument(metavar="SOURCE_OR_CONFIG", help="Images of any source, or a TOML file.")
]
DatasetArgument = Annotated[str, typer.Argument(metavar="DATASET[@N]", help="Dataset folder or URI, or a TOML file.")]
ReplaceSource = Annotated[bool, typer.Option("--replace-source", help="Allow another source of images than before.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Train again even if a result exists; the old result is kept.")]
AllowChange = Annotated[
    list[str],
    typer.Option("--allow-change", metavar="NAME", help="Resume an unfinished training that differs in train.NAME."),
]
DatasetVersion = Annotated[
    int, typer.Option("--dataset-version", min=0, help="This version of the dataset; 0: the one in DATASET[@N].")
]
Overrides = Annotated[list[str], typer.Option("--set", metavar="SECTION.NAME=VALUE", help="Override one config key.")]
Workdir = Annotated[
    str, typer.Option(metavar="DIR", help="Folder of run records, and of the results if the source is a folder.")
]
RunId = Annotated[str, typer.Option(metavar="ID", help="Name of this run; continues the run if it exists.")]
Json = Annotated[bool, typer.Option("--json", help="Machine output on stdout, human output on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]

_options = typer.Typer(add_completion=False)


@_options.command()
def common_options(
    overrides: Overrides = [],  # noqa: B006  typer copies it
    workdir: Workdir = DEFAULT_WORKDIR,
    run_id: RunId = "",
    json: Json = False,
    debug: Debug = False,
) -> Common:
    """The common options as typer declares them; no command of its own."""
    from shardmill.jobs.run_files import new_run_id

    return Common(tuple(overrides), workdir, run_id or new_run_id(), bool(run_id), json, debug)


COMMON_OPTIONS = typer.main.get_command(_options)


class Command(TyperCommand):
    """A command that takes the common options as well; its function finds them, a `Common`, in `context.obj`."""

    unused: ClassVar[frozenset[str]] = frozenset()
    """Common options without effect here: accepted, because scripts pass the same options to all commands, but
    hidden."""
    workdir: ClassVar[str] = DEFAULT_WORKDIR
    """The default of `--workdir`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for option in map(copy.copy, COMMON_OPTIONS.params):
            option.hidden = option.name in self.unused  # pyright: ignore[reportAttributeAccessIssue]  all are options
            if option.name == "workdir":
                option.default = self.workdir
            self.params.append(option)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments as they are named, such as `MODEL IMAGE...`; typer would write `{MODEL} {IMAGE...}...`."""
        arguments = [each for each in self.params if isinstance(each, TyperArgument)]
        return ["[OPTIONS]", *(str(each.metavar) if each.required else f"[{each.metavar}]" for each in arguments)]

    def invoke(self, ctx: Any) -> Any:
        given = {option.name: ctx.params.pop(option.name) for option in COMMON_OPTIONS.params}
        assert COMMON_OPTIONS.callback is not None
        common = ctx.obj = replace(COMMON_OPTIONS.callback(**given), command=ctx.info_name)
        try:
            _check_run_id(common)
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except BaseException as error:  # the stages have recorded it; here it becomes one line and an exit code
            run_id = _recorded_run(common)
            is_stopped = run_id is not None and not isinstance(error, Exception)
            committed = committed_version(common) if is_stopped else ""
            code = end_with_failure(
                error, is_json=common.json, is_debug=common.debug, run_id=run_id, committed=committed
            )
            raise SystemExit(code) from None


def command(*unused: str, workdir: str = DEFAULT_WORKDIR) -> Callable[[Callable[..., Any]], TyperCommand]:
    """Makes a command of a function; its help is that of its entry in `pipeline.cli`, if it has one there.

    `unused`: the common options that do nothing in it, which its help leaves out; `workdir`: the default of that one.
    """
    kind = type("Command", (Command,), {"unused": frozenset(unused), "workdir": workdir})

    def make(function: Callable[..., Any]) -> TyperCommand:
        only = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        only.command(cls=kind)(function)
        made = typer.main.get_command(only)
        assert isinstance(made, TyperCommand)
        return made

    return make


def _check_run_id(common: Common) -> None:
    """Raises UsageError for an id that names no run, before the command works for it."""
    from shardmill.jobs.run_files import run_folder

    run_folder(common.run_id)


def _recorded_run(common: Common) -> str | None:
    """The run's id, if the command left a record under it."""
    from shardmill.jobs.run_files import read_run_state

    try:
        read_run_state(common.workdir, common.run_id)
    except (ShardmillError, OSError):
        return None
    return common.run_id


def committed_version(common: Common) -> str:
    """`DATASET@N by run ID` of the version that this run has committed, also in an earlier attempt; empty for none."""
    import tomllib

    from shardmill.dataset.dataset import open_dataset
    from shardmill.jobs.run_files import run_folder
    from shardmill.stores import open_store

    try:
        recorded = open_store(common.workdir).read(f"{run_folder(common.run_id)}/config.toml").decode()
        dataset = open_dataset(tomllib.loads(recorded)["dataset"]["uri"])
    except (ShardmillError, OSError, ValueError, KeyError):
        return ""
    name = f"{dataset.pin.uri}@{dataset.pin.version}"
    return f"{name} by run {common.run_id}" if dataset.manifest.run_id == common.run_id else ""
