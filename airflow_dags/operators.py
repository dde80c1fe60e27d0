"""The tasks of the DAG: a stage as a command or a `spark-submit`, judged by the record that it leaves."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

if TYPE_CHECKING:
    from airflow.sdk import Context

# Usage, data integrity, rejection limit, security, gate: a second try meets the same config, bytes and figures.
EXIT_CODES_WITHOUT_RETRY = frozenset({2, 3, 7, 8, 9})
# Airflow's own run ids hold ':' and '+', which some file systems do not like in names.
RUN_ID = "{{ run_id | replace(':', '') | replace('+', '_') }}"


class RunFolder:
    """`<workdir>/runs/<run_id>/` of one DAG run, as far as tasks read it."""

    def __init__(self, workdir: str, run_id: str) -> None:
        # At parse time this file must stay light.
        from shardmill.jobs.run_files import run_folder
        from shardmill.stores import open_store

        self._store = open_store(workdir)
        self._folder = run_folder(run_id)

    def remove_summary(self) -> None:
        """So that what is read after a failure was written by this attempt, and not by an earlier one."""
        self._store.delete(f"{self._folder}/summary.json")

    def summary(self) -> dict[str, Any]:
        """The run's summary; empty if there is none yet."""
        try:
            return json.loads(self._store.read(f"{self._folder}/summary.json"))
        except FileNotFoundError:
            return {}

    def sections_of(self, stage: str) -> dict[str, Any]:
        """What a stage decided, from its own record. Raises IntegrityError if that was altered."""
        from shardmill.sealed import unseal

        path = f"{self._folder}/{stage}.json"
        try:
            return json.loads(unseal(self._store.read(path), path)).get("sections", {})
        except FileNotFoundError:
            return {}

    def failure(self, stage: str, ended: str) -> AirflowException:
        """The exception that says why the stage failed, and by its type whether another try makes sense."""
        summary = self.summary()
        code = summary.get("exit_code")
        if not code:
            # Killed, never started, or `doctor`, whose next try may meet a sound machine: nothing is known against it.
            return AirflowException(f"{stage} {ended} and left no reason in summary.json; see the log above")
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
        folder.remove_summary()
        try:
            super().execute(context)
        except AirflowFailException:
            raise
        except AirflowException as error:
            raise folder.failure(self.stage, f"ended ({error})") from error
        return report_result(self, context, folder)


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
        folder.remove_summary()
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
        return report_result(self, context, folder)

    def on_kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            # SIGTERM: the command ends its ranks and leaves its record; Airflow kills what does not listen.
            self._process.terminate()


def report_result(task: Any, context: Context, folder: RunFolder) -> dict[str, Any]:
    """Ids and digests for XCom; and an asset event, if this stage has published something that was not there before."""
    sections = folder.sections_of(task.stage)
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
    is_published = (sections.get("etl") or {}).get("published") or promotion.get("published")
    for alias in task.outlets:
        if is_published:
            asset = Asset(name=alias.name.removesuffix(":new"), uri=task.publishes)
            context["outlet_events"][alias].add(asset, extra=ids)
    return ids


class ConfigErrorOperator(BaseOperator):
    """The one task of a DAG whose config file is wrong: it fails and says why."""

    def __init__(self, *, problem: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.problem = problem

    def execute(self, context: Context) -> None:
        raise AirflowFailException(self.problem)
