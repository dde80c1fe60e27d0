"""Every model by name trains; a user's own, or a library's, is taken as it is, or refused with the numbers."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalMemberAccess=false
from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.formats.rows import RowSchema
from shardmill.jobs.config import SparkConfig, load_tree
from shardmill.registry import Entry, load_object
from shardmill.values import Batch
from tests.lab.scale import exhaustive
from tests.train.learners import SHAPE, THREE, batch_of, learner, step_of
from tests.train.training import MODELS as USER_MODELS
from tests.train.training import DriverRecorder, Recorder, train_here
from train.api import SharedModel, replicated_state
from train.backends import BACKENDS
from train.backends.keras.build import build_model
from train.backends.model_spec import InputScale, ModelSpec
from train.backends.rules import is_decayed
from train.config import TrainConfig
from train.contracts.world import World
from train.layers.sample_bits import drawing, number_layers, sample_keys
from train.models import BUILD_FOR_ANY_IMAGE, MODELS, MODULES
from train.models.small_cnn import small_cnn
from train.models.user import find_model, source_sha256
from train.planning.setup import resolve
from train.planning.trial_build import try_build
from train.strategies.replicated import SINGLE
from train.tree import TrainTree

OURS = [name for name, each in MODELS.entries.items() if "keras" in each.packages]


@pytest.mark.parametrize(
    ("name", "shape_HWC"),
    [*((name, SHAPE) for name in OURS if name in BUILD_FOR_ANY_IMAGE),
     *(exhaustive(name, (32, 32, channels), id=f"{name}-{channels}") for name in OURS for channels in (1, 3))],
)  # fmt: skip
def test_every_model_takes_a_step(request, name, shape_HWC):
    import tensorflow as tf

    # ResNet-50 takes ten seconds to compile one, a small transformer three.
    request.addfinalizer(lambda: tf.config.run_functions_eagerly(False))
    tf.config.run_functions_eagerly(shape_HWC == SHAPE)
    built, step = step_of(TrainConfig(model=name, optimizer="sgd"), shape_HWC)
    assert built.outputs_are_logits and built.compiled_optimizer is None
    before = [np.array(variable) for variable in built.model.trainable_variables]
    outcome = step.apply(step.gradients(batch_of(shape_HWC), 4, 1.0), 0.1)
    assert outcome.is_applied and np.isfinite(outcome.loss) and outcome.gradient_norm > 0
    after = [np.array(variable) for variable in built.model.trainable_variables]
    assert any((old != new).any() for old, new in zip(before, after, strict=True))
    assert step.outputs(batch_of(shape_HWC).images_NHWC).shape == (4, 3)


@pytest.mark.parametrize("side", [1, 2, 7, 16, 100])
def test_small_cnn_fits_images_of_any_size(side):
    model = small_cnn((side, side, 1), 5)
    assert model(np.zeros((2, side, side, 1), np.float32)).shape == (2, 5)
    # World-size invariance rests on it: nothing that mixes samples or draws numbers.
    assert not model.non_trainable_variables


@pytest.mark.parametrize("model", ["small_cnn", f"{USER_MODELS}:regularized"])
def test_the_parts_of_a_batch_add_up_to_its_gradient(model):
    whole_batch = batch_of(SHAPE, num_rows=6)
    config = TrainConfig(model=model, label_smoothing=0.1)
    whole = step_of(config, SHAPE)[1].gradients(whole_batch, 6, 1.0)
    sums = None
    for rows, share in ((slice(0, 4), 4 / 6), (slice(4, 6), 2 / 6)):
        part = Batch(*(getattr(whole_batch, name)[rows] for name in ("images_NHWC", "labels_N", "weights_N")),
                     whole_batch.sample_ids_N[rows], 0, 0)  # fmt: skip
        addends = [np.array(addend) for addend in step_of(config, SHAPE)[1].gradients(part, 6, share)]
        sums = addends if sums is None else [a + b for a, b in zip(sums, addends, strict=True)]
    assert sums is not None
    for expected, total in zip(whole, sums, strict=True):
        np.testing.assert_allclose(total, expected, rtol=1e-4, atol=1e-6)


def test_rows_of_weight_zero_change_nothing():
    batch = batch_of(SHAPE, num_rows=6)
    padded = Batch(
        batch.images_NHWC, batch.labels_N, np.array([1, 1, 1, 1, 0, 0], np.float32), batch.sample_ids_N, 0, 0
    )
    short = Batch(batch.images_NHWC[:4], batch.labels_N[:4], batch.weights_N[:4], batch.sample_ids_N[:4], 0, 0)
    step = step_of(TrainConfig(), SHAPE)[1]
    for left, right in zip(step.gradients(padded, 4, 1.0), step.gradients(short, 4, 1.0), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def test_resnet50_refuses_small_images():
    with pytest.raises(UsageError, match=r'"resnet50" with images of 16 x 16; expected at least 32 x 32; .*small_cnn'):
        build_model(TrainConfig(model="resnet50"), SHAPE, THREE)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r'train.model = "resnet"; expected .*:object; did you mean .resnet50.\?'):
        load_tree(TrainTree, None, ("train.model=resnet",))
    libraries = "keras.applications:NAME, torchvision.models:NAME"
    with pytest.raises(
        UsageError, match=f"one of small_cnn, resnet50, vit, vit_tiny, .*{libraries}, or package.module:object"
    ):
        load_tree(TrainTree, None, ("train.model=zzz",))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("tests.no_such_module:f", r"there is no module 'tests.no_such_module'; looked in .*PYTHONPATH"),
        (f"{USER_MODELS}:no_such_function", r"models_under_test.py has no 'no_such_function'"),
        (f"{USER_MODELS}:failing",
         r"the factory failed: RuntimeError: no such backbone \(.*models_under_test.py:\d+\); .*num_classes=3"),
        (f"{USER_MODELS}:leaving", r"the factory failed: SystemExit: 0 \(.*\); .*num_classes=3"),
        (f"{USER_MODELS}:leaving_when_called",
         r"calling the model failed: SystemExit: 0 \(.*models_under_test.py:\d+\); .*shape \(N, "),
        # Keras's sentence alone: no colours, no list of what the layer was called with.
        (f"{USER_MODELS}:for_larger_images",
         r"call\(\)\. Input 0 .* \(2, \d+\); expected it to take .*; build it for the "),
        ("tests.train.leaving_module:model", r"cannot import 'tests.train.leaving_module': SystemExit: 0"),
        (f"{USER_MODELS}:no_model", r"the factory returned builtins.str; expected a Keras 3 model"),
        (f"{USER_MODELS}:one_class_too_many", r"returns 4 outputs; expected 3 outputs: the dataset has 3 classes"),
        (f"{USER_MODELS}:with_features", r"returns a dict; expected 3 outputs"),
        (f"{USER_MODELS}:frozen", r"has no trainable variables"),
        (f"{USER_MODELS}:compiled_with_mean", r"one number for a whole batch; expected one loss per sample"),
    ],
)  # fmt: skip
def test_a_factory_that_does_not_fit_is_refused(factory, message):
    with pytest.raises(UsageError, match=message):
        build_model(TrainConfig(model=factory), SHAPE, THREE)


@pytest.mark.starts("program")
def test_modules_of_the_working_directory_come_last(tmp_path):
    (tmp_path / "train.py").write_text("raise RuntimeError('imported the wrong train')")
    (tmp_path / "mine.py").write_text("def model(image_shape, num_classes): ...\n")
    code = "import sys; from train.models import MODELS; MODELS['mine:model']; print(sys.path[-1])"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path), done.stderr[-1000:]


@pytest.mark.parametrize(
    ("factory", "are_logits", "own_optimizer"),
    [
        ("subclassed", True, False),
        ("compiled_by_name", False, True),
        ("compiled_categorical", False, True),
        ("compiled_with_object", True, True),
        ("compiled_with_function", True, True),
    ],
)
def test_a_users_model_trains_as_it_came(tiny_uri, tmp_path, factory, are_logits, own_optimizer):
    name = f"{USER_MODELS}:{factory}"
    built = build_model(TrainConfig(model=name), SHAPE, THREE)
    assert built.outputs_are_logits == are_logits
    assert (built.compiled_optimizer is not None) == own_optimizer
    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path, recorder, model=name, epochs=4)
    losses = [record.train_loss for record in result.history]
    assert losses[-1] < losses[0]
    if "SGD" in type(built.compiled_optimizer).__name__:
        rates = [record.learning_rate for record in result.history]
        steps_per_epoch = recorder.steps[0].num_steps
        decays = factory == "compiled_with_object"
        expected = [0.125 * 0.5 ** ((epoch + 1) * steps_per_epoch) if decays else 0.125 for epoch in range(4)]
        assert rates == pytest.approx(expected), "its own learning rate is kept"


def test_the_config_wins_over_a_compiled_model_when_it_says_so(tiny_uri, tmp_path):
    result = train_here(
        tiny_uri, tmp_path, model=f"{USER_MODELS}:compiled_by_name", optimizer="sgd", loss="softmax",
        learning_rate=0.25, schedule="constant", label_smoothing=0.1,
    )  # fmt: skip
    assert result.history[0].learning_rate == 0.25
    for extra in ({"label_smoothing": 0.1}, {"gradient_clip_norm": 1.0}):
        with pytest.raises(UsageError, match=rf"{next(iter(extra))} = .* of a compiled model; "):
            train_here(tiny_uri, tmp_path / "own", model=f"{USER_MODELS}:compiled_by_name", **extra)


@pytest.mark.parametrize("factory", ["compiled_by_name", "compiled_categorical"])
def test_keras_losses_by_name_are_softmax_cross_entropy(factory):
    import tensorflow as tf

    outputs_NK = tf.constant([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    labels_N = tf.constant([0, 1], tf.int64)
    own = build_model(TrainConfig(model=f"{USER_MODELS}:{factory}"), SHAPE, THREE).per_sample_loss
    np.testing.assert_allclose(own(labels_N, outputs_NK), -np.log([0.7, 0.1]), rtol=1e-5)


def test_label_smoothing_spreads_the_label():
    import tensorflow as tf

    loss = build_model(TrainConfig(label_smoothing=0.3), SHAPE, THREE).per_sample_loss
    logits_NK = np.array([[2.0, -1.0, 0.5]])
    log_p = logits_NK - np.log(np.exp(logits_NK).sum())
    expected = -(0.8 * log_p[0, 0] + 0.1 * log_p[0, 1] + 0.1 * log_p[0, 2])
    np.testing.assert_allclose(
        loss(tf.constant([0], tf.int64), tf.constant(logits_NK, tf.float32)), [expected], rtol=1e-5
    )


def test_a_module_of_an_editable_install_is_found(tmp_path, monkeypatch):
    package = tmp_path / "src" / "editable_models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text("def model(image_shape, num_classes): ...\n")

    class Finder:
        """As setuptools installs it: no folder of it is on the path."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "editable_models":
                return importlib.util.spec_from_file_location(
                    name, package / "__init__.py", submodule_search_locations=[str(package)]
                )
            return None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert find_model("editable_models.nets:model") == str(package / "nets.py")
    assert source_sha256("editable_models.nets:model")
    assert MODELS["editable_models.nets:model"].__module__ == "editable_models.nets"


