"""Predicts labels of ordinary image files: decoded by `process_image` like the training images, then by the export.

Shape legend: N batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.augment.pixels import centre_of
from shardmill.dataset.versions import split_version
from shardmill.errors import UsageError
from shardmill.formats.encodings import decode_stored
from shardmill.images.decoder_id import decoder_id, is_served
from shardmill.images.sandbox import DecodeSandbox
from shardmill.options import DecodeLimits
from shardmill.stores import open_store
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from train.labels import LabelSpec
from train.published.exported import (
    ARTIFACTS,
    ExportedModel,
    ExportRecord,
    current_export,
    load_exported,
    number_of_artifact,
)
from train.published.mlflow_registry import SCHEME, resolve_registered


def list_files(paths: Sequence[str]) -> list[str]:
    """The paths themselves; in place of a folder (or `s3://` prefix), all files below it that are not hidden, sorted.

    Raises UsageError if nothing is left.
    """
    files = [file for path in paths for file in _files_of(path)]
    if not files:
        raise UsageError(
            f"no files below {', '.join(paths)}",
            "expected image files, or folders that contain some",
            "check the paths",
        )
    return files


def read_file(path: str, max_bytes: int) -> bytes | Rejection:
    """The bytes of a regular file (or an object on S3) of at most `max_bytes`, or why they are not read."""
    return _read_object(path, max_bytes) if "://" in path else _read_local(path, max_bytes)


def _files_of(path: str) -> Iterator[str]:
    if "://" in path:
        folder, _, name = path.rstrip("/").rpartition("/")
        store = open_store(folder)
        below = [] if store.stat(name) is not None else sorted(file.path for file in store.list(name))
        yield from (f"{folder}/{each}" for each in below if not _is_hidden(each[len(name) :]))
        if not below:
            yield path
    elif os.path.isdir(path):
        # A folder that cannot be listed stays in the list: it is rejected by its own name.
        unlisted: list[str] = []
        found = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(path, onerror=lambda error: unlisted.append(error.filename))
            for name in names
        ]
        yield from sorted([each for each in found if not _is_hidden(os.path.relpath(each, path))] + unlisted)
    else:
        yield path


def _is_hidden(relative: str) -> bool:
    return any(part.startswith(".") for part in relative.split("/"))


def _read_local(path: str, max_bytes: int) -> bytes | Rejection:
    try:
        # Without waiting: opening a FIFO would hang until another process writes to it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return _rejection(path, RejectReason.NOT_REGULAR_FILE, stat.filemode(status.st_mode))
            if status.st_size > max_bytes:
                return _too_large(path, status.st_size, max_bytes)
            # Files of /proc say that they are empty, and growing ones soon say something else.
            data = file.read(max_bytes + 1)
            return _too_large(path, len(data), max_bytes) if len(data) > max_bytes else data
    except FileNotFoundError:
        return _rejection(path, RejectReason.MISSING, "no such file")
    except OSError as error:
        if os.path.isdir(path):
            return _rejection(path, RejectReason.NOT_REGULAR_FILE, f"a folder: {error.strerror}")
        return _rejection(path, RejectReason.UNREADABLE, error.strerror or str(error))


def _read_object(path: str, max_bytes: int) -> bytes | Rejection:
    folder, _, name = path.rpartition("/")
    store = open_store(folder)
    found = store.stat(name)
    if found is None:
        return _rejection(path, RejectReason.MISSING, "no such file")
    return _too_large(path, found.size_bytes, max_bytes) if found.size_bytes > max_bytes else store.read(name)


def _rejection(path: str, reason: RejectReason, detail: str) -> Rejection:
    return Rejection(path, reason, detail, stage="read")


def _too_large(path: str, num_bytes: int, max_bytes: int) -> Rejection:
    detail = f"{num_bytes} bytes; max_source_bytes is {max_bytes}"
    return Rejection(path, RejectReason.TOO_LARGE_BYTES, detail, num_bytes, stage="read")


MAX_BATCH_SIZE = 64
LIKELY = 0.5
"""With several classes per image, classes with at least this probability count as predicted."""


@dataclass(frozen=True, slots=True)
class Guess:
    """One class, and how sure the model is of it."""

    label: str
    probability: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The model's prediction for one file, or the reason why the file was rejected."""

    path: str
    label: str
    """The most probable class; empty if rejected, or if the model answers with numbers."""
    probability: float
    rejection: str
    """`reason: detail` from the closed list of reasons; empty if the file is an image."""
    top: tuple[Guess, ...] = ()
    """The most probable classes, best first; if an image may have several, also all classes with a probability of at
    least `LIKELY`.
    """
    values: tuple[float, ...] = ()
    """Values of a model of numbers."""


