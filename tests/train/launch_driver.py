"""A driver as a process of its own, so that tests can kill it: `python -m tests.train.launch_driver`.

Takes one JSON argument; writes a line `step N` for each global step, `stopping` when it asks its ranks to stop, and at
the end one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace

from shardmill.errors import ShardmillError
from shardmill.jobs import process
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.process import Terminated, raise_on_signals
from shardmill.values import DatasetPin, Nonce
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import OUTPUT
from train.launching import LAUNCHERS
from train.launching.attach import attached
from train.models.user import source_sha256
from train.planning.setup import resolve


class Teller:
    def __init__(self) -> None:
        self.sample_ids: list[tuple[str, ...]] = []
        self.events: list[tuple[int, str]] = []
        self.output: dict[int, str] = {}
        self.pids: list[int] = []
        self.at_step: Callable[[], object] = lambda: None

    def step(self, step) -> None:
        self.sample_ids.append(step.sample_ids)
        self._say(f"step {step.step}")
        self.at_step()

    def event(self, name, fields) -> None:
        if name == "rank_started":
            self.pids.append(fields["pid"])
        if name == "stopping":
            self._say(name)
        if name == OUTPUT:
            self.output[fields["rank"]] = self.output.get(fields["rank"], "") + fields["text"]
        else:
            self.events.append((fields["rank"], name))

    def _say(self, line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def main() -> None:
    # A test may be slow to send the second of two signals that are one request.
    process.ONE_REQUEST_SECONDS = 60.0
    raise_on_signals()
    given = json.loads(sys.argv[1])
    config = resolve(TrainConfig(**given["train"]), SparkConfig(master=given["master"])).config
    task = WorkerTask(
        config, DatasetPin(**given["dataset"]), given["models_uri"], "trainings/test", source_sha256(config.model)
    )
    if given.get("reach"):
        task = replace(task, reach=Nonce(**given["reach"]))
    teller = Teller()
    outcome: dict[str, object]
    try:
        with attached(config):
            how = {"worker": given["worker"]} if given["worker"] else {}
            result = LAUNCHERS[config.launcher].launch(task, SparkConfig(master=given["master"]), teller, **how)
        outcome = {"weights_sha256": result.weights_sha256, "world_size": result.world_size}
    except (ShardmillError, KeyboardInterrupt, Terminated) as error:
        outcome = {
            "error": type(error).__name__,
            "exit_code": getattr(error, "exit_code", None),
            "message": str(error),
            "notes": "\n".join(getattr(error, "__notes__", [])),
        }
    told = {"sample_ids": teller.sample_ids, "events": teller.events, "output": teller.output}
    sys.stdout.write(json.dumps({**outcome, **told}) + "\n")


if __name__ == "__main__":
    main()
