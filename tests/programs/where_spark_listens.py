"""Below `spark-submit`: prints a line `address HOST` for each on which Spark listens while our context is open."""

import os

from shardmill.jobs.config import SparkConfig
from shardmill.jobs.spark import spark_context
from tests.processes import listeners
from tests.services.marked import MARK

with spark_context("test", SparkConfig(), {}):
    for host in sorted({each.address for each in listeners(os.environ[MARK])}):
        print("address", host)
