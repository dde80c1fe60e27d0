"""Every kind of label from its dataset to predictions; mixed labels, and classes that count more."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
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
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.config import load_tree
from shardmill.jobs.observer import SilentObserver
from tests.etl.incremental import build_from
from tests.lab.scale import exhaustive
from tests.train.forked_ranks import launch_forked
from tests.train.learners import LINEAR, SHAPE, THREE, batch_of
from tests.train.ranks import SERVED, Watcher
from tests.train.training import MODELS, DriverRecorder, Recorder, check_trainable, task_of, train_here, tree_of
from train.api import StatePart
from train.backends import BACKENDS
from train.backends.model_spec import InputScale, ModelSpec, class_weights, synthetic_batch
from train.config import TrainConfig
from train.contracts.values import EpochRecord, Evaluation
from train.contracts.world import World
from train.labels import LabelSpec, check_gate, check_labels
from train.published.export import export_training
from train.published.gate import judge_export, promote_export
from train.published.predict import open_model, predict_files
from train.readers.silos import SiloBatches
from train.reporting.run_log import RunLog
from train.settings import GateConfig
from train.strategies.options import LocalSgdOptions
from train.training import train_model
from train.tree import TrainTree

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
    settings = {"model": LINEAR[backend], "epochs": 15, "learning_rate": 2 * rate,
                "augment": {"random_crop_padding": 0}}  # fmt: skip
    dataset = datasets[kind]
    result = train_here(dataset.pin.uri, tmp_path / "models", **settings)
    metric, first, last = result.evaluation.metric, result.history[0], result.history[-1]
    assert last.train_loss < first.train_loss and last.validation.label_kind == kind
    assert result.evaluation.num_samples == dataset.manifest.splits["test"].num_rows
    worst = {"multi_label": 0.9, "float": 0.6, "float_vector": 0.5}[kind]
    assert metric.reaches(result.evaluation.metric_value, worst), result.evaluation
    assert (last.train_accuracy is None) == (kind != "multi_label")

    config = TrainConfig(**settings, global_batch_size=32)
    export = export_training(str(tmp_path / "models"), config, result, "run").export
    assert export.record.labels == KINDS[kind]
    assert export.record.evaluation.metric_value == pytest.approx(result.evaluation.metric_value, rel=1e-4)

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
        predictions_NK = one.predictions(batch.images_NHWC)[:4]
        assert one.outputs_are_logits == (kind == "multi_label") and predictions_NK.shape == (4, num_outputs)
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
def test_two_ranks_have_the_metrics_of_one(datasets, tmp_path):
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


SOFTMAX = {"keras": f"{MODELS}:compiled_categorical", "torch": "tests.train.torch_models:linear"}
MIXES = {"mixup_alpha": 0.4, "cutmix_alpha": 1.0}


def step(backend: str, batch, spec: ModelSpec, **config):
    """The outcome of the first step."""
    BACKENDS[backend].start(World(), 0)
    learner = BACKENDS[backend].build(TrainConfig(optimizer="sgd", augment=MIXES, **config), spec)
    return learner.apply(learner.gradients(batch, 5, 1.0), 0.01)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [(), (0.5, 1.0, 3.0)])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_loss_of_shares_is_the_mean_of_the_classes_losses(name, weights, smoothing):
    """Cross-entropy is linear in its targets."""
    spec = ModelSpec(SHAPE, THREE, InputScale((120.0,) * 3, (60.0,) * 3))
    batch = replace(batch_of(SHAPE, 6), weights_N=np.float32([1, 1, 1, 1, 1, 0]))
    first_N, second_N = np.array([0, 1, 2, 2, 1, 0]), np.array([1, 1, 0, 2, 2, 0])
    one_hot = np.eye(3, dtype=np.float32)
    settings = {"model": LINEAR[name], "label_smoothing": smoothing}
    of_class = [step(name, replace(batch, labels_N=labels_N), spec, **settings) for labels_N in (first_N, second_N)]
    mixed_NK = 0.75 * one_hot[first_N] + 0.25 * one_hot[second_N]
    # Padding has no class at all.
    mixed_NK[5] = 0
    mixed = step(name, replace(batch, labels_N=mixed_NK), spec, **settings)
    assert mixed.loss == pytest.approx(0.75 * of_class[0].loss + 0.25 * of_class[1].loss, rel=1e-5)
    assert mixed.num_correct == of_class[0].num_correct
    if weights:
        weighed = ModelSpec(SHAPE, THREE, spec.scale, weights)
        found = step(name, replace(batch, labels_N=mixed_NK), weighed, **settings)
        weights_N = batch.weights_N * (mixed_NK @ np.float32(weights))
        expected = step(name, replace(batch, labels_N=mixed_NK, weights_N=weights_N), spec, **settings)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_is_measured_with_such_labels(name):
    spec = ModelSpec(SHAPE, THREE, InputScale((120.0,) * 3, (60.0,) * 3), mixes_labels=True)
    batch = synthetic_batch(spec, 6)
    assert (batch.labels_N.shape, batch.labels_N.dtype) == ((6, 3), np.float32)
    assert np.isfinite(step(name, batch, spec, model=LINEAR[name]).loss)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_model_learns_from_mixed_rows(name, tiny_uri, tmp_path):
    settings = {"model": LINEAR[name], "epochs": 8, "learning_rate": 3e-3, "global_batch_size": 24, "num_streams": 4}
    result = train_here(tiny_uri, tmp_path, backend=name, augment=MIXES, **settings)
    assert result.evaluation.accuracy > 0.9


@pytest.mark.starts("ranks")
def test_mixed_steps_are_the_same_on_two_ranks(tiny_uri, tmp_path):
    settings = {"model": LINEAR["torch"], "epochs": 1, "augment": MIXES, "num_streams": 4, "global_batch_size": 24}
    recorder = Recorder()
    one = train_here(tiny_uri, tmp_path / "one", recorder, **settings)
    task = task_of(tiny_uri, tmp_path / "two", **settings, strategy="torch_ddp", launcher="local", num_workers=2)
    two = launch_forked(task, RunLog(SilentObserver()))
    assert two.history[-1].train_loss == pytest.approx(one.history[-1].train_loss, rel=1e-5)


@pytest.mark.needs("petastorm")
def test_what_cannot_be_mixed_is_refused(tiny_uri):
    config = TrainConfig(augment=MIXES)
    with pytest.raises(UsageError, match=r"mixup_alpha = 0.4 and cutmix_alpha = 1, but .* kind 'float'; .* to 0"):
        check_labels(config, LabelSpec("float"))
    check_labels(config, LabelSpec("multi_label", ("a", "b")))
    dataset = open_dataset(tiny_uri)
    with pytest.raises(UsageError, match="a step has 1 row of each stream; .* lower num_streams"):
        check_trainable(TrainConfig(augment=MIXES, global_batch_size=8, num_streams=8, num_workers=1), dataset)
    with pytest.raises(UsageError, match="'petastorm' with mixup or cutmix"):
        check_trainable(TrainConfig(augment=MIXES, reader="petastorm", num_workers=1, num_streams=8), dataset)


def test_a_models_own_loss_takes_shares_or_is_refused():
    spec = ModelSpec(SHAPE, THREE, InputScale((120.0,) * 3, (60.0,) * 3))
    batch = replace(batch_of(SHAPE, 6), labels_N=np.full((6, 3), 1 / 3, np.float32))
    assert np.isfinite(step("keras", batch, spec, model=SOFTMAX["keras"]).loss)
    for model in ("compiled_by_name", "compiled_with_function"):
        with pytest.raises(UsageError, match=r"own loss \w+ takes class numbers; .* train.loss = \"softmax\""):
            step("keras", batch, spec, model=f"{MODELS}:{model}")


def test_the_shares_of_a_silo_are_those_of_the_pinned_classes():
    batch = replace(batch_of(SHAPE, 2), labels_N=np.float32([[0.25, 0.75], [1, 0]]))
    batches = SiloBatches(None, 0, 1, np.array([2, 0]), 3)
    assert batches._labels(batch).tolist() == [[0.75, 0, 0.25], [0, 0, 1]]


@pytest.mark.drill
def test_workers_of_a_parameter_server_send_shares_of_one_size(tiny_uri, tmp_path):
    augment = {**MIXES, "size": 12, "random_resized_crop": True, "min_crop_area": 0.5}
    config = {**SERVED, "model": "small_cnn", "epochs": 2, "augment": augment}
    result = launch_forked(task_of(tiny_uri, tmp_path, **config), Watcher())
    assert result.history[1].train_loss < result.history[0].train_loss
    assert result.evaluation.accuracy > 0.9


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
