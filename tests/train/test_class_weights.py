"""The loss of a class can count more than that of another; what is evaluated counts as ever."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.config import load_tree
from tests.train.learners import SHAPE, batch_of
from train.backends import BACKENDS
from train.backends.backend import InputScale, ModelSpec
from train.backends.class_weights import class_weights
from train.config import TrainConfig
from train.contracts.world import World
from train.labels import LabelSpec
from train.planning.preflight import check_trainable
from train.tree import TrainTree

LINEAR = {"keras": "tests.train.models_under_test:linear", "torch": "tests.train.torch_models:linear"}
THREE = LabelSpec("class", ("a", "b", "c"))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_class_counts_in_the_loss_as_if_its_samples_weighed_so_much(name, smoothing):
    config = TrainConfig(model=LINEAR[name], optimizer="sgd", label_smoothing=smoothing)
    weights_K = (0.5, 1.0, 3.0)
    batch = replace(batch_of(SHAPE, 6), labels_N=np.array([0, 1, 2, 2, 1, 0]), weights_N=np.float32([1, 1, 1, 1, 1, 0]))
    weighed = replace(batch, weights_N=batch.weights_N * np.float32(weights_K)[batch.labels_N])
    found = []
    for given, weights in ((batch, weights_K), (weighed, ())):
        BACKENDS[name].start(World(), 0)
        spec = ModelSpec(SHAPE, THREE, InputScale((120.0,) * 3, (60.0,) * 3), weights)
        learner = BACKENDS[name].build(config, spec)
        found.append(learner.apply(learner.gradients(given, 5, 1.0), 0.01))
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6)
    assert found[0].gradient_norm == pytest.approx(found[1].gradient_norm, rel=1e-5)
    # Right answers are counted, not weighed.
    assert found[0].num_correct == round(found[0].num_correct)


def test_balanced_classes_count_alike(tiny_uri):
    dataset = open_dataset(tiny_uri)
    counts = dataset.manifest.splits["train"].class_counts
    weights = class_weights(TrainConfig(class_weights="balanced"), dataset.manifest)
    products = [weight * count for weight, count in zip(weights, counts, strict=True)]
    assert products == pytest.approx([sum(counts) / 3] * 3)
    assert class_weights(TrainConfig(), dataset.manifest) == ()


def test_classes_are_weighed_by_name(tiny_uri):
    dataset = open_dataset(tiny_uri)
    _, second, third = dataset.manifest.row_schema.class_names
    tree = load_tree(TrainTree, None, (f'train.class_weights={{"{second}" = 2.5}}',))
    assert class_weights(tree.train, dataset.manifest) == (1.0, 2.5, 1.0)
    misspelt = TrainConfig(class_weights={f"{third}x": 2.0})
    with pytest.raises(UsageError, match=f"'{third}x'; expected classes of the dataset: .* did you mean '{third}'"):
        check_trainable(misspelt, dataset)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("even", "config key train.class_weights = \"even\"; expected 'balanced' or a table, NAME = VALUE"),
        ("[1, 2]", "config key train.class_weights = [1, 2]; expected 'balanced' or a table, NAME = VALUE"),
        ("{cat=0}", "config key train.class_weights.cat = 0; expected greater than 0"),
        ('{cat="x"}', 'config key train.class_weights.cat = "x"; expected a number'),
    ],
)
def test_a_weight_of_another_type_gets_one_line(given: str, line: str):
    with pytest.raises(UsageError) as caught:
        load_tree(TrainTree, None, (f"train.class_weights={given}",))
    assert caught.value.what.startswith(line), caught.value
