"""Makes the Airflow DAGs of a config file: doctor, etl, verify, train, evaluate, gate, promote, report.

`dags_of` is for a DAG file of your own, `dags_of_folder` for a folder of config files. A config file of which no DAG
can be built, and a wrong variable of the environment, have a DAG with one task, which fails and says why, and the tag
`config-error`; no other DAG disappears. (Airflow drops all DAGs of a module with an import error.)

Spark stages go through `spark-submit` with a connection, the others through the command `shardmill`; Airflow's own
environment needs no TensorFlow. All that tasks hand on are ids and digests. docs/airflow.md is the guide.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Asset, AssetAlias, BaseOperator, Param, TaskGroup

from airflow_dags.config_file import master_of, plain_settings, read_config
from airflow_dags.operators import RUN_ID, ConfigErrorOperator, ShardmillOperator, ShardmillSparkOperator
from airflow_dags.settings import DagSettings, check_schedule, dag_settings

VERSION = "{{ ti.xcom_pull(task_ids='etl')['version'] }}"
# Of both DAGs: what `verify` has found to be whole, also if the latest version is another one by now.
VERIFIED_VERSION = "{{ ti.xcom_pull(task_ids='verify')['version'] }}"
# The newest version among the events that started the run; 0 (the latest) for a manual run.
ASSET_VERSION = (
    "{{ (triggering_asset_events.values() | map('list') | sum(start=[])"
    " | map(attribute='extra.version') | list + [0]) | max }}"
)
# What `DagOptions.tasks` may name.
TASKS = ("doctor", "etl", "verify", "drift", "train", "evaluate", "gate", "promote", "report", "compact", "gc")
# The id of the DAG that says why there are no others.
NO_CONFIGS = "shardmill_config_error"
# Parameters of a manual run, and the option of the task that each one sets.
REPLACE_SOURCE = Param(False, type="boolean", description="etl: allow the images to come from another source")
FRESH = Param(False, type="boolean", description="train: start from the first step even if a result exists")
REQUIRE = Param(False, type="boolean", description="promote: fail the run if the gate is not passed")
ACCEPT_DRIFT = Param(False, type="boolean", description="etl, drift: accept a version beyond etl.max_drift")
# The option that accepts a drift.
ACCEPTS = {"accept_drift": "--set=etl.max_drift=1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DagOptions:
    """What a DAG file decides about the DAGs of a config; airflow_dags/settings.py is what the environment decides."""

    schedule: Any = None
    """As Airflow's DAG takes it; None: only when triggered."""
    train_on_asset: bool = False
    """Training is a DAG of its own, which each new version of the dataset's asset starts."""
    maintenance: Any = None
    """Schedule of a DAG that merges small shards and deletes leftovers (`compact`, `gc`); None: no such DAG."""
    connection: str = "spark_default"
    """The Spark connection of `etl` and `train`."""
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments of single tasks' operators, by task: `execution_timeout`, `retries`, `pool`, callbacks."""
    dag: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of each DAG: `dagrun_timeout`, `default_args`, callbacks."""


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
    options: DagOptions

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
        return ShardmillOperator(stage=stage, arguments=arguments, **self._of_task(stage, publishes), **kwargs)

    def spark(
        self, stage: str, *more_arguments: str, publishes: Asset | None = None, **kwargs: Any
    ) -> ShardmillSparkOperator:
        """A stage as a `spark-submit`."""
        of_task = self._of_task(stage, publishes)
        place = {"master": master_of(self.config), "conn_id": self.options.connection, "name": f"{self.name}_{stage}"}
        conf = {**plain_settings(self.config, stage), **of_task.pop("conf", {})}
        return ShardmillSparkOperator(
            stage=stage,
            application=job_file(stage),
            application_args=["--config", str(self.config_file), *self._common(), *more_arguments],
            conf=conf,
            **{**place, **of_task},
            **kwargs,
        )

    def _of_task(self, stage: str, publishes: Asset | None) -> dict[str, Any]:
        # An alias, because an outlet that is an asset would have an event even if nothing new was published.
        outlet = {"outlets": [AssetAlias(f"{publishes.name}:new")], "publishes": publishes.uri} if publishes else {}
        return {"task_id": stage, "workdir": self.workdir, **outlet, **self.options.tasks.get(stage, {})}

    def _common(self) -> list[str]:
        common = ["--workdir", self.workdir, "--run-id", RUN_ID]
        # The config's own is read from the file: it may name a user, and arguments are for all to see.
        return common if self._given_models() else [*common, "--set", f"models.uri={self.workdir}/models"]

    def _given_models(self) -> str:
        return self.config.get("models", {}).get("uri", "")


def empty_dag(about: str, dag_id: str, **kwargs: Any) -> DAG:
    """A DAG without tasks yet."""
    ours = {
        "description": f"shardmill: {about}",
        "start_date": datetime(2026, 1, 1),
        "catchup": False,
        # Two runs at once would only race to the same dataset version.
        "max_active_runs": 1,
        # Else Airflow would also take up what was left when building one failed.
        "auto_register": False,
    }
    return DAG(dag_id, **{**ours, **kwargs, "tags": ["shardmill", *kwargs.get("tags", ())]})


def build_dags(config_file: Path, dag_id: str, settings: DagSettings, options: DagOptions) -> list[DAG]:
    """The DAGs of one config file. Raises ValueError or OSError for an invalid file."""
    # Airflow's database keeps the path as text.
    str(config_file).encode()
    if unknown := options.tasks.keys() - set(TASKS):
        raise ValueError(f"options.tasks names {', '.join(sorted(unknown))}; expected of {', '.join(TASKS)}")
    config = read_config(config_file)
    stages = Stages(config_file, dag_id, config, settings.workdir_of(config_file), options)
    common = {"doc_md": page_of(stages), **options.dag}
    common["default_args"] = {**settings.of_each_task(), **options.dag.get("default_args", {})}
    own_params = common.pop("params", {})
    schedule = options.schedule
    dags = [maintenance_dag(stages, common)] if options.maintenance else []
    both = {"fresh": FRESH, "require_promotion": REQUIRE, **own_params}
    of_data = {"replace_source": REPLACE_SOURCE, **own_params}
    if stages.limits_drift:
        of_data["accept_drift"] = ACCEPT_DRIFT

    # One DAG for everything: images to a promoted model.
    if not options.train_on_asset:
        with empty_dag(config_file.name, dag_id, schedule=schedule, params={**of_data, **both}, **common) as dag:
            in_order([*etl_stages(stages), *training_stages(stages)])
        return [dag, *dags]

    # Or one that publishes versions of the dataset, and one that each of them starts.
    if not config.get("dataset", {}).get("uri"):
        raise ValueError("dataset.uri is not set; expected the dataset whose new versions start the training")
    with empty_dag(config_file.name, dag_id, schedule=schedule, params=of_data, **common) as dag:
        in_order(etl_stages(stages))
    on_dataset = [stages.dataset]
    params = {**both, "accept_drift": ACCEPT_DRIFT} if stages.limits_drift else both
    with empty_dag(config_file.name, f"{dag_id}_train", schedule=on_dataset, params=params, **common) as training:
        in_order(training_stages(stages))
    return [dag, training, *dags]


def page_of(stages: Stages) -> str:
    """What Airflow shows as a DAG's documentation."""
    places = {"config": stages.config_file, "dataset": stages.dataset.uri, "models": stages.models.uri}
    lines = [f"- {name}: `{place}`" for name, place in {**places, "records of runs": stages.workdir}.items()]
    return "\n".join([f"shardmill makes a promoted model of images, as `{stages.config_file.name}` says.\n", *lines])


