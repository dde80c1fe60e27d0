"""A model that only guesses outside of its training comes with a warning, and the gate does not promote it."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import replace

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.stores import open_store
from shardmill.typed_columns import LABEL_TYPES
from tests.lab.datasets import make_dataset
from tests.lab.scale import exhaustive
from tests.train.training import MODELS, Recorder, train_here
from train.backends import BACKENDS
from train.backends.backend import InputScale, ModelSpec
from train.backends.batch_norms import largest_momentum
from train.config import TrainConfig
from train.contracts.progress import EarlyStop, Progress
from train.contracts.values import EpochRecord, Evaluation
from train.contracts.world import World
from train.labels import LabelSpec
from train.published.export import export_training
from train.published.gate import promote_export
from train.rank.session import Chance
from train.results import read_result
from train.settings.gate import GateConfig

LATE = {"keras": "tests.train.keras_norm_models", "torch": "tests.train.torch_models"}
LINEAR = {"keras": MODELS, "torch": "tests.train.torch_models"}
EACH_BACKEND = pytest.mark.parametrize("backend", LATE)


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    fractions = {"train": 0.4, "validation": 0.3, "test": 0.3}
    return make_dataset(tmp_path_factory.mktemp("data"), num_images=240, split_fractions=fractions)


@pytest.fixture
def guessing(uri, backend, tmp_path):
    """A training's settings, what it reported and its result."""
    settings = {"model": f"{LATE[backend]}:late_statistics", "epochs": 4, "augment": {"random_flip": False}}
    recorder = Recorder()
    return settings, recorder, train_here(uri, tmp_path, recorder, **settings)


@EACH_BACKEND
def test_it_is_reported_and_not_promoted(guessing, backend, tmp_path):
    settings, recorder, result = guessing
    assert result.history[-1].train_accuracy > 0.6, "it has not learned"
    [told] = recorder.named("guessing")
    assert (
        told["warning"].startswith(result.caution) and "the weights of the last epoch are exported" in told["warning"]
    )
    assert "no better than guessing" in result.caution
    assert (result.exported, result.weights_epoch, result.checkpoint) == ("last", 3, result.last_checkpoint)
    assert read_result(open_store(str(tmp_path)), "t").caution == result.caution

    export = export_training(str(tmp_path), TrainConfig(**settings, global_batch_size=32), result, "run").export
    decision = promote_export(str(tmp_path), export, GateConfig(), "run").gate
    assert decision.decision == "kept" and decision.reason.startswith(result.caution)


@EACH_BACKEND
def test_a_model_that_does_better_is_not_said_to(uri, backend, tmp_path):
    recorder = Recorder()
    result = train_here(uri, tmp_path, recorder, model=f"{LINEAR[backend]}:linear", epochs=3)
    assert (result.caution, result.exported, recorder.named("guessing")) == ("", "best", [])


def record(epoch: int, loss: float, figure: float, *, train_accuracy: float | None = 0.5, **how: object) -> EpochRecord:
    validation = replace(Evaluation("validation", 60, loss, figure, None, ()), **how)
    return EpochRecord(epoch, 10, 1.0, train_accuracy, 1e-3, 1.0, validation)


def test_a_first_epoch_of_low_loss_that_guesses_is_not_the_best(uri):
    chance = Chance.of(open_dataset(uri).manifest)
    progress = Progress()
    for each in (record(0, 1.1, 0.33), record(1, 1.3, 0.7), record(2, 1.2, 0.34), record(3, 1.25, 0.8)):
        is_guessing = chance.is_all((*progress.history, each))
        assert is_guessing == (each.epoch in (0, 2))
        progress = progress.after_epoch(each, EarlyStop(), f"epoch {each.epoch}", is_guessing=is_guessing)
    assert (progress.best.epoch, progress.best.is_guessing) == (3, False)


