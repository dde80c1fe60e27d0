"""Architectures of installed libraries as `train.model`: named as the installed release names them, built, refused."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import inspect

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig, load_tree
from shardmill.registry import Entry, load_object
from tests.train.learners import THREE, batch_of, step_of
from train.backends import BACKENDS
from train.backends.backend import InputScale, ModelSpec
from train.backends.keras.build import build_model
from train.config import TrainConfig
from train.contracts.world import World
from train.models import MODELS
from train.planning.auto import resolve
from train.tree import TrainTree


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
    np.testing.assert_allclose(served.answers(images_NHWC), one.answers(images_NHWC), atol=1e-5)


def test_images_that_an_architecture_of_torchvision_does_not_take_are_refused():
    for name, message in (("alexnet", "16 x 16; .*too small"), ("vit_b_16", "16 x 20; it accepts only square images")):
        with pytest.raises(UsageError, match=message):
            MODELS[f"torchvision.models:{name}"]((16, 20 if "vit" in name else 16, 3), 3)
