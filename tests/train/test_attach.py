"""The launcher `attach`: processes that torchrun, or variables like SLURM's, start as one job, on one host or two."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.preflight import check_one_process
from pipeline.tree import PipelineTree
from shardmill.environments import ENVIRONMENTS, find_rank_environment
from shardmill.environments.known import first_host, tasks_per_node
from shardmill.environments.rank_environment import RankEnvironment
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig, load_tree
from shardmill.jobs.spark import loopback_warning as spark_loopback_warning
from tests.lab.scale import exhaustive
from tests.processes import children_of_all_threads
from tests.services.hosts import Host
from tests.services.marked import MARK, free_ports
from tests.train.driver_process import PIN, ROOT, WORKERS, Driver
from train.config import TrainConfig
from train.launching.attach import JOB_TOKEN_VARIABLE, Gate, _call_gate, attached, call_gate, check_world_size
from train.launching.attach_options import AttachOptions, host_of_rank_0, loopback_warning
from train.launching.connection import ProtocolError
from train.planning.setup import resolve
from train.tree import TrainTree

TOKEN = "secret of this job" * 2
SHARDMILL, TORCHRUN = (str(Path(sys.executable).with_name(name)) for name in ("shardmill", "torchrun"))
SLURM = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[07-08,11]",
         "SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "place", "host"),
    [
        (SLURM, RankEnvironment(3, 5, 1, 2), "gpu07"),
        # torchrun and mpirun that srun has started are nearer to this process than srun.
        (
            {**SLURM, "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            RankEnvironment(1, 4, 1, 2),
            "a",
        ),
        (
            {
                **SLURM,
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            RankEnvironment(0, 2, 0, 2),
            "127.0.0.1",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
         RankEnvironment(1, 2, 1, 2),
         "127.0.0.1"),
        # A pod of Kubernetes' PyTorchJob is a host of one process.
        ({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0"}, RankEnvironment(2, 3, 0, 1), "job-0"),
        ({"JOB_COMPLETION_INDEX": "2", "SHARDMILL_JOB_COMPLETIONS": "3"}, RankEnvironment(2, 3, 0, 1), ""),
        ({"SHARDMILL_RANK": "2", "SHARDMILL_WORLD_SIZE": "3"}, RankEnvironment(2, 3, 0, 1), ""),
    ],
)  # fmt: skip
def test_a_place_is_read_from_the_variables_of_whoever_started_us(environment, place, host):
    found = find_rank_environment(environment)
    assert found is not None and found[1] == place
    assert host_of_rank_0(environment, place) == host


def test_without_a_starter_there_is_no_place_and_nonsense_is_refused():
    assert find_rank_environment({"SLURM_JOB_NODELIST": "a"}) is None
    for rank, said in (("first", "torchrun are not numbers"), ("2", "rank 2 of 2")):
        with pytest.raises(UsageError, match=f"{said}.*`unset RANK WORLD_SIZE`"):
            find_rank_environment({"RANK": rank, "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("environment", "config", "said"),
    [
        ({}, {}, "no launcher has started this process.*torchrun, SLURM"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {"num_workers": 3}, "num_workers = 3, but torchrun started 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "without SHARDMILL_JOB_TOKEN.*openssl rand"),
        ({"RANK": "0", "WORLD_SIZE": "2", JOB_TOKEN_VARIABLE: "short"}, {}, "has 5 characters.*at least 16"),
        (
            {"SHARDMILL_RANK": "0", "SHARDMILL_WORLD_SIZE": "2", JOB_TOKEN_VARIABLE: TOKEN},
            {},
            "rank 0's host is not known.*train.attach.host",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", JOB_TOKEN_VARIABLE: TOKEN},
            {"attach": {"host": "192.0.2.1"}},
            "rank 0 cannot listen on 192.0.2.1:29610",
        ),
    ],
)
def test_a_job_that_cannot_meet_is_refused_at_once(monkeypatch, environment, config, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = {"num_workers": 2, "strategy": "torch_ddp", "launcher": "attach", **config}
    with pytest.raises(UsageError, match=said), attached(TrainConfig(**settings)):
        raise AssertionError("nothing may run")


def test_a_taken_port_is_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {**RankEnvironment(0, 2, 0, 2).environment(), JOB_TOKEN_VARIABLE: TOKEN}.items():
            monkeypatch.setenv(name, value)
        config = TrainConfig(num_workers=2, launcher="attach").with_options(AttachOptions(port=port))
        with pytest.raises(UsageError, match=rf"127.0.0.1:{port}.*free port"), attached(config):
            raise AssertionError("nothing may run")


def test_only_processes_that_know_the_token_wait_at_the_gate(monkeypatch):
    monkeypatch.setattr("train.launching.attach.LATE_SECONDS", 0.1)
    [port] = free_ports(1)
    address, gate = f"127.0.0.1:{port}", Gate("127.0.0.1", port, TOKEN, 3)
    try:
        for token, rank in (("another secret of 30 characters", 1), (TOKEN, 0), (TOKEN, 3)):
            with pytest.raises(ProtocolError, match="does not know this job's token, or refused"):
                _call_gate(address, token, rank, time.monotonic() + 60)
        known = call_gate(address, TOKEN, 2, time.monotonic() + 60)
        gate.begin("host:1", "nonce", lambda why: None)
        assert getattr(known.receive(), "address", "") == "host:1"
        # Who comes later hears of it, too.
        late = call_gate(address, TOKEN, 1, time.monotonic() + 60)
        assert getattr(late.receive(), "nonce", "") == "nonce"
    finally:
        gate.end(5, "because")
    assert [getattr(late.receive(), "line", "")] == ["because"]
    with pytest.raises(OSError):
        call_gate(address, TOKEN, 1, time.monotonic())


class Job:
    """Processes as SLURM's `srun -n` starts them, each of which runs tests/train/launch_driver.py."""

    def __init__(self, num_processes: int, worker: str, models: Path, stop_timeout_seconds: float) -> None:
        train = {"launcher": "attach", "num_workers": num_processes, "strategy": "torch_ddp",
                 "attach": {"port": free_ports(1)[0]},
                 "watch": {"start_timeout_seconds": 280, "stop_timeout_seconds": stop_timeout_seconds}}  # fmt: skip
        dataset = {"uri": PIN.uri, "version": PIN.version, "manifest_sha256": PIN.manifest_sha256}
        given = {"train": train, "dataset": dataset, "models_uri": str(models), "master": "", "worker": worker}
        mark = f"mark-{uuid.uuid4()}"
        self.processes = []
        for rank in range(num_processes):
            slurm = {
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NODEID": "0",
                "SLURM_STEP_NUM_TASKS": str(num_processes),
                "SLURM_STEP_TASKS_PER_NODE": str(num_processes),
                "SLURM_STEP_NODELIST": socket.gethostname(),
            }
            environment = {**os.environ, MARK: mark, JOB_TOKEN_VARIABLE: TOKEN, **slurm}
            command = [sys.executable, "-m", "tests.train.launch_driver", json.dumps(given)]
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            self.processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, **streams))
        self.driver = Driver(self.processes[0], mark)

    def ends(self) -> list[tuple[int, str]]:
        """Exit code and last words of every process but rank 0's."""
        ended = []
        for process in self.processes[1:]:
            _, stderr = process.communicate(timeout=180)
            ended.append((process.returncode, stderr.strip()))
        return ended


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start(num_processes: int, worker: str, stop_timeout_seconds: float = 1) -> Job:
        jobs.append(Job(num_processes, f"{WORKERS}:{worker}", tmp_path / "models", stop_timeout_seconds))
        return jobs[-1]

    yield start
    for job in jobs:
        for process in job.processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "killed", [pytest.param(1, marks=pytest.mark.starts("program")), pytest.param(0, marks=pytest.mark.drill)]
)
def test_a_killed_process_ends_all_others_with_the_cause(start, killed):
    job = start(3, "sleeps")
    job.driver.wait_for_step()
    job.processes[killed].kill()
    ends = job.ends()
    if killed:
        outcome = job.driver.outcome()
        assert outcome["error"] == "RankLost" and "rank 1 (host" in outcome["message"], outcome
        assert ends[1][0] == 5 and "ERROR 5: rank 1 (host" in ends[1][1] and "was killed" in ends[1][1]
    else:
        assert [code for code, _ in ends] == [5, 5]
        assert all("the process of rank 0 at 127.0.0.1" in line and "has ended" in line for _, line in ends)
    job.driver.assert_nothing_left()