def test_a_module_in_a_zip_archive_is_found(tmp_path, monkeypatch):
    archive = tmp_path / "models.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("zipped_models.py", "def model(image_shape, num_classes): ...\n")
    monkeypatch.syspath_prepend(archive)
    assert find_model("zipped_models:model") == f"{archive}/zipped_models.py"
    with pytest.raises(UsageError, match="did you mean zipped_models:model"):
        find_model("zipped_models:modle")


def test_a_typo_is_answered_with_the_nearest_architecture():
    with pytest.raises(UsageError, match=r"of keras.applications; did you mean 'keras.applications:MobileNetV2'\?"):
        load_tree(TrainTree, None, ("train.model=keras.applications:MobilNetV2",))
    with pytest.raises(UsageError, match=r"of torchvision.models; did you mean 'torchvision.models:resnet18'\?"):
        load_tree(TrainTree, None, ("train.model=torchvision.models:resnet19",))


def test_the_architectures_of_libraries_are_those_that_they_have():
    import keras
    import torchvision

    listed = MODELS.libraries
    found = {module: load_object(entry.target).names() for module, entry in listed.items()}
    assert set(found["torchvision.models"]) == set(torchvision.models.list_models(module=torchvision.models))
    functions = {name for name, value in vars(keras.applications).items() if inspect.isfunction(value)}
    assert set(found["keras.applications"]) == functions


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    entry = Entry("train.models.libraries:TORCHVISION_MODELS", "", extra="torch", packages=("no_such_package",))
    monkeypatch.setitem(MODELS.libraries, "torchvision.models", entry)
    config = load_tree(TrainTree, None, ("train.model=torchvision.models:resnet18",)).train
    with pytest.raises(UsageError, match=r"needs no_such_package; not installed here; .* pip install '.\[torch\]'"):
        MODELS.usable(config.model)


