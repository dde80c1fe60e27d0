"""ETL and training through an S3 server that fails one request in ten: the same bytes, the same losses, no hang."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from etl.config import EtlConfig
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.failpoints import VARIABLE
from shardmill.jobs.line_log import read_lines
from shardmill.stores import open_store, s3
from shardmill.stores.bucket_requests import BucketRequests
from shardmill.stores.s3 import S3Store
from tests.canaries import files_with_canaries
from tests.lab.commands import in_process
from tests.lab.datasets import build_here, upload, write_images
from tests.services.fault_proxy import Choice, Fault, at_random, in_turn, proxying
from tests.services.versitygw import Gateway, connect_to
from tests.train.training import Recorder, train_here

pytestmark = pytest.mark.drill

_SEED = random.SystemRandom().randrange(2**32)
_CONFIG = EtlConfig(
    image_size=16, formats=("parquet", "tfrecord"), encoding="png", chunk_bytes=4_000, unit_min_images=20
)
_FAULTS = (
    Fault.INTERNAL_ERROR, Fault.SLOW_DOWN, Fault.TOO_MANY, Fault.RESET, Fault.CUT, Fault.SHORT, Fault.DROPPED,
    Fault.DELAYED, Fault.SLOW,
)  # fmt: skip


def build_and_train(source: str, root: str) -> tuple[str, str, dict[tuple[int, int], str], object, str]:
    """The digests of the version and of its layout, loss and samples of every step, the digest of the weights."""
    manifest = open_dataset(build_here(source, f"{root}/dataset", _CONFIG)).manifest
    recorder = Recorder()
    result = train_here(
        f"{root}/dataset", f"{root}/models", recorder, epochs=3, global_batch_size=8, checkpoint_every_steps=5,
        record_samples=True,
    )  # fmt: skip
    samples = [report.sample_ids for report in recorder.steps]
    assert all(samples)
    return manifest.content_digest, manifest.layout_digest, recorder.losses, samples, result.weights_sha256


def busy(seed: int) -> Choice:
    """A server that has too much to do: of all operations one in ten."""
    return at_random(0.1, Fault.INTERNAL_ERROR, Fault.SLOW_DOWN, seed=seed)


def all_kinds(seed: int) -> Choice:
    """One request in ten is spoiled in any way, and two stall, which would last a minute each."""
    stalls = in_turn(Fault.STALLED, path="/dataset/shards"), in_turn(Fault.STALLED, path="/models/")
    others = at_random(0.1, *_FAULTS, seed=seed)
    return lambda method, path: stalls[0](method, path) or stalls[1](method, path) or others(method, path)


MIXES = {"busy": busy, "all_kinds": all_kinds}
STALL_SECONDS, DEADLINE_SECONDS = 1.0, 120.0
"""Two requests stall; how long all may take is no part of it."""


def test_faults_change_neither_the_dataset_nor_the_training(
    gateway_bucket: str, gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    print(f"seed {_SEED}")
    write_images(tmp_path / "images", num_images=80)
    source = upload(tmp_path / "images", f"{gateway_bucket}/images")
    expected = build_and_train(source, f"{gateway_bucket}/expected")
    told: dict[str, Counter[Fault | None]] = {}
    with proxying(gateway.endpoint) as proxy:
        monkeypatch.setenv(S3Store.deadline_variable, str(8 * STALL_SECONDS))
        connect_to(proxy.endpoint, monkeypatch)
        monkeypatch.setattr(s3._connected(os.getpid()), "_deadline_seconds", DEADLINE_SECONDS)
        for name, mix in MIXES.items():
            proxy.choose, proxy.told = mix(_SEED), Counter()
            assert build_and_train(source, f"{gateway_bucket}/{name}") == expected
            told[name] = proxy.told
            print(f"{name}: {dict(told[name])}")
            verify_dataset(open_dataset(f"{gateway_bucket}/{name}/dataset"), deep=True).raise_if_failed()
            # Nothing was committed twice.
            versions = [file.path for file in open_store(f"{gateway_bucket}/{name}/dataset").list("manifests")]
            assert versions == ["manifests/00000001.json"]
            assert told[name].total() - told[name][None] > 10
    assert set(told["busy"]) == {None, Fault.INTERNAL_ERROR, Fault.SLOW_DOWN}
    assert told["all_kinds"][Fault.STALLED] == 2 and len(told["all_kinds"]) > 5


def test_a_killed_driver_has_logged_every_step_that_is_not_done_again(gateway_bucket: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    root = open_store(gateway_bucket)
    build_here(upload(tmp_path / "images", f"{gateway_bucket}/images"), f"{gateway_bucket}/dataset", _CONFIG)
    config = tmp_path / "config.toml"
    config.write_text(
        f"""
        dataset.uri = "{gateway_bucket}/dataset"
        models.uri = "{gateway_bucket}/models"
        [train]
        launcher = "inline"
        strategy = "single"
        epochs = 3
        global_batch_size = 8
        checkpoint_every_steps = 4
        record_samples = true
        """
    )
    command = [sys.executable, "-m", "pipeline.cli", "train", str(config), "--workdir", f"{gateway_bucket}/work"]

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in read_lines(root, f"work/runs/run/{name}.jsonl")]

    def train(**environment: str) -> int:
        done = subprocess.run(
            [*command, "--run-id", "run"], env={**os.environ, **environment}, capture_output=True, timeout=200
        )
        return done.returncode

    # The driver is the only rank: it dies when the second marker is there.
    assert train(**{VARIABLE: "checkpoint_done:2"}) == -signal.SIGKILL
    logged, events = lines("steps"), lines("events")
    assert train() == 0
    [resumed] = [event for event in lines("events") if event["event"] == "train.resumed"]
    assert len(logged) >= resumed["global_step"] > 4 and lines("events")[: len(events)] == events != []
    places = [(line["epoch"], line["step"]) for line in lines("steps")]
    assert lines("steps")[: resumed["global_step"]] == logged[: resumed["global_step"]]
    assert places == [(epoch, step) for epoch in range(3) for step in range(len(places) // 3)]
    assert not [file.path for file in root.list("work") if ".parts/" in file.path]


def written_config(bucket: str, folder: Path) -> Path:
    """Of a run with two processes that decode and two ranks; its images are uploaded."""
    write_images(folder / "images", num_images=60)
    upload(folder / "images", f"{bucket}/images")
    config = folder / "config.toml"
    config.write_text(
        f"""
        source.uri = "{bucket}/images"
        dataset.uri = "{bucket}/dataset"
        models.uri = "{bucket}/models"
        [etl]
        engine = "local"
        image_size = 16
        [train]
        strategy = "horovod"
        launcher = "local"
        num_workers = 2
        epochs = 1
        global_batch_size = 16
        """
    )
    return config


def run(command: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pipeline.cli", command, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=280)


def test_a_run_says_how_many_requests_were_sent_again(gateway_bucket: str, gateway: Gateway, tmp_path, monkeypatch):
    config, of_run = written_config(gateway_bucket, tmp_path), ("--workdir", tmp_path / "work", "--run-id", "run")
    with proxying(gateway.endpoint) as proxy:
        # A request that only waits is not sent again.
        monkeypatch.setenv(S3Store.deadline_variable, "1200")
        connect_to(proxy.endpoint, monkeypatch)
        # By processes that read and write units, by ranks, and by one of them for the checkpoint.
        spoiled = [
            in_turn(Fault.SLOW_DOWN, Fault.INTERNAL_ERROR, method="GET", path="/images/class_"),
            in_turn(Fault.SLOW_DOWN, method="PUT", path="/dataset/shards/"),
            in_turn(Fault.SLOW_DOWN, Fault.SLOW_DOWN, method="GET", path="/dataset/shards/"),
            in_turn(Fault.INTERNAL_ERROR, method="PUT", path="/checkpoints/"),
        ]
        proxy.choose = lambda method, path: next(filter(None, (choose(method, path) for choose in spoiled)), None)
        for command in ("etl", "train", "report"):
            done = run(command, *([] if command == "report" else [config]), *of_run)
            assert done.returncode == 0, done.stderr[-2000:]
        assert proxy.told[Fault.SLOW_DOWN] + proxy.told[Fault.INTERNAL_ERROR] == 6
    stages = json.loads((tmp_path / "work/runs/run/summary.json").read_text())["stages"]
    assert {name: stage["retried_requests"] for name, stage in stages.items() if name != "report"} == {
        "etl": 3,
        "train": 3,
    }
    assert "requests sent again" in (tmp_path / "work/runs/run/report.html").read_text()


@pytest.mark.parametrize("fault", [Fault.FORBIDDEN, Fault.EXPIRED])
@pytest.mark.parametrize(("command", "revoked_at"), [("etl", "/images/class_1"), ("train", "/dataset/shards/")])
def test_keys_that_are_revoked_or_expire_during_a_run_end_it_once(
    command: str,
    revoked_at: str,
    fault: Fault,
    gateway_bucket: str,
    gateway: Gateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    config = written_config(gateway_bucket, tmp_path)
    if command == "train":
        assert run("etl", config, "--workdir", tmp_path / "work").returncode == 0
    refused = Counter[str]()
    first_seconds: list[float] = []
    is_meant = in_turn(None, None, fault, path=revoked_at)

    def choose(method: str, path: str) -> Fault | None:
        if not refused and is_meant(method, path) is None:
            return None
        refused[f"{method} {path}"] += 1
        first_seconds.append(time.monotonic())
        return fault

    with proxying(gateway.endpoint) as proxy:
        # Longer than a test may take: nothing waits for it.
        monkeypatch.setenv(S3Store.deadline_variable, "1200")
        connect_to(proxy.endpoint, monkeypatch)
        proxy.choose = choose
        done = run(command, config, "--workdir", tmp_path / "work", "--debug")
        seconds = time.monotonic() - first_seconds[0]
    print(f"exit {done.returncode} {seconds:.1f} s after the first of {refused.total()} refusals")
    assert done.returncode == 4 and seconds < 120, (seconds, done.stderr[-3000:])
    # Others that were under way by then were refused as well, and may be named first.
    folder = revoked_at.split("/")[1]
    assert done.stderr.splitlines()[-1].startswith(f"ERROR 4: cannot access {gateway_bucket}/{folder}/"), done.stderr
    assert revoked_at in next(iter(refused))
    # No process asks for a thing again that was refused; two may ask for one.
    assert max(refused.values()) <= 2, refused
    assert "canary+" not in done.stdout + done.stderr
    assert files_with_canaries(tmp_path / "work") == []
    connect_to(gateway.endpoint, monkeypatch)
    again = run(command, config, "--workdir", tmp_path / "work")
    assert again.returncode == 0, again.stderr[-2000:]
    assert open_dataset(f"{gateway_bucket}/dataset").manifest.counts.accepted == 60


def test_a_commit_that_may_have_happened_is_reported_and_found_later(
    gateway_bucket: str, gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, bucket = written_config(gateway_bucket, tmp_path), open_store(gateway_bucket)
    is_lost = in_turn(Fault.DROPPED, method="PUT", path="/manifests/00000001.json")
    lost: list[Fault] = []
    create = BucketRequests.create

    def create_soon(requests: BucketRequests, bucket: str, key: str, data: bytes) -> bool:
        # From here on nothing succeeds any more, so that nothing is to wait long.
        if key.endswith("/manifests/00000001.json"):
            monkeypatch.setattr(requests, "_deadline_seconds", 1.0)
        return create(requests, bucket, key, data)

    def choose(method: str, path: str) -> Fault | None:
        if lost:
            return Fault.INTERNAL_ERROR
        lost.extend(filter(None, [is_lost(method, path)]))
        return lost[0] if lost else None

    with proxying(gateway.endpoint) as proxy:
        monkeypatch.setattr(BucketRequests, "create", create_soon)
        connect_to(proxy.endpoint, monkeypatch)
        proxy.choose = choose
        done = in_process("etl", config, "--workdir", tmp_path / "work", cwd=tmp_path)
    assert done.returncode == 4, done.stderr[-3000:]
    last = done.stderr.splitlines()[-1]
    assert "00000001.json was published is unknown" in last and "nothing was deleted" in last
    connect_to(gateway.endpoint, monkeypatch)
    committed = open_dataset(f"{gateway_bucket}/dataset")
    verify_dataset(committed, deep=True).raise_if_failed()
    assert run("etl", config, "--workdir", tmp_path / "work").returncode == 0
    assert open_dataset(f"{gateway_bucket}/dataset").pin == committed.pin
    assert [file.path for file in bucket.list("dataset/manifests")] == ["dataset/manifests/00000001.json"]