def exact_name(model: str) -> str:
    """`URI@3` for `URI` (the current export of a models' root) or an export's folder `URI/artifacts/...`.

    The same for `models:/NAME@ALIAS`, which MLflow's registry knows. Raises UsageError if there is none.
    """
    if model.startswith(SCHEME):
        return resolve_registered(model)
    uri, number = split_version(model.rstrip("/"))
    root, artifacts, artifact = uri.rpartition(f"/{ARTIFACTS}/")
    if artifacts:
        return f"{root}@{number_of_artifact(root, artifact.split('/')[0])}"
    return f"{uri}@{current_export(uri).number if number is None else number}"


def open_model(model: str) -> ExportedModel:
    """The export that a name refers to, as `exact_name` takes it.

    Raises UsageError if there is none or this machine decodes images differently, IntegrityError for altered files.
    """
    uri, _, number = exact_name(model).rpartition("@")
    exported = load_exported(uri, int(number))
    check_served(model, exported.export.record)
    return exported


def check_served(model: str, record: ExportRecord) -> None:
    """Raises UsageError if this machine decodes images differently than the model's training did."""
    if not is_served(record.normalize, record.normalization_fingerprint):
        raise UsageError(
            f"{model} was trained on images decoded by {record.decoder_id}",
            f"this machine decodes with {decoder_id(record.normalize)}",
            "install the versions in `uv.lock`, or train again",
        )


def predict_images(model: str, paths: Sequence[str], num_top: int = 1) -> list[Prediction]:
    """`predict_files` for a model as `open_model` takes it, and for the files in folders as `list_files` finds them."""
    return predict_files(open_model(model), list_files(paths), num_top)


def predict_files(
    model: ExportedModel, paths: Sequence[str], num_top: int = 1, limits: DecodeLimits | None = None
) -> list[Prediction]:
    """One prediction for each path, in order. A file that the ETL would reject is rejected, for the same reason."""
    predictions: list[Prediction] = []
    with DecodeSandbox(limits) as sandbox:
        for start in range(0, len(paths), MAX_BATCH_SIZE):
            batch = paths[start : start + MAX_BATCH_SIZE]
            images = [_read_image(path, sandbox, model.export.record) for path in batch]
            predictions += _predict_batch(model, batch, images, num_top)
    return predictions


def _predict_batch(
    model: ExportedModel, paths: Sequence[str], read: Sequence[np.ndarray | Rejection], num_top: int
) -> list[Prediction]:
    record = model.export.record
    images = [image for image in read if isinstance(image, np.ndarray)]
    predictions_NK = model.predict(np.stack(images)) if images else np.empty((0, record.labels.num_outputs))
    of_images = iter(predictions_NK)
    predictions = []
    for path, image in zip(paths, read, strict=True):
        if isinstance(image, Rejection):
            predictions.append(Prediction(path, "", 0.0, f"{image.reason}: {image.detail}"))
            continue
        predictions_K = next(of_images)
        if record.labels.are_numbers:
            predictions.append(Prediction(path, "", 0.0, "", values=tuple(map(float, predictions_K))))
            continue
        best_first = ranked(predictions_K, record.labels, num_top)
        top = tuple(Guess(record.class_names[index], float(predictions_K[index])) for index in best_first)
        predictions.append(Prediction(path, top[0].label, top[0].probability, "", top))
    return predictions


def _read_image(path: str, sandbox: DecodeSandbox, record: ExportRecord) -> np.ndarray | Rejection:
    """The normalized pixels of an image file as the model saw them in evaluation: stored encoding included."""
    options = record.normalize
    data = read_file(path, options.max_source_bytes)
    if isinstance(data, Rejection):
        return data
    sample = sandbox.process(SourceImage(path, len(data)), data, options)
    if isinstance(sample, Rejection):
        return sample
    return pixels_of(sample, options.encoding, record)


def pixels_of(sample: ImageSample, encoding: str, record: ExportRecord) -> np.ndarray:
    """A stored image as the model takes it."""
    return centre_of(decode_stored(sample.image, encoding, record.normalize.image_shape_HWC), record.size)


def ranked(predictions_K: np.ndarray, labels: LabelSpec, num_top: int) -> np.ndarray:
    """The classes to give, best first: the most probable ones, and every likely one if an image may have several."""
    num_likely = int((predictions_K >= LIKELY).sum()) if labels.kind == "multi_label" else 0
    return np.argsort(-predictions_K, kind="stable")[: max(num_top, num_likely)]
