"""One Airflow DAG for each TOML file of a folder: etl -> verify -> train -> evaluate -> gate -> promote -> report.

Spark stages go through `spark-submit` with the connection `spark_default`, the others through the command `shardmill`;
Airflow's own environment needs no TensorFlow. All that tasks hand on are ids and digests. Settings, from the
environment of the DAG processor and the workers:

SHARDMILL_CONFIG_DIR   the folder of config files; without it this file defines nothing
SHARDMILL_WORKDIR      where run records go: below it one folder for each config (default: `work` in the config folder)
SHARDMILL_COMMAND      how to call the command line (default: `shardmill`, found on PATH)
SHARDMILL_SCHEDULE     cron expression or preset for the DAGs (default: only when triggered)
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shlex
import subprocess
import tomllib
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import DAG, Asset, AssetAlias, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

if TYPE_CHECKING:
    from airflow.sdk import Context

PROJECT = Path(__file__).resolve().parent.parent
# Usage, data integrity, rejection limit, security, gate: a second try meets the same config, bytes and figures.
EXIT_CODES_WITHOUT_RETRY = frozenset({2, 3, 7, 8, 9})
# Airflow's own run ids hold ':' and '+', which some file systems do not like in names.
VERSION = "{{ ti.xcom_pull(task_ids='etl')['version'] }}"
RUN_ID = "{{ run_id | replace(':', '') | replace('+', '_') }}"


class RunFolder:
    """`<workdir>/runs/<run_id>/` of one DAG run, as far as tasks read it."""

    def __init__(self, workdir: str, run_id: str) -> None:
        # At parse time this file must stay light.
        from shardmill.events import run_folder
        from shardmill.storage import open_store

        self._store = open_store(workdir)
        self._folder = run_folder(run_id)

    def forget_summary(self) -> None:
        """So that what is read after a failure was written by this attempt, and not by an earlier one."""
        self._store.delete(f"{self._folder}/summary.json")

    def read(self, name: str) -> dict[str, Any]:
        """One JSON file of the record; empty where there is none."""
        try:
            return json.loads(self._store.read(f"{self._folder}/{name}.json"))
        except FileNotFoundError:
            return {}

    def failure(self, stage: str, ended: str) -> AirflowException:
        """The exception that says why the stage failed, and by its type whether another try makes sense."""
        summary = self.read("summary")
        code = summary.get("exit_code")
        if not code:
            # Killed, or never started: nothing is known against trying again.
            return AirflowException(f"{stage} {ended} and left no reason in summary.json")
        line = f"{stage} failed with exit code {code}: {summary.get('error')}"
        return AirflowFailException(line) if code in EXIT_CODES_WITHOUT_RETRY else AirflowException(line)


class ShardmillSparkOperator(SparkSubmitOperator):
    """`spark-submit` of one of our jobs; spark-submit's exit code may be Spark's own, so the run record decides."""

    template_fields = (*SparkSubmitOperator.template_fields, "shardmill_run_id")

    def __init__(
        self, *, stage: str, workdir: str, publishes: str = "", shardmill_run_id: str = RUN_ID, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.stage = stage
        self.workdir = workdir
        self.publishes = publishes
        self.shardmill_run_id = shardmill_run_id

    def execute(self, context: Context) -> dict[str, Any]:
        folder = RunFolder(self.workdir, self.shardmill_run_id)
        folder.forget_summary()
        try:
            super().execute(context)
        except AirflowFailException:
            raise
        except AirflowException as error:
            raise folder.failure(self.stage, f"ended ({error})") from error
        return hand_on(self, context, folder)


class ShardmillOperator(BaseOperator):
    """One command of the command line, in a process group of its own."""

    template_fields = ("arguments", "shardmill_run_id")

    def __init__(
        self,
        *,
        stage: str,
        arguments: list[str],
        workdir: str,
        publishes: str = "",
        shardmill_run_id: str = RUN_ID,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.stage = stage
        self.arguments = arguments
        self.workdir = workdir
        self.publishes = publishes
        self.shardmill_run_id = shardmill_run_id
        self._process: subprocess.Popen[str] | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        folder = RunFolder(self.workdir, self.shardmill_run_id)
        folder.forget_summary()
        command = [*shlex.split(os.environ.get("SHARDMILL_COMMAND", "shardmill")), *self.arguments]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.info("%s", line.rstrip())
        exit_code = self._process.wait()
        if exit_code:
            raise folder.failure(self.stage, f"ended with exit code {exit_code}")
        return hand_on(self, context, folder)

    def on_kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            # SIGTERM: the command ends its ranks and leaves its record; Airflow kills what does not listen.
            self._process.terminate()


def hand_on(task: Any, context: Context, folder: RunFolder) -> dict[str, Any]:
    """Ids and digests for XCom; and an asset event, if this stage has published something that was not there before."""
    record = folder.read(task.stage)
    sections = record.get("sections", {})
    dataset, promotion = sections.get("dataset") or {}, sections.get("promotion") or {}
    found = {
        "version": dataset.get("version"),
        "content_digest": dataset.get("content_digest"),
        "weights_sha256": (sections.get("train") or {}).get("weights_sha256"),
        "decision": promotion.get("decision"),
        "current": promotion.get("current"),
    }
    ids = {name: value for name, value in found.items() if value is not None}
    # `published` is about the run, not the try: one that died after its commit is followed by one that only finds it.
    is_published = (sections.get("etl") or {}).get("published") or promotion.get("decision") == "promoted"
    for alias in task.outlets:
        if is_published:
            asset = Asset(name=alias.name.removesuffix(":new"), uri=task.publishes)
            context["outlet_events"][alias].add(asset, extra=ids)
    return ids


def asset_uri(uri: str) -> str:
    """`uri` as assets are named: local paths become file:// URIs."""
    return uri if "://" in uri else Path(os.path.abspath(uri)).as_uri()


def build_dag(config_file: Path) -> DAG:
    """The DAG of one config file."""
    from shardmill.spark_settings import flat_settings

    config = tomllib.loads(config_file.read_text(encoding="utf-8"))
    name = f"shardmill_{config_file.stem}"
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
            application=str(PROJECT / stage / "job.py"),
            application_args=["--config", str(config_file), *common, *more_arguments],
            conf=flat_settings(config.get("spark", {}).get(stage, {}).get("conf", {})),
            conn_id="spark_default",
            name=f"{name}_{stage}",
            **kwargs,
        )

    def published(kind: str, uri: str) -> dict[str, Any]:
        # An alias, because an outlet that is an asset would have an event even where nothing new was published.
        alias = AssetAlias(f"{name}_{kind}:new")
        return {"outlets": [alias], "publishes": asset_uri(uri)}

    with DAG(
        dag_id=name,
        description=f"shardmill: {config_file.name}",
        schedule=os.environ.get("SHARDMILL_SCHEDULE") or None,
        start_date=datetime(2026, 1, 1),
        catchup=False,
        # Two runs at once would only race to the same dataset version.
        max_active_runs=1,
        default_args={"retries": 2, "retry_delay": timedelta(minutes=1), "retry_exponential_backoff": True},
        tags=["shardmill"],
    ) as dag:
        stages = [
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


# The one thing that happens at import: Airflow finds DAGs among a module's globals.
if os.environ.get("SHARDMILL_CONFIG_DIR"):
    for file in sorted(Path(os.environ["SHARDMILL_CONFIG_DIR"]).glob("*.toml")):
        try:
            globals()[f"dag_{file.stem}"] = build_dag(file)
        except ValueError:  # one file that does not parse must not take the other DAGs away
            logging.getLogger(__name__).exception("no DAG for %s", file)
