"""An attacker at the ports of a training: nothing is answered, nothing listens beyond this machine.

Gloo's own ports are left in peace: a stranger's connection while ranks meet makes them hang (docs/decisions/0006). The
deadline for progress is there for that (tests/train/test_deadlines.py).
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
import time

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.lab.scale import exhaustive
from tests.processes import LOCAL, has_loaded, listeners
from tests.services.marked import marked
from tests.train.test_launchers import dataset, start
from tests.train.training import check_terms
from train.config import TrainConfig
from train.strategies.horovod_rendezvous import GLOO_ADDRESS, GuardedRendezvous, address_variables, listening_on, places

__all__ = ["dataset", "start"]

# What Gloo's ranks look for, by names that everybody can guess.
KEYS = [f"/{scope}/{key}" for scope in ("global", "cross_0", "local_127.0.0.1") for key in ("0", "1", "0/1")]


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and content; status 0 if nobody speaks HTTP there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


@pytest.fixture
def store():
    server = GuardedRendezvous("127.0.0.1", "s" * 64)
    server.init([])
    port = server.start()
    yield port, f"/{'s' * 64}:{port}"
    server.stop()


def test_a_key_is_written_once_and_by_those_who_know_the_path(store):
    port, root = store
    assert address_variables("127.0.0.1", port, "s" * 64)[GLOO_ADDRESS] == f"127.0.0.1:{port}/{'s' * 64}"
    assert ask(port, "PUT", "/global/0", b"mine")[0] == 403
    assert ask(port, "GET", f"{root}/global/0")[0] == 404
    assert ask(port, "PUT", f"{root}/global/0", b"first")[0] == 200
    assert ask(port, "PUT", f"{root}/global/0", b"first")[0] == 200
    assert ask(port, "PUT", f"{root}/global/0", b"second")[0] == 409
    assert ask(port, "DELETE", f"{root}/global/0")[0] == 200
    assert ask(port, "GET", f"{root}/global/0") == (200, b"first")
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        assert ask(port, method, "/pyproject.toml", b"")[0] == 403
        assert ask(port, method, f"/{'t' * 64}:{port}/global/0", b"")[0] == 403


def test_the_end_waits_for_nobody():
    GuardedRendezvous("127.0.0.1", "s" * 64).stop()
    server = GuardedRendezvous("127.0.0.1", "s" * 64)
    server.init([])
    with socket.create_connection(("127.0.0.1", server.start())) as silent:
        silent.sendall(b"GET /")
        time.sleep(0.2)
        end = threading.Thread(target=server.stop, daemon=True)
        end.start()
        end.join(10)
        assert not end.is_alive()


def test_ranks_are_placed_as_horovod_places_them():
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

    for hosts in ("a:1", "a:3", "a:2,b:2", "a:2,b:1", "a:1,b:3,c:2"):
        theirs = get_host_assignments(parse_hosts(hosts), sum(int(each[-1]) for each in hosts.split(",")))
        ours = places([slot.hostname.encode() for slot in theirs])
        assert ours == [
            {
                "HOROVOD_RANK": str(slot.rank),
                "HOROVOD_SIZE": str(slot.size),
                "HOROVOD_LOCAL_RANK": str(slot.local_rank),
                "HOROVOD_LOCAL_SIZE": str(slot.local_size),
                "HOROVOD_CROSS_RANK": str(slot.cross_rank),
                "HOROVOD_CROSS_SIZE": str(slot.cross_size),
                "HOROVOD_HOSTNAME": slot.hostname,
            }
            for slot in theirs
        ]


def test_an_interface_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match=r"train.nics: .* has no interface 'nosuch0' with an IPv4"):
        with listening_on({"nosuch0"}):
            pass


@pytest.mark.parametrize(
    ("launcher", "strategy", "master"),
    [
        ("local", "horovod", "local[2]"),
        ("horovod_spark", "horovod", "local[2]"),
        ("spark_barrier", "torch_ddp", "yarn"),
    ],
)
def test_the_driver_looks_for_the_interfaces_of_ranks_on_its_own_machine(launcher, strategy, master):
    given = TrainConfig(num_workers=2, launcher=launcher, strategy=strategy, nics=("lo",))
    unknown = given.model_copy(update={"nics": ("lo", "nosuch0")})
    check_terms(given, SparkConfig(master=master))
    if master == "yarn":
        # Other machines have other interfaces.
        check_terms(unknown, SparkConfig(master=master))
    else:
        with pytest.raises(UsageError, match=r"no interface 'nosuch0' .*; it has .*\blo\b.*; name an interface"):
            check_terms(unknown, SparkConfig(master=master))


@pytest.mark.drill
@pytest.mark.parametrize("launcher", ["local", exhaustive("horovod_spark")])
def test_training_under_attack_ends_well_and_listens_to_this_machine_only(start, dataset, launcher):
    train = {"global_batch_size": 24, "num_streams": 6, "epochs": 40 if launcher == "local" else 20}
    driver = start(launcher, 2, dataset=dataset, **train)
    seen, answers, others = set(), set(), set()
    # On Spark ranks listen until all are there, which may be too short to be seen: one of them is held up meanwhile.
    # Under `local` rank 0 has the rendezvous, which listens for longer.
    held = 0
    while driver.process.poll() is None:
        seen |= listeners(driver.mark)
        if any(each.is_rank for each in seen):
            if held:
                os.kill(held, signal.SIGCONT)
                held = 0
        elif launcher == "horovod_spark" and not held:
            ranks = [pid for pid, command in marked(driver.mark).items() if "train.launching.rank" in command]
            # Not before all have told each other their devices: nobody would go on to listen.
            if len(ranks) == 2 and has_loaded(ranks[1], "tensorflow"):
                held = ranks[1]
                os.kill(held, signal.SIGSTOP)
        for port in (
            {each.port for each in seen} - {each.port for each in seen if each.is_rank or each.is_spark} - others
        ):
            answer = ask(port, "PUT", KEYS[0], b"\0" * 64)[0]
            if answer == 0:
                # No HTTP there. Asking on and on would find the rendezvous too late.
                others.add(port)
            answers |= {answer, *(ask(port, "PUT", path, b"\0" * 64)[0] for path in KEYS if answer)}
        time.sleep(0.05)
    outcome = driver.outcome()
    assert outcome.get("world_size") == 2, outcome
    driver.assert_no_file_left()
    assert any(each.is_rank for each in seen)
    assert {each.address for each in seen} <= LOCAL, seen
    # On Spark the driver has the rendezvous, which was among those who were asked, and refused. Under `local` it is at
    # rank 0: a rank's ports are left in peace (see above), and the first test asks it alone.
    assert launcher == "local" or 403 in answers
    assert not any(200 <= answer < 300 for answer in answers), answers