@pytest.mark.drill
def test_a_signal_to_any_process_ends_the_job_as_a_signal_to_rank_0_does(start):
    job = start(2, "sleeps")
    job.driver.wait_for_step()
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.driver.outcome()["error"] == "Terminated"
    [(code, line)] = job.ends()
    assert code == 143 and "ERROR 143: terminated by SIGTERM" in line
    job.driver.assert_nothing_left()


@pytest.mark.drill
def test_a_signal_to_all_processes_at_once_is_one_request(start):
    """As scancel, torchrun or a cgroup's end give it: to the commands, to their ranks, and twice to rank 0's."""
    job = start(3, "stops_in_order", 60)
    job.driver.wait_for_step()
    ranks = {child for process in job.processes for child in children_of_all_threads(process.pid)}
    assert len(ranks) == 3
    for pid in (*ranks, *(process.pid for process in job.processes)):
        os.kill(pid, signal.SIGTERM)
    # Two signals at once would be one.
    job.driver.wait_for("stopping")
    job.processes[0].send_signal(signal.SIGTERM)
    outcome = job.driver.outcome()
    assert outcome["error"] == "Terminated" and outcome["message"].endswith("; stopped in order"), outcome
    assert [code for code, _ in job.ends()] == [143, 143]
    job.driver.assert_nothing_left()


