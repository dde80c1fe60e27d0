"""A model that is sure of itself, also where it is wrong, has one loss: in training, in its export and for the gate."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from etl.config import SourceConfig, SplitFractions
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.open import open_dataset
from shardmill.errors import IntegrityError
from shardmill.loader.reader import read_split
from tests.etl.incremental import build_from
from tests.train.training import MODELS, train_here
from train.backends import BACKENDS
from train.config import TrainConfig
from train.contracts.values import Evaluation
from train.contracts.world import World
from train.evaluation.evaluate import scores_of
from train.published.export import check_figures, export_training
from train.published.figures import by_name, evaluate_export
from train.published.load import load_exported

LINEAR = {"keras": f"{MODELS}:linear", "torch": "tests.train.torch_models:linear"}
NUM_IMAGES = 160
SURE = 30.0
"""A float32 sigmoid is exactly 1 from a logit of 16.7 on."""


def _image(brightness: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), brightness, np.uint8)).save(out, "PNG")
    return out.getvalue()


def _labels(kind: str, brightness_N: np.ndarray) -> list[Any]:
    """What can be learned from the brightness, but for every seventh image, whose label says the contrary."""
    is_bright_N = (brightness_N > 127) ^ (np.arange(len(brightness_N)) % 7 == 0)
    match kind:
        case "class":
            return [f"class {int(each) + (number % 3 == 0)}" for number, each in enumerate(is_bright_N)]
        case "binary":
            return ["bright" if each else "dark" for each in is_bright_N]
        case "multi_label":
            return [["bright", "image"] if each else ["image"] for each in is_bright_N]
        case _:
            return (is_bright_N * 1e6).tolist()


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> dict[str, Dataset]:
    brightness_N = np.random.default_rng(0).integers(0, 256, NUM_IMAGES)
    found = {}
    for kind in ("class", "binary", "multi_label", "float"):
        folder = tmp_path_factory.mktemp(kind)
        images = [_image(each) for each in brightness_N]
        pq.write_table(pa.table({"image": images, "labels": _labels(kind, brightness_N)}), folder / "a.parquet")
        label_kind = "class" if kind == "binary" else kind
        source = SourceConfig(uri=str(folder / "a.parquet"), kind="parquet", label_kind=label_kind)
        fractions = SplitFractions(train=0.5, validation=0.2, test=0.3)
        build_from(source, folder / "dataset", image_size=8, split_fractions=fractions)
        found[kind] = open_dataset(str(folder / "dataset"))
    return found


@pytest.mark.parametrize("kind", ["class", "binary", "multi_label", "float"])
@pytest.mark.parametrize("backend", LINEAR)
def test_it_is_exported_with_the_loss_that_training_recorded(datasets, kind, backend, tmp_path):
    dataset, settings = datasets[kind], {"model": LINEAR[backend], "epochs": 4, "schedule": "constant"}
    settings |= {"learning_rate": 100.0 if kind == "float" else 3.0, "augment": {"random_crop_padding": 0}}
    result = train_here(dataset.pin.uri, tmp_path, **settings)
    assert result.evaluation.loss > SURE, "the model is not sure enough of what it mistakes"

    config = TrainConfig(**settings, global_batch_size=32)
    export = export_training(str(tmp_path), config, result, "run").export
    assert export.record.evaluation.loss == pytest.approx(result.evaluation.loss, rel=1e-4)
    assert export.record.evaluation.figure == pytest.approx(result.evaluation.figure, rel=1e-4)

    # As `evaluate` on another version and the gate's comparison measure it.
    with read_split(dataset, "test") as batches:
        measured = evaluate_export(load_exported(str(tmp_path), export.number), dataset, "test", batches)
    assert measured.loss == pytest.approx(result.evaluation.loss, rel=1e-4)
    assert measured.per_class == result.evaluation.per_class


def _older_saved_model(folder: Path) -> None:
    """As exports were written that carried probabilities alone."""
    import keras
    import tensorflow as tf

    model = keras.Sequential([keras.Input((4, 4, 3)), keras.layers.Flatten(), keras.layers.Dense(3, "softmax")])

    def serve(images: Any) -> dict[str, Any]:
        probabilities_NK = model(tf.cast(images, tf.float32), training=False)
        return {"probabilities": probabilities_NK, "label": tf.argmax(probabilities_NK, axis=-1)}

    archive: Any = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", serve, input_signature=[tf.TensorSpec((None, 4, 4, 3), tf.uint8, name="images")])
    archive.write_out(str(folder / "saved_model"), verbose=False)


def _older_program(folder: Path) -> None:
    import torch
    from torch import nn

    class Served(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(48, 3)

        def forward(self, images_NHWC: Any) -> Any:
            return self.out(images_NHWC.flatten(1).float()).softmax(dim=1)

    images, batch = torch.zeros((2, 4, 4, 3), dtype=torch.uint8), {0: torch.export.Dim("N")}
    (folder / "torch_export").mkdir()
    program = torch.export.export(Served().eval(), (images,), dynamic_shapes=(batch,))
    torch.export.save(program, folder / "torch_export" / "model.pt2", extra_files={"class_names.json": "[]"})


@pytest.mark.parametrize(("backend", "write"), [("keras", _older_saved_model), ("torch", _older_program)])
def test_an_export_without_logits_is_evaluated_by_its_probabilities(backend, write, tmp_path):
    BACKENDS[backend].start(World(), 0)
    write(tmp_path)
    served = BACKENDS[backend].load_served(tmp_path)
    images_NHWC = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    assert not served.outputs_are_logits
    assert np.array_equal(served.outputs(images_NHWC), served.answers(images_NHWC))
    np.testing.assert_allclose(served.answers(images_NHWC).sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("kind", ["class", "multi_label"])
@pytest.mark.parametrize("are_logits", [True, False])
def test_a_class_that_an_export_does_not_know_is_never_its_answer(kind, are_logits):
    outputs_NK = np.array([[-500.0, 300.0, -900.0]], np.float32) if are_logits else np.array([[0.0, 1.0, 0.0]])
    scores = by_name(lambda _images: scores_of(kind, outputs_NK, are_logits), "abc", ["new", "c", "b", "a"])
    [found] = scores(np.empty(0))
    assert found.argmax() == 2 and found[0] < found[1:].min() and np.isfinite(found).all()
    # Without the best one: of two that it is sure not to see, it still takes none that it does not know.
    among = by_name(lambda _images: scores_of(kind, outputs_NK, are_logits), "abc", ["new", "c", "a"], ["a", "c"])
    assert among(np.empty(0)).argmax() != 0


def test_numbers_without_error_may_differ_by_rounding_alone():
    exact = Evaluation("test", 9, 0.0, None, None, (), label_kind="float", mean_absolute_error=0.0)
    rounded = replace(exact, loss=4.0, mean_absolute_error=1.5)
    # Answers around a million, in float32.
    check_figures(rounded, exact, "off", rounding=10.0)
    with pytest.raises(IntegrityError, match=r"loss 4\.0000 and mean absolute error 1\.5000"):
        check_figures(rounded, exact, "off", rounding=1.0)


def test_a_sigmoid_that_rounds_to_1_costs_no_more_than_the_number_before_it():
    """Kernels of two builds differ in the last bit of a float32, and 1 less nothing has no logarithm."""
    one, before_one, small = np.float32(1), np.nextafter(np.float32(1), np.float32(0)), np.float32(1e-30)
    of_one, of_before, of_small = scores_of("multi_label", np.array([[one, before_one, small]]), False)[0]
    assert of_one == of_before == pytest.approx(24 * np.log(2), abs=1e-6)
    assert of_small == pytest.approx(-30 * np.log(10), rel=1e-6), "a float32 near 0 is exact"
