"""Runs `spark-submit` for one task, logs which master it uses, and leaves no process behind."""

from __future__ import annotations

from typing import Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_dags.processes import children_that_run, end_in_order, tied_to_this_process
from airflow_dags.run_folder import RunFolder

# https://hadoop.apache.org/docs/stable/hadoop-yarn/hadoop-yarn-site/ResourceManagerRest.html
ACTIVE = frozenset({"NEW", "NEW_SAVING", "SUBMITTED", "ACCEPTED", "RUNNING"})


class YarnHook(SparkSubmitHook):
    """The provider's hook, which also tells an application that YARN does not know from a YARN that does not answer."""

    def query_yarn_application_status(self, application_id: str) -> str:
        """Return one of `ACTIVE`, `SUCCEEDED`, `FAILED`, or `FORGOTTEN`, for which the task submits a new application.

        Raises RuntimeError if YARN does not tell.
        """
        try:
            return super().query_yarn_application_status(application_id)
        except RuntimeError as error:
            # YARN's own answer, not that of a proxy which does not find YARN.
            if not ("HTTP 404" in str(error) and "NotFoundException" in str(error)):
                raise
            self.log.warning("YARN does not know %s any more (%s)", application_id, error)
            return "FORGOTTEN"


class ShardmillSparkHook(YarnHook):
    """The config's `spark.master` goes before the connection's, which is `yarn` if nobody has chosen one."""

    def __init__(self, *, config_master: str, folder: RunFolder, **kwargs: Any) -> None:
        self._config_master = config_master
        self._folder = folder
        super().__init__(**kwargs)
        # The id of an application that outlives this process is kept for the next try, which asks YARN about it.
        self._yarn_track_via_rm_api = self._is_yarn_cluster_mode

    def _resolve_connection(self) -> dict[str, Any]:
        # The provider asks for it in its constructor, and makes everything else follow from it.
        if not self._config_master:
            self._check_that_there_is_one()
        connection = super()._resolve_connection()
        given = connection["master"]
        if not self._config_master:
            self.log.info("Spark master: %s, of the connection %s; the config names none", given, self._conn_id)
            return connection
        self.log.info("Spark master: %s, of the config, not the connection %s", self._config_master, self._conn_id)
        if self._config_master == given:
            return connection
        # Its deploy mode, queue and the like are about another cluster; who we are is the same on both.
        elsewhere = {
            "deploy_mode": self._deploy_mode,
            "queue": self._yarn_queue,
            "namespace": None,
            "rest_endpoint": None,
        }
        return {**connection, **elsewhere, "master": self._config_master}

    def _check_that_there_is_one(self) -> None:
        try:
            self.get_connection(self._conn_id)
        except AirflowException as error:
            # The provider would go to YARN.
            raise AirflowFailException(
                f"no spark.master in the config, and no connection {self._conn_id} ({error}); set one of them"
            ) from error

    def submit(self, application: str = "", **kwargs: Any) -> str | None:
        """Run it to its end (client mode), or until the cluster has it. Raises AirflowException if that fails."""
        # What is read after a failure is of this application. One that was found stays as it was.
        self._folder.remove_summary()
        return super().submit(application, **tied_to_this_process(), **kwargs)

    @property
    def is_yarn_cluster_mode(self) -> bool:
        """Whether the application is one of YARN's, and outlives this process."""
        return self._is_yarn_cluster_mode

    def follow(self, application_id: str) -> None:
        """Let `on_kill` end an application on YARN, which an earlier try may have submitted."""
        self._yarn_application_id = application_id

    def end(self, application: str) -> None:
        """End a driver of this machine in order, and spark-submit with it."""
        if self._submit_sp is not None:
            # Spark's JVM would take its Python driver down without asking it.
            end_in_order(self._submit_sp, lambda pid: children_that_run(application, pid))
