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

from shardmill.jobs.process import log_to_stderr
from shardmill.jobs.spark_python import keep_zip_directories
from shardmill.registry import applications_home
from shardmill.stores.retries import begin_under_driver


def put_applications_first() -> None:
    """Let this process import our applications, even if other modules on its path have their names."""
    home = applications_home()
    if sys.path[:1] != [home]:
        sys.path.insert(0, home)


class OnExecutor:
    """A function as Spark ships it: the Python of an executor finds our applications before it loads the function.

    Spark's serializer names functions and classes by their modules, and imports these where it loads them, whose path
    is its own. A process that only passes one on (shardmill/jobs/lent_spark.py) imports nothing.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        from pyspark.serializers import CloudPickleSerializer

        self.shipped: bytes = CloudPickleSerializer().dumps(function)

    @classmethod
    def of_shipped(cls, shipped: bytes) -> OnExecutor:
        """The one with these bytes."""
        one = cls.__new__(cls)
        one.shipped = shipped
        return one

    def __call__(self, *arguments: Any) -> Any:
        from pyspark.serializers import CloudPickleSerializer

        put_applications_first()
        keep_zip_directories()
        begin_under_driver()
        log_to_stderr(others=True)
        return CloudPickleSerializer().loads(self.shipped)(*arguments)


def main() -> None:
    """Entry point of the command `shardmill`."""
    put_applications_first()
    # By its name: the library imports no application.
    import_module("pipeline.cli").main()