@pytest.mark.drill
def test_a_rank_that_fails_while_all_are_stopped_gives_every_process_one_code(start):
    job = start(2, "fails_when_stopped", 60)
    job.driver.wait_for_step()
    job.processes[0].send_signal(signal.SIGTERM)
    assert job.driver.outcome()["error"] == "TrainingError"
    [(code, line)] = job.ends()
    assert code == 143 and "ERROR 143: terminated by SIGTERM" in line


@pytest.mark.drill
def test_ranks_of_a_job_do_not_see_its_token(start):
    job = start(2, "reports_variables_with_token")
    outcome = job.driver.outcome()
    assert outcome["events"].count([0, "no token"]) == outcome["events"].count([1, "no token"]) == 1, outcome
    assert job.ends() == [(0, "")]


@pytest.mark.drill
def test_torchrun_trains_as_processes_of_our_own_do(tiny_uri, tmp_path):
    """The whole command, as users start it: equal weights, all exit codes 0, and 0 again when nothing is left to do."""
    train = ["model=tests.train.torch_models:smooth", "strategy=torch_ddp", "epochs=3", "global_batch_size=24",
             "num_streams=6"]  # fmt: skip
    settings = [part for each in train for part in ("--set", f"train.{each}")]

    def command(name: str, *more: str) -> list[str]:
        return [SHARDMILL, "train", tiny_uri, "--workdir", str(tmp_path / name), *settings, *more]

    local = ("--set", "train.launcher=local", "--set", "train.num_workers=2", "--run-id", "one", "--json")
    here = subprocess.run(command("local", *local), cwd=ROOT, capture_output=True, text=True, check=False)
    assert here.returncode == 0, here.stderr

    attach = ("--set", "train.launcher=attach", "--set", f"train.attach.port={free_ports(1)[0]}", "--run-id", "one")
    for _ in range(2):
        started = subprocess.run(
            [TORCHRUN, "--standalone", "--nproc-per-node", "2", "--no-python", *command("attach", *attach)],
            cwd=ROOT, env={**os.environ, JOB_TOKEN_VARIABLE: TOKEN}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert started.returncode == 0, started.stderr
    summary = json.loads((tmp_path / "attach/runs/one/summary.json").read_text())
    expected = json.loads(here.stdout)["sections"]["train"]
    assert summary["train"]["weights_sha256"] == expected["weights_sha256"]
    assert (summary["train"]["launcher"], summary["train"]["world_size"]) == ("attach", 2)
    assert "measured in" in expected["exchange"] and "measured" not in expected["strategy_reason"]
    assert summary["stages"]["train"]["status"] == "skipped"
    assert [file.name for file in (tmp_path / "attach/runs").iterdir()] == ["one"]


def test_a_whole_run_is_for_one_process():
    with pytest.raises(UsageError, match=r"`shardmill etl` in one process, then start `shardmill train` in all"):
        check_one_process(PipelineTree.model_validate({"train": {"launcher": "attach"}}))


@pytest.mark.drill
@pytest.mark.parametrize(
    ("strategy", "model"), [("torch_ddp", "tests.train.torch_models:smooth"), exhaustive("horovod", "small_cnn")]
)
def test_two_hosts_train_as_one_does(tiny_uri, tmp_path, two_hosts: tuple[Host, Host], strategy: str, model: str):
    settings = [f"model={model}", f"strategy={strategy}", "epochs=2", "global_batch_size=24", "num_streams=6"]

    def command(name: str, *more: str) -> list[str]:
        sets = [part for each in (*settings, *more) for part in ("--set", f"train.{each}")]
        return [SHARDMILL, "train", tiny_uri, "--workdir", str(tmp_path / name), "--run-id", "one", *sets]

    here = subprocess.run(
        command("here", "launcher=local", "num_workers=2"), cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert here.returncode == 0, here.stderr

    torchrun = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", two_hosts[0].address,
                "--master-port", str(free_ports(1)[0]), "--no-python"]  # fmt: skip
    attach = command("there", "launcher=attach", f"attach.port={free_ports(1)[0]}")
    processes = [
        subprocess.Popen(
            host.command(*torchrun, "--node-rank", str(number), *attach),
            cwd=ROOT, env={**os.environ, JOB_TOKEN_VARIABLE: "t" * 32}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for number, host in enumerate(two_hosts)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=280)[0] for process in processes]
    finally:
        # Torchrun ends its ranks, which have sessions of their own.
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)
    assert [process.returncode for process in processes] == [0, 0], "".join(said)
    runs = [json.loads((tmp_path / name / "runs/one/summary.json").read_text())["train"] for name in ("here", "there")]
    # On a host of its own a rank computes with all of its processors: the bits differ.
    losses = [float.fromhex(run["final_loss_hex"]) for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (runs[1]["launcher"], runs[1]["world_size"]) == ("attach", 2)
    told = (tmp_path / "there/runs/one/events.jsonl").read_text()
    assert all(host.name in told for host in two_hosts)


def test_a_rank_that_waits_for_rank_0_says_so(monkeypatch, capsys):
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds, sleep=lambda seconds: later(seconds))

    def later(seconds: float) -> None:
        clock.seconds += seconds

    monkeypatch.setattr("train.launching.attach.time", clock)
    with socket.socket() as taken:
        # A port that nobody else gets, and on which nobody listens.
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(OSError):
            call_gate(f"127.0.0.1:{port}", "t" * 32, 1, 55.0)
    # Once, and again only six times as long after it.
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(rf"shardmill: rank 1 waits for 45 s more for rank 0 at 127.0.0.1:{port}: .*refused", line)


