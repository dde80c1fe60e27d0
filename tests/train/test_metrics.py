"""The figures of every kind of label are exact: those of a plain computation over all samples, at any world size."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest

from shardmill.values import Batch
from train.contracts.values import Evaluation, from_json, to_json
from train.evaluation.evaluate import metrics_of, scores_of
from train.labels import LabelSpec
from train.metrics import multi_label
from train.metrics.multi_label import average_precision


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
    monkeypatch.setattr(multi_label, "BLOCK_BYTES", 100)
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
    assert first.mean_average_precision == first.figure == pytest.approx(np.mean(expected))
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
        assert each.mean_absolute_error == each.figure == pytest.approx(np.abs(errors).mean(), rel=1e-12)
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
    labels, answers_NK = LabelSpec("multi_label", ("a", "b")), make((4, 2), np.float32)
    found, _ = on_ranks(labels, answers_NK, 1 - answers_NK, 1, False)
    assert np.isfinite(found[0].loss) and found[0].accuracy == 0
