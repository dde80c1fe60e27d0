"""The rows of a version of predictions in memory: each image's class, what the model answered, and its embedding.

Shape legend: N rows of all splits, T rows of the train split of the training, D numbers of an embedding.

Probabilities of each row's classes are those of a classifier that was fitted to other rows' embeddings: it has one
Gaussian for each class with a common covariance (linear discriminant analysis). On the features of a network it resists
wrong labels: K. Lee et al., Robust Inference via Generative Classifiers for Handling Noisy Labels, ICML 2019. Shape
legend: N rows, D numbers of an embedding, K classes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardmill.dataset.chunks import read_embeddings
from shardmill.dataset.dataset import Dataset, open_pinned
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.row_segments import read_rows
from shardmill.errors import ShardmillError, UsageError
from shardmill.memory import free_bytes
from shardmill.values import DatasetPin, PredictedBy
from shardmill.words import first_of

TRAIN = "train"
_NUM_COPIES = 6
_HOW = "shardmill predict MODELS DATASET --layer NAME --out DIR"


@dataclass(frozen=True)
class PredictedRows:
    """Every row of a version of predictions, split by split in stored order."""

    pin: DatasetPin
    made_by: PredictedBy
    class_names: tuple[str, ...]
    sources: list[str]
    sample_ids_N: np.ndarray
    splits: list[str]
    labels_N: np.ndarray
    """Class numbers as the source gives them, -1 without a class."""
    predictions: list[str]
    """The model's most probable class."""
    probabilities_N: np.ndarray
    """The probability that the model gives it."""
    is_seen_N: np.ndarray
    """Whether the model may have been trained on the row, bool."""
    embeddings_ND: np.ndarray
    """float32."""
    hashes_N: np.ndarray
    """uint64, of the embedding: rows with equal pixels have equal ones."""


def read_predicted_rows(
    predictions: Dataset, on_progress: Callable[[int, int], None] = lambda num_read, num_images: None
) -> PredictedRows:
    """Read all rows, four bytes in memory for each number of an embedding. `on_progress`: rows read, and all.

    Raises UsageError for a version without finite embeddings or classes, or by a model that lacks one of the classes;
    IntegrityError for an altered shard.
    """
    made_by = _checked(predictions)
    check_memory(predictions, free_bytes())
    schema, num_rows = predictions.manifest.row_schema, predictions.manifest.counts.accepted
    embeddings_ND = np.empty((num_rows, schema.vector_size), np.float32)
    hashes_N, chunks, splits, num_read, num_finite = np.empty(num_rows, np.uint64), [], [], 0, 0
    for chunk in read_embeddings(predictions):
        stop = num_read + len(chunk.embeddings_ND)
        embeddings_ND[num_read:stop] = chunk.embeddings_ND
        hashes_N[num_read:stop] = [_hash_of(embedding_D) for embedding_D in chunk.embeddings_ND]
        num_finite += np.count_nonzero(np.isfinite(chunk.embeddings_ND).all(axis=1))
        # Of the rest, an embedding is the largest part.
        chunks.append(replace(chunk.rows, images=()))
        splits += [chunk.split] * (stop - num_read)
        num_read = stop
        on_progress(num_read, num_rows)
    if num_finite < num_rows:
        raise UsageError(
            f"{num_rows - num_finite:,} of {num_rows:,} embeddings have numbers that are NaN or infinite",
            "expected finite ones",
            "predict with a model whose training has not diverged",
        )
    names = [name for each in chunks for name in each.extra["prediction"]]
    _check_classes(made_by, set(names), _classes_with_images(predictions.manifest))
    sample_ids_N = np.concatenate([each.sample_ids_N for each in chunks])
    return PredictedRows(
        pin=predictions.pin,
        made_by=made_by,
        class_names=predictions.manifest.class_names,
        sources=[source for each in chunks for source in each.sources],
        sample_ids_N=sample_ids_N,
        splits=splits,
        labels_N=np.concatenate([each.labels_N for each in chunks]),
        predictions=names,
        probabilities_N=np.concatenate([np.array(each.extra["probability"], np.float32) for each in chunks]),
        is_seen_N=may_be_seen(made_by, np.array(splits, object), sample_ids_N),
        embeddings_ND=embeddings_ND,
        hashes_N=hashes_N,
    )


