"""The DAGs' operators: each runs a stage as a command or a `spark-submit`, and judges it by the record that
it writes.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import Asset, BaseOperator, BaseOperatorLink
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowException, AirflowFailException, TaskDeferralTimeout

from airflow_dags.processes import end_in_order, end_with_worker, tied_to_this_process
from airflow_dags.run_folder import RunFolder
from airflow_dags.settings import dag_settings
from airflow_dags.spark_hook import ShardmillSparkHook

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.types import TaskInstanceKey

# Airflow's own run ids hold ':' and '+', which some file systems do not like in names.
RUN_ID = "{{ run_id | replace(':', '') | replace('+', '_') }}"


class ReportLink(BaseOperatorLink):
    """The button on a task's page that leads to the run's report, which the last task writes."""

    @property
    def name(self) -> str:
        return "Report"

    def get_link(self, operator: Any, *, ti_key: TaskInstanceKey) -> str:
        """The report's address. It is asked for in the task's own process, where the templates have been rendered."""
        return dag_settings().report_url(operator.workdir, operator.shardmill_run_id)


class MlflowLink(BaseOperatorLink):
    """The button on a training's page that leads to its run at the MLflow server, if it was logged to one."""

    @property
    def name(self) -> str:
        return "MLflow"

    def get_link(self, operator: Any, *, ti_key: TaskInstanceKey) -> str:
        """The run's address, which holds its id alone; empty without one."""
        training = operator.folder.record_of("train").get("sections", {}).get("train") or {}
        server, run_id = dag_settings().mlflow_url, training.get("mlflow_run_id")
        return f"{server.rstrip('/')}/#/runs/{run_id}" if server and run_id else ""


