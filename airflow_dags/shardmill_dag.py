"""Airflow DAGs for each TOML file of a folder: doctor, etl, verify, train, evaluate, gate, promote, report.

This file may be copied into any DAG folder. A config file of which no DAG can be built, and a wrong variable of the
environment, have a DAG with one task, which fails and says why, and the tag `config-error`; no other DAG disappears.
(Airflow drops all DAGs of a module with an import error.)

Spark stages go through `spark-submit` with the connection `spark_default`, the others through the command `shardmill`;
Airflow's own environment needs no TensorFlow. All that tasks hand on are ids and digests. Settings come from the
environment (airflow_dags/settings.py); docs/airflow.md is the guide.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Asset, AssetAlias, BaseOperator, Param

from airflow_dags.config_file import master_of, plain_settings, read_config
from airflow_dags.operators import RUN_ID, ConfigErrorOperator, ShardmillOperator, ShardmillSparkOperator
from airflow_dags.settings import DagSettings, dag_settings

VERSION = "{{ ti.xcom_pull(task_ids='etl')['version'] }}"
# Of both DAGs: what `verify` has found to be whole, also if the latest version is another one by now.
VERIFIED_VERSION = "{{ ti.xcom_pull(task_ids='verify')['version'] }}"
# The newest version among the events that started the run; 0 (the latest) for a manual run.
ASSET_VERSION = (
    "{{ (triggering_asset_events.values() | map('list') | sum(start=[])"
    " | map(attribute='extra.version') | list + [0]) | max }}"
)
# The id of the DAG that says why there are no others.
NO_CONFIGS = "shardmill_config_error"
# Parameters of a manual run, and the option of the task that each one sets.
REPLACE_SOURCE = Param(False, type="boolean", description="etl: allow the images to come from another source")
FRESH = Param(False, type="boolean", description="train: start from the first step even if a result exists")
REQUIRE = Param(False, type="boolean", description="promote: fail the run if the gate is not passed")
ACCEPT_DRIFT = Param(False, type="boolean", description="etl, drift: accept a version beyond etl.max_drift")
# The option that accepts a drift.
ACCEPTS = {"accept_drift": "--set=etl.max_drift=1"}


def asset_uri(uri: str) -> str:
    """`uri` as assets are named, for all to see: local paths become file:// URIs, passwords are hidden."""
    from shardmill.jobs.redact import redacted_text

    uri = redacted_text(uri)
    return uri if "://" in uri else Path(os.path.abspath(uri)).as_uri()


def job_file(stage: str) -> str:
    """The application of a Spark stage, as this installation has it."""
    from shardmill.registry import applications_home

    return str(Path(applications_home()) / stage / "job.py")


@dataclass(frozen=True, slots=True)
class Stages:
    """Makes the tasks of one config file's DAGs."""

    config_file: Path
    name: str
    """Name used in its assets and Spark applications."""
    config: dict[str, Any]
    workdir: str

    @property
    def dataset(self) -> Asset:
        return Asset(name=f"{self.name}_dataset", uri=asset_uri(self.config.get("dataset", {}).get("uri", "")))

    @property
    def models(self) -> Asset:
        return Asset(name=f"{self.name}_model", uri=asset_uri(self._given_models() or f"{self.workdir}/models"))

    @property
    def limits_drift(self) -> bool:
        """Whether a version may be too far from an older one: `etl.max_drift` is set."""
        return "max_drift" in self.config.get("etl", {})

    def command(
        self, stage: str, *more_arguments: str, publishes: Asset | None = None, **kwargs: Any
    ) -> ShardmillOperator:
        """A stage as a command."""
        arguments = [stage, str(self.config_file), *self._common(), *more_arguments]
        return ShardmillOperator(
            task_id=stage, stage=stage, arguments=arguments, workdir=self.workdir, **_outlet(publishes), **kwargs
        )

    def spark(
        self, stage: str, *more_arguments: str, publishes: Asset | None = None, **kwargs: Any
    ) -> ShardmillSparkOperator:
        """A stage as a `spark-submit`."""
        return ShardmillSparkOperator(
            task_id=stage,
            stage=stage,
            workdir=self.workdir,
            master=master_of(self.config),
            application=job_file(stage),
            application_args=["--config", str(self.config_file), *self._common(), *more_arguments],
            conf=plain_settings(self.config, stage),
            conn_id="spark_default",
            name=f"{self.name}_{stage}",
            **_outlet(publishes),
            **kwargs,
        )

    def _common(self) -> list[str]:
        common = ["--workdir", self.workdir, "--run-id", RUN_ID]
        # The config's own is read from the file: it may name a user, and arguments are for all to see.
        return common if self._given_models() else [*common, "--set", f"models.uri={self.workdir}/models"]

    def _given_models(self) -> str:
        return self.config.get("models", {}).get("uri", "")


def _outlet(asset: Asset | None) -> dict[str, Any]:
    # An alias, because an outlet that is an asset would have an event even if nothing new was published.
    return {"outlets": [AssetAlias(f"{asset.name}:new")], "publishes": asset.uri} if asset else {}


def empty_dag(about: str, dag_id: str, **kwargs: Any) -> DAG:
    """A DAG without tasks yet."""
    return DAG(
        dag_id=dag_id,
        description=f"shardmill: {about}",
        start_date=datetime(2026, 1, 1),
        catchup=False,
        # Two runs at once would only race to the same dataset version.
        max_active_runs=1,
        tags=["shardmill"],
        # Else Airflow would also take up what was left when building one failed.
        auto_register=False,
        **kwargs,
    )