@pytest.mark.parametrize("host", ["gpu-07:29610", "http://gpu-07"])
def test_a_host_is_no_host_and_port(host):
    with pytest.raises(UsageError, match=f'train.attach.host = "{host}"; expected a host\'s name or address alone'):
        load_tree(TrainTree, None, (f"train.attach.host={host}",))
    train = load_tree(TrainTree, None, ("train.attach.host=fe80::1",)).train
    assert train.options(AttachOptions).host == "fe80::1"


@pytest.mark.parametrize("starter", ENVIRONMENTS.values(), ids=str)
def test_variables_that_another_program_has_left_are_named(monkeypatch, starter):
    # What nearer starters have left in the environment of the tests would count first.
    for each in ENVIRONMENTS.values():
        monkeypatch.delenv(each.rank, raising=False)
    monkeypatch.setenv(starter.rank, "1")
    monkeypatch.setenv(starter.world_size, "2")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    with pytest.raises(UsageError) as refused:
        resolve(TrainConfig(num_workers=1, strategy="single"), SparkConfig())
    assert f"{starter.rank} = 1, {starter.world_size} = 2" in refused.value.what
    assert f"`unset {starter.rank} {starter.world_size}`" in refused.value.fix
    with pytest.raises(UsageError, match=f"`unset {starter.rank} {starter.world_size}`"):
        check_world_size(3, SparkConfig())
    monkeypatch.delenv(starter.rank)
    assert resolve(TrainConfig(num_workers=1, strategy="single"), SparkConfig()).config.launcher == "inline"


