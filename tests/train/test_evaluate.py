"""Evaluation equals a plain computation over all samples at once, and repeats what the training recorded."""

# pyright: reportOperatorIssue=false, reportOptionalMemberAccess=false, reportOptionalOperand=false
from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal, localcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardmill.checksummed import with_checksum
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.errors import IntegrityError, TrainingError, UsageError
from shardmill.loader.reader import read_batches, read_split
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from shardmill.values import Batch, DatasetPin
from tests.lab.datasets import make_dataset
from tests.train.exports import put_export
from tests.train.launch_workers import result_of
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import RESULT, Evaluation, from_json, to_json
from train.contracts.world import World
from train.labels import LabelSpec
from train.metrics import kinds
from train.metrics.evaluate import Outputs, evaluate_batches, metrics_of, scores_by, scores_of
from train.metrics.kinds import NUM_MISTAKES, average_precision
from train.published.evaluation import Evaluated, evaluate_export, evaluate_on
from train.published.exported import Export, ExportedModel
from train.strategies.collective import SingleCollective

NUM_CLASSES = 7


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Seven classes, so that the top five are fewer than all; 33 rows or so in the test split."""
    folder = tmp_path_factory.mktemp("seven")
    fractions = {"train": 0.4, "validation": 0.2, "test": 0.4}
    return open_dataset(make_dataset(folder, num_images=84, num_classes=NUM_CLASSES, split_fractions=fractions))


def logits_of(images_NHWC: np.ndarray) -> np.ndarray:
    """Some model: a fixed random projection, in float32 as TensorFlow gives it."""
    weights = np.random.default_rng(1).normal(size=(images_NHWC[0].size, NUM_CLASSES)) / 2000
    return (images_NHWC.reshape(len(images_NHWC), -1) @ weights).astype(np.float32)


def softmax(logits_NK: np.ndarray) -> np.ndarray:
    exponentials_NK = np.exp(logits_NK - logits_NK.max(axis=1, keepdims=True))
    return exponentials_NK / exponentials_NK.sum(axis=1, keepdims=True)


def evaluate_logits(dataset: Dataset, split: str, batch_size: int, num_streams: int) -> Evaluation:
    spec = dataset.plan_spec(split, seed=0, global_batch_size=batch_size, num_streams=num_streams, shuffle=False)
    labels, scores = LabelSpec.of(dataset.manifest), scores_by(logits_of, "class", are_logits=True)
    with read_batches(dataset, dataset.plan_epoch(spec, 0)) as batches:
        return evaluate_batches(scores, batches, split, labels, SingleCollective())


def matrix(evaluation: Evaluation) -> list[list[int]]:
    cells = evaluation.confused
    dense = np.zeros((NUM_CLASSES, NUM_CLASSES), int)
    dense[cells.true, cells.predicted] = cells.num_samples
    assert (dense > 0).sum() == len(cells.num_samples)
    return dense.tolist()


def evaluate(probabilities_of: Outputs, dataset: Dataset, batch_size: int = 64) -> Evaluation:
    labels, scores = LabelSpec.of(dataset.manifest), scores_by(probabilities_of, "class", are_logits=False)
    with read_split(dataset, "test", batch_size=batch_size) as batches:
        return evaluate_batches(scores, batches, "test", labels, SingleCollective())


@pytest.mark.parametrize(("batch_size", "num_streams"), [(8, 1), (8, 8), (64, 4), (3, 3)])
@pytest.mark.parametrize("split", ["test", "validation"])
def test_metrics_equal_plain_numpy(dataset, split, batch_size, num_streams):
    evaluation = evaluate_logits(dataset, split, batch_size, num_streams)

    samples = read_samples(dataset, split, 1000)
    labels_N = np.array([sample.label for sample in samples])
    logits_NK = logits_of(np.stack([sample.image_HWC for sample in samples])).astype(np.float64)
    predicted_N = logits_NK.argmax(axis=1)
    top5_N5 = np.argsort(-logits_NK, axis=1, kind="stable")[:, :5]
    confusion = np.zeros((NUM_CLASSES, NUM_CLASSES), int)
    for label, predicted in zip(labels_N, predicted_N, strict=True):
        confusion[label, predicted] += 1

    assert evaluation.split == split
    assert evaluation.num_samples == len(samples) == dataset.manifest.splits[split].num_rows
    assert evaluation.accuracy == (predicted_N == labels_N).mean()
    assert evaluation.top5_accuracy == pytest.approx((top5_N5 == labels_N[:, None]).any(axis=1).mean(), abs=1e-12)
    assert 0 < evaluation.accuracy < evaluation.top5_accuracy < 1
    assert evaluation.loss == pytest.approx(
        -np.log(softmax(logits_NK)[np.arange(len(samples)), labels_N]).mean(), rel=1e-9
    )
    assert matrix(evaluation) == confusion.tolist()
    mistakes = [
        (-float(probabilities_K.max().round(6)), sample.sample_id, label, int(predicted))
        for sample, probabilities_K, label, predicted in zip(
            samples, softmax(logits_NK), labels_N.tolist(), predicted_N, strict=True
        )
        if predicted != label
    ]
    found = [(-each.confidence, each.sample_id, each.true, each.predicted) for each in evaluation.confused.mistakes]
    assert found == sorted(mistakes)[:NUM_MISTAKES] and len(found) > 5
    for label, metrics in enumerate(evaluation.per_class):
        assert metrics.name == dataset.manifest.class_names[label]
        assert metrics.num_samples == dataset.manifest.splits[split].class_counts[label] == (labels_N == label).sum()
        assert metrics.recall == pytest.approx((predicted_N[labels_N == label] == label).mean())
        chosen_N = labels_N[predicted_N == label]
        assert metrics.precision == pytest.approx((chosen_N == label).mean() if len(chosen_N) else 0.0)


def test_probabilities_give_what_logits_give(dataset):
    by_logits = evaluate_logits(dataset, "test", 16, 8)
    sizes = set()

    def probabilities_of(images_NHWC):
        sizes.add(images_NHWC.shape)
        return softmax(logits_of(images_NHWC).astype(np.float64))

    by_probabilities = evaluate(probabilities_of, dataset, batch_size=10)
    assert by_probabilities.loss == pytest.approx(by_logits.loss, rel=1e-6)
    assert by_probabilities.confused == by_logits.confused
    assert by_probabilities.top5_accuracy == by_logits.top5_accuracy
    assert sizes == {(10, 16, 16, 3)}


def test_equal_outputs_are_ranked_as_argmax_ranks_them(dataset):
    evaluation = evaluate(lambda images_NHWC: np.full((len(images_NHWC), NUM_CLASSES), 1 / NUM_CLASSES), dataset)
    counts = dataset.manifest.splits["test"].class_counts
    assert evaluation.accuracy == counts[0] / sum(counts)
    assert evaluation.top5_accuracy == pytest.approx(sum(counts[:5]) / sum(counts))
    assert evaluation.loss == pytest.approx(np.log(NUM_CLASSES))


def test_a_probability_of_zero_keeps_the_loss_finite(dataset):
    def never_right(images_NHWC):
        outputs = np.zeros((len(images_NHWC), NUM_CLASSES))
        return outputs

    assert np.isfinite(evaluate(never_right, dataset).loss)


def test_outputs_that_are_not_numbers_are_an_error(dataset):
    with pytest.raises(TrainingError, match="the evaluation on 'test' gave a loss of nan"):
        evaluate(lambda images_NHWC: np.full((len(images_NHWC), NUM_CLASSES), np.nan), dataset)


FOLDER = "trainings/0/v00000001-00000000/epochs-00001-best"


class Trained:
    """A dataset `a`, and an export of a training on its version 1 that recorded metrics like no others."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.uri = folder, make_dataset(folder / "a")
        export = put_export(str(folder / "models"), self.uri)
        self.pin = export.record.dataset
        self.export = Export(export.number, export.record.model_copy(update={"training_dir": FOLDER}))
        assert export.record.evaluation is not None
        self.recorded = replace(export.record.evaluation, num_samples=123_456)
        self.put_result(self.pin)

    def put_result(self, pin: DatasetPin) -> None:
        task = WorkerTask(TrainConfig(), pin, str(self.folder / "models"), FOLDER, "")
        result = replace(result_of(task, World()), checkpoint="c", last_checkpoint="c", evaluation=self.recorded)
        open_store(self.folder / "models").put(f"{FOLDER}/{RESULT}", with_checksum(to_json(result)))

    def evaluate(self, dataset_uri: str) -> Evaluated:
        return evaluate_on(str(self.folder / "models"), self.export, dataset_uri, is_new=False)

    def is_recorded(self, dataset_uri: str) -> bool:
        found = self.evaluate(dataset_uri)
        assert found.skipped == (found.evaluation == self.recorded)
        return found.skipped


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(tmp_path)


