"""Every kind of label is trained on from its dataset to predictions, in each backend; what does not fit is refused."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false
from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from etl.config import SourceConfig, SplitFractions
from pipeline.commands.predict import prediction_csv, prediction_rows
from pipeline.report.data import ReportData
from pipeline.report.page import render
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.observer import SilentObserver
from tests.etl.incremental import build_from
from tests.lab.scale import exhaustive
from tests.train.forked_ranks import launch_forked
from tests.train.learners import batch_of
from tests.train.training import MODELS, DriverRecorder, task_of, train_here, tree_of
from train.backends import BACKENDS
from train.backends.backend import InputScale, ModelSpec, StatePart
from train.config import TrainConfig
from train.contracts.values import EpochRecord, Evaluation
from train.contracts.world import World
from train.labels import LabelSpec, check_gate, check_labels
from train.planning.preflight import check_trainable
from train.published.export import export_training
from train.published.gate import judge_export, promote_export
from train.published.predict import open_model, predict_files
from train.reporting.run_log import RunLog
from train.settings.gate import GateConfig
from train.strategies.options import LocalSgdOptions
from train.training import train_model

SHAPE = (16, 16, 3)
SIDES = ("left", "right")
TORCH_MODELS = "tests.train.torch_models"
LINEAR = {"keras": f"{MODELS}:linear", "torch": f"{TORCH_MODELS}:linear"}
KINDS = {
    "multi_label": LabelSpec("multi_label", ("left", "right")),
    "float": LabelSpec("float"),
    "float_vector": LabelSpec("float_vector", (), 2),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def picture(left: int, right: int) -> bytes:
    pixels = np.full((16, 16, 3), left, np.uint8)
    pixels[:, 8:] = right
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def sides() -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    return [tuple(each) for each in rng.integers(0, 256, (120, 2)).tolist()]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> dict[str, Dataset]:
    """How bright the two halves of an image are: as classes that it has, as a sum, as two numbers."""
    labels: dict[str, list[Any]] = {
        "multi_label": [
            [n for n, value in zip(("left", "right"), each, strict=True) if value > 127] for each in sides()
        ],
        "float": [(left + right - 255) / 100 for left, right in sides()],
        "float_vector": [[(left - 128) / 100, (right - 128) / 100] for left, right in sides()],
    }
    found = {}
    for kind, values in labels.items():
        folder = tmp_path_factory.mktemp(kind)
        pq.write_table(
            pa.table({"image": [picture(*each) for each in sides()], "labels": values}), folder / "a.parquet"
        )
        source = SourceConfig(uri=str(folder / "a.parquet"), kind="parquet", label_kind=kind)
        fractions = SplitFractions(train=0.6, validation=0.2, test=0.2)
        build_from(source, folder / "dataset", image_size=16, split_fractions=fractions)
        found[kind] = open_dataset(str(folder / "dataset"))
        assert LabelSpec.of(found[kind].manifest) == KINDS[kind]
    return found


@EVERY_KIND
def test_moved_contents_beside_labels_that_are_numbers_are_a_warning(datasets, kind, tmp_path):
    for number, augment in enumerate(({}, {"random_resized_crop": True}, {"images": "photographs"})):
        tree = tree_of(
            datasets[kind].pin.uri, tmp_path / "models", model=LINEAR["keras"], epochs=1, seed=number, augment=augment
        )
        observer = DriverRecorder()
        train_model(tree, observer)
        told = [fields["warning"] for fields in observer.named("augment")]
        assert len(told) == (kind != "multi_label" and augment != {}), told
        assert all("numeric labels stay unchanged" in warning for warning in told)
        assert all(("random_flip" if number == 2 else "random_resized_crop") in warning for warning in told)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        (kind, backend) if (kind == "float") == (backend == "torch") else exhaustive(kind, backend)
        for kind in KINDS
        for backend in BACKENDS
    ],
)
def test_from_the_dataset_to_predictions(datasets, kind, backend, tmp_path):
    # A linear model of 768 pixels: steps that suit probabilities overshoot on numbers.
    rate = 0.04 if kind == "multi_label" else 0.004
    settings = {
        "model": LINEAR[backend],
        "epochs": 15,
        "learning_rate": 2 * rate,
        "augment": {"random_crop_padding": 0},
    }
    dataset = datasets[kind]
    result = train_here(dataset.pin.uri, tmp_path / "models", **settings)
    metric, first, last = result.evaluation.metric, result.history[0], result.history[-1]
    assert last.train_loss < first.train_loss and last.validation.label_kind == kind
    assert result.evaluation.num_samples == dataset.manifest.splits["test"].num_rows
    worst = {"multi_label": 0.9, "float": 0.6, "float_vector": 0.5}[kind]
    assert metric.reaches(result.evaluation.figure, worst), result.evaluation
    assert (last.train_accuracy is None) == (kind != "multi_label")

    config = TrainConfig(**settings, global_batch_size=32)
    export = export_training(str(tmp_path / "models"), config, result, "run").export
    assert export.record.labels == KINDS[kind]
    assert export.record.evaluation.figure == pytest.approx(result.evaluation.figure, rel=1e-4)

    uri = str(tmp_path / "models")
    too_good = GateConfig(metric_limit=2.0 if metric.higher_is_better else 1e-9)
    assert f"{metric.words} " in judge_export(uri, export, too_good).gate.reason
    assert judge_export(uri, export, too_good).gate.decision == "kept"
    promoted = promote_export(uri, export, GateConfig(metric_limit=worst), "run")
    assert (promoted.gate.decision, promoted.gate.metric) == ("promoted", metric.name)
    # Another export of the same weights is as good as the current one.
    other = replace(export, number=export.number + 1)
    assert judge_export(uri, other, GateConfig()).gate.decision == "promoted"
    with pytest.raises(UsageError, match=r"gate.min_accuracy = 0.5, but the labels are of kind .*gate.metric_limit"):
        judge_export(uri, export, GateConfig(min_accuracy=0.5))

    (tmp_path / "both.png").write_bytes(picture(250, 250))
    [predicted] = predict_files(open_model(f"{uri}@1"), [str(tmp_path / "both.png")])
    if kind == "multi_label":
        assert {guess.label for guess in predicted.top} == {"left", "right"} and predicted.values == ()
        assert prediction_rows([predicted])[0][1:4:2] == (predicted.top[0].label, predicted.top[1].label)
    else:
        expected = [2.45] if kind == "float" else [1.22, 1.22]
        assert predicted.values == pytest.approx(expected, abs=0.8) and predicted.top == ()
        header, row = prediction_csv([predicted]).splitlines()
        assert header == ",".join(["path", "rejection", "value", "value_2"][: 2 + len(expected)])
        assert float(row.split(",")[2]) == pytest.approx(predicted.values[0], rel=1e-6)
    check_the_report(result.evaluation, result.history)


def check_the_report(evaluation: Evaluation, history: tuple[EpochRecord, ...]) -> None:
    page = render(ReportData("r", {"status": "ok", "train": {}}, history=history, evaluation=evaluation))
    assert evaluation.metric.words in page and "Confusion matrix" not in page


@EVERY_KIND
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_backends_agree_on_loss_and_gradient(kind, smoothing):
    labels, rng = KINDS[kind], np.random.default_rng(1)
    if labels.are_numbers and smoothing:
        with pytest.raises(UsageError, match="label_smoothing = 0.2, but the dataset has labels of . number"):
            check_labels(TrainConfig(label_smoothing=smoothing), labels)
        return
    num_outputs = labels.num_outputs
    truth = {"float": rng.normal(size=6), "float_vector": rng.normal(size=(6, 2))}.get(kind, rng.random((6, 2)) < 0.5)
    batch = replace(batch_of(SHAPE, 6), labels_N=truth.astype(np.float32), weights_N=np.float32([1, 1, 1, 1, 0, 0]))
    kernel = rng.normal(0, 0.02, (16 * 16 * 3, num_outputs)).astype(np.float32)
    in_torch = kernel.reshape(16, 16, 3, num_outputs).transpose(3, 2, 0, 1).reshape(num_outputs, -1)
    bias = np.arange(num_outputs, dtype=np.float32) / 10
    found = {}
    for name, weights in {"keras": [kernel, bias], "torch": [in_torch, bias]}.items():
        BACKENDS[name].start(World(), 0)
        spec = ModelSpec(SHAPE, labels, InputScale((120.0,) * 3, (60.0,) * 3))
        one = BACKENDS[name].build(TrainConfig(model=LINEAR[name], optimizer="sgd", label_smoothing=smoothing), spec)
        one.assign(StatePart.WEIGHTS, [np.ascontiguousarray(each) for each in weights], "the test")
        outputs_NK = one.outputs(batch.images_NHWC)[:4]
        found[name] = one.apply(one.gradients(batch, 4, 1.0), 0.01)
        answers_NK = one.answers(batch.images_NHWC)[:4]
        assert one.outputs_are_logits == (kind == "multi_label") and answers_NK.shape == (4, num_outputs)
    keras, torch = found["keras"], found["torch"]
    truth_NK = truth[:4].reshape(4, num_outputs).astype(np.float64)
    if kind == "multi_label":
        soft_NK = truth_NK * (1 - smoothing) + smoothing / 2
        expected = (np.logaddexp(0, outputs_NK) - soft_NK * outputs_NK).mean()
        assert keras.num_correct == pytest.approx(((outputs_NK >= 0) == (truth_NK > 0.5)).mean(axis=1).sum())
    else:
        expected = ((outputs_NK - truth_NK) ** 2).mean()
        assert keras.num_correct == 0
    assert keras.loss == pytest.approx(expected, rel=1e-4)
    assert torch.loss == pytest.approx(keras.loss, rel=1e-5) and torch.num_correct == pytest.approx(keras.num_correct)
    assert torch.gradient_norm == pytest.approx(keras.gradient_norm, rel=1e-4)


@pytest.mark.starts("ranks")
def test_two_ranks_have_the_figures_of_one(datasets, tmp_path):
    settings = {"model": LINEAR["torch"], "epochs": 1, "augment": {"random_crop_padding": 0}}
    uri = datasets["multi_label"].pin.uri
    one = train_here(uri, tmp_path, **settings)
    (tmp_path / "t" / "result.json").unlink()
    task = task_of(uri, tmp_path, **settings, strategy="torch_ddp", launcher="local", num_workers=2)
    two = launch_forked(task, RunLog(SilentObserver()))
    assert two.weights_sha256 == one.weights_sha256, "nothing is left to train"
    assert two.evaluation.per_class == one.evaluation.per_class
    assert two.evaluation.mean_average_precision == one.evaluation.mean_average_precision


def test_what_does_not_fit_the_labels_is_refused(datasets):
    multi_label, numbers = datasets["multi_label"], datasets["float"]
    check_trainable(TrainConfig(), multi_label)
    with pytest.raises(UsageError, match=r"'softmax', but the dataset has 2 classes, of which .*'sigmoid'"):
        check_trainable(TrainConfig(loss="softmax"), multi_label)
    with pytest.raises(UsageError, match=r"'probabilities', but the dataset has labels of 1 number"):
        check_trainable(TrainConfig(model_outputs="probabilities"), numbers)
    with pytest.raises(UsageError, match="local_sgd.silos on labels of 1 number\\(s\\); expected one class per image"):
        check_trainable(TrainConfig(strategy="local_sgd").with_options(LocalSgdOptions(silos=("a@1",))), numbers)
    with pytest.raises(UsageError, match=r"expected a limit for their mean absolute error; .* gate.metric_limit"):
        check_trainable(TrainConfig(), numbers, GateConfig(min_accuracy=0.9))
    check_gate(GateConfig(min_accuracy=0.9), "class")
