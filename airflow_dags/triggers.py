"""Waits in Airflow's triggerer for an application on YARN, in place of a task that holds a worker's slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from airflow_dags.spark_hook import ACTIVE, YarnHook

_MAX_FAILED_POLLS = 10


class YarnApplicationTrigger(BaseTrigger):
    """Fires once with the final status of an application. A person who ends the deferred task ends the application; a
    triggerer that ends hands the trigger to another one.
    """

    def __init__(self, *, connection: str, application_id: str, poll_seconds: float) -> None:
        """`connection`: the id of the Spark connection that names the ResourceManager."""
        super().__init__()
        self.connection = connection
        self.application_id = application_id
        self.poll_seconds = poll_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        names = "connection", "application_id", "poll_seconds"
        return f"{type(self).__module__}.{type(self).__name__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Raises RuntimeError if YARN does not answer ten times in a row; the task's next try asks it again."""
        hook = await asyncio.to_thread(self._hook)
        polls = AsyncRetrying(
            retry=retry_if_exception_type(RuntimeError),
            stop=stop_after_attempt(_MAX_FAILED_POLLS),
            wait=wait_fixed(self.poll_seconds),
            reraise=True,
        )
        known = ""
        while True:
            status = await polls(asyncio.to_thread, hook.query_yarn_application_status, self.application_id)
            if status != known:
                self.log.info("YARN application %s is %s", self.application_id, status)
            if status not in ACTIVE:
                break
            known = status
            await asyncio.sleep(self.poll_seconds)
        yield TriggerEvent(status)

    async def on_kill(self) -> None:
        """Called if a person clears or marks the deferred task, and at no other end of this trigger."""
        await asyncio.to_thread(lambda: self._hook()._kill_yarn_application(self.application_id))

    def _hook(self) -> YarnHook:
        return YarnHook(conn_id=self.connection)