def test_the_trainings_own_version_is_not_measured_again(trained: Trained):
    assert trained.is_recorded(trained.uri) and trained.is_recorded(f"{trained.uri}@1")
    # A later version is measured if it is named, and a rollback to the rows of the first one is those rows.
    make_dataset(trained.folder / "a", num_images=150)
    roll_back(open_store(trained.uri), 1, "run")
    found = [trained.is_recorded(f"{trained.uri}{version}") for version in ("", "@1", "@2", "@3")]
    assert found == [True, True, False, True]


def test_another_dataset_of_the_same_version_number_is_measured(trained: Trained):
    other = make_dataset(trained.folder / "b", num_images=60)
    for uri in (f"{other}@1", other):
        found = trained.evaluate(uri).evaluation
        manifest = open_dataset(other).manifest
        assert found is not None and found.num_samples == manifest.splits["test"].num_rows
    # Without a version it is the latest, whatever number the training's has.
    make_dataset(trained.folder / "b", num_images=90)
    found = trained.evaluate(other).evaluation
    assert found is not None and found.num_samples == open_dataset(other).manifest.splits["test"].num_rows


def test_a_dataset_that_was_built_anew_is_measured(trained: Trained):
    shutil.rmtree(trained.uri)
    make_dataset(trained.folder / "a", num_images=60)
    assert not trained.is_recorded(f"{trained.uri}@1") and not trained.is_recorded(trained.uri)
    # Also if it has fewer versions than the one that is gone.
    gone = DatasetPin(trained.uri, 3, "0" * 64)
    trained.put_result(gone)
    trained.export = Export(trained.export.number, trained.export.record.model_copy(update={"dataset": gone}))
    assert not trained.is_recorded(trained.uri)


