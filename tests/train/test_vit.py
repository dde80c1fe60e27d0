"""The vision transformers that are PyTorch modules, and strategies that need one."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.formats.rows import RowSchema
from shardmill.jobs.config import SparkConfig
from tests.lab.scale import exhaustive
from tests.train.learners import SHAPE, THREE, batch_of, learner
from tests.train.training import DriverRecorder
from train.backends import BACKENDS
from train.backends.backend import InputScale, ModelSpec
from train.backends.step_rules import is_decayed
from train.config import TrainConfig
from train.contracts.world import World
from train.layers.sample_bits import drawing, number_layers, sample_keys
from train.models import MODELS, MODULES
from train.planning.auto import resolve
from train.planning.trial_build import try_build
from train.strategies.held import holds_all
from train.strategies.shared_model import SharedModel
from train.strategies.single import SINGLE

SHARES_NOTHING = SharedModel(axes=(), held=holds_all)
NEEDS_MODULE = replace(SINGLE, backends=("torch",), shared_model=SHARES_NOTHING)
"""A strategy whose one rank holds all parts of a module."""
STRATEGY = f"{__name__}:NEEDS_MODULE"


def assign_from_keras(module, weights: list[np.ndarray]) -> None:
    """Both have their parameters in one order; a layer of Keras has the axis that it multiplies first, and two for
    heads.
    """
    import torch

    with torch.no_grad():
        for (name, parameter), weight in zip(module.named_parameters(), weights, strict=True):
            is_kernel = name.endswith("weight") and parameter.ndim == 2
            array = weight.reshape(parameter.shape[::-1]).T if is_kernel else weight.reshape(parameter.shape)
            parameter.copy_(torch.from_numpy(array.copy()))


@pytest.mark.parametrize(("shape_HWC", "dropout"), [((16, 16, 3), 0.0), ((20, 33, 1), 0.0), ((16, 16, 3), 0.25)])
def test_the_module_computes_what_the_keras_model_does(shape_HWC, dropout):
    import tensorflow as tf
    import torch

    from train.backends.keras.build import number_sample_dropouts
    from train.layers.torch import SampleDropout
    from train.models.vit import vit as keras_vit

    model, module = keras_vit(shape_HWC, 3, dropout), MODULES["vit"](shape_HWC, 3, dropout=dropout)
    number_sample_dropouts(model)
    number_layers(each for each in module.modules() if isinstance(each, SampleDropout))
    # Biases that are zero would hide where they are added.
    rng = np.random.default_rng(0)
    for weight in model.trainable_variables:
        weight.assign(weight.numpy() + rng.normal(0, 0.02, weight.shape))
    assign_from_keras(module, [each.numpy() for each in model.trainable_variables])
    assert sum(each.numel() for each in module.parameters()) == model.count_params()

    images_NHWC, keys_N = rng.normal(size=(5, *shape_HWC)).astype(np.float32), sample_keys(3, 1, np.arange(5))
    factors_NK = rng.normal(size=(5, 3)).astype(np.float32)
    with tf.GradientTape() as tape, drawing(tf.constant(keys_N)):
        outputs = model(images_NHWC, training=True)
        total = tf.reduce_sum(outputs * factors_NK)
    with drawing(torch.from_numpy(keys_N)):
        found = module.train()(torch.from_numpy(images_NHWC).permute(0, 3, 1, 2))
    np.testing.assert_allclose(found.detach().numpy(), outputs.numpy(), atol=1e-5)
    (found * torch.from_numpy(factors_NK)).sum().backward()
    gradients = MODULES["vit"](shape_HWC, 3, dropout=dropout)
    assign_from_keras(gradients, [each.numpy() for each in tape.gradient(total, model.trainable_variables)])
    for parameter, wanted in zip(module.parameters(), gradients.parameters(), strict=True):
        np.testing.assert_allclose(parameter.grad.numpy(), wanted.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_the_module_begins_with_the_values_of_the_keras_model():
    from train.models.vit import vit as keras_vit

    drawn, model = (MODULES["vit"](SHAPE, 3, seed=seed) for seed in (5, 6))
    assign_from_keras(model, [each.numpy() for each in keras_vit(SHAPE, 3, seed=5).trainable_variables])
    for (name, one), other in zip(drawn.named_parameters(), model.parameters(), strict=True):
        assert one.equal(other), name


@pytest.mark.parametrize(
    ("name", "heads", "num_weights"),
    # Of arXiv:2012.12877 and arXiv:2010.11929 for 1000 classes, less what class tokens are: their rows and places, and
    # the bias of the patches.
    [
        ("vit_tiny", 3, 5_717_416),
        ("vit_small", 6, 22_050_664),
        ("vit_base", 12, 86_567_656),
        ("vit_large", 16, 304_326_632),
        ("vit_huge", 16, 632_045_800),
    ],
)
def test_the_family_has_the_published_sizes(name, heads, num_weights):
    import torch

    with torch.device("meta"):
        model = MODELS[name]((224, 224, 3), 1000)
    assert sum(each.numel() for each in model.parameters()) == num_weights - 3 * model.size.width
    assert {block.attention.num_heads for block in model.blocks} == {heads}
    with torch.device("meta"):
        own = MODELS[name]((224, 224, 3), 2, patch_size=56, num_blocks=2)
    assert own.embedding.position_bias.shape[0] == 16 and len(own.blocks) == 2
    with pytest.raises(UsageError, match=r"width 100 with (\d+) heads; expected heads that divide the width"):
        MODELS[name]((224, 224, 3), 2, width=100, num_heads=7)


@pytest.mark.parametrize(
    ("side", "patches"),
    [(1, (1, 1, 1)), (8, (1, 1, 1)), (28, (2, 3, 4)), (32, (4, 3, 4)), (64, (8, 7, 8)), (224, (16, 14, 28))],
)
def test_patches_follow_the_size_of_the_images(side, patches):
    from train.models.vit_torch import BASE_16, HUGE_14, SMALL

    assert tuple(size.patch_of(side, side + 3) for size in (BASE_16, HUGE_14, SMALL)) == patches


@pytest.mark.parametrize(
    ("model", "shape_HWC"),
    [
        ("tests.train.torch_models:tiny_vit", (17, 30, 1)),
        exhaustive("vit_tiny", (17, 30, 1), id="vit_tiny, gray"),
        exhaustive("vit_tiny", (32, 32, 3), id="vit_tiny, color"),
    ],
)
def test_a_vision_transformer_of_torch_trains_and_exports(tmp_path, model, shape_HWC):
    """Of two small blocks; the smallest of DeiT's takes six times as long to trace."""
    assert resolve(TrainConfig(model=model), SparkConfig()).config.backend == "torch"
    channels = shape_HWC[2]
    BACKENDS["torch"].start(World(), 0)
    spec = ModelSpec(shape_HWC, THREE, InputScale((120.0,) * channels, (60.0,) * channels))
    one = BACKENDS["torch"].build(TrainConfig(model=model), spec)
    outcome = one.apply(one.gradients(batch_of(shape_HWC), 4, 1.0), 0.01)
    assert outcome.is_applied and outcome.gradient_norm > 0
    one.write_served(tmp_path)
    images_NHWC = batch_of(shape_HWC, 5).images_NHWC
    served = BACKENDS["torch"].load_served(tmp_path)
    np.testing.assert_allclose(served.answers(images_NHWC), one.answers(images_NHWC), atol=1e-5)


