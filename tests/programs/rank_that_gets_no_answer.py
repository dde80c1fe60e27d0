"""A driver whose only rank, in its own process, trains on dataset argv[1] into argv[2] until a read has no answer.

The first of the validation split: its first step is done then.
"""

import sys

from shardmill.jobs.config import SparkConfig
from tests.train.multi_rank_workers import no_answer_from
from tests.train.test_inline_watch import PATIENT_START, Recorder
from tests.train.training import task_of
from train.launching import inline_watch
from train.launching.inline import launch_inline

dataset_uri, folder = sys.argv[1:]
inline_watch.GRACE_SECONDS = 0.5
no_answer_from(dataset_uri, after_reads=0, under="shards/validation/")
launch_inline(task_of(dataset_uri, folder, **PATIENT_START), SparkConfig(), Recorder())
