"""Evaluation equals a plain computation over all samples at once, however it was cut into batches."""

# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportOperatorIssue=false
from __future__ import annotations

import numpy as np
import pytest

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.open import open_dataset
from shardmill.errors import TrainingError
from shardmill.loader.reader import read_batches, read_split
from shardmill.loader.samples import read_samples
from tests.lab.datasets import make_dataset
from train.contracts.values import Evaluation
from train.evaluation.evaluate import Outputs, evaluate_batches, scores_by
from train.labels import LabelSpec
from train.metrics.one_class import NUM_MISTAKES
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
def test_figures_equal_plain_numpy(dataset, split, batch_size, num_streams):
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
    for label, figures in enumerate(evaluation.per_class):
        assert figures.name == dataset.manifest.class_names[label]
        assert figures.num_samples == dataset.manifest.splits[split].class_counts[label] == (labels_N == label).sum()
        assert figures.recall == pytest.approx((predicted_N[labels_N == label] == label).mean())
        chosen_N = labels_N[predicted_N == label]
        assert figures.precision == pytest.approx((chosen_N == label).mean() if len(chosen_N) else 0.0)


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
