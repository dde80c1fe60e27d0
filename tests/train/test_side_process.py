"""Work in a process of its own: what it answers, and what becomes of one that raises, leaves, crashes or hangs."""

from __future__ import annotations

import time

import pytest

from shardmill.errors import ShardmillError, TrainingError, UsageError
from tests.processes import is_running
from tests.programs.answer_in_every_way import Task
from train.contracts.values import to_json
from train.launching.side_process import Question, ask

PROGRAM = "tests.programs.answer_in_every_way"
pytestmark = pytest.mark.starts("ranks")


def asked(way: str, timeout_seconds: float | None = None) -> int:
    question = Question(PROGRAM, to_json(Task(way)), {}, timeout_seconds, "train.patience")
    return ask(question, int, lambda how: TrainingError(f"the work {how}"))


def test_what_it_has_started_is_gone_when_it_has_answered():
    # Who was sent SIGKILL may take a moment.
    pid, deadline_seconds = asked("answers"), time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline_seconds, f"process {pid}, which the work started, still runs"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("way", "kind", "said", "noted"),
    [
        ("refuses", UsageError, "too few; expected more; add some", "raise UsageError("),
        ("raises", TrainingError, r"the work failed: KeyError: 'absent' (.*answer_in_every_way.py:\d+)", "in work"),
        ("leaves", TrainingError, "the work exited with code 3: goodbye", "nothing to do here"),
        ("crashes", TrainingError, r"the work was killed by SIGSEGV (.*answer_in_every_way.py:\d+)", "Segmentation"),
    ],
)
def test_how_it_ends_is_reported(way: str, kind: type[ShardmillError], said: str, noted: str):
    with pytest.raises(kind, match=said.replace("(", r"\(").replace(")", r"\)")) as caught:
        asked(way)
    assert noted in "".join(caught.value.__notes__)


def test_one_that_hangs_is_ended():
    with pytest.raises(TrainingError, match="the work did not finish within train.patience = 1"):
        asked("hangs", timeout_seconds=1)
