"""Ranks that hold one model together are killed while they write a checkpoint of it; nothing that was complete is lost.

Each is forked from a process that has imported PyTorch, so that a kill and the resume behind it take about a second.
"""

from __future__ import annotations

import random

import pytest

from shardmill.stores import open_store
from tests.lab.scale import usually
from tests.train.forked_ranks import launch_forked
from tests.train.multi_rank_workers import KILLED_IN
from tests.train.ranks import WORKERS, Watcher, train_on_ranks
from tests.train.training import task_of
from train.checkpoints.checkpoint import complete_checkpoints
from train.launching import faults
from train.launching.faults import RankLost

NUM_KILLS = usually(3, 300)
# A kill comes within two checkpoints. Rank 0 writes an index, too, and the marker.
PLACES = {
    0: [*(f"checkpoint_file:{number}" for number in range(1, 9)),
        *(f"checkpoint_{place}:{number}" for place in ("marker", "done") for number in (1, 2))],
    1: [f"checkpoint_file:{number}" for number in range(1, 7)],
}  # fmt: skip


@pytest.mark.drill
@pytest.mark.timeout(120 + 10 * NUM_KILLS)
def test_no_kill_of_a_rank_costs_a_complete_checkpoint(tiny_uri, tmp_path, monkeypatch):
    config = {"model": "tests.train.torch_models:linear", "strategy": "torch_fsdp", "global_batch_size": 12,
              "num_streams": 6, "epochs": NUM_KILLS // 3 + 2, "checkpoint_every_steps": 1}  # fmt: skip
    whole_result, whole = train_on_ranks(tiny_uri, tmp_path / "whole", 2, config)
    print("seed", seed := random.randrange(2**32))
    # That one was killed says all: no other fault of the same cause is waited for.
    monkeypatch.setattr(faults, "GRACE_SECONDS", 0.1)
    pick, store, losses, newest = random.Random(seed), open_store(tmp_path / "killed"), {}, None
    for _ in range(NUM_KILLS):
        rank = pick.randrange(2)
        monkeypatch.setenv(KILLED_IN, f"{rank} {pick.choice(PLACES[rank])}")
        task = task_of(tiny_uri, tmp_path / "killed", num_workers=2, launcher="local", **config)
        # In so short a grace, and under load, the driver may not have heard of the signal yet.
        with pytest.raises(RankLost, match=f"rank {rank} .*(SIGKILL|killed by an unknown signal)"):
            launch_forked(task, watcher := Watcher(), f"{WORKERS}:one_rank_dies_in_a_checkpoint")
        assert watcher.losses.items() <= whole.losses.items(), "it went on with other numbers"
        begun_at = newest.marker.progress.cursor if newest else None
        assert min(watcher.losses) == ((begun_at.epoch, begun_at.step) if begun_at else (0, 0))
        losses |= watcher.losses

        found = next(complete_checkpoints(store, "t"), None)
        if newest:
            assert found and found.marker.global_step >= newest.marker.global_step, "a complete checkpoint was lost"
        for file in found.marker.files if found else ():
            assert found and found.read(store, file.path)
        newest = found
    result, rest = train_on_ranks(tiny_uri, tmp_path / "killed", 2, config)
    assert result.resumed_from == (newest.marker.progress.cursor if newest else None)
    assert losses | rest.losses == whole.losses
    assert result.weights_sha256 == whole_result.weights_sha256
