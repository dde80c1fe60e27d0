"""Makes `etl`, `train` and `pipeline` importable in shardmill's own processes, and in no others.

Their names are ordinary ones: people have a `train.py` of their own. So a wheel holds them in a folder of this package,
which is on nobody's path (docs/decisions/0012-import-names.md). A process of ours puts that folder first on its path,
where no file of a user hides them; what it starts gets its path (`shardmill.jobs.process.python_path`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from shardmill.jobs.spark_python import keep_zip_directories
from shardmill.registry import applications_home
from shardmill.stores.retries import begin_under_driver


def put_applications_first() -> None:
    """Let this process import our applications, even if other modules on its path have their names."""
    home = applications_home()
    if sys.path[:1] != [home]:
        sys.path.insert(0, home)


class OnExecutor:
    """A function as Spark ships it: the Python of an executor finds our applications before it unpickles the rest.

    Pickle names functions and classes by their modules, and imports these on the executor, whose path is its own.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        keep_zip_directories()
        begin_under_driver()
        return self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        # The first is called before the last, the state with the function in it, is unpickled.
        return _arrived, (), {"_function": self._function}


def _arrived() -> OnExecutor:
    put_applications_first()
    return OnExecutor.__new__(OnExecutor)


def main() -> None:
    """Entry point of the command `shardmill`."""
    put_applications_first()
    # By its name: the library imports no application.
    import_module("pipeline.cli").main()
