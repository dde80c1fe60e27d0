"""The output of a module of a PyTorch export, beside its answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shardmill.errors import UsageError
from train.backends.backend import InputScale, ModelSpec
from train.backends.torch.layer_output import LAYER_OUTPUT
from train.backends.torch.model import classifier_of
from train.backends.torch.serving import load_program, served_module, write_program
from train.labels import LabelSpec

SHAPE_HWC = (8, 8, 3)


class Net(torch.nn.Module):
    """Standardized images_NCHW -> logits of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        self.pool = torch.nn.AdaptiveAvgPool2d(1)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.features(images_NCHW)).flatten(1))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    spec = ModelSpec(SHAPE_HWC, LabelSpec("class", ("a", "b", "c")), InputScale((0.0,) * 3, (255.0,) * 3))
    classifier = classifier_of(Net(), is_keras=False, spec=spec)
    write_program(served_module(classifier, "class", are_logits=True), spec, "net", tmp_path / "program")
    return tmp_path / "program"


def test_a_modules_output_comes_with_the_answers(program: Path):
    images_NHWC = np.random.default_rng(0).integers(0, 256, (5, *SHAPE_HWC), np.uint8)
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        pixels_NCHW = torch.from_numpy(images_NHWC).permute(0, 3, 1, 2).float() / 255
        features = net.features(pixels_NCHW)
        expected = {"features": features, "features.0": net.features[0](pixels_NCHW), "pool": net.pool(features)}
    for name, output in expected.items():
        answers_NK, layer_ND = LAYER_OUTPUT.load(program, name)(images_NHWC)
        assert np.allclose(layer_ND, output.flatten(1).numpy(), atol=1e-6), name
        assert np.allclose(answers_NK, load_program(program).answers(images_NHWC), atol=1e-6)


def test_a_module_that_is_not_there_is_named_beside_those_that_are(program: Path):
    with pytest.raises(UsageError, match="no layer 'pol'; expected one of its 5 layers; .* did you mean 'pool'"):
        LAYER_OUTPUT.load(program, "pol")