def test_what_a_guess_reaches_depends_on_the_labels(uri):
    manifest = open_dataset(uri).manifest

    def of(kind: str, counts: tuple[int, ...], num_rows: int = 100) -> Chance | None:
        split = manifest.splits["train"].model_copy(update={"class_counts": counts, "num_rows": num_rows})
        changed = {"splits": {"train": split, "validation": split}, "columns": {"label": LABEL_TYPES[kind]}}
        return Chance.of(manifest.model_copy(update=changed))

    assert of("class", (80, 10, 10)).train_accuracy == of("class", (80, 10, 10)).validation_figure == 0.8
    # The mean precision of any order of images is the share of a class; "no" is right for the rare one.
    assert of("multi_label", (80, 10, 0)).validation_figure == pytest.approx(0.45)
    assert of("multi_label", (80, 10, 0)).train_accuracy == pytest.approx((0.8 + 0.9 + 1.0) / 3)
    assert of("class", (80, 10, 10)).validation_limit == pytest.approx(0.88)
    assert of("class", (10, 10, 9), 29) is None and of("class", (100, 0, 0)) is None


def test_a_training_that_has_not_learned_is_not_at_fault_for_its_validation(uri):
    chance = Chance.of(open_dataset(uri).manifest)
    assert not chance.has_learned([record(0, 1.1, 0.3, train_accuracy=0.38)])
    assert chance.has_learned([record(0, 1.1, 0.3, train_accuracy=0.45)])


def test_numbers_are_compared_with_the_first_epoch():
    chance = Chance(0.0, 0.0, 0.0)
    numbers = {"label_kind": "float", "mean_absolute_error": 1.0}
    first = replace(record(0, 5.0, 0.0, train_accuracy=None, **numbers), train_loss=4.0)
    worse = replace(record(1, 4.5, 0.0, train_accuracy=None, **numbers), train_loss=1.0)
    better = replace(worse, validation=replace(worse.validation, loss=1.5))
    assert chance.is_all([first, worse]) and chance.has_learned([first, worse])
    assert not chance.is_all([first, better]) and not chance.has_learned([first])
    assert "loss 4.5 after epoch 2 is no better than the loss 4 of the first epoch" in chance.told([first, worse])


@pytest.mark.parametrize("steps", [1, 3, 10, 300, 100_000])
def test_moving_statistics_are_those_of_the_model_by_the_end_of_an_epoch(steps):
    momentum = largest_momentum(steps)
    assert 0.5 <= momentum < 1 and (momentum**steps <= 0.0501 or momentum == 0.5)
    assert largest_momentum(300) == pytest.approx(0.99, abs=1e-4)


@pytest.mark.parametrize(
    ("backend", "model", "own"),
    [
        exhaustive("keras", "resnet50", 0.99),
        exhaustive("keras", "keras.applications:MobileNetV2", 0.999),
        ("torch", "torchvision.models:resnet18", 0.9),
        ("keras", f"{LATE['keras']}:late_statistics", None),
        ("torch", f"{LATE['torch']}:late_statistics", None),
    ],
)
def test_models_by_name_follow_the_length_of_an_epoch(backend, model, own):
    def built(steps_per_epoch: int) -> tuple[set[float], str]:
        BACKENDS[backend].start(World(), 0)
        spec = ModelSpec((32, 32, 3), LabelSpec("class", ("a", "b")), InputScale((0.0,) * 3, (1.0,) * 3))
        one = BACKENDS[backend].build(TrainConfig(model=model), replace(spec, steps_per_epoch=steps_per_epoch))
        if backend == "keras":
            layers = one._model._flatten_layers()
            found = {layer.momentum for layer in layers if "BatchNorm" in type(layer).__name__}
        else:
            found = {1 - each.momentum for each in one.classifier.modules() if "BatchNorm" in type(each).__name__}
        return {round(each, 6) for each in found}, one.config_sha256

    (short, identity), (unknown, same) = built(10), built(0)
    assert identity == same, "an older checkpoint would no longer fit"
    if own is None:
        assert short == unknown == {0.99999}
    else:
        assert short == {round(largest_momentum(10), 6)} and unknown == {own}
