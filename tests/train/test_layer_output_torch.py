"""The output of a module of a PyTorch export, beside its answers."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardmill.errors import UsageError
from train.backends.backend import InputScale, ModelSpec
from train.backends.torch.layer_output import LAYER_OUTPUT
from train.backends.torch.model import classifier_of
from train.backends.torch.serving import load_program, served_module, write_program
from train.labels import LabelSpec

if TYPE_CHECKING:
    import torch

SHAPE_HWC = (8, 8, 3)


def net() -> torch.nn.Sequential:
    """Standardized images_NCHW -> logits of three classes."""
    from torch import manual_seed, nn

    manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    layers = {"features": features, "pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "head": nn.Linear(4, 3)}
    return nn.Sequential(OrderedDict(layers))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    spec = ModelSpec(SHAPE_HWC, LabelSpec("class", ("a", "b", "c")), InputScale((0.0,) * 3, (255.0,) * 3))
    classifier = classifier_of(net(), is_keras=False, spec=spec)
    write_program(served_module(classifier, "class", are_logits=True), spec, "net", tmp_path / "program")
    return tmp_path / "program"


def test_a_modules_output_comes_with_the_answers(program: Path):
    import torch

    images_NHWC = np.random.default_rng(0).integers(0, 256, (5, *SHAPE_HWC), np.uint8)
    model = net().eval()
    features_of, first_of, pool_of = (model.get_submodule(name) for name in ("features", "features.0", "pool"))
    with torch.no_grad():
        pixels_NCHW = torch.from_numpy(images_NHWC).permute(0, 3, 1, 2).float() / 255
        features = features_of(pixels_NCHW)
        expected = {"features": features, "features.0": first_of(pixels_NCHW), "pool": pool_of(features)}
    for name, output in expected.items():
        answers_NK, layer_ND = LAYER_OUTPUT.load(program, name)(images_NHWC)
        assert np.allclose(layer_ND, output.flatten(1).numpy(), atol=1e-6), name
        assert np.allclose(answers_NK, load_program(program).answers(images_NHWC), atol=1e-6)


def test_a_module_that_is_not_there_is_named_beside_those_that_are(program: Path):
    with pytest.raises(UsageError, match="no layer 'pol'; expected one of its 6 layers; .* did you mean 'pool'"):
        LAYER_OUTPUT.load(program, "pol")
