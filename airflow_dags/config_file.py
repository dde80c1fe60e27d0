"""What a DAG and an operator need of a config file; the stages check the rest."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_config(config_file: Path) -> dict[str, Any]:
    """A config file's tables, as far as a DAG needs them; the stages check the rest. Raises ValueError or OSError."""
    config = tomllib.loads(config_file.read_text(encoding="utf-8"))
    for path in ("dataset", "models", "etl", "spark", "spark.etl", "spark.train", "spark.etl.conf", "spark.train.conf"):
        table: Any = config
        for name in path.split("."):
            table = table.get(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"{path} = {table!r} is not a section; expected [{path}] and keys below it")
    for section in ("dataset", "models"):
        uri = config.get(section, {}).get("uri", "")
        if not isinstance(uri, str):
            raise ValueError(f"{section}.uri = {uri!r} is not a text; expected a path or URI in quotes")
    return config


def plain_settings(config: dict[str, Any], stage: str) -> dict[str, str]:
    """The Spark settings of a stage that may be on a command line and in Airflow's database.

    The job itself reads all of them from its config file, before its Spark context starts.
    """
    from shardmill.jobs.config import flat_settings
    from shardmill.jobs.redact import redacted

    settings = flat_settings(config.get("spark", {}).get(stage, {}).get("conf", {}))
    return {name: value for name, value in settings.items() if redacted(value, name) == value}


def master_of(config: dict[str, Any]) -> str:
    """The config's `spark.master`; empty if it has none."""
    return str(config.get("spark", {}).get("master", ""))