def test_what_is_not_there_is_named(trained: Trained):
    for version in (0, 7):
        with pytest.raises(UsageError, match=f"has no version {version}"):
            trained.evaluate(f"{trained.uri}@{version}")
    [manifest] = (Path(trained.uri) / "manifests").iterdir()
    manifest.write_bytes(manifest.read_bytes().replace(b"test", b"tent"))
    with pytest.raises(IntegrityError, match="manifests"):
        trained.evaluate(trained.uri)


def test_a_class_that_the_dataset_does_not_have_is_a_wrong_answer(tmp_path: Path):
    export = put_export(str(tmp_path / "models"), make_dataset(tmp_path / "three"))
    # In another order of names than the columns, which are those of three classes.
    names = ("class_2", *export.record.class_names[:2])
    export = Export(export.number, export.record.model_copy(update={"class_names": names}))

    def metrics(answers: list[float]) -> Any:
        served: Any = SimpleNamespace(
            outputs=lambda images_NHWC: np.tile(np.float32(answers), (len(images_NHWC), 1)), outputs_are_logits=False
        )
        dataset = open_dataset(two)
        with read_split(dataset, "test") as batches:
            return evaluate_export(ExportedModel(export, served), dataset, "test", batches)

    two = make_dataset(tmp_path / "two", num_classes=2)
    num_first, num_second = open_dataset(two).manifest.splits["test"].class_counts
    found = metrics([0.9, 0.06, 0.04])
    assert found.accuracy == 0 and [each.recall for each in found.per_class] == [0, 0]
    assert [each.precision for each in found.per_class] == [0, 0]
    assert (found.confused.true, found.confused.predicted) == ((0, 1), (2, 2))
    assert found.confused.num_samples == (num_first, num_second)
    assert found.loss == pytest.approx(
        -(num_first * np.log(0.06) + num_second * np.log(0.04)) / (num_first + num_second), rel=1e-5
    )
    sure = metrics([0.2, 0.5, 0.3])
    assert sure.accuracy == num_first / (num_first + num_second)
    assert sure.confused.predicted == (0, 0) and sure.per_class[0].precision == sure.accuracy


