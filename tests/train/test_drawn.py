"""What our own generators draw: `SampleDropout`'s masks by sample, and first values by seed and name."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.mix import mix64
from tests.import_graph import ROOT
from tests.lab.scale import exhaustive
from tests.train.learners import SHAPE, THREE, TORCH_MODELS, batch_of, learner
from tests.train.ranks import SMOOTH_MODEL, train_on_ranks
from tests.train.training import MODELS
from train.api import StatePart
from train.backends import BACKENDS
from train.backends.keras.serving import KERAS_FILE, KerasCheck, ServingModel, write_keras_file
from train.backends.model_spec import InputScale, ModelSpec
from train.layers.sample_bits import DROPOUT, drawing, sample_keys
from train.models import MODELS as OURS
from train.models import MODULES
from train.models.first_values import FIRST_VALUES, begin_torch, first_values
from train.strategies import STRATEGIES

PATCHES = {"keras": f"{MODELS}:with_dropout_of_patches", "torch": f"{TORCH_MODELS}:with_dropout_of_patches"}


def kept_by_keras(rate: float, keys_N: np.ndarray, place: int, shape: tuple[int, ...]) -> np.ndarray:
    """As a compiled step has it."""
    import tensorflow as tf

    from train.layers.keras import SampleDropout

    layer = SampleDropout(rate)
    layer.place = place

    @tf.function
    def step(keys_N, ones):
        with drawing(keys_N):
            return layer(ones, training=True)

    return step(tf.constant(keys_N), tf.ones((len(keys_N), *shape))).numpy()


def kept_by_torch(rate: float, keys_N: np.ndarray, place: int, shape: tuple[int, ...]) -> np.ndarray:
    import torch

    from train.layers.torch import SampleDropout

    module = SampleDropout(rate)
    module.place = place
    with drawing(torch.from_numpy(keys_N)):
        return module(torch.ones((len(keys_N), *shape))).numpy()


KEPT = {"keras": kept_by_keras, "torch": kept_by_torch}


@pytest.mark.parametrize("name", BACKENDS)
def test_masks_are_what_the_formula_says(name):
    """Of each word of 64 bits four elements have sixteen: among the lowest, as signed integers, they are dropped."""
    ids_N, rate = np.array([3, -7, 2**62, 0]), 0.3
    words_NW = [[mix64(DROPOUT, 5, 2, int(each), 1, word) for word in range(4)] for each in ids_N]
    is_kept_NE = np.array(words_NW, np.uint64).view(np.int16)[:, :15] >= round(rate * 2**16) - 2**15
    found = KEPT[name](rate, sample_keys(5, 2, ids_N), 1, (3, 5))
    np.testing.assert_allclose(found, is_kept_NE.reshape(4, 3, 5) / 0.7, rtol=1e-4)


@pytest.mark.drill
def test_a_keras_model_on_pytorch_has_the_masks_that_it_has_on_tensorflow():
    """In a process of its own: one has one of the two."""
    command = [sys.executable, "-m", "tests.programs.drop_by_keras_on_torch"]
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    expected = kept_by_keras(0.3, sample_keys(5, 2, np.arange(4)), 1, (3, 5)) > 0
    assert done.stdout.strip() == np.packbits(expected).tobytes().hex(), done.stderr[-2000:]


def test_masks_keep_their_share_and_have_nothing_in_common():
    """Over samples with neighbouring ids, epochs, layers and seeds; within five and six standard deviations."""
    num_elements, rate = 8192, 0.25
    masks = []
    for seed, epoch, place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2), (2**32 - 1, 50, 3)]:
        keys_N = sample_keys(seed, epoch, np.arange(40))
        masks.append(kept_by_torch(rate, keys_N, place, (num_elements,)) > 0)
    masks_ME = np.concatenate(masks)
    deviation = np.sqrt(rate * (1 - rate) / num_elements)
    assert np.abs(masks_ME.mean(axis=1) - (1 - rate)).max() < 5 * deviation
    assert abs(masks_ME.mean() - (1 - rate)) < 5 * deviation / np.sqrt(len(masks_ME))
    # Each with each other, with itself some elements on, and place by place over all.
    correlations = np.corrcoef(masks_ME) - np.eye(len(masks_ME))
    assert np.abs(correlations).max() < 6 / np.sqrt(num_elements)
    centred_ME = (masks_ME - (1 - rate)) / np.sqrt(rate * (1 - rate))
    for lag in (1, 2, 3, 4, 5, 8, 16, 64, 1024):
        assert abs((centred_ME[:, lag:] * centred_ME[:, :-lag]).mean()) < 5 / np.sqrt(centred_ME[:, lag:].size)
    assert np.abs(centred_ME.mean(axis=0)).max() < 6 / np.sqrt(len(masks_ME))


def test_runs_of_elements_are_kept_as_often_as_by_chance():
    """All 256 patterns of eight neighbours, at one half: chi squared with 255 degrees of freedom."""
    keys_N = sample_keys(7, 0, np.arange(100))
    is_kept_NE = kept_by_torch(0.5, keys_N, 0, (8192,)) > 0
    counts = np.bincount(np.packbits(is_kept_NE, axis=1).ravel(), minlength=256)
    expected = counts.sum() / 256
    assert 150 < ((counts - expected) ** 2 / expected).sum() < 380


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sample_keeps_its_mask_in_any_batch(name):
    batch = batch_of(SHAPE, num_rows=6)
    one = learner(name, SMOOTH_MODEL[name], seed=3)
    whole = [np.array(each) for each in one.gradients(batch, 6, 1.0)]
    rows = np.array([4, 1, 5, 0, 3, 2])
    names = ("images_NHWC", "labels_N", "weights_N", "sample_ids_N")
    shuffled = replace(batch, **{each: getattr(batch, each)[rows] for each in names})
    accumulated = learner(name, SMOOTH_MODEL[name], seed=3, accumulation_steps=4).gradients(shuffled, 6, 1.0)
    for expected, found in zip(whole, accumulated, strict=True):
        np.testing.assert_allclose(np.array(found), expected, rtol=1e-4, atol=1e-6)
    # And another one in another epoch.
    *_, (loss, _) = one.gradients(replace(batch, epoch=1), 6, 1.0)
    assert abs(float(loss) / whole[-1][0] - 1) > 1e-4


@pytest.mark.parametrize("name", BACKENDS)
def test_outside_training_it_is_not_there(name, tmp_path):
    """Neither in answers nor in exports: of the rate 0.2 nothing is left but the weights."""
    batch, one = batch_of(SHAPE), learner(name, SMOOTH_MODEL[name])
    one.apply(one.gradients(batch, 4, 1.0), 0.01)
    answers = one.predictions(batch.images_NHWC)
    assert np.array_equal(one.predictions(batch.images_NHWC), answers)
    assert not [array for array in one.arrays(StatePart.OWN) if array.dtype.kind == "f"]
    one.write_served(tmp_path)
    np.testing.assert_allclose(BACKENDS[name].load_served(tmp_path).predictions(batch.images_NHWC), answers, atol=1e-6)
    if name == "keras":
        bare = learner(name, "small_cnn")
        bare.assign(StatePart.WEIGHTS, one.arrays(StatePart.WEIGHTS), "the test")
        np.testing.assert_allclose(bare.predictions(batch.images_NHWC), answers, atol=1e-6)


def test_activations_that_are_computed_again_are_the_same():
    batch = batch_of(SHAPE, num_rows=6)
    once, twice = (learner("torch", name) for name in (f"{TORCH_MODELS}:smooth", f"{TORCH_MODELS}:Recomputing"))
    twice.assign(StatePart.WEIGHTS, once.arrays(StatePart.WEIGHTS), "the test")
    for one, other in zip(once.gradients(batch, 6, 1.0), twice.gradients(batch, 6, 1.0), strict=True):
        np.testing.assert_allclose(np.array(other), np.array(one), rtol=1e-5, atol=1e-7)


@pytest.fixture
def transformer():
    return learner("keras", f"{MODELS}:dropping_vit")


def test_the_vision_transformer_has_it_when_asked_for(transformer):
    from train.layers.keras import SampleDropout

    one, batch = transformer, batch_of(SHAPE)
    places = [layer.place for layer in one._model.layers if isinstance(layer, SampleDropout)]
    assert places == list(range(9)), "behind the embedding, and behind both halves of four blocks"
    *_, (loss, _) = one.gradients(batch, 4, 1.0)
    *_, (again, _) = one.gradients(batch, 4, 1.0)
    *_, (in_next_epoch, _) = one.gradients(replace(batch, epoch=1), 4, 1.0)
    assert float(loss) == float(again) != float(in_next_epoch)


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    section = (ROOT / "docs" / "training" / "models.md").read_text().partition("## Dropout\n")[2]
    (tmp_path / "documented.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    *_, (loss, _) = learner("keras", "documented:build").gradients(batch_of(SHAPE), 4, 1.0)
    *_, (again, _) = learner("keras", "documented:build").gradients(replace(batch_of(SHAPE), epoch=1), 4, 1.0)
    assert float(loss) != float(again)


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_that_are_no_samples_are_refused(name):
    one = learner(name, PATCHES[name])
    with pytest.raises(UsageError, match=r"^SampleDropout was given \d+ rows of a batch of 4; expected one row for"):
        one.gradients(batch_of(SHAPE), 4, 1.0)


def test_outside_a_training_step_it_has_nothing_to_draw_from():
    import torch

    from train.layers import keras as for_keras
    from train.layers import torch as for_torch

    images = np.ones((2, 8), np.float32)
    assert np.array_equal(for_keras.SampleDropout(0.5)(images), images)
    with pytest.raises(UsageError, match="was called in training mode without sample ids"):
        for_keras.SampleDropout(0.5)(images, training=True)
    module = for_torch.SampleDropout(0.5)
    assert torch.equal(module.eval()(torch.ones(2, 8)), torch.ones(2, 8))
    with pytest.raises(
        UsageError, match=("without sample ids.*; outside of training, call the model with training=False")
    ):
        module.train()(torch.ones(2, 8))
    with pytest.raises(UsageError, match=r"calling the model failed: .* keep modules in an nn.ModuleList"):
        learner("torch", f"{TORCH_MODELS}:Hiding")
    with pytest.raises(UsageError, match=r"rate=1\); expected a share of elements: at least 0, less than 1"):
        for_torch.SampleDropout(1)


def test_a_keras_file_names_the_dropout_that_it_keeps(tmp_path):
    import keras

    from train.layers.keras import SampleDropout

    spec, images_NHWC = ModelSpec(SHAPE, THREE, InputScale((120.0,) * 3, (60.0,) * 3)), batch_of(SHAPE).images_NHWC
    named = "load it with custom_objects for train.layers.keras.SampleDropout"
    for dropout, note in [(SampleDropout(0.2), ""), (keras.layers.TimeDistributed(SampleDropout(0.2)), named)]:
        layers = [dropout, keras.layers.Flatten(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input(SHAPE), *layers])
        serving = ServingModel(model, outputs_are_logits=True, spec=spec)
        check = KerasCheck(serving.predictions_name, images_NHWC, serving.predict(images_NHWC), max_abs_diff=1e-5)
        assert write_keras_file(serving, tmp_path / KERAS_FILE, check) == note
        loaded: keras.Model = keras.models.load_model(tmp_path / KERAS_FILE)
        kept = {type(layer) for layer in loaded._flatten_layers()} & {SampleDropout, keras.layers.Dropout}
        assert kept == ({SampleDropout} if note else {keras.layers.Dropout})


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
    """Each weight has the same values, in the layout of its framework; test_models.py compares what they compute."""
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
    of_torch, has_odd_heads = "torch" in OURS.entry(model).packages, model == "vit_tiny"
    return tuple(
        name
        for name, each in STRATEGIES.installed().items()
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
