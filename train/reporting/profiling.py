"""Records a profile of some steps on each rank with its backend: `train.log.profile_steps`.

A profile is worth no training: what goes wrong with it is a warning.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

from shardmill.jobs.observer import WARNING
from shardmill.storage import join_uri
from shardmill.stores import open_store
from train.api import Recording
from train.backends import BACKENDS
from train.contracts.activities import Activity, during
from train.contracts.task import WorkerTask
from train.contracts.values import PROFILES, Reporter
from train.settings import steps_of
from train.strategies import STRATEGIES


class StepProfiler:
    """Records the global steps `train.log.profile_steps` of one rank, as far as they are trained while it is open.

    <training>/profiles/steps-10-15/rank-0/...      what the tools of the framework read
    """

    def __init__(self, task: WorkerTask, rank: int, reporter: Reporter) -> None:
        self._config = task.config
        self._steps = steps_of(task.config.log.profile_steps)
        self._store = open_store(task.models_uri)
        self._folder = f"{task.training_dir}/{PROFILES}/steps-{self._steps.start}-{self._steps.stop}/rank-{rank}"
        self._rank = rank
        self._reporter = reporter
        self._recording: Recording | None = None
        self._here, self._exchange = ExitStack(), ExitStack()
        self._recorded: list[int] = []

    def begin(self, global_step: int) -> bool:
        """Called before each step: starts to record, if it is time. -> whether it did."""
        if global_step not in self._steps or self._recording is not None:
            return False
        with during(self._reporter, Activity("starting a profile")), self._reported(), ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardmill-profile-")))
            stack.callback(self._upload, folder)
            recording = BACKENDS[self._config.backend].record(folder)
            stack.callback(recording.stop)
            self._exchange.enter_context(STRATEGIES[self._config.strategy].timeline(folder))
            self._recording, self._here = recording, stack.pop_all()
        return True

    def step(self, global_step: int) -> AbstractContextManager[None]:
        """Around the computation of each step: marks it in what is recorded."""
        if self._recording is None:
            return nullcontext()
        self._recorded.append(global_step)
        return self._recording.step(global_step)

    def end(self, global_step: int) -> None:
        """Called after each step, with the number of the next one."""
        if self._recording is not None and global_step not in self._steps:
            self._finish()

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            # Nobody answers any more if a peer is lost. What was recorded here may say why.
            self._exchange.pop_all()
        if self._recording is not None:
            self._finish()
        missing = len(self._steps) - len(self._recorded)
        if error is None and missing and self._rank == 0:
            counted = "they are counted from 0 over all epochs"
            self._warn(f"{missing} of {len(self._steps)} steps were not trained by this attempt; {counted}")

    def _finish(self) -> None:
        self._recording = None
        with during(self._reporter, Activity("writing a profile")), self._reported():
            self._exchange.close()
            self._here.close()
            if self._rank == 0:
                path = join_uri(self._store.uri, self._folder.rpartition("/")[0])
                self._reporter.event("profile", {"path": path, "steps": len(self._recorded)})

    def _upload(self, folder: Path) -> None:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self._store.put_file(f"{self._folder}/{file.relative_to(folder)}", file)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a profiler is the framework's, and may need rights that this process has not
            self._steps = range(0)
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, problem: str) -> None:
        self._reporter.event(
            "profile_incomplete", {WARNING: f"train.log.profile_steps = {self._config.log.profile_steps!r}: {problem}"}
        )