def test_an_architecture_of_keras_takes_a_step(request):
    import tensorflow as tf

    # Compiling takes five times as long as the step.
    request.addfinalizer(lambda: tf.config.run_functions_eagerly(False))
    tf.config.run_functions_eagerly(True)
    built, step = step_of(TrainConfig(model="keras.applications:MobileNetV2", optimizer="sgd"), (32, 40, 1))
    assert built.outputs_are_logits
    outcome = step.apply(step.gradients(batch_of((32, 40, 1)), 4, 1.0), 0.1)
    assert outcome.is_applied and outcome.gradient_norm > 0


@pytest.mark.parametrize(
    ("model", "message"),
    [("InceptionV3", r"images of 16 x 16; expected at least 75 x 75; set etl.image_size >= 75"),
     ("EfficientNetB0", r"images of 16 x 16; expected at least 32 x 32")],
)  # fmt: skip
def test_images_that_an_architecture_of_keras_does_not_take_are_refused(model, message):
    with pytest.raises(UsageError, match=message):
        build_model(TrainConfig(model=f"keras.applications:{model}"), (16, 16, 3), THREE)


def test_an_architecture_that_scales_pixels_by_itself_gets_none_that_are_standardized():
    with pytest.raises(UsageError, match="scales pixels itself.* set train.standardize = false"):
        build_model(TrainConfig(model="keras.applications:EfficientNetB0"), (32, 32, 3), THREE)


