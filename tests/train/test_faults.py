"""Selection of the cause among several faults, and its report."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardmill.errors import IntegrityError
from shardmill.values import Cursor
from tests.train.driver_process import ROOT
from train.contracts.values import from_json
from train.launching.faults import FaultKind, RankFault, error_of, failure_of, is_cause_known, merged, root_cause
from train.launching.messages import Failure
from train.launching.watchdog import ABORT_SECONDS, TICK_SECONDS
from train.strategies import STRATEGIES

HOROVODS_SECONDARY = STRATEGIES["horovod"].secondary_error
SECONDARY = RuntimeError("HorovodInternalError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer")


def fault(kind: FaultKind, rank: int, seen_seconds: float, error: Exception | None = None, **more) -> RankFault:
    failure = failure_of(error, HOROVODS_SECONDARY) if error is not None else None
    return RankFault(kind, rank, "host a, pid 1", seen_seconds, failure=failure, **more)


@pytest.mark.parametrize(
    ("faults", "rank"),
    [
        pytest.param(
            [fault(FaultKind.COLLECTIVE, 0, 1.0, SECONDARY), fault(FaultKind.KILLED, 1, 1.1)],
            1,
            id="killed after its secondary error",
        ),
        pytest.param(
            [fault(FaultKind.COLLECTIVE, 0, 1.0, SECONDARY), fault(FaultKind.FAILED, 2, 1.2, ValueError("x"))],
            2,
            id="own error after its secondary error",
        ),
        pytest.param(
            [fault(FaultKind.FAILED, 2, 1.2, ValueError("x")), fault(FaultKind.FAILED, 1, 1.1, ValueError("y"))],
            1,
            id="the first of two own errors",
        ),
        pytest.param(
            [fault(FaultKind.LAUNCHER, -1, 1.0), fault(FaultKind.KILLED, 1, 2.0)], 1, id="the launcher knows less"
        ),
        pytest.param(
            [fault(FaultKind.COLLECTIVE, 0, 1.0, SECONDARY), fault(FaultKind.LAUNCHER, -1, 1.5)],
            -1,
            id="but more than a secondary error",
        ),
        pytest.param(
            [
                fault(
                    FaultKind.KILLED,
                    0,
                    1.0,
                    returncode=-signal.SIGABRT,
                    output_tail="terminate called after throwing an instance of 'gloo::IoException'",
                ),
                fault(FaultKind.KILLED, 1, 1.1, returncode=-signal.SIGKILL),
            ],
            1,
            id="a survivor that Gloo aborted",
        ),
        pytest.param(
            [fault(FaultKind.COLLECTIVE, 1, 1.1, SECONDARY), fault(FaultKind.COLLECTIVE, 0, 1.0, SECONDARY)],
            0,
            id="secondary errors alone",
        ),
    ],
)
def test_the_cause_is_chosen(faults, rank):
    assert root_cause(faults, HOROVODS_SECONDARY).rank == rank
    assert root_cause(reversed(faults), HOROVODS_SECONDARY).rank == rank


def test_a_dead_rank_is_known_within_seconds_in_whatever_order_its_end_is_seen():
    """Well within 10 s: what is left of them is for the driver to look, and for the other ranks to end."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(1000):
        dead, *survivors = chance.sample(range(8), 1 + chance.randrange(1, 4))
        # The kernel closes its connection; who started it tells its exit; the others lose it in the middle of a sum.
        signs = [fault(FaultKind.KILLED, dead, chance.uniform(0, 2))]
        signs += [fault(FaultKind.KILLED, dead, chance.uniform(0, 2), returncode=-signal.SIGKILL)]
        signs += [fault(FaultKind.COLLECTIVE, rank, chance.uniform(0, 30), SECONDARY) for rank in survivors]
        signs += [fault(FaultKind.LAUNCHER, -1, chance.uniform(0, 30))] * chance.randrange(2)
        now, seen = 0.0, {}
        while not (seen and is_cause_known(seen.values(), now)):
            now += TICK_SECONDS
            for sign in signs:
                if now - TICK_SECONDS <= sign.seen_seconds < now:
                    seen[sign.rank] = merged(seen.get(sign.rank), sign)
            assert now < 10 - ABORT_SECONDS - 2.0
        assert root_cause(seen.values(), HOROVODS_SECONDARY).rank == dead


