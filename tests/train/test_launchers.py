"""Ranks that end in every way there is, and what speaks at their ports: nothing is left, the first cause is told."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.errors import ShardmillError, TrainingError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.jobs.process import PREFIX, Terminated
from shardmill.jobs.reach import planted
from shardmill.stores import open_store
from shardmill.values import DatasetPin, Nonce
from tests.lab.scale import exhaustive
from tests.processes import LOCAL, has_loaded, is_running, listeners
from tests.services.marked import marked
from tests.train.driver_process import PIN, WORKERS, Driver, hearing_signals, start_driver
from tests.train.forked_ranks import forked_ranks
from tests.train.launch_driver import Teller
from tests.train.multi_rank_workers import HELD_FROM, let_go
from tests.train.training import check_terms
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import TrainResult
from train.launching import LAUNCHERS
from train.launching.rank import DEFAULT_WORKER, EXIT_ABORTED
from train.models.user import source_sha256
from train.planning.setup import resolve
from train.reporting.run_log import RunLog
from train.strategies.horovod import GLOO_ADDRESS, GuardedRendezvous, address_variables, listening_on, rank_variables

MODELS = "tests.train.models_under_test"
HOURS = {"silent_seconds": 7200, "progress_timeout_seconds": 9000}
# Every launcher with the world sizes at which it is tried as users have it.
WORLDS = {"inline": 1, "local": 3, "horovod_spark": 2, "spark_barrier": 2, "attach": 3}
ELSEWHERE = ("attach", "spark_barrier", "horovod_spark")


@pytest.fixture
def start(tmp_path):
    """start(launcher, num_workers, worker, **train) -> a running Driver."""
    drivers = []

    def start(launcher: str, num_workers: int, worker: str = "", dataset: DatasetPin = PIN, **train: object) -> Driver:
        strategy = "single" if num_workers == 1 else "horovod"
        given = {"launcher": launcher, "num_workers": num_workers, "strategy": strategy, **train}
        drivers.append(start_driver(tmp_path, given, worker=worker, dataset=dataset))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.kill()


@pytest.fixture(scope="module")
def dataset(tiny_uri) -> DatasetPin:
    return open_dataset(tiny_uri).pin


class Here:
    """A driver in this process, with what it was told of its ranks; they are forked."""

    def __init__(self, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.teller = Teller()
        self._models = models
        self._temporary = models / "temporary"
        self._temporary.mkdir()
        monkeypatch.setenv("TMPDIR", str(self._temporary))

    def launch(
        self,
        worker: str = DEFAULT_WORKER,
        num_workers: int = 2,
        dataset: DatasetPin = PIN,
        reach: Nonce | None = None,
        **train: object,
    ) -> TrainResult:
        strategy = "single" if num_workers == 1 else "horovod"
        given = {"launcher": "local", "num_workers": num_workers, "strategy": strategy, "watch": HOURS, **train}
        config = resolve(TrainConfig.model_validate(given), SparkConfig()).config
        task = WorkerTask(config, dataset, str(self._models), "trainings/test", source_sha256(config.model))
        task = task if reach is None else replace(task, reach=reach)
        with forked_ranks("keras" if worker == DEFAULT_WORKER else "none"):
            return LAUNCHERS[config.launcher].launch(task, SparkConfig(), self.teller, worker=worker)

    def error(self, *given: object, **train: object) -> ShardmillError:
        """That the ranks end with; nothing of them is left."""
        with pytest.raises(ShardmillError) as caught:
            self.launch(*given, **train)  # pyright: ignore[reportArgumentType]
        self.assert_nothing_left()
        return caught.value

    def assert_nothing_left(self) -> None:
        assert not [pid for pid in self.teller.pids if is_running(pid)]
        assert not list(self._temporary.rglob("__autograph_generated_file*"))
        assert not list(self._temporary.glob(f"{PREFIX}*"))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Here:
    return Here(tmp_path, monkeypatch)


def test_every_launcher_is_tried():
    assert set(WORLDS) == set(LAUNCHERS)


@pytest.mark.parametrize(
    ("launcher", "world_size"),
    [*(pytest.param(each, WORLDS[each], marks=pytest.mark.starts("program")) for each in ("inline", "local")),
     *(pytest.param(each, WORLDS[each], marks=pytest.mark.drill) for each in ELSEWHERE),
     *(exhaustive("local", ranks) for ranks in (1, 2))],
)  # fmt: skip
def test_every_rank_runs_and_rank_0_answers(start, launcher, world_size):
    driver = start(launcher, world_size, f"{WORKERS}:well")
    outcome = driver.outcome()
    assert (outcome.get("weights_sha256"), outcome.get("world_size")) == ("0" * 64, world_size), outcome
    # Each rank gives two ids a step, which tell step and place: all of them, in rank order.
    expected = [[f"{step:08x}{place:08x}" for place in range(2 * world_size)] for step in range(4)]
    assert outcome["sample_ids"] == expected
    assert sorted(rank for rank, name in outcome["events"] if name == "resumed") == list(range(world_size))
    # Whatever the frameworks of a launcher print beside it. In the driver's own process what is written to a descriptor
    # stays where it goes.
    written = ["no end of a line"] if launcher != "inline" else []
    for rank in range(world_size):
        assert {f"hello from {rank}", *written} <= set(outcome["output"][str(rank)].splitlines()), outcome
    driver.assert_nothing_left()
    driver.assert_no_file_left()


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    ("worker", "watch", "error", "said"),
    [
        ("raises_on_last_rank", HOURS, "TrainingError", ["rank 1", "step 0 of epoch 0",
                                                         "ValueError: the third layer exploded"]),
        ("finds_altered_shard", HOURS, "IntegrityError", ["shard a.parquet was altered (rank 1",
                                                          "expected CRC 1; run verify"]),
        ("is_killed", HOURS, "RankLost", ["rank 1", "was killed by SIGKILL after step 0 of epoch 0", "host "]),
        ("exits_early", HOURS, "TrainingError", ["rank 1", "exited with code 7", "no licence found"]),
        ("is_stopped", {"silent_seconds": 4}, "RankLost", ["rank 1", "stopped sending heartbeats after step 0"]),
        ("hangs", {"silent_seconds": 7200, "progress_timeout_seconds": 6}, "RankLost",
         ["rank 1 (host ", "hangs after step 0 of epoch 0", "in its own work; rank 0 waiting in an allreduce"]),
        # By nothing but what steps took: without progress a rank has 600 s.
        ("sleeps_in_a_step", {"silent_seconds": 4}, "RankLost",
         ["rank 1 (host ", "watch.silent_seconds = 4, the longest", "in a step; rank 0 waiting in"]),
    ],
)  # fmt: skip
def test_the_first_failing_rank_is_reported_and_nothing_is_left(here, worker, watch, error, said):
    failed = here.error(f"{WORKERS}:{worker}", watch=watch)
    assert type(failed).__name__ == error, failed
    assert all(part in str(failed) for part in said), failed
    assert "closed by peer" not in str(failed)


@pytest.mark.parametrize(
    ("launcher", "worker"),
    [
        pytest.param("local", "is_killed", marks=pytest.mark.starts("program")),
        *(pytest.param(each, "is_killed", marks=pytest.mark.drill) for each in ELSEWHERE),
        *(exhaustive(each, "is_stopped") for each in ELSEWHERE),
    ],
)  # fmt: skip
def test_a_dead_rank_ends_the_job_with_every_launcher(start, launcher, worker):
    driver = start(launcher, 2, f"{WORKERS}:{worker}", watch=HOURS if worker == "is_killed" else {"silent_seconds": 5})
    outcome = driver.outcome()
    how = {"is_killed": "was killed by SIGKILL", "is_stopped": "stopped sending heartbeats"}[worker]
    assert outcome["error"] == "RankLost" and f"{how} after step 0" in outcome["message"], outcome
    driver.assert_nothing_left()


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        # Its own line, and what it printed last.
        ("exploding", "TrainingError", ("the third layer exploded", "models_under_test.py:4",
                                        "the second layer smokes")),
        ("killed", "RankLost", ("was killed by SIGKILL after step",)),
    ],
)  # fmt: skip
def test_real_training_reports_the_cause_and_not_the_survivors_echo(here, dataset, model, error, said):
    train = {"model": f"{MODELS}:{model}", "global_batch_size": 24, "num_streams": 6, "epochs": 2}
    failed = here.error(dataset=dataset, **train)
    assert (type(failed).__name__, failed.exit_code) == (error, 5), failed
    told = "\n".join([str(failed), *getattr(failed, "__notes__", [])])
    assert str(failed).startswith("rank 1 ") and all(part in told for part in said), told


@pytest.mark.starts("ranks")
@pytest.mark.parametrize("lost", ["models", "dataset"])
def test_a_rank_on_a_host_without_the_drivers_storage_ends_before_it_works(here, tmp_path, dataset, lost):
    models = open_store(tmp_path)
    with planted(models) as nonce:
        if lost == "models":
            # Another host's folder of the same name.
            models.delete(nonce.path)
        failed = here.error(f"{WORKERS}:well", dataset=PIN if lost == "dataset" else dataset, reach=nonce)
    assert isinstance(failed, UsageError), failed
    place = str(tmp_path) if lost == "models" else PIN.uri
    assert f"host {socket.gethostname()} does not" in str(failed) and place in str(failed)
    assert [name for _, name in here.teller.events].count("resumed") == 0


@pytest.mark.starts("ranks")
@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_a_worker_that_leaves_with_0_has_failed(here, launcher):
    failed = here.error(f"{WORKERS}:leaves", num_workers=1, launcher=launcher)
    assert type(failed) is TrainingError and "rank 0" in str(failed) and "SystemExit: 0" in str(failed)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("worker", "limits"),
    [("is_slow", {"silent_seconds": 8, "progress_timeout_seconds": 4}), ("plods", {"progress_timeout_seconds": 10})],
)
def test_straggler_is_not_killed(here, worker, limits):
    """On the real clock; test_deadlines.py has the same with numbers."""
    assert here.launch(f"{WORKERS}:{worker}", watch=limits).world_size == 2


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("local", marks=pytest.mark.starts("program")),
        pytest.param("spark_barrier", marks=pytest.mark.drill),
        exhaustive("attach"),
        exhaustive("horovod_spark"),
    ],
)
def test_killed_driver_leaves_no_rank(start, launcher):
    driver = start(launcher, 2, f"{WORKERS}:sleeps")
    driver.wait_for_step()
    driver.process.kill()
    driver.process.wait()
    driver.assert_nothing_left()


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)], ids=["INT", "TERM"]
)
def test_interrupted_driver_ends_its_ranks(here, number, error):
    """On SIGTERM ranks that come to no other step are waited for, but not for long."""
    here.teller.at_step = lambda: os.kill(os.getpid(), number)
    with hearing_signals(), pytest.raises(error):
        here.launch(f"{WORKERS}:sleeps", watch={**HOURS, "stop_timeout_seconds": 1})
    here.assert_nothing_left()


@pytest.mark.starts("program")
def test_a_rank_whose_parent_died_before_it_started_ends_at_once():
    # Nothing else is set: it must end before it looks for its driver.
    orphan = subprocess.run([sys.executable, "-m", "train.launching.rank", "0"], timeout=60, check=False)
    assert orphan.returncode == EXIT_ABORTED


def test_inline_runs_one_rank_only():
    task = WorkerTask(TrainConfig(num_workers=2, strategy="horovod"), PIN, "/nowhere", "trainings/test", "")
    with pytest.raises(UsageError, match="num_workers = 2.*'local' or 'spark_barrier'"):
        LAUNCHERS["inline"].launch(task, SparkConfig(), RunLog(SilentObserver()))


@pytest.mark.needs("horovod")
def test_spark_with_too_few_slots_is_refused_before_it_starts():
    config = TrainConfig(num_workers=3, strategy="horovod", launcher="horovod_spark")
    task = WorkerTask(config, PIN, "/nowhere", "trainings/test", "")
    with pytest.raises(UsageError, match=r"a training of 3 ranks, but Spark at 'local\[2\]' runs 2 task.*local\[3\]"):
        LAUNCHERS["horovod_spark"].launch(task, SparkConfig(master="local[2]"), RunLog(SilentObserver()))


def test_unknown_launcher_gets_the_nearest_name():
    with pytest.raises(UsageError, match="'horovod-spark'.*did you mean 'horovod_spark'"):
        LAUNCHERS["horovod-spark"]


# What Gloo's ranks look for, by names that everybody can guess.
KEYS = [f"/{scope}/{key}" for scope in ("global", "cross_0", "local_127.0.0.1") for key in ("0", "1", "0/1")]


def ask(port: int, method: str, path: str, body: bytes | None = None, timeout: float = 60) -> tuple[int, bytes]:
    """Status and content; status 0 if nobody speaks HTTP there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
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


