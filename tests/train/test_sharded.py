"""Loop, checkpoints, evaluation and export do for ranks that share a model what they do for replicas."""

from __future__ import annotations

import numpy as np
import pytest

from tests.train import sharded_strategy
from tests.train.sharded_strategy import SHARDED_PARTS, shard_file
from tests.train.test_multi_rank import SMOOTH_MODEL, kill_on_ranks, train_on_ranks
from tests.train.training import Recorder, task_of, train_here
from train.backends.backend import StatePart
from train.checkpoints.checkpoint import MARKER
from train.checkpoints.state import load_arrays, rank_file
from train.published.export import export_training

STRATEGY = f"{sharded_strategy.__name__}:SHARDED"
CONFIG = {"model": SMOOTH_MODEL["torch"], "num_streams": 6, "global_batch_size": 24, "epochs": 3, "export": "best",
          "checkpoint_every_steps": 2, "record_samples": True}  # fmt: skip


@pytest.mark.drill
def test_ranks_that_share_rows_and_hold_a_part_of_the_weights_train_resume_and_are_exported(
    tiny_uri, tmp_path, monkeypatch
):
    one, config = Recorder(), {**CONFIG, "strategy": STRATEGY}
    alone = train_here(tiny_uri, tmp_path / "one", one, **CONFIG)
    killed = kill_on_ranks(tiny_uri, tmp_path / "two", 2, config, monkeypatch, killed_at=7)
    result, resumed = train_on_ranks(tiny_uri, tmp_path / "two", 2, config)

    assert result.resumed_from is not None and (result.resumed_from.epoch, result.resumed_from.step) == (1, 2)
    # As one rank with all of the weights trains, of whose samples each is told once, and evaluated once.
    for step, loss_hex in one.losses.items():
        assert float.fromhex((killed.losses | resumed.losses)[step]) == pytest.approx(float.fromhex(loss_hex), rel=1e-5)
    ids = {(report.epoch, report.step): report.sample_ids for report in one.steps}
    assert killed.sample_ids | resumed.sample_ids == ids
    assert result.evaluation is not None and alone.evaluation is not None
    assert result.evaluation.num_samples == alone.evaluation.num_samples
    assert result.evaluation.per_class == alone.evaluation.per_class
    assert result.evaluation.loss == pytest.approx(alone.evaluation.loss, rel=1e-5)

    # Each rank wrote its own part, and has no other.
    folder = tmp_path / "two" / result.checkpoint
    shards = {shard_file(part, rank) for part in SHARDED_PARTS for rank in range(2)}
    assert {file.name for file in folder.iterdir()} == {MARKER, *shards, *map(rank_file, range(2))}
    parts = [load_arrays((folder / shard_file(StatePart.WEIGHTS, rank)).read_bytes()) for rank in range(2)]
    assert all(parts) and all(np.isfinite(array).all() for part in parts for array in part)
    # The export puts them together; it compares hash and figures with those that the ranks had.
    exported = export_training(str(tmp_path / "two"), task_of(tiny_uri, tmp_path, **config).config, result, "run")
    assert exported.export.record.weights_sha256 == result.weights_sha256
    assert exported.export.record.parity_num_images > 0
