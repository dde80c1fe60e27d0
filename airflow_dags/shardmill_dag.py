"""One Airflow DAG for each TOML file of a folder: doctor, etl, verify, train, evaluate, gate, promote, report.

This file may be copied into any DAG folder. A config file that is wrong has a DAG with one task, which fails and says
why, and the tag `config-error`; it takes no other DAG away. (Airflow drops all DAGs of a module with an import error.)

Spark stages go through `spark-submit` with the connection `spark_default`, the others through the command `shardmill`;
Airflow's own environment needs no TensorFlow. All that tasks hand on are ids and digests. Settings, from the
environment of the DAG processor and the workers:

SHARDMILL_CONFIG_DIR   the folder of config files; without it this file defines nothing
SHARDMILL_WORKDIR      where run records go: below it one folder for each config (default: `work` in the config folder)
SHARDMILL_COMMAND      how to call the command line (default: `shardmill`, found on PATH)
SHARDMILL_SCHEDULE     cron expression or preset for the DAGs (default: only when triggered)
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import re
import tomllib
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, AssetAlias

from airflow_dags.operators import RUN_ID, ConfigErrorOperator, ShardmillOperator, ShardmillSparkOperator

VERSION = "{{ ti.xcom_pull(task_ids='etl')['version'] }}"


def asset_uri(uri: str) -> str:
    """`uri` as assets are named: local paths become file:// URIs."""
    return uri if "://" in uri else Path(os.path.abspath(uri)).as_uri()


def job_file(stage: str) -> str:
    """The application of a Spark stage, beside the installed library; nothing is imported to find it."""
    library = importlib.util.find_spec("shardmill")
    assert library is not None and library.origin is not None
    return str(Path(library.origin).parent.parent / stage / "job.py")


def read_config(config_file: Path) -> dict[str, Any]:
    """A config file's tables, as far as a DAG needs them; the stages check the rest. Raises ValueError or OSError."""
    config = tomllib.loads(config_file.read_text(encoding="utf-8"))
    for path in ("dataset", "models", "spark", "spark.etl", "spark.train", "spark.etl.conf", "spark.train.conf"):
        table: Any = config
        for name in path.split("."):
            table = table.get(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"{path} = {table!r} is not a section; expected [{path}] and keys below it")
    return config


def plain_settings(config: dict[str, Any], stage: str) -> dict[str, str]:
    """The Spark settings of a stage that may be on a command line and in Airflow's database.

    The job itself reads all of them from its config file, before its Spark context starts.
    """
    from shardmill.jobs.redact import redacted
    from shardmill.jobs.spark_settings import flat_settings

    settings = flat_settings(config.get("spark", {}).get(stage, {}).get("conf", {}))
    return {name: value for name, value in settings.items() if redacted(value, name) == value}


def empty_dag(config_file: Path, dag_id: str) -> DAG:
    """A DAG for one config file, without tasks yet."""
    return DAG(
        dag_id=dag_id,
        description=f"shardmill: {config_file.name}",
        schedule=os.environ.get("SHARDMILL_SCHEDULE") or None,
        start_date=datetime(2026, 1, 1),
        catchup=False,
        # Two runs at once would only race to the same dataset version.
        max_active_runs=1,
        default_args={"retries": 2, "retry_delay": timedelta(minutes=1), "retry_exponential_backoff": True},
        tags=["shardmill"],
    )


def build_dag(config_file: Path, dag_id: str) -> DAG:
    """The DAG of one config file. Raises ValueError or OSError for a file that is none."""
    config = read_config(config_file)
    workdir = os.path.join(os.environ.get("SHARDMILL_WORKDIR") or str(config_file.parent / "work"), config_file.stem)
    dataset_uri = config.get("dataset", {}).get("uri", "")
    models_uri = config.get("models", {}).get("uri") or f"{workdir}/models"
    common = ["--workdir", workdir, "--run-id", RUN_ID, "--set", f"models.uri={models_uri}"]

    def command(stage: str, **kwargs: Any) -> ShardmillOperator:
        arguments = [stage, str(config_file), *common]
        return ShardmillOperator(task_id=stage, stage=stage, arguments=arguments, workdir=workdir, **kwargs)

    def spark(stage: str, *more_arguments: str, **kwargs: Any) -> ShardmillSparkOperator:
        return ShardmillSparkOperator(
            task_id=stage,
            stage=stage,
            workdir=workdir,
            application=job_file(stage),
            application_args=["--config", str(config_file), *common, *more_arguments],
            conf=plain_settings(config, stage),
            conn_id="spark_default",
            name=f"{dag_id}_{stage}",
            **kwargs,
        )

    def published(kind: str, uri: str) -> dict[str, Any]:
        # An alias, because an outlet that is an asset would have an event even if nothing new was published.
        alias = AssetAlias(f"{dag_id}_{kind}:new")
        return {"outlets": [alias], "publishes": asset_uri(uri)}

    with empty_dag(config_file, dag_id) as dag:
        stages = [
            # What can be known before the ETL starts is found before it.
            command("doctor"),
            spark("etl", **published("dataset", dataset_uri)),
            command("verify"),
            spark("train", "--until", "export", "--dataset-version", VERSION),
            command("evaluate"),
            command("gate"),
            command("promote", **published("model", models_uri)),
            command("report"),
        ]
        for before, after in itertools.pairwise(stages):
            before >> after
    return dag


def config_error_dag(config_file: Path, dag_id: str, problem: str) -> DAG:
    """What stands for a config file that is wrong: people see it, and its schedule fails instead of going silent."""
    with empty_dag(config_file, dag_id) as dag:
        dag.description = f"CONFIG ERROR: {problem}"
        dag.doc_md = f"**This config file is wrong.**\n\n```text\n{problem}\n```"
        dag.tags.add("config-error")
        ConfigErrorOperator(task_id="config_error", problem=problem)
    return dag


def dags_of_folder(folder: Path) -> dict[str, DAG]:
    """A DAG for each config file of the folder, by id. Raises OSError if there is no such folder."""
    from shardmill.jobs.redact import redacted_text

    files: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix == ".toml":
            # What Airflow allows in an id.
            files.setdefault("shardmill_" + re.sub(r"[^\w.-]+", "_", file.stem), []).append(file)
    dags: dict[str, DAG] = {}
    for dag_id, (file, *others) in files.items():
        try:
            if others:
                names = ", ".join(repr(each.name) for each in (file, *others))
                raise ValueError(f"{names} would all be {dag_id}; expected names that differ in letters or digits")
            dags[dag_id] = build_dag(file, dag_id)
        except Exception as error:  # whatever is wrong with one file must not take the DAGs of the others away
            problem = redacted_text(f"{file}: {error}")
            logging.getLogger(__name__).error("no DAG for %s", problem)
            dags[dag_id] = config_error_dag(file, dag_id, problem)
    return dags


# The one thing that happens at import: Airflow finds DAGs among a module's globals.
if os.environ.get("SHARDMILL_CONFIG_DIR"):
    globals().update(dags_of_folder(Path(os.environ["SHARDMILL_CONFIG_DIR"])))
