"""A driver as a process of its own, and what is left of it and its ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shardmill.environments.rank_environment import RankEnvironment
from shardmill.jobs.process import PREFIX, raise_on_signals
from shardmill.values import DatasetPin
from tests.services.marked import MARK, free_ports, marked
from train.launching.attach import JOB_TOKEN_VARIABLE

ROOT = Path(__file__).parents[2]
WORKERS = "tests.train.launch_workers"
PIN = DatasetPin("/nowhere", 1, "0" * 64)
# Far more than a busy machine takes to end a process, and less than what a sleeping worker would live.
_HANG_SECONDS = 60.0


def start_driver(
    folder: Path,
    train: dict[str, object],
    *,
    worker: str = "",
    dataset: DatasetPin = PIN,
    reach: dict | None = None,
    models: str = "models",
) -> Driver:
    """A driver (tests/train/launch_driver.py) of the ranks that `train` says, with its models below `folder`."""
    num_workers, launcher = int(str(train["num_workers"])), str(train["launcher"])
    places: list[dict[str, str]] = [{}]
    if launcher == "attach":
        # The same program in as many processes, all of them marked.
        train = {**train, "attach": {"port": free_ports(1)[0]}}
        local = [RankEnvironment(rank, num_workers, rank, num_workers) for rank in range(num_workers)]
        places = [{JOB_TOKEN_VARIABLE: "t" * 32, **place.environment()} for place in local]
    given = {"train": train, "dataset": {"uri": dataset.uri, "version": dataset.version,
                                         "manifest_sha256": dataset.manifest_sha256},
             "models_uri": str(folder / models), "master": f"local[{num_workers}]", "worker": worker,
             "reach": reach}  # fmt: skip
    mark, temporary = f"mark-{uuid.uuid4()}", folder / "temporary"
    temporary.mkdir(exist_ok=True)
    process, *others = [
        subprocess.Popen([sys.executable, "-m", "tests.train.launch_driver", json.dumps(given)], cwd=ROOT,
                         env={**os.environ, MARK: mark, "TMPDIR": str(temporary), **place}, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
        for place in places
    ]  # fmt: skip
    return Driver(process, mark, temporary, launcher, others)


@contextmanager
def hearing_signals() -> Iterator[None]:
    """Inside, this process hears signals as a command does."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    raise_on_signals()
    try:
        yield
    finally:
        # No earlier signal is left for the next command in this process.
        raise_on_signals()
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Driver:
    """A launched driver, and what is left of its processes."""

    process: subprocess.Popen[str]
    mark: str
    temporary: Path | None = None
    launcher: str = ""
    others: list[subprocess.Popen[str]] = field(default_factory=list)
    """The processes of other ranks, where something else has started them."""

    def wait_for(self, word: str) -> None:
        """A line that the driver begins with it."""
        assert self.process.stdout and self.process.stderr
        while not (line := self.process.stdout.readline()).startswith(word):
            assert line, self.process.stderr.read()

    def wait_for_step(self) -> None:
        self.wait_for("step")
        if self.launcher == "inline":
            return
        # So that finding none later means something.
        assert self.processes_left()

    def stopped_somewhere(self) -> dict:
        """SIGTERM at a random moment after the first step. -> the outcome: it stopped, and left nothing.

        Of ranks that are held before their end (multi_rank_workers.py): they may not come to it sooner.
        """
        seed = random.randrange(1 << 30)
        print(f"seed {seed}")
        self.wait_for_step()
        time.sleep(random.Random(seed).random() * 0.3)
        self.process.send_signal(signal.SIGTERM)
        outcome = self.outcome()
        assert outcome.get("error") == "Terminated", outcome
        self.assert_nothing_left()
        return outcome

    def kill(self) -> None:
        for process in (self.process, *self.others):
            process.kill()
            process.communicate()

    def outcome(self) -> dict:
        stdout, stderr = self.process.communicate(timeout=180)
        assert stdout.strip(), stderr
        return json.loads(stdout.splitlines()[-1])

    def processes_left(self) -> list[str]:
        """Command lines of live processes that inherited the mark."""
        return [" ".join(command) for pid, command in marked(self.mark).items() if pid != self.process.pid]

    def assert_no_file_left(self) -> None:
        """Of the ranks: what a driver that is no command leaves goes with its command's own folder."""
        assert self.temporary is not None
        assert not list(self.temporary.rglob("__autograph_generated_file*"))
        assert not list(self.temporary.glob(f"{PREFIX}*"))

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + _HANG_SECONDS
        while (left := self.processes_left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left
