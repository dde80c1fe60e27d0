"""Every model by name trains; a user's own is taken as it is, or refused with the numbers."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import load_tree
from shardmill.values import Batch
from tests.lab.scale import exhaustive
from tests.train.learners import SHAPE, THREE, batch_of, step_of
from tests.train.training import MODELS as USER_MODELS
from tests.train.training import Recorder, train_here
from train.backends.keras.build import build_model
from train.config import TrainConfig
from train.models import BUILD_FOR_ANY_IMAGE, MODELS
from train.models.find import find_model
from train.models.small_cnn import small_cnn
from train.models.user import source_sha256
from train.tree import TrainTree

OURS = [name for name, each in MODELS.entries.items() if "keras" in each.packages]


@pytest.mark.parametrize(
    ("name", "shape_HWC"),
    [
        *((name, SHAPE) for name in OURS if name in BUILD_FOR_ANY_IMAGE),
        *(exhaustive(name, (32, 32, channels), id=f"{name}-{channels}") for name in OURS for channels in (1, 3)),
    ],
)
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
        (
            "tests.no_such_module:f",
            r"there is no module 'tests.no_such_module'; looked in .*PYTHONPATH",
        ),
        (f"{USER_MODELS}:no_such_function", r"models_under_test.py has no 'no_such_function'"),
        (
            f"{USER_MODELS}:failing",
            r"the factory failed: RuntimeError: no such backbone \(.*models_under_test.py:\d+\); .*num_classes=3",
        ),
        (f"{USER_MODELS}:leaving", r"the factory failed: SystemExit: 0 \(.*\); .*num_classes=3"),
        (
            f"{USER_MODELS}:leaving_when_called",
            r"calling the model failed: SystemExit: 0 \(.*models_under_test.py:\d+\); .*shape \(N, ",
        ),
        # Keras's sentence alone: no colours, no list of what the layer was called with.
        (
            f"{USER_MODELS}:for_larger_images",
            r"call\(\)\. Input 0 .* \(2, \d+\); expected it to take .*; build it for the ",
        ),
        ("tests.train.leaving_module:model", r"cannot import 'tests.train.leaving_module': SystemExit: 0"),
        (f"{USER_MODELS}:no_model", r"the factory returned builtins.str; expected a Keras 3 model"),
        (f"{USER_MODELS}:one_class_too_many", r"returns 4 outputs; expected 3 outputs: the dataset has 3 classes"),
        (f"{USER_MODELS}:with_features", r"returns a dict; expected 3 outputs"),
        (f"{USER_MODELS}:frozen", r"has no trainable variables"),
        (f"{USER_MODELS}:compiled_with_mean", r"one number for a whole batch; expected one loss per sample"),
    ],
)
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
