"""The launcher `attach`: real processes that torchrun, or variables like SLURM's, start as one job; they end as one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from pipeline.preflight import check_one_process
from pipeline.tree import PipelineTree
from shardmill.environments import find_place
from shardmill.environments.place import Place
from shardmill.errors import UsageError
from tests.processes import children_of_all_threads
from tests.services.marked import MARK, free_ports
from tests.train.driver_process import PIN, ROOT, WORKERS, Driver
from train.config import TrainConfig
from train.launching.attach import JOB_TOKEN_VARIABLE, Gate, attached, call_gate
from train.launching.attach_options import AttachOptions, host_of_rank_0
from train.launching.connection import ProtocolError

TOKEN = "secret of this job" * 2
SHARDMILL = str(Path(sys.executable).with_name("shardmill"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SLURM = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("environment", "place", "host"),
    [
        (SLURM, Place(3, 5, 1, 2), "gpu07"),
        # torchrun and mpirun that srun has started are nearer to this process than srun.
        (
            {**SLURM, "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            Place(1, 4, 1, 2),
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
            Place(0, 2, 0, 2),
            "127.0.0.1",
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, Place(1, 2, 1, 2),
         "127.0.0.1"),
        # A pod of Kubernetes' PyTorchJob is a host of one process.
        ({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0"}, Place(2, 3, 0, 1), "job-0"),
        ({"JOB_COMPLETION_INDEX": "2", "SHARDMILL_JOB_COMPLETIONS": "3"}, Place(2, 3, 0, 1), ""),
        ({"SHARDMILL_RANK": "2", "SHARDMILL_WORLD_SIZE": "3"}, Place(2, 3, 0, 1), ""),
    ],
)  # fmt: skip
def test_a_place_is_read_from_the_variables_of_whoever_started_us(environment, place, host):
    found = find_place(environment)
    assert found is not None and found[1] == place
    assert host_of_rank_0(environment, place) == host


def test_without_a_starter_there_is_no_place_and_nonsense_is_refused():
    assert find_place({"SLURM_JOB_NODELIST": "a"}) is None
    for rank, said in (("first", "torchrun are not numbers"), ("2", "rank 2 of 2")):
        with pytest.raises(UsageError, match=f"{said}.*`unset RANK WORLD_SIZE`"):
            find_place({"RANK": rank, "WORLD_SIZE": "2"})


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
        for name, value in {**Place(0, 2, 0, 2).environment(), JOB_TOKEN_VARIABLE: TOKEN}.items():
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
            with pytest.raises(ProtocolError):
                call_gate(address, token, rank, time.monotonic())
        known = call_gate(address, TOKEN, 2, time.monotonic() + 10)
        gate.begin("host:1", "nonce", lambda why: None)
        assert getattr(known.receive(), "address", "") == "host:1"
        # Who comes later hears of it, too.
        late = call_gate(address, TOKEN, 1, time.monotonic() + 10)
        assert getattr(late.receive(), "nonce", "") == "nonce"
    finally:
        gate.end(5, "because")
    assert [getattr(late.receive(), "line", "")] == ["because"]
    with pytest.raises(OSError):
        call_gate(address, TOKEN, 1, time.monotonic())


class Job:
    """Processes as SLURM's `srun -n` starts them, each of which runs tests/train/launch_driver.py."""

    def __init__(self, num_processes: int, worker: str, models: Path, stop_timeout_seconds: float) -> None:
        train = {
            "launcher": "attach",
            "num_workers": num_processes,
            "strategy": "torch_ddp",
            "attach": {"port": free_ports(1)[0]},
            "watch": {"start_timeout_seconds": 30, "stop_timeout_seconds": stop_timeout_seconds},
        }
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
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.train.launch_driver", json.dumps(given)],
                    cwd=ROOT,
                    env={**os.environ, MARK: mark, JOB_TOKEN_VARIABLE: TOKEN, **slurm},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        self.driver = Driver(self.processes[0], mark)

    def ends(self) -> list[tuple[int, str]]:
        """Exit code and last words of every process but rank 0's."""
        ended = []
        for process in self.processes[1:]:
            _, stderr = process.communicate(timeout=60)
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
    time.sleep(0.5)
    job.processes[0].send_signal(signal.SIGTERM)
    outcome = job.driver.outcome()
    assert outcome["error"] == "Terminated" and outcome["message"] == "stopped in order", outcome
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
    job = start(2, "tells_variables_with_token")
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
