"""Starts Spark at the master argv[1] with the settings argv[2:], each NAME=VALUE; prints `started`, or our error."""

import sys

from shardmill.errors import ShardmillError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.spark import spark_context

master, *settings = sys.argv[1:]
try:
    with spark_context("test", SparkConfig(master=master), dict(each.split("=", 1) for each in settings)):
        print("started")
except ShardmillError as error:
    print(type(error).__name__, error)
