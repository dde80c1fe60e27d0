"""Logits and probabilities are told apart by the outputs, wherever in the model a softmax or sigmoid is."""

# pyright: reportArgumentType=false
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardmill.errors import UsageError
from tests.train.learners import batch_of
from train.backends import BACKENDS
from train.backends.backend import InputScale, ModelSpec, StatePart
from train.config import TrainConfig
from train.contracts.world import World
from train.labels import LabelSpec

SHAPE = (8, 8, 3)
EACH_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
SOFTMAXES = ["nested_softmax", "ops_softmax", "softmax_of_zeros", "softmax_then_identity", "own_softmax_layer"]
SIGMOIDS = ["nested_sigmoid", "ops_sigmoid"]
LOGITS = ["logits", "zeros", "constant_distribution", "small_relu", "tanh"]


def learner(backend: str, factory: str, labels: LabelSpec, **train: object) -> Any:
    BACKENDS[backend].start(World(), 0)
    config = TrainConfig(model=f"tests.train.{backend}_output_models:{factory}", optimizer="sgd", **train)
    return BACKENDS[backend].build(config, ModelSpec(SHAPE, labels, InputScale((127.5,) * 3, (64.0,) * 3)))


def classes(number: int) -> LabelSpec:
    return LabelSpec("class", tuple("abcdefghij"[:number]))


def several(number: int) -> LabelSpec:
    return LabelSpec("multi_label", tuple("abcdefghij"[:number]))


@EACH_BACKEND
@pytest.mark.parametrize("factory", SOFTMAXES)
@pytest.mark.parametrize("num_classes", [2, 10])
def test_a_softmax_is_recognised_wherever_it_is(backend, factory, num_classes):
    one = learner(backend, factory, classes(num_classes))
    assert not one.outputs_are_logits
    images_NHWC = batch_of(SHAPE).images_NHWC
    # Not a second time in what an export answers.
    np.testing.assert_array_equal(one.answers(images_NHWC), one.outputs(images_NHWC))


@EACH_BACKEND
@pytest.mark.parametrize("factory", SIGMOIDS)
@pytest.mark.parametrize("num_classes", [1, 2, 10])
def test_a_sigmoid_is_recognised_wherever_it_is(backend, factory, num_classes):
    assert not learner(backend, factory, several(num_classes)).outputs_are_logits


@EACH_BACKEND
@pytest.mark.parametrize("factory", LOGITS)
@pytest.mark.parametrize("labels", [classes(2), classes(10), several(1), several(2), several(10)], ids=str)
def test_logits_are_no_probabilities_though_they_look_so_at_first(backend, factory, labels):
    assert learner(backend, factory, labels).outputs_are_logits


@EACH_BACKEND
@pytest.mark.parametrize("num_classes", [2, 10])
def test_logarithms_of_probabilities_are_logits(backend, num_classes):
    assert learner(backend, "log_softmax", classes(num_classes)).outputs_are_logits


@EACH_BACKEND
@pytest.mark.parametrize("factory", ["softmax_of_zeros", "zeros", "logits"])
def test_looking_leaves_the_model_as_it_was(backend, factory):
    seen, said = (
        learner(backend, factory, classes(3), model_outputs=each).arrays(StatePart.WEIGHTS)
        for each in ("auto", "logits")
    )
    assert [array.tobytes() for array in seen] == [array.tobytes() for array in said]


@EACH_BACKEND
def test_what_cannot_be_right_is_refused_with_the_key_to_set(backend):
    with pytest.raises(
        UsageError, match=r"do not always add up to 1; .*one class; .*set train.model_outputs to \"logits\""
    ):
        learner(backend, "ops_sigmoid", classes(3))
    assert learner(backend, "ops_sigmoid", classes(3), model_outputs="logits").outputs_are_logits
    for factory, labels, found in (
        ("logits", classes(3), "not all from 0 to 1"),
        ("ops_sigmoid", classes(3), "each from 0 to 1, but do not add up to 1"),
        ("tanh", several(3), "not all from 0 to 1"),
    ):
        with pytest.raises(UsageError, match=rf"train.model_outputs = \"probabilities\", .*{found}.*\"auto\""):
            learner(backend, factory, labels, model_outputs="probabilities")
    assert not learner(backend, "ops_softmax", classes(3), model_outputs="probabilities").outputs_are_logits


def test_a_compiled_loss_that_contradicts_the_outputs_is_refused():
    with pytest.raises(
        UsageError, match="loss for probabilities, but returns any numbers; .*from_logits=True.*train.loss"
    ):
        learner("keras", "logits_without_from_logits", classes(3))
    assert learner("keras", "logits_without_from_logits", classes(3), loss="softmax").outputs_are_logits
    with pytest.raises(UsageError, match="from_logits=True, but returns probabilities; .*from_logits=False"):
        learner("keras", "softmax_with_from_logits", classes(3))
    assert not learner("keras", "softmax_with_from_logits", classes(3), loss="softmax").outputs_are_logits


@EACH_BACKEND
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_softmax_in_sixteen_bits_is_one(backend, precision):
    assert not learner(backend, "ops_softmax", classes(10), mixed_precision=precision).outputs_are_logits