def maintenance_dag(stages: Stages, common: Mapping[str, Any]) -> DAG:
    """Merges small shards as a new version of equal content; then deletes what killed processes have left behind."""
    about, schedule = f"maintenance of {stages.config_file.name}", stages.options.maintenance
    with empty_dag(about, f"{stages.name}_maintenance", schedule=schedule, **common) as dag:
        in_order([stages.command("compact"), stages.command("gc", "--delete")])
    return dag


def etl_stages(stages: Stages) -> list[BaseOperator]:
    """Images -> a dataset version."""
    with TaskGroup("dataset", prefix_group_id=False):
        return [
            # What can be known before the ETL starts is found before it.
            stages.command("doctor"),
            stages.spark("etl", publishes=stages.dataset, flags={"replace_source": "--replace-source", **ACCEPTS}),
        ]


def training_stages(stages: Stages) -> list[BaseOperator]:
    """A dataset version, of this run's `etl` or of the event that starts a DAG of its own -> a promoted model."""
    on_asset, verified = stages.options.train_on_asset, ("--dataset-version", VERIFIED_VERSION)
    with TaskGroup("model", prefix_group_id=False):
        return [
            stages.command("verify", "--dataset-version", ASSET_VERSION if on_asset else VERSION),
            # Others than this config's `etl` may have committed the version of an event.
            *([stages.command("drift", *verified, flags=ACCEPTS)] if on_asset and stages.limits_drift else []),
            stages.spark("train", "--until", "export", *verified, flags={"fresh": "--fresh"}),
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


def config_error_dag(dag_id: str, problem: str, schedule: Any, **kwargs: Any) -> DAG:
    """Build a DAG that stands in for DAGs that cannot be built: it shows the problem, and its scheduled runs fail."""
    from shardmill.jobs.redact import redacted_text

    # Names of files may hold bytes that are no text, which Airflow's database refuses.
    problem = redacted_text(problem).encode(errors="backslashreplace").decode()
    logging.getLogger(__name__).error("no DAG for %s", problem)
    # Airflow allows 250 characters.
    with empty_dag("config error", dag_id[:250], schedule=schedule, **kwargs) as dag:
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
            files.setdefault(dag_id_of(file), []).append(file)
    return files


def dag_id_of(config_file: Path) -> str:
    """A DAG's id, of the characters that Airflow allows."""
    return "shardmill_" + re.sub(r"[^\w.-]+", "_", config_file.stem)


def dags_of(config_file: str | Path, options: DagOptions | None = None) -> dict[str, DAG]:
    """The DAGs of one config file, by id, for the globals of a DAG file; a problem is shown by a DAG, not raised."""
    file, options, settings = Path(config_file), options or DagOptions(), dag_settings()
    dag_id, schedule = dag_id_of(file), None
    try:
        settings.check()
        for name in ("schedule", "maintenance"):
            try:
                check_schedule(given := getattr(options, name))
            except ValueError as error:
                raise ValueError(f"options.{name}={given!r}: {error}") from error
        schedule = options.schedule
        return {dag.dag_id: dag for dag in build_dags(file, dag_id, settings, options)}
    except Exception as error:  # a file may have the DAGs of several configs
        problem = f"{file}: {error}"
        try:
            return {dag_id: config_error_dag(dag_id, problem, schedule, **options.dag)}
        except Exception:  # the problem is in options.dag itself: Airflow checks each argument in its own way
            return {dag_id: config_error_dag(dag_id, problem, schedule)}


def dags_of_folder(settings: DagSettings) -> dict[str, DAG]:
    """The DAGs of each config file of the folder, by id; problems are shown by a DAG, and never raised."""
    try:
        schedule = settings.schedule_of("schedule")
    except ValueError:
        schedule = None
    try:
        files = config_files(settings.config_dir)
    except OSError as error:
        problem = f"SHARDMILL_CONFIG_DIR={settings.config_dir!r}: expected a folder of config files ({error})"
        return {NO_CONFIGS: config_error_dag(NO_CONFIGS, problem, schedule)}
    try:
        settings.check()
    except ValueError as error:
        return {dag_id: config_error_dag(dag_id, str(error), schedule) for dag_id in files}

    maintenance = settings.schedule_of("maintenance_schedule")
    options = DagOptions(schedule=schedule, train_on_asset=settings.has_own_training_dag(), maintenance=maintenance)
    dags: dict[str, DAG] = {}
    for dag_id, (file, *others) in files.items():
        try:
            if others:
                names = ", ".join(repr(each.name) for each in (file, *others))
                raise ValueError(f"{names} would all be {dag_id}; expected names that differ in letters or digits")
            built = build_dags(file, dag_id, settings, options)
            if taken := [dag.dag_id for dag in built[1:] if dag.dag_id in files]:
                raise ValueError(f"it would also be {taken[0]}, the DAG of another config file; rename one of the two")
            dags |= {dag.dag_id: dag for dag in built}
        except Exception as error:  # whatever is wrong with one file must not take the DAGs of the others away
            dags[dag_id] = config_error_dag(dag_id, f"{file}: {error}", schedule)
    return dags