def test_weights_have_names_by_which_they_are_decayed_and_frozen():
    module = MODULES["vit"](SHAPE, 3)
    owners = {path: type(each).__name__ for path, each in module.named_modules()}
    decayed = {
        name for name, each in module.named_parameters() if is_decayed(name, each.ndim, owners[name.rpartition(".")[0]])
    }
    assert decayed == {name for name, each in module.named_parameters() if each.ndim == 2 and name.endswith("weight")}
    frozen = learner("torch", "vit_tiny", freeze=("all_but_head",))
    trained = [name for name, each in frozen.classifier.model.named_parameters() if each.requires_grad]
    assert trained == ["head.weight", "head.bias"]


def test_the_builtin_vit_is_a_module_only_if_the_strategy_needs_one():
    for strategy, backend in ((STRATEGY, "torch"), ("single", "keras"), ("auto", "keras")):
        assert resolve(TrainConfig(model="vit", strategy=strategy), SparkConfig()).config.backend == backend
    one = learner("torch", "vit", strategy=STRATEGY)
    assert one.export_backend == "torch"
    losses = [one.apply(one.gradients(batch_of(SHAPE), 4, 1.0), 1e-4).loss for _ in range(2)]
    assert losses[1] < losses[0]


def factory(name: str, tmp_path, monkeypatch, text: str) -> str:
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return f"{name}:build"


@pytest.mark.parametrize("model", ["small_cnn", "resnet50", "keras.applications:MobileNetV2", "own", "by_ours"])
def test_a_keras_model_is_refused_before_anything_starts(model, tmp_path, monkeypatch):
    if model == "own":
        model = factory("own_keras", tmp_path, monkeypatch, "import keras\ndef build(image_shape, num_classes): ...\n")
    if model == "by_ours":
        text = "from train.models.vit import vit\ndef build(image_shape, num_classes): ...\n"
        model = factory("own_by_ours", tmp_path, monkeypatch, text)
    wanted = (
        rf"train.model = '{model}' is a Keras model, and train.strategy = '{STRATEGY}' .*; expected an nn.Module; "
        r'set train.model = "vit" or torchvision.models:NAME, or give a factory that returns an nn.Module'
    )
    with pytest.raises(UsageError, match=wanted):
        resolve(TrainConfig(model=model, strategy=STRATEGY), SparkConfig())


@pytest.mark.drill
def test_a_factory_that_imports_both_is_refused_when_it_returns_a_keras_model(tmp_path, monkeypatch):
    text = """
        import keras, torch
        def build(image_shape, num_classes):
            return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)])
    """
    model = factory("own_of_both", tmp_path, monkeypatch, "".join(line[8:] + "\n" for line in text.splitlines()))
    config = resolve(TrainConfig(model=model, strategy=STRATEGY), SparkConfig()).config
    with pytest.raises(UsageError, match="is a Keras model, and train.strategy = .*; expected an nn.Module"):
        try_build(config, RowSchema("png", (16, 16, 3), ("cat", "dog")), DriverRecorder())


def test_a_factory_that_builds_on_a_module_of_ours_needs_pytorch(tmp_path, monkeypatch):
    text = "from train.models.vit_torch import vit_tiny\ndef build(image_shape, num_classes): ...\n"
    model = factory("own_tiny", tmp_path, monkeypatch, text)
    assert resolve(TrainConfig(model=model), SparkConfig()).config.backend == "torch"
