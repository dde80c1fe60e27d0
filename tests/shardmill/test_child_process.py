"""A child that answers messages: its answers, and how its exit is reported."""

from __future__ import annotations

import os
import select
import signal
import threading
import time

import pytest

from shardmill.child_process import ChildDied, ChildProcess, calling, start_child
from tests.import_graph import ROOT

MAIN = calling("tests.programs.echo_messages:main", str(ROOT))


def started() -> ChildProcess:
    return start_child(MAIN, {**os.environ, "PYTHONPATH": str(ROOT)})


def is_gone(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.starts("program")
def test_messages_of_any_size_arrive_one_by_one():
    child = started()
    try:
        large = os.urandom(3_000_000)
        # It answers while we still send.
        sending = threading.Thread(target=lambda: [child.send({"n": n}, body) for n, body in enumerate((b"", large))])
        sending.start()
        assert child.receive() == ({"n": 0}, b"")
        assert child.receive() == ({"n": 1}, large)
        sending.join()
    finally:
        child.end()
    assert is_gone(child.process_id)
    child.end()


@pytest.mark.starts("program")
def test_ctrl_c_while_a_child_imports_is_its_parents():
    child = started()
    try:
        for _ in range(20):
            os.kill(child.process_id, signal.SIGINT)
            time.sleep(0.001)
        child.send({"n": 0}, b"still here")
        assert child.receive() == ({"n": 0}, b"still here")
    finally:
        child.end()


@pytest.mark.starts("program")
@pytest.mark.parametrize(("how", "status"), [({"exit": 3}, 3), ({"kill": 9}, -9), ({"kill": int(signal.SIGSEGV)}, -11)])
def test_a_child_that_died_tells_its_exit(how: dict[str, int], status: int):
    child = started()
    child.send(how)
    with pytest.raises(ChildDied, match=f"exit status {status}") as died:
        child.receive()
    assert died.value.status == status and is_gone(child.process_id)
    child.end()


@pytest.mark.starts("program")
def test_a_child_that_ended_before_it_was_asked_tells_its_exit():
    child = started()
    os.kill(child.process_id, signal.SIGKILL)
    os.waitid(os.P_PID, child.process_id, os.WEXITED | os.WNOWAIT)
    child.send({}, bytes(3_000_000))
    with pytest.raises(ChildDied, match="exit status -9"):
        child.receive()


@pytest.mark.starts("program")
def test_a_wait_ends_an_answer_that_takes_too_long():
    def wait(pipe: select.poll) -> None:
        if not pipe.poll(200):
            raise TimeoutError

    child = started()
    try:
        child.send({"sleep": 1000})
        with pytest.raises(TimeoutError):
            child.receive(wait)
    finally:
        child.end()
    assert is_gone(child.process_id)