@pytest.mark.needs("horovod")
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


@pytest.mark.needs("horovod")
def test_the_end_waits_for_nobody():
    GuardedRendezvous("127.0.0.1", "s" * 64).stop()
    server = GuardedRendezvous("127.0.0.1", "s" * 64)
    server.init([])
    with socket.create_connection(("127.0.0.1", server.start())) as silent:
        silent.sendall(b"GET /")
        time.sleep(0.2)
        end = threading.Thread(target=server.stop, daemon=True)
        end.start()
        end.join(60)
        assert not end.is_alive()


@pytest.mark.needs("horovod")
def test_ranks_are_placed_as_horovod_places_them():
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

    for hosts in ("a:1", "a:3", "a:2,b:2", "a:2,b:1", "a:1,b:3,c:2"):
        theirs = get_host_assignments(parse_hosts(hosts), sum(int(each[-1]) for each in hosts.split(",")))
        ours = rank_variables([slot.hostname.encode() for slot in theirs])
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


@pytest.mark.needs("horovod")
def test_an_interface_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match=r"train.nics: .* has no interface 'nosuch0' with an IPv4"):
        with listening_on({"nosuch0"}):
            pass


@pytest.mark.needs("horovod")
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
def test_training_under_attack_ends_well_and_listens_to_this_machine_only(
    start, tmp_path, monkeypatch, dataset, launcher
):
    # Ranks do not end before they were seen.
    monkeypatch.setenv(HELD_FROM, "1")
    train = {"global_batch_size": 24, "num_streams": 6, "epochs": 40 if launcher == "local" else 20}
    driver = start(launcher, 2, "tests.train.multi_rank_workers:every_rank_is_held", dataset, **train)
    seen, answers, others = set(), set(), set()
    # On Spark ranks listen until all are there, which may be too short to be seen: one of them is held up meanwhile.
    # Under `local` rank 0 has the rendezvous, which listens for longer.
    held = 0
    while driver.process.poll() is None:
        seen |= listeners(driver.mark)
        if any(each.is_rank for each in seen):
            let_go(tmp_path / "models")
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
            answer = ask(port, "PUT", KEYS[0], b"\0" * 64, timeout=1)[0]
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
