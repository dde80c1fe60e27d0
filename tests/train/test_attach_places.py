"""Ranks with wrong places: variables left over from another program, and loopback addresses."""

from __future__ import annotations

import socket

import pytest

from shardmill.environments import ENVIRONMENTS
from shardmill.environments.place import Place
from shardmill.environments.slurm import first_host, tasks_per_node
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.spark import loopback_warning as spark_loopback_warning
from tests.services.marked import free_ports
from train.config import TrainConfig
from train.launching.attach import JOB_TOKEN_VARIABLE, attached, check_world_size
from train.launching.attach_options import AttachOptions, loopback_warning
from train.planning.auto import resolve

TOKEN = "secret of this job" * 2


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
    here, there, together = Place(0, 4, 0, 2), Place(2, 4, 0, 2), Place(0, 2, 0, 2)
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