class StageOperator(BaseOperator):
    """One stage of a config file, judged by the record that it leaves; how it is started is a subclass's own."""

    def __init__(
        self,
        *,
        stage: str,
        workdir: str,
        publishes: str = "",
        flags: Mapping[str, str] | None = None,
        shardmill_run_id: str = RUN_ID,
        **kwargs: Any,
    ) -> None:
        """`publishes`: the URI of the asset. `flags`: params of the DAG -> options of the stage."""
        super().__init__(**kwargs)
        self.stage = stage
        self.workdir = workdir
        self.publishes = publishes
        self.flags = dict(flags or {})
        self.shardmill_run_id = shardmill_run_id

    @property
    def operator_extra_links(self) -> tuple[BaseOperatorLink, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Maintenance belongs to no run of the pipeline.
        links = {"train": (ReportLink(), MlflowLink()), "compact": (), "gc": ()}
        return links.get(self.stage, (ReportLink(),))

    @property
    def folder(self) -> RunFolder:
        """Folder of this run. Its id is a template until the task runs."""
        return RunFolder(self.workdir, self.shardmill_run_id)

    def chosen_flags(self, context: Context) -> list[str]:
        """The options whose params are set in this run, or were in the one whose version has started it."""
        events = [event.extra or {} for of_asset in self._events(context) for event in of_asset]
        newest = max(events, key=lambda extra: extra.get("version") or 0, default={})
        chosen = {*self._set_params(context), *newest.get("params", ())}
        return [option for name, option in self.flags.items() if name in chosen]

    def _set_params(self, context: Context) -> list[str]:
        params = context.get("params") or {}
        return [name for name in self.flags if params.get(name)]

    def _events(self, context: Context) -> Iterable[Any]:
        return (context.get("triggering_asset_events") or {}).values()

    def report_result(self, context: Context) -> dict[str, Any]:
        """Ids and digests for XCom; and an asset event, if this run has published something that was not there."""
        ids, is_published = self.folder.result_of(self.stage)
        # What a person has accepted for a version holds for the training that it starts.
        extra = {**ids, "params": params} if (params := self._set_params(context)) else ids
        for alias in self.outlets:
            if is_published:
                asset = Asset(name=alias.name.removesuffix(":new"), uri=self.publishes)
                # Airflow's type says that it may be missing; a running task always has it.
                context["outlet_events"][alias].add(asset, extra=extra)  # pyright: ignore[reportTypedDictNotRequiredAccess]
        return ids


class ShardmillSparkOperator(StageOperator, SparkSubmitOperator):
    """`spark-submit` of one of our jobs; spark-submit's exit code may be Spark's own, so the run record decides."""

    template_fields = (*SparkSubmitOperator.template_fields, "shardmill_run_id")

    def __init__(
        self,
        *,
        master: str = "",
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        """`master`: the config's own, which goes before the connection's. `deferrable`: on YARN in cluster mode, wait
        in the triggerer and hold no worker slot; in client mode the driver is this task's child, which has to stay.
        """
        super().__init__(**kwargs)
        self.master = master
        self.deferrable = deferrable
        self._hook: ShardmillSparkHook | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        end_with_worker()
        self.application_args = [*(self.application_args or ()), *self.chosen_flags(context)]
        try:
            super().execute(context)
        except AirflowFailException:
            raise
        except (AirflowException, RuntimeError) as error:  # the latter: an application that has failed on its cluster
            raise self.folder.failure(self.stage, f"ended ({error})") from error
        except ValueError as error:  # what the connection lacks for its deploy mode
            raise AirflowFailException(f"{self.stage} was not submitted: {error}") from error
        return self._succeed(context)

    def _succeed(self, context: Context) -> dict[str, Any]:
        # Who clears a task that has succeeded wants another application, not the one that is remembered.
        if store := context.get("task_state_store"):
            store.delete(self.external_id_key)
        return self.report_result(context)

    def poll_until_complete(self, external_id: Any, context: Context) -> None:
        """Wait for an application on a cluster that this try has submitted or found; Airflow has its id by now."""
        assert self._hook is not None
        if self._hook.is_yarn_cluster_mode:
            if self.deferrable:
                # Airflow parses DAG files again and again, and of all tasks few are deferred.
                from airflow_dags.triggers import YarnApplicationTrigger

                seconds, kwargs = max(self._status_poll_interval, 10), {"application_id": external_id}
                trigger = YarnApplicationTrigger(connection=self._conn_id, poll_seconds=seconds, **kwargs)
                self.defer(trigger=trigger, method_name="resume", kwargs=kwargs, timeout=self.execution_timeout)
            self._hook.follow(external_id)
        # Asked to end, as until now, this process would end the application, which the next try is to find.
        end_with_worker(by=signal.SIGKILL)
        super().poll_until_complete(external_id, context)

    def resume(self, context: Context, event: str, application_id: str) -> dict[str, Any]:
        """Judge the application that this task was deferred for. `event`: its final status."""
        if event != "SUCCEEDED":
            raise self.folder.failure(self.stage, f"ended (YARN calls {application_id} {event})")
        return self._succeed(context)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Called by Airflow; a task that was deferred for longer than its `execution_timeout` ends its application."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            store = context.get("task_state_store")
            if application_id := store and store.get(self.external_id_key):
                self._get_hook()._kill_yarn_application(str(application_id))
            raise

    def on_kill(self) -> None:
        if self._hook is not None:
            self._hook.end(self.application)
            super().on_kill()

    def _get_hook(self) -> ShardmillSparkHook:
        # As the provider passes them on: each is an attribute of its operator, with or without an underscore.
        names = signature(SparkSubmitHook).parameters
        given = {name: getattr(self, f"_{name}" if hasattr(self, f"_{name}") else name) for name in names}
        return ShardmillSparkHook(config_master=self.master, folder=self.folder, **given)


# Of a command's line, by its first word or, with SHARDMILL_LOG_FORMAT=json, its level; any other is information.
_LEVELS = {
    "ERROR": logging.ERROR,
    "fail": logging.ERROR,
    "WARNING:": logging.WARNING,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "warning": logging.WARNING,
}
_FIRST_WORD = re.compile(r'\s*(?:\{"time": "[^"]*", "level": ")?([^\s"]+)')


def level_of(line: str) -> int:
    """The level at which Airflow logs a line of a command."""
    found = _FIRST_WORD.match(line)
    return _LEVELS.get(found[1], logging.INFO) if found else logging.INFO


class ShardmillOperator(StageOperator):
    """One command of the command line."""

    template_fields = ("arguments", "env", "shardmill_run_id")

    def __init__(self, *, arguments: list[str], env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        """`env`: variables of the command beside the worker's own."""
        super().__init__(**kwargs)
        self.arguments = arguments
        self.env = dict(env or {})
        self._process: subprocess.Popen[str] | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        end_with_worker()
        self.folder.remove_summary()
        self._process = self._start([*self.arguments, *self.chosen_flags(context)])
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.log(level_of(line), "%s", line.rstrip())
        exit_code = self._process.wait()
        if exit_code:
            raise self.folder.failure(self.stage, f"ended with exit code {exit_code}", exit_code)
        return self.report_result(context)

    def on_kill(self) -> None:
        if self._process is not None:
            end_in_order(self._process)

    def _start(self, arguments: list[str]) -> subprocess.Popen[str]:
        program = dag_settings().command_line()
        try:
            return subprocess.Popen(
                [*program, *arguments],
                env={**os.environ, **self.env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                # The command's messages may quote any file name.
                encoding="utf-8",
                errors="backslashreplace",
                **tied_to_this_process(),
            )
        except (FileNotFoundError, PermissionError) as error:
            # The next try would find the same.
            raise AirflowFailException(
                f"{self.stage} could not be started: {error}; expected SHARDMILL_COMMAND to name one of this worker"
            ) from error


class ConfigErrorOperator(BaseOperator):
    """The one task of a DAG whose config file is wrong: it fails and says why."""

    def __init__(self, *, problem: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.problem = problem

    def execute(self, context: Context) -> None:
        raise AirflowFailException(self.problem)