def check_memory(predictions: Dataset, num_free_bytes: int) -> None:
    """Raises UsageError if the search for wrong labels needs more than is free. `num_free_bytes`: 0 if unknown."""
    manifest = predictions.manifest
    num_classes, num_numbers = len(_classes_with_images(manifest)), manifest.row_schema.vector_size
    # Embeddings as float32, those that are judged once more, and their components; the probabilities of each class,
    # which SciPy and cleanlab copy.
    bytes_of_row = 2 * 4 * num_numbers + 8 * min(num_numbers, MAX_DIMENSIONS) + _NUM_COPIES * 8 * num_classes
    num_bytes = manifest.counts.accepted * bytes_of_row
    if num_bytes > num_free_bytes > 0:
        raise UsageError(
            f"{manifest.counts.accepted:,} images of {num_classes:,} classes, with {num_numbers:,} numbers each, "
            f"take about {num_bytes / 1e9:,.1f} GB of memory",
            f"expected at most the {num_free_bytes / 1e9:,.1f} GB that are free",
            "run it on a machine with more memory, or predict a part of the images",
        )


def _classes_with_images(manifest: Manifest) -> list[str]:
    counts = np.sum([split.class_counts for split in manifest.splits.values()], axis=0)
    return [name for name, number in zip(manifest.class_names, counts, strict=True) if number]


def _check_classes(made_by: PredictedBy, predicted: set[str], class_names: Collection[str]) -> None:
    """Raises UsageError for a model that lacks a class of the images, each of which would be a mistake. It may have
    classes that they lack.
    """
    known = _classes_of(made_by)
    if known is None:
        # What it knows shows in its answers. One that gives no others may have learned a class that it never finds.
        known = predicted if predicted.difference(class_names) else set(class_names)
    if lacking := [name for name in class_names if name not in known]:
        others = sorted(known.difference(class_names))
        raise UsageError(
            f"{made_by} does not know {first_of(lacking, 8)}, which images are labelled with",
            "expected a model of all their classes" + (f": it also knows {first_of(others, 8)}" if others else ""),
            "predict with a model that was trained on these classes, or rename them with etl.label_map",
        )


def _classes_of(made_by: PredictedBy) -> set[str] | None:
    """The classes that the model was trained on; None if its dataset is not there any more."""
    try:
        return set(open_pinned(made_by.trained_on).manifest.class_names)
    except (ShardmillError, OSError):
        return None


def _hash_of(embedding_D: np.ndarray) -> int:
    return int.from_bytes(hashlib.sha256(embedding_D.tobytes()).digest()[:8], "big")


def may_be_seen(made_by: PredictedBy, splits_N: np.ndarray, sample_ids_N: np.ndarray) -> np.ndarray:
    """Whether a row's image is one of the training's, by its bytes; in another version of the same dataset also by its
    sample id, since its file may have changed a little.

    Of a source, whose images may be anybody's, all are; also if a version can no longer be read.
    """
    predicted, trained_on = made_by.predicted, made_by.trained_on
    if predicted is None:
        return np.ones(len(splits_N), bool)
    if predicted.manifest_sha256 == trained_on.manifest_sha256:
        return splits_N == TRAIN
    with contextlib.suppress(ShardmillError, OSError):
        ids_T, digests_T = _ids_and_digests(_trained_version(trained_on, predicted.uri), (TRAIN,))
        dataset = open_pinned(predicted)
        ids, digests = _ids_and_digests(dataset, dataset.manifest.splits)
        is_seen_N = np.isin(sample_ids_N, ids[np.isin(digests, digests_T)])
        return is_seen_N | np.isin(sample_ids_N, ids_T) if predicted.uri == trained_on.uri else is_seen_N
    return np.ones(len(splits_N), bool)