def test_two_sights_of_one_end_become_one():
    lost = fault(FaultKind.KILLED, 1, 1.0, last_step=Cursor(2, 7))
    seen = fault(FaultKind.KILLED, 1, 1.3, returncode=-signal.SIGSEGV)
    assert "was killed by SIGSEGV after step 7 of epoch 2" in str(error_of(merged(lost, seen)))
    told = fault(FaultKind.FAILED, 1, 1.4, ValueError("boom"))
    both = merged(merged(lost, seen), told)
    assert both.seen_seconds == 1.0
    assert "ValueError: boom" in str(error_of(both))


def test_an_error_of_ours_keeps_its_class_and_parts():
    found = IntegrityError("shard a is short", "expected 10 bytes", "run verify")
    error = error_of(fault(FaultKind.FAILED, 3, 1.0, found))
    assert isinstance(error, IntegrityError)
    assert str(error) == "shard a is short (rank 3, host a, pid 1); expected 10 bytes; run verify"


def test_a_traceback_is_a_note_and_the_line_names_its_place():
    try:
        raise ValueError("boom\nin two lines")
    except ValueError as error:
        told = error_of(fault(FaultKind.FAILED, 0, 1.0, error))
    assert "\n" not in str(told)
    assert "ValueError: boom in two lines (" in str(told) and "test_faults.py:" in str(told)
    assert "Traceback (most recent call last)" in told.__notes__[0]


GRAPH_ERROR = """Graph execution error:

Detected at node model_1/layer_1/GatherV2 defined at (most recent call last):
  File "{root}/train/rank/worker.py", line 192, in _train_steps

  File "{folder}/my_model.py", line 12, in call

indices = 7 is not in [0, 2)
\t [[{{{{node model_1/layer_1/GatherV2}}}}]] [Op:__inference_gradients_196]"""
TRACED_ERROR = """in user code:

    File "{folder}/my_model.py", line 12, in call  *
        return a + b

    ValueError: Dimensions must be equal
"""
CALLED_ERROR = """ValueError: the layer exploded
Traceback (most recent call last):

  File "{folder}/my_model.py", line 12, in explode
    raise ValueError("the layer exploded")
    ^^^^^^^^

ValueError: the layer exploded
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GRAPH_ERROR, "indices = 7 is not in [0, 2)"),
        (TRACED_ERROR, "Dimensions must be equal"),
        (CALLED_ERROR, "the layer exploded"),
    ],
)
def test_of_what_tensorflow_writes_into_an_error_the_cause_and_the_place_are_reported(text, said, tmp_path):
    """The texts are those of TensorFlow 2.18."""
    told = str(error_of(fault(FaultKind.FAILED, 0, 1.0, ValueError(text.format(folder=tmp_path, root=ROOT)))))
    assert told.startswith(
        f"rank 0 (host a, pid 1) failed before its first step: ValueError: {said} ({tmp_path}/my_model.py:12); "
    )


def test_the_place_is_the_users_own_line_and_not_where_a_library_raised(tmp_path):
    """Whatever lies in between: our loop calls the user's model, which calls a library, which calls others."""
    (tmp_path / "my_model.py").write_text("import json\n\ndef build(text):\n    return json.loads(text)\n")
    namespace = {}
    exec(compile((tmp_path / "my_model.py").read_text(), tmp_path / "my_model.py", "exec"), namespace)
    try:
        namespace["build"]("no JSON")
    except ValueError as error:
        told = str(error_of(fault(FaultKind.FAILED, 0, 1.0, error)))
    assert f"({tmp_path}/my_model.py:4)" in told
    # Nothing of the user's in it: where it was raised.
    with ThreadPoolExecutor(1) as executor:
        ours = executor.submit(from_json, Failure, b"no JSON").exception()
    assert ours is not None and "/pydantic/" in failure_of(ours).place


def test_what_horovod_says_of_another_rank_is_a_secondary_error_however_it_is_wrapped():
    assert failure_of(SECONDARY, HOROVODS_SECONDARY).collective
    try:
        try:
            raise SECONDARY
        except RuntimeError as inner:
            raise ValueError("step failed") from inner
    except ValueError as outer:
        assert failure_of(outer, HOROVODS_SECONDARY).collective
    assert not failure_of(ValueError("connection to the database refused"), HOROVODS_SECONDARY).collective