def of_hosts(monkeypatch, addresses: dict[str, list[str]]) -> None:
    """Names resolve as a host's /etc/hosts may have them."""

    def look_up(host: str, port: object, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in addresses and not host[0].isdigit() and ":" not in host:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses.get(host, [host])]

    monkeypatch.setattr("socket.getaddrinfo", look_up)


def test_a_loopback_address_of_rank_0_is_warned_of_if_ranks_are_on_other_hosts(monkeypatch):
    of_hosts(monkeypatch, {"gpu-1": ["127.0.1.1"], "gpu-2": ["10.0.0.2"], "gpu-3": ["10.0.0.3", "127.0.1.1"]})
    here, there, together = RankEnvironment(0, 4, 0, 2), RankEnvironment(2, 4, 0, 2), RankEnvironment(0, 2, 0, 2)
    assert all(loopback_warning(host, together) == "" for host in ("gpu-1", "127.0.0.1", "::1"))
    for place, does in (
        (here, "rank 0 is rank 0 at gpu-1, which is 127.0.1.1"),
        (there, "rank 2 calls rank 0 at gpu-1"),
    ):
        warning = loopback_warning("gpu-1", place)
        assert warning.startswith(does) and "set train.attach.host to the address of rank 0's host" in warning
    assert loopback_warning("127.0.0.1", here) and loopback_warning("::1", here)
    # It listens on one of them, and may be called at any.
    assert loopback_warning("gpu-3", here) and not loopback_warning("gpu-3", there)
    for host in ("gpu-2", "10.0.0.9", "unknown"):
        assert loopback_warning(host, here) == loopback_warning(host, there) == ""


def test_rank_0_warns_as_it_begins_to_listen(monkeypatch, capsys):
    monkeypatch.setattr("train.launching.attach.LATE_SECONDS", 0.1)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.1.1", JOB_TOKEN_VARIABLE: TOKEN}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = TrainConfig(num_workers=2, strategy="torch_ddp", launcher="attach")
    config = config.with_options(AttachOptions(port=free_ports(1)[0]))
    with attached(config):
        assert "WARNING: rank 0 is rank 0 at 127.0.1.1: a loopback address" in capsys.readouterr().err


def test_sparks_driver_at_a_loopback_address_is_warned_of_if_executors_may_be_elsewhere():
    for name in ("spark.driver.host", "spark.driver.bindAddress"):
        settings = {"spark.driver.host": "10.0.0.1", name: "127.0.0.1"}
        for master in ("yarn", "spark://10.0.0.5:7077", "k8s://https://10.0.0.5:6443"):
            assert spark_loopback_warning(master, settings.get).startswith(f"{name} = 127.0.0.1 is a loopback address")
        for master in ("local[2]", "local-cluster[2,1,1024]", "spark://127.0.0.1:7077"):
            assert spark_loopback_warning(master, settings.get) == ""
    assert spark_loopback_warning("yarn", {"spark.driver.host": "10.0.0.1"}.get) == ""


def test_slurms_lists_are_read():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert [first_host(nodes) for nodes in ("a,b", "n[3-7,9],m2", "r[1-2]n[05-06]", "login", "")] == [
        "a", "n3", "r1n05", "login", ""
    ]  # fmt: skip
