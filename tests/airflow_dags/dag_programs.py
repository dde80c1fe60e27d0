"""Configs of DAGs, and programs that load them in Airflow's environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.lab.commands import ENVIRONMENT, ROOT

STAGES = ["doctor", "etl", "verify", "train", "evaluate", "gate", "promote", "report"]


def environment_of(folder: Path) -> dict[str, str]:
    return {
        **ENVIRONMENT,
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "airflow_dags"),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        "SHARDMILL_CONFIG_DIR": str(folder / "configs"),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def write_config(folder: Path, name: str, source: Path, etl: str = "") -> None:
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs" / f"{name}.toml").write_text(
        f'[source]\nuri = "{source}"\n[dataset]\nuri = "{folder}/dataset"\n[etl]\nimage_size = 16\n{etl}'
        "[train]\nepochs = 1\nglobal_batch_size = 16\n"
        '[spark.etl.conf]\n"spark.ui.enabled" = "false"\n'
    )


def python(code: str, folder: Path, timeout: float = 300) -> str:
    return _output([sys.executable, "-W", "ignore", "-c", code], folder, timeout)


def program(name: str, folder: Path, *arguments: Path) -> str:
    """What one of `tests.programs` prints."""
    return _output([sys.executable, "-W", "ignore", "-m", f"tests.programs.{name}", *map(str, arguments)], folder)


def _output(command: list[str], folder: Path, timeout: float = 300) -> str:
    done = subprocess.run(
        command,
        env=environment_of(folder),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
