"""Compressed gradients train as others do, but for their rounding; what a strategy lacks is refused."""

from __future__ import annotations

import pytest

from tests.lab.scale import exhaustive
from tests.train.ranks import SMOOTH_MODEL, train_on_ranks
from tests.train.training import Recorder, train_here
from train.strategies import STRATEGIES

# Momentum alone: Adam would blow the rounding of small gradients up.
CONFIG = {"num_streams": 4, "global_batch_size": 24, "epochs": 4, "optimizer": "sgd", "learning_rate": 0.02,
          "label_smoothing": 0.1}  # fmt: skip
USUAL = {("horovod", "fp16"), ("torch_ddp", "bf16")}
COMPRESSED = [
    (name, each) if (name, each) in USUAL else exhaustive(name, each)
    for name, strategy in STRATEGIES.items()
    for each in strategy.compressions
    if each != "none"
]


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(("strategy", "compression"), COMPRESSED)
def test_compressed_gradients_train_as_others_do(tiny_uri, tmp_path, strategy, compression):
    """In small buckets too. The first loss is that of one rank alone, because no gradient has been used yet."""
    model = SMOOTH_MODEL[STRATEGIES[strategy].backends[0]]
    one = Recorder()
    alone = train_here(tiny_uri, tmp_path / "one", one, **CONFIG, model=model)
    config = {**CONFIG, "model": model, "strategy": strategy, "compression": compression, "bucket_bytes": 20_000}
    result, watched = train_on_ranks(tiny_uri, tmp_path / "several", 2, config)
    losses = [(float.fromhex(watched.losses[step]), float.fromhex(loss)) for step, loss in one.losses.items()]
    assert losses[0][0] == pytest.approx(losses[0][1], rel=1e-6)
    differences = [abs(found - expected) / expected for found, expected in losses]
    # One that did nothing, or nothing but harm, would show here.
    assert 1e-6 < max(differences) < 0.05, differences
    assert result.evaluation is not None and alone.evaluation is not None
    assert result.evaluation.accuracy >= alone.evaluation.accuracy - 0.1
