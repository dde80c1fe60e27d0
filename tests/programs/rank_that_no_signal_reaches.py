"""A driver whose only rank, in its own process, stands still and hears no signal."""

from shardmill.jobs.config import SparkConfig
from tests.train.test_inline_watch import HERE, Recorder, task
from train.launching import inline_watch
from train.launching.inline import launch_inline

inline_watch.GRACE_SECONDS = 0.5
launch_inline(task(), SparkConfig(), Recorder(), worker=f"{HERE}:holds_on")