def test_an_architecture_of_torchvision_trains_and_exports(tmp_path):
    shape = (32, 32, 1)
    BACKENDS["torch"].start(World(), 0)
    spec = ModelSpec(shape, THREE, InputScale((120.0,), (60.0,)))
    config = TrainConfig(model="torchvision.models:squeezenet1_1")
    assert resolve(config, SparkConfig()).config.backend == "torch"
    one = BACKENDS["torch"].build(config, spec)
    outcome = one.apply(one.gradients(batch_of(shape), 4, 1.0), 0.01)
    assert outcome.is_applied and outcome.gradient_norm > 0
    one.write_served(tmp_path)
    images_NHWC = batch_of(shape, 5).images_NHWC
    served = BACKENDS["torch"].load_served(tmp_path)
    np.testing.assert_allclose(served.predictions(images_NHWC), one.predictions(images_NHWC), atol=1e-5)


def test_images_that_an_architecture_of_torchvision_does_not_take_are_refused():
    for name, message in (("alexnet", "16 x 16; .*too small"), ("vit_b_16", "16 x 20; it accepts only square images")):
        with pytest.raises(UsageError, match=message):
            MODELS[f"torchvision.models:{name}"]((16, 20 if "vit" in name else 16, 3), 3)


SHARES_NOTHING = SharedModel(axes=(), rank_state=replicated_state)
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
            if parameter.ndim == 4:
                array = weight.transpose(3, 2, 0, 1)
            else:
                is_kernel = name.endswith("weight") and parameter.ndim == 2
                array = weight.reshape(parameter.shape[::-1]).T if is_kernel else weight.reshape(parameter.shape)
            parameter.copy_(torch.from_numpy(array.copy()))


