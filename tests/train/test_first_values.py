"""A model of ours and a seed are one training: it begins with the same values in each framework, whoever shares it."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from shardmill.mix import mix64
from tests.lab.scale import exhaustive
from tests.train.learners import SHAPE, learner
from tests.train.ranks import train_on_ranks
from train.backends.backend import StatePart
from train.models import MODELS, MODULES
from train.models.first_values import FIRST_VALUES, begin_torch, first_values
from train.strategies import STRATEGIES

STEP: dict[str, Any] = {"epochs": 1, "global_batch_size": 40, "num_streams": 8, "label_smoothing": 0.1}
RANKS = {"single": 1, "mirrored": 1, "parameter_server": 1, "hybrid": 4}


def test_values_are_what_the_formula_says():
    words = [mix64(FIRST_VALUES, 7, int.from_bytes(hashlib.sha256(b"a_weight").digest()[:8]), each) for each in (0, 1)]
    bits = [bits - (bits >> 31 << 32) for word in words for bits in (word & 0xFFFFFFFF, word >> 32)]
    np.testing.assert_allclose(first_values(7, "a_weight", (3, 1)).ravel(), np.sqrt(6 / 4) / 2**31 * np.array(bits[:3]))


def test_a_weight_depends_on_seed_and_name_alone_and_has_the_usual_spread():
    dense, convolution = first_values(0, "a_weight", (301, 200)), first_values(0, "b_weight", (3, 3, 40, 90))
    assert dense.std() == pytest.approx(np.sqrt(2 / 501), rel=0.01)
    assert convolution.std() == pytest.approx(np.sqrt(2 / 360), rel=0.01)
    assert first_values(0, "a_position_bias", (64, 128)).std() == pytest.approx(0.02, rel=0.02)
    assert not first_values(0, "a_bias", (9,)).any() and (first_values(0, "norm_weight", (9,)) == 1).all()
    others = [first_values(*each, dense.shape) for each in ((1, "a_weight"), (0, "b_weight"))]
    assert all(abs(np.corrcoef(dense.ravel(), each.ravel())[0, 1]) < 0.02 for each in others)


def test_a_learner_begins_with_the_values_of_its_seed_in_each_framework():
    """Each weight has the same values, in the layout of its framework; test_vit.py compares what they compute."""
    of_keras, of_torch, other = (
        learner(backend, "vit", strategy=strategy, seed=seed).arrays(StatePart.WEIGHTS)
        for backend, strategy, seed in (("keras", "single", 3), ("torch", "torch_fsdp", 3), ("torch", "torch_fsdp", 4))
    )
    for one, two in zip(of_keras, of_torch, strict=True):
        np.testing.assert_array_equal(np.sort(one, axis=None), np.sort(two, axis=None))
    assert not np.array_equal(of_torch[0], other[0])


def test_without_a_seed_two_modules_begin_differently_and_follow_the_frameworks_seed():
    import torch

    def drawn() -> torch.Tensor:
        return MODULES["vit"](SHAPE, 3).head.weight

    torch.manual_seed(1)
    first, second = drawn(), drawn()
    torch.manual_seed(1)
    assert not torch.equal(first, second) and torch.equal(first, drawn())
    with torch.device("meta"):
        begin_torch(torch.nn.Linear(3, 4), None)


def taking(model: str) -> tuple[str, ...]:
    """The strategies that train it on two ranks, or four."""
    of_torch, has_odd_heads = "torch" in MODELS.entry(model).packages, model == "vit_tiny"
    return tuple(
        name
        for name, each in STRATEGIES.items()
        if (model in MODULES or not each.needs_module or of_torch)
        and (not of_torch or "torch" in each.backends)
        and not (has_odd_heads and "tensor" in each.axes)
    )


@pytest.mark.drill
@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    ("model", "strategies", "most_ranks"),
    [
        ("vit", ("single", "torch_ddp", "torch_fsdp"), 2),
        *(exhaustive(model, taking(model), 4) for model in ("small_cnn", "vit", "vit_tiny")),
        # Several ranks have batch norms of their own.
        exhaustive("resnet50", ("single", "torch_ddp"), 1),
    ],
)
def test_the_first_loss_of_a_model_is_the_same_with_every_strategy(
    model, strategies, most_ranks, shared_dataset, tmp_path
):
    """On TensorFlow, Keras on PyTorch, and PyTorch. Wider transformers are `vit_tiny` with other numbers."""
    uri, losses = shared_dataset(num_images=60, image_size=32), {}
    for strategy in strategies:
        config = {**STEP, "model": model, "strategy": strategy}
        config |= {"mirrored": {"num_devices": 2}} if strategy == "mirrored" else {}
        _, watcher = train_on_ranks(uri, tmp_path / strategy, min(RANKS.get(strategy, 2), most_ranks), config)
        losses[strategy] = float.fromhex(watcher.losses[0, 0])
    assert losses == pytest.approx(dict.fromkeys(losses, losses["single"]), rel=1e-5)
