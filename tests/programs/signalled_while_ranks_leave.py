"""`python -m tests.programs.signalled_while_ranks_leave`: SIGTERM comes just before the ranks are gone."""

from __future__ import annotations

import os
import signal

from shardmill.jobs.config import SparkConfig
from shardmill.jobs.process import Terminated, raise_on_signals, stopping_in_order
from tests.train.training import DriverRecorder
from train.config import TrainConfig
from train.contracts.values import TrainResult
from train.launching.rank_failures import RankLost
from train.planning.plan import TrainingPlan
from train.planning.setup import resolve
from train.restarts import launch_until_done


def main() -> None:
    raise_on_signals()
    lost = RankLost("rank 1 was killed")
    lost.ranks = frozenset({1})

    def launch(plan: TrainingPlan) -> TrainResult:
        print("launched")
        with stopping_in_order(60):
            os.kill(os.getpid(), signal.SIGTERM)
            raise lost

    config = TrainConfig(num_workers=2, strategy="horovod", launcher="local", max_restarts=1)
    plan = TrainingPlan(resolve(config, SparkConfig()))
    try:
        launch_until_done(launch, plan, DriverRecorder(), check=lambda plan: None)
    except Terminated as error:
        print(error)


if __name__ == "__main__":
    main()