def _trained_version(pin: DatasetPin, other_uri: str) -> Dataset:
    """From its place, or from a copy of the dataset that has it. Raises as `open_pinned` does."""
    try:
        return open_pinned(pin)
    except (ShardmillError, OSError):
        return open_pinned(DatasetPin(other_uri, pin.version, pin.manifest_sha256))


def _ids_and_digests(dataset: Dataset, splits: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """The sample ids of all rows of splits, int64, and the SHA-256 of their sources, bytes."""
    ids, digests = [np.empty(0, np.int64)], [np.empty(0, "S32")]
    for shard in (shard for split in splits for shard in dataset.shards_of(split)):
        rows = read_rows(dataset.store, shard, dataset.manifest.row_schema, ("sample_id", "source_sha256"))
        ids.append(rows.column("sample_id").to_numpy())
        joined = bytes.fromhex("".join(rows.column("source_sha256").to_pylist()))
        digests.append(np.frombuffer(joined, "S32"))
    return np.concatenate(ids), np.concatenate(digests)


def _checked(predictions: Dataset) -> PredictedBy:
    """Raises UsageError unless rows have one class, a model's answer and an embedding."""
    manifest, name = predictions.manifest, f"{predictions.pin.uri}@{predictions.pin.version}"
    if manifest.predicted_by is None:
        raise UsageError(f"{name} holds images", "expected predictions of a dataset", _HOW)
    if not manifest.row_schema.vector_size:
        raise UsageError(
            f"the predictions {name} have no embeddings",
            "expected those of a layer: classifiers that have not seen an image are fitted to them",
            _HOW,
        )
    if not manifest.class_names or "prediction" not in manifest.predicted_by.columns:
        raise UsageError(
            f"the predictions {name} have no classes to compare",
            "expected images with one class each, and a model that predicts one",
            "predict a dataset, or a source with --set source.label_kind=class",
        )
    return manifest.predicted_by


NUM_FOLDS = 5
MAX_DIMENSIONS = 256
# A probability of 0 has no logarithm.
_SMALLEST_LOG = -700.0
_MAX_ROWS_CALIBRATED = 20_000


def out_of_sample_probabilities(embeddings_ND: np.ndarray, labels_N: np.ndarray, hashes_N: np.ndarray) -> np.ndarray:
    """float64, (N, K). Rows of equal hashes are in one fold; labels are the numbers from 0 to K - 1, each there."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.model_selection import PredefinedSplit, cross_val_predict

    # By the content alone, so that no order of the rows and no chance decides.
    folds_N = (hashes_N % np.uint64(NUM_FOLDS)).astype(np.int64)
    logs_NK: Any = cross_val_predict(
        LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"),
        _reduced(embeddings_ND),
        labels_N,
        cv=PredefinedSplit(folds_N),
        method="predict_log_proba",
    )
    return _calibrated(np.clip(logs_NK, _SMALLEST_LOG, None), labels_N)


def _reduced(embeddings_ND: np.ndarray) -> np.ndarray:
    """The principal components, which know of no label, if an embedding has more numbers than a class has images."""
    if embeddings_ND.shape[1] <= MAX_DIMENSIONS:
        return embeddings_ND
    from sklearn.decomposition import PCA

    return PCA(min(MAX_DIMENSIONS, len(embeddings_ND)), random_state=0).fit_transform(embeddings_ND)


def _calibrated(logs_NK: np.ndarray, labels_N: np.ndarray) -> np.ndarray:
    """With the temperature at which the given labels are most probable: embeddings are no Gaussians, so that the
    classifier is too sure. It changes no order of classes (C. Guo et al., On Calibration of Modern Neural Networks,
    ICML 2017).
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax, softmax

    step = -(-len(logs_NK) // _MAX_ROWS_CALIBRATED)
    some_SK, given_S = logs_NK[::step], labels_N[::step]

    def mean_loss(log_temperature: float) -> float:
        logs_SK = log_softmax(some_SK / np.exp(log_temperature), axis=1)
        return -float(logs_SK[np.arange(len(given_S)), given_S].mean())

    best: Any = minimize_scalar(mean_loss, bounds=(-3.0, 6.0), method="bounded")
    return softmax(logs_NK / np.exp(best.x), axis=1)
