"""A rank in the command's own process that stands still is told of and ended, unless somebody is debugging it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from shardmill.errors import TrainingError
from shardmill.jobs.observer import WARNING
from tests.train.inline_workers import HERE, inline_task, launch_watched
from tests.train.test_job import Recorder

# Of a program that ends by its watch; a process that imports, on a busy machine.
_HANG_SECONDS = 120


def test_a_hanging_rank_is_reported_and_ended():
    recorder, handler = Recorder(), signal.getsignal(signal.SIGUSR2)
    with pytest.raises(TrainingError, match="rank 0 .* hangs after step 0 of epoch 0: no progress for 6[02] s"):
        launch_watched(inline_task(), recorder, f"{HERE}:stands_still")
    assert "has made no progress for 3" in recorder.fields["rank_paused"][WARNING]
    assert signal.getsignal(signal.SIGUSR2) is handler


def test_a_step_that_sleeps_is_ended_by_what_steps_took():
    with pytest.raises(TrainingError, match="rank 0 .* hangs .*silent_seconds = 30, the longest .* in a step"):
        launch_watched(inline_task(progress_timeout_seconds=9000), Recorder(), f"{HERE}:sleeps_in_a_step")


@pytest.mark.starts("program")
def test_one_that_no_signal_reaches_takes_the_process_with_it():
    command = [sys.executable, "-m", "tests.programs.rank_that_no_signal_reaches"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_HANG_SECONDS, check=False)
    assert ended.returncode == 5
    assert "in holds_on" in ended.stderr and ended.stderr.splitlines()[-1].startswith("ERROR 5: rank 0 ")


@pytest.mark.drill
def test_a_read_without_an_answer_takes_the_process_with_it(tiny_uri, tmp_path):
    """The reader's threads are not waited for: they would hold the end up for as long as the storage is silent."""
    command = [sys.executable, "-m", "tests.programs.rank_that_gets_no_answer", tiny_uri, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_HANG_SECONDS, check=False)
    assert ended.returncode == 5, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("ERROR 5: rank 0 (")
    assert "hangs after step" in ended.stderr.splitlines()[-1]


def test_a_person_at_a_breakpoint_may_take_as_long_as_they_like():
    recorder = Recorder()
    with pytest.raises(TrainingError, match="nobody ended it"):
        launch_watched(inline_task(), recorder, f"{HERE}:is_looked_at")
    assert "rank_paused" not in recorder.events


def test_in_another_thread_nothing_is_watched():
    found: list[BaseException] = []

    def launch() -> None:
        try:
            launch_watched(inline_task(), Recorder(), f"{HERE}:tells_threads")
        except TrainingError as error:
            found.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(_HANG_SECONDS)
    assert "threads: ['MainThread'" in str(found[0]) and "inline-watch" not in str(found[0])
