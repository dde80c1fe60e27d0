"""What a lender's Spark says reaches the command, also if it is an error as the socket between them has."""

from __future__ import annotations

import os
import socket

import pytest

from shardmill.applications import OnExecutor
from shardmill.jobs import lent_spark
from shardmill.jobs.lent_spark import LentSpark, SparkJobFailed
from shardmill.jobs.spark_tasks import Job, SparkTasks, Tasks, ThreadJob


class GoneSpark(SparkTasks):
    """As one whose JVM has ended."""

    def __init__(self) -> None:
        super().__init__({"spark.master": "local[2]"})

    def num_slots(self) -> int | None:
        raise ConnectionRefusedError("no JVM")

    def start(self, tasks: Tasks) -> Job:
        return ThreadJob(self.num_slots, lambda: 0, lambda: None)  # pyright: ignore[reportArgumentType]


def test_an_oserror_of_spark_is_what_spark_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lent_spark, "_tasks_of_session", lambda _: GoneSpark())
    lent = LentSpark(None)
    line = lent_spark._Line(socket.socket(fileno=os.dup(lent.descriptor)))
    lent.serve()
    commands = lent_spark._LentTasks(line)
    with pytest.raises(SparkJobFailed, match="no JVM"):
        commands.start(Tasks(OnExecutor(list), {"number": "bigint"}, 1)).result()
    with pytest.raises(SparkJobFailed, match="no JVM"):
        commands.num_slots()
    line.close()
