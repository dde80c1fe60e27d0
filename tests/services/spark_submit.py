"""`spark-submit` of our two jobs to a cluster of tests: the code as `make bundle` packs it, nothing of the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.stores import open_store
from tests.lab.commands import BIN, ENVIRONMENT, ROOT
from tests.quick_start import FOLDER
from tests.services.marked import MARK, QUICK_JVM
from tests.services.spark_standalone import SparkCluster

SECURE = ROOT / "examples" / "spark" / "secure.properties"


def make_bundle(folder: Path) -> Path:
    """What `make bundle` makes."""
    subprocess.run([sys.executable, ROOT / "scripts" / "bundle.py", folder / "shardmill.zip"], check=True, timeout=200)
    return folder / "shardmill.zip"


@dataclass(frozen=True, slots=True)
class Submitter:
    """Submits to one cluster."""

    master: str
    environment: Mapping[str, str]
    """Where the cluster's settings are."""
    conf: Mapping[str, str]
    py_files: tuple[Path, ...]
    folder: Path
    """The working directory of what it submits."""

    def start(self, script: str, *arguments: str, options: tuple[str, ...] = (), **conf: str) -> Submitted:
        """`conf`: settings of Spark, with `__` for a dot."""
        settings = {
            "spark.pyspark.python": sys.executable, "spark.executor.memory": "512m",
            "spark.driver.extraJavaOptions": " ".join(QUICK_JVM),
            "spark.executor.extraJavaOptions": " ".join(QUICK_JVM), **self.conf,
            **{name.replace("__", "."): value for name, value in conf.items()},
        }  # fmt: skip
        command = [
            str(BIN / "spark-submit"), "--master", self.master, "--properties-file", str(SECURE),
            "--load-spark-defaults", *(part for item in settings.items() for part in ("--conf", "=".join(item))),
            "--py-files", ",".join(map(str, self.py_files)), *options, str(ROOT / script), *arguments,
        ]  # fmt: skip
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK", "SPARK"))}
        process = subprocess.Popen(
            command, cwd=self.folder, text=True,
            env={**plain, "PATH": ENVIRONMENT["PATH"], "PYTHONPATH": FOLDER, **self.environment},
            stdout=open(self.folder / "stdout", "w"), stderr=open(self.folder / "stderr", "w"),  # noqa: SIM115
            start_new_session=True,
        )  # fmt: skip
        return Submitted(process, self.folder)

    def run(self, script: str, *arguments: str, options: tuple[str, ...] = (), **conf: str) -> Submitted:
        """To its end."""
        submitted = self.start(script, *arguments, options=options, **conf)
        submitted.wait()
        return submitted


def to_standalone(cluster: SparkCluster, folder: Path, *py_files: Path) -> Submitter:
    """Submits from `folder` to a standalone cluster of loopback."""
    environment = {"SPARK_CONF_DIR": str(cluster.conf), "SPARK_LOCAL_IP": "127.0.0.1", MARK: cluster.mark}
    return Submitter(cluster.master, environment, {"spark.driver.host": "127.0.0.1"}, py_files, folder)


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job on its way."""

    process: subprocess.Popen[str]
    folder: Path

    def wait(self, timeout_seconds: float = 500) -> int:
        """Its exit code; it does not outlive the time."""
        try:
            return self.process.wait(timeout_seconds)
        finally:
            self.process.kill()

    @property
    def output(self) -> str:
        """Its end: what Spark's JVM says, then our process, which spark-submit passes on as its own stdout."""
        return "".join((self.folder / name).read_text()[-3000:] for name in ("stderr", "stdout"))

    def our_lines(self) -> list[str]:
        """Of our process, on stdout or stderr."""
        return (self.folder / "stdout").read_text().splitlines()


def summary_of(workdir: str | Path, run_id: str) -> dict[str, Any]:
    """What the run has left."""
    return json.loads(open_store(str(workdir)).read(f"runs/{run_id}/summary.json"))
