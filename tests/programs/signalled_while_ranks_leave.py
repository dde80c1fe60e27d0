"""`python -m tests.programs.signalled_while_ranks_leave fewer|lost`: SIGTERM comes just before the ranks are gone."""

from __future__ import annotations

import os
import signal
import sys

from shardmill.jobs.process import Terminated, raise_on_signals, stopping_in_order
from tests.train.training import StepWatcher
from train.config import TrainConfig
from train.launching.faults import RankLost
from train.launching.restarts import launch_until_done
from train.values import FewerRanks, TrainResult


def main(how: str) -> None:
    raise_on_signals()
    lost = RankLost("rank 1 was killed")
    lost.ranks = frozenset({1})

    def launch(config: TrainConfig) -> TrainResult:
        print("launched")
        with stopping_in_order(60):
            os.kill(os.getpid(), signal.SIGTERM)
            raise FewerRanks(1, "one is faster") if how == "fewer" else lost

    config = TrainConfig(num_workers=2, strategy="horovod", launcher="local", max_restarts=1)
    try:
        launch_until_done(launch, config, StepWatcher(), check=lambda config: None, settle=lambda fewer: None)
    except Terminated as error:
        print(error)


if __name__ == "__main__":
    main(sys.argv[1])