class Threads:
    """What ranks need of each other, between threads of this process."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._sent: dict[int, bytes] = {}
        self.bytes_sent = 0

    def of(self, rank: int) -> _Rank:
        return _Rank(self, rank)

    def gather(self, rank: int, data: bytes) -> list[bytes]:
        self._sent[rank] = data
        self.bytes_sent += len(data)
        self._barrier.wait(30)
        gathered = [self._sent[each] for each in sorted(self._sent)]
        self._barrier.wait(30)
        return gathered


class _Rank:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self._rank = threads, rank

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self._threads.gather(self._rank, data)

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        arrays = [np.frombuffer(data, array.dtype) for data in self.gather_bytes(array.tobytes())]
        return np.sum(arrays, axis=0).reshape(array.shape)


def on_ranks(
    labels: LabelSpec, outputs_NK: np.ndarray, truth_N: np.ndarray, num_ranks: int, are_logits: bool
) -> tuple[list[Evaluation], Threads]:
    """Each rank has every n-th sample, in batches that end with padding; more ranks than samples leave some without."""
    threads, found = Threads(num_ranks), {}

    def work(rank: int) -> None:
        metrics = metrics_of(labels)
        mine = np.arange(rank, len(outputs_NK), num_ranks)
        for start in range(0, len(mine), 7):
            rows = mine[start : start + 7]
            padded = np.concatenate([rows, np.zeros(7 - len(rows), int)])
            weights_N = np.array([1.0] * len(rows) + [0.0] * (7 - len(rows)), np.float32)
            batch = Batch(np.zeros((7, 1, 1, 1), np.uint8), truth_N[padded], weights_N, padded, 0, 0)
            metrics.add(scores_of(labels.kind, outputs_NK[padded], are_logits), batch)
        found[rank] = metrics.evaluation("test", threads.of(rank))

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(60)
    return [found[rank] for rank in range(num_ranks)], threads


# From 16.7 on a float32 sigmoid is 1; from 88 on a float32 exponential overflows, from 710 on a float64 one.
SIZES = pytest.mark.parametrize("size", [1, 30, 100, 2000])


def log_of_sum_of_exponentials(numbers: list[float]) -> float:
    """By whole decimals instead of float64."""
    with localcontext() as context:
        context.prec = 60
        context.Emin, context.Emax = -999_999, 999_999
        return float(sum(Decimal(number).exp() for number in numbers).ln())


@SIZES
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_loss_of_a_class_is_exact_at_any_size_of_logits(size, num_ranks):
    rng = np.random.default_rng(6)
    truth_N = rng.integers(0, 7, 40)
    logits_NK = (size * rng.normal(size=(40, 7))).astype(np.float32)
    found, _ = on_ranks(LabelSpec("class", tuple("abcdefg")), logits_NK, truth_N, num_ranks, are_logits=True)
    losses = [
        log_of_sum_of_exponentials(row) - row[truth] for row, truth in zip(logits_NK.tolist(), truth_N, strict=True)
    ]
    places_N = (logits_NK > logits_NK[np.arange(40), truth_N][:, None]).sum(axis=1)
    for each in found:
        assert each.loss == pytest.approx(math.fsum(losses) / 40, rel=1e-12)
        assert (each.accuracy, each.top5_accuracy) == ((places_N < 1).mean(), (places_N < 5).mean())


@SIZES
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_loss_of_several_classes_is_exact_at_any_size_of_logits(size, num_ranks):
    rng = np.random.default_rng(7)
    truth_NK = (rng.random((40, 3)) < 0.5).astype(np.float32)
    logits_NK = (size * rng.normal(size=(40, 3))).astype(np.float32)
    found, _ = on_ranks(LabelSpec("multi_label", tuple("abc")), logits_NK, truth_NK, num_ranks, are_logits=True)
    signs_NK = np.where(truth_NK > 0, -1.0, 1.0)
    losses = [log_of_sum_of_exponentials([0.0, each]) for each in (signs_NK * logits_NK).ravel().tolist()]
    for each in found:
        assert each.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12)
        assert each.accuracy == pytest.approx(((logits_NK >= 0) == (truth_NK > 0)).mean())


@pytest.mark.parametrize("num_ranks", [1, 3, 50])
@pytest.mark.parametrize("are_logits", [True, False])
def test_several_classes_an_image(num_ranks, are_logits, monkeypatch):
    # A block holds one class: the gathering goes round more than once.
    monkeypatch.setattr(kinds, "BLOCK_BYTES", 100)
    from sklearn.metrics import average_precision_score

    rng = np.random.default_rng(3)
    truth_NK = (rng.random((40, 5)) < [0.5, 0.1, 0.9, 0.3, 0.0]).astype(np.float32)
    # Rounded, so that many scores are equal.
    logits_NK = (rng.normal(size=(40, 5)) + truth_NK).round(1).astype(np.float32)
    scores_NK = (1 / (1 + np.exp(-logits_NK.astype(np.float64)))).astype(np.float32)
    labels = LabelSpec("multi_label", ("a", "b", "c", "d", "never"))
    found, _ = on_ranks(labels, logits_NK if are_logits else scores_NK, truth_NK, num_ranks, are_logits)
    first = found[0]
    assert all(each == first for each in found)
    expected = [average_precision_score(truth_NK[:, place], scores_NK[:, place]) for place in range(4)]
    assert [each.average_precision for each in first.per_class] == [*map(pytest.approx, expected), None]
    assert first.mean_average_precision == first.metric_value == pytest.approx(np.mean(expected))
    p = scores_NK.astype(np.float64)
    assert first.loss == pytest.approx(-np.where(truth_NK > 0, np.log(p), np.log(1 - p)).mean(), rel=1e-5)
    assert first.accuracy == pytest.approx(((scores_NK >= 0.5) == (truth_NK > 0)).mean())
    assert [each.num_samples for each in first.per_class] == truth_NK.sum(axis=0).tolist()
    assert first.num_samples == 40 and first.confused is None
    assert first.per_class[0].recall == pytest.approx((scores_NK[truth_NK[:, 0] > 0, 0] >= 0.5).mean())


def test_the_order_of_equal_scores_does_not_matter():
    scores_N, truth_N = np.array([0.5, 0.5, 0.5, 0.1]), np.array([True, False, False, True])
    assert average_precision(scores_N, truth_N) == average_precision(scores_N, truth_N[[1, 2, 0, 3]])
    assert average_precision(scores_N, np.zeros(4, bool)) is None


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(("kind", "size"), [("float", 0), ("float_vector", 3)])
def test_numbers(kind, size, num_ranks):
    rng = np.random.default_rng(4)
    outputs_NK = rng.normal(10, 3, (40, size or 1)).astype(np.float32)
    truth_N = rng.normal(10, 3, (40, size) if size else 40).astype(np.float32)
    found, _ = on_ranks(LabelSpec(kind, (), size), outputs_NK, truth_N, num_ranks, False)
    errors = outputs_NK.astype(np.float64) - truth_N.reshape(40, -1)
    for each in found:
        assert each.loss == pytest.approx((errors**2).mean(), rel=1e-12)
        assert each.mean_absolute_error == each.metric_value == pytest.approx(np.abs(errors).mean(), rel=1e-12)
        assert (each.num_samples, each.accuracy, each.per_class) == (40, None, ())


def test_ten_thousand_classes_send_no_matrix():
    rng, num_classes = np.random.default_rng(5), 10_000
    truth_N = rng.integers(0, num_classes, 300)
    outputs_NK = np.zeros((300, num_classes), np.float32)
    outputs_NK[np.arange(300), np.where(rng.random(300) < 0.5, truth_N, 17)] = 1
    found, threads = on_ranks(
        LabelSpec("class", tuple(map(str, range(num_classes)))), outputs_NK, truth_N, 2, are_logits=False
    )
    assert found[0] == found[1] and found[0].accuracy == (outputs_NK.argmax(axis=1) == truth_N).mean()
    cells = found[0].confused
    assert cells is not None and sum(cells.num_samples) == 300
    pairs = set(zip(truth_N.tolist(), outputs_NK.argmax(axis=1).tolist(), strict=True))
    assert set(zip(cells.true, cells.predicted, strict=True)) == pairs
    assert threads.bytes_sent < 7000
    assert from_json(Evaluation, to_json(found[0])) == found[0]
    assert len(to_json(found[0].without_classes())) < 500
    fullest = cells.most_frequent(5)
    assert sum(fullest.num_samples) == sum(sorted(cells.num_samples)[-5:])


@pytest.mark.parametrize("make", [np.ones, np.zeros])
def test_a_sure_mistake_keeps_the_loss_finite(make: Callable[..., np.ndarray]):
    labels, predictions_NK = LabelSpec("multi_label", ("a", "b")), make((4, 2), np.float32)
    found, _ = on_ranks(labels, predictions_NK, 1 - predictions_NK, 1, False)
    assert np.isfinite(found[0].loss) and found[0].accuracy == 0
