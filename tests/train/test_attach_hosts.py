"""The launcher `attach` on two hosts, started there by torchrun, and how the others find rank 0's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import load_tree
from tests.lab.scale import exhaustive
from tests.services.hosts import Host
from tests.services.marked import free_ports
from tests.train.driver_process import ROOT
from train.launching.attach import JOB_TOKEN_VARIABLE, call_gate
from train.launching.attach_options import AttachOptions
from train.tree import TrainTree

SHARDMILL, TORCHRUN = (str(Path(sys.executable).with_name(name)) for name in ("shardmill", "torchrun"))


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
    monkeypatch.setattr("train.launching.attach.PATIENCE_SECONDS", 0.3)
    [port] = free_ports(1)
    with pytest.raises(OSError):
        call_gate(f"127.0.0.1:{port}", "t" * 32, 1, time.monotonic() + 1.5)
    # Once, and again only six times as long after it.
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(rf"shardmill: rank 1 waits for \d s more for rank 0 at 127.0.0.1:{port}: .*refused", line)


@pytest.mark.parametrize("host", ["gpu-07:29610", "http://gpu-07"])
def test_a_host_is_no_host_and_port(host):
    with pytest.raises(UsageError, match=f'train.attach.host = "{host}"; expected a host\'s name or address alone'):
        load_tree(TrainTree, None, (f"train.attach.host={host}",))
    train = load_tree(TrainTree, None, ("train.attach.host=fe80::1",)).train
    assert train.options(AttachOptions).host == "fe80::1"
