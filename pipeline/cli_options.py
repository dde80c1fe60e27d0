"""What all commands share: their common options, and what happens to an error inside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from pipeline.config import DEFAULT_WORKDIR
from pipeline.ending import tell_failure
from shardmill.errors import ShardmillError
from shardmill.jobs.run_files import new_run_id, read_run_state


@dataclass(frozen=True, slots=True)
class Common:
    """The options that every command takes."""

    overrides: tuple[str, ...]
    workdir: str
    run_id: str
    """As named by --run-id, or a new one."""
    is_run_named: bool
    json: bool
    debug: bool


Overrides = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one config key.")]
Workdir = Annotated[str, typer.Option(metavar="DIR", help="Where runs leave their records (and more with a folder).")]
RunId = Annotated[str, typer.Option(metavar="ID", help="Name this run, or continue the run of that name.")]
Json = Annotated[bool, typer.Option("--json", help="Machine output on stdout, human output on stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]

COMMON_PARAMETERS = tuple(
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, default, annotation in (
        ("overrides", [], Overrides),
        ("workdir", DEFAULT_WORKDIR, Workdir),
        ("run_id", "", RunId),
        ("json", False, Json),
        ("debug", False, Debug),
    )
)


def with_common(function: Callable[..., None]) -> Callable[..., None]:
    """The typer command of a function whose first parameter is `Common`: it gets the common options as well."""
    hints = get_type_hints(function, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in list(inspect.signature(function).parameters.values())[1:]
    ]

    def command(**values: Any) -> None:
        given = {parameter.name: values.pop(parameter.name) for parameter in COMMON_PARAMETERS}
        named = given.pop("run_id")
        overrides = tuple(given.pop("overrides"))
        common = Common(overrides=overrides, run_id=named or new_run_id(), is_run_named=bool(named), **given)
        try:
            function(common, **values)
        except typer.Exit:
            raise
        except BaseException as error:  # recorded by whoever could; here it gets its line, and the process its code
            run_id = _recorded_run(common)
            code = tell_failure(error, is_json=common.json, is_debug=common.debug, run_id=run_id)
            raise SystemExit(code) from None

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    parameters = [*(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own), *COMMON_PARAMETERS]
    # typer reads both.
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _recorded_run(common: Common) -> str | None:
    """The run's id, if the command left a record under it."""
    try:
        read_run_state(common.workdir, common.run_id)
    except (ShardmillError, OSError):
        return None
    return common.run_id