@pytest.mark.parametrize(
    ("name", "shape_HWC", "options"),
    [
        ("vit", (16, 16, 3), {}),
        ("vit", (20, 33, 1), {}),
        ("vit", (16, 16, 3), {"dropout": 0.25}),
        ("small_cnn", (16, 16, 3), {}),
        ("small_cnn", (65, 31, 1), {}),
        ("small_cnn", (1, 7, 3), {}),
    ],
)
def test_the_module_computes_what_the_keras_model_does(name, shape_HWC, options):
    import tensorflow as tf
    import torch

    from train.backends.keras.build import number_sample_dropouts
    from train.layers.torch import SampleDropout

    build: Any = MODELS[name], MODULES[name]
    model, module = (each(shape_HWC, 3, **options) for each in build)
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
    gradients = build[1](shape_HWC, 3, **options)
    assign_from_keras(gradients, [each.numpy() for each in tape.gradient(total, model.trainable_variables)])
    for parameter, wanted in zip(module.parameters(), gradients.parameters(), strict=True):
        np.testing.assert_allclose(parameter.grad.numpy(), wanted.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
def test_the_module_begins_with_the_values_of_the_keras_model(name):
    build: Any = MODELS[name], MODULES[name]
    drawn, model = (build[1](SHAPE, 3, seed=seed) for seed in (5, 6))
    assign_from_keras(model, [each.numpy() for each in build[0](SHAPE, 3, seed=5).trainable_variables])
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
    np.testing.assert_allclose(served.predictions(images_NHWC), one.predictions(images_NHWC), atol=1e-5)


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


def test_without_tensorflow_a_model_with_a_twin_is_that_module(monkeypatch):
    monkeypatch.setattr("train.models.user.find_spec", lambda name: None if name == "tensorflow" else "found")
    config = resolve(TrainConfig(), SparkConfig()).config
    assert (config.model, config.backend, config.strategy, config.launcher) == (
        "small_cnn",
        "torch",
        "single",
        "inline",
    )
    setup = resolve(config, SparkConfig())
    assert setup.trains_module and not setup.changed(model="resnet50").trains_module


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


@pytest.mark.parametrize("model", ["resnet50", "keras.applications:MobileNetV2", "own", "by_ours"])
def test_a_keras_model_is_refused_before_anything_starts(model, tmp_path, monkeypatch):
    if model == "own":
        model = factory("own_keras", tmp_path, monkeypatch, "import keras\ndef build(image_shape, num_classes): ...\n")
    if model == "by_ours":
        text = "from train.models.vit import vit\ndef build(image_shape, num_classes): ...\n"
        model = factory("own_by_ours", tmp_path, monkeypatch, text)
    wanted = (
        rf"train.model = '{model}' is a Keras model, and train.strategy = '{STRATEGY}' .*; expected an nn.Module; "
        r'set train.model = "small_cnn" or "vit" or torchvision.models:NAME, or give a factory that returns an nn.Modu'
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
    setup = resolve(TrainConfig(model=model, strategy=STRATEGY), SparkConfig())
    with pytest.raises(UsageError, match="is a Keras model, and train.strategy = .*; expected an nn.Module"):
        try_build(setup, RowSchema("png", (16, 16, 3), ("cat", "dog")), DriverRecorder())


def test_a_factory_that_builds_on_a_module_of_ours_needs_pytorch(tmp_path, monkeypatch):
    text = "from train.models.vit_torch import vit_tiny\ndef build(image_shape, num_classes): ...\n"
    model = factory("own_tiny", tmp_path, monkeypatch, text)
    assert resolve(TrainConfig(model=model), SparkConfig()).config.backend == "torch"
