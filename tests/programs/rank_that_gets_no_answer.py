"""A driver whose only rank, in its own process, trains on dataset argv[1] into argv[2] until a read has no answer.

The first of the validation split: its first step is done then.
"""

import sys
import time

from tests.train.inline_workers import CLOCK, LIMITS, launch_watched
from tests.train.multi_rank_workers import no_answer_from
from tests.train.training import DriverRecorder, task_of
from train.launching import inline
from train.launching.rank import DEFAULT_WORKER


def stand_still(seconds: float) -> None:
    CLOCK.runs.set()
    time.sleep(seconds)


dataset_uri, folder = sys.argv[1:]
inline.GRACE_SECONDS = 0.5
no_answer_from(dataset_uri, after_reads=0, under="shards/validation/", sleep=stand_still)
task = task_of(dataset_uri, folder, watch=LIMITS, strategy="single", launcher="inline", epochs=2)
launch_watched(task, DriverRecorder(), DEFAULT_WORKER)