def build_dags(config_file: Path, dag_id: str, settings: DagSettings) -> list[DAG]:
    """The DAGs of one config file. Raises ValueError or OSError for an invalid file."""
    # Airflow's database keeps the path as text.
    str(config_file).encode()
    config = read_config(config_file)
    stages = Stages(config_file, dag_id, config, settings.workdir_of(config_file))
    common = {"default_args": settings.of_each_task()}
    schedule = settings.dag_schedule()
    both = {"fresh": FRESH, "require_promotion": REQUIRE}
    of_data = {"replace_source": REPLACE_SOURCE}
    if stages.limits_drift:
        of_data["accept_drift"] = ACCEPT_DRIFT

    # One DAG for everything: images to a promoted model.
    if not settings.has_own_training_dag():
        with empty_dag(config_file.name, dag_id, schedule=schedule, params={**of_data, **both}, **common) as dag:
            in_order([*etl_stages(stages), *training_stages(stages, VERSION)])
        return [dag]

    # Or one that publishes versions of the dataset, and one that each of them starts.
    if not config.get("dataset", {}).get("uri"):
        raise ValueError("dataset.uri is not set; expected the dataset whose new versions start the training")
    with empty_dag(config_file.name, dag_id, schedule=schedule, params=of_data, **common) as dag:
        in_order(etl_stages(stages))
    on_dataset = [stages.dataset]
    params = {**both, "accept_drift": ACCEPT_DRIFT} if stages.limits_drift else both
    with empty_dag(config_file.name, f"{dag_id}_train", schedule=on_dataset, params=params, **common) as training:
        verify, *others = training_stages(stages, ASSET_VERSION)
        in_order([verify, *asset_checks(stages), *others])
    return [dag, training]


def etl_stages(stages: Stages) -> list[BaseOperator]:
    """Images -> a dataset version."""
    return [
        # What can be known before the ETL starts is found before it.
        stages.command("doctor"),
        stages.spark("etl", publishes=stages.dataset, flags={"replace_source": "--replace-source", **ACCEPTS}),
    ]


def asset_checks(stages: Stages) -> list[BaseOperator]:
    """What a version must pass that an asset event names: others than this config's `etl` may have committed it."""
    if not stages.limits_drift:
        return []
    return [stages.command("drift", "--dataset-version", VERIFIED_VERSION, flags=ACCEPTS)]


def training_stages(stages: Stages, version: str) -> list[BaseOperator]:
    """A dataset version, given by a template -> a promoted model."""
    return [
        stages.command("verify", "--dataset-version", version),
        stages.spark("train", "--until", "export", "--dataset-version", VERIFIED_VERSION, flags={"fresh": "--fresh"}),
        # These take the export that `train` has recorded for this run.
        stages.command("evaluate"),
        stages.command("gate"),
        stages.command("promote", publishes=stages.models, flags={"require_promotion": "--require"}),
        stages.command("report"),
    ]


def in_order(tasks: Sequence[BaseOperator]) -> None:
    """One after the other."""
    for before, after in itertools.pairwise(tasks):
        before.set_downstream(after)


def config_error_dag(dag_id: str, settings: DagSettings, problem: str) -> DAG:
    """Build a DAG that stands in for DAGs that cannot be built: it shows the problem, and its scheduled runs fail."""
    from shardmill.jobs.redact import redacted_text

    # Names of files may hold bytes that are no text, which Airflow's database refuses.
    problem = redacted_text(problem).encode(errors="backslashreplace").decode()
    logging.getLogger(__name__).error("no DAG for %s", problem)
    try:
        schedule = settings.dag_schedule()
    except ValueError:
        schedule = None
    # Airflow allows 250 characters.
    with empty_dag("config error", dag_id[:250], schedule=schedule) as dag:
        dag.description = f"CONFIG ERROR: {problem}"
        dag.doc_md = f"**This DAG could not be built.**\n\n```text\n{problem}\n```"
        dag.tags.add("config-error")
        ConfigErrorOperator(task_id="config_error", problem=problem)
    return dag


def config_files(config_dir: str) -> dict[str, list[Path]]:
    """The config files of the folder by the id of their DAG. Raises OSError if there is no such folder."""
    files: dict[str, list[Path]] = {}
    for file in sorted(Path(config_dir).iterdir()):
        if file.suffix == ".toml":
            # What Airflow allows in an id.
            files.setdefault("shardmill_" + re.sub(r"[^\w.-]+", "_", file.stem), []).append(file)
    return files


def dags_of_folder(settings: DagSettings) -> dict[str, DAG]:
    """The DAGs of each config file of the folder, by id; problems are shown by a DAG, and never raised."""
    try:
        files = config_files(settings.config_dir)
    except OSError as error:
        problem = f"SHARDMILL_CONFIG_DIR={settings.config_dir!r}: expected a folder of config files ({error})"
        return {NO_CONFIGS: config_error_dag(NO_CONFIGS, settings, problem)}
    try:
        settings.check()
    except ValueError as error:
        return {dag_id: config_error_dag(dag_id, settings, str(error)) for dag_id in files}

    dags: dict[str, DAG] = {}
    for dag_id, (file, *others) in files.items():
        try:
            if others:
                names = ", ".join(repr(each.name) for each in (file, *others))
                raise ValueError(f"{names} would all be {dag_id}; expected names that differ in letters or digits")
            built = build_dags(file, dag_id, settings)
            if taken := [dag.dag_id for dag in built[1:] if dag.dag_id in files]:
                raise ValueError(f"its training would be {taken[0]}, which is another config file; rename one of them")
            dags |= {dag.dag_id: dag for dag in built}
        except Exception as error:  # whatever is wrong with one file must not take the DAGs of the others away
            dags[dag_id] = config_error_dag(dag_id, settings, f"{file}: {error}")
    return dags


# The one thing that happens at import: Airflow finds DAGs among a module's globals.
if (_settings := dag_settings()).config_dir:
    globals().update(dags_of_folder(_settings))
