"""Ordinary image files to labels: through `process_image`, as the training images went, then through the export.

Shape legend: N batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.dataset.dataset import split_version
from shardmill.errors import UsageError
from shardmill.images.decode import DECODER_ID
from shardmill.images.normalize import decode_stored, normalization_fingerprint
from shardmill.images.process import process_image
from shardmill.options import NormalizeOptions
from shardmill.storage import open_store
from shardmill.values import Rejection, RejectReason, SourceImage
from train.current import current_export
from train.exported import ARTIFACTS, ExportedModel, load_exported, number_of_artifact

MAX_BATCH_SIZE = 64


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the model says of one file, or why the file is no image that it could be asked about."""

    path: str
    label: str
    """Empty where rejected."""
    probability: float
    rejection: str
    """`reason: detail` from the closed list of reasons; empty where the file is an image."""


def open_model(model: str) -> ExportedModel:
    """`URI` (the current export of a models' root), `URI@3` (its export 3), or an export's folder `URI/artifacts/...`.

    Raises UsageError where there is none or this machine decodes images otherwise, IntegrityError for altered files.
    """
    uri, number = split_version(model.rstrip("/"))
    root, artifacts, artifact = uri.rpartition(f"/{ARTIFACTS}/")
    if number is not None:
        exported = load_exported(uri, number)
    elif artifacts:
        exported = load_exported(root, number_of_artifact(root, artifact.split("/")[0]))
    else:
        exported = load_exported(uri, current_export(uri).number)
    record = exported.export.record
    if normalization_fingerprint(record.normalize) != record.normalization_fingerprint:
        raise UsageError(
            f"{model} was trained on images decoded by {record.decoder_id}",
            f"this machine decodes with {DECODER_ID}",
            "install the versions that `uv.lock` names, or train again",
        )
    return exported


def predict_images(model: str, paths: Sequence[str]) -> list[Prediction]:
    """`predict_files` for a model as `open_model` takes it."""
    return predict_files(open_model(model), paths)


def predict_files(model: ExportedModel, paths: Sequence[str]) -> list[Prediction]:
    """One prediction for each path, in order. A file that the ETL would reject is rejected, for the same reason."""
    predictions: list[Prediction] = []
    for start in range(0, len(paths), MAX_BATCH_SIZE):
        predictions += _predict_batch(model, paths[start : start + MAX_BATCH_SIZE])
    return predictions


def _predict_batch(model: ExportedModel, paths: Sequence[str]) -> list[Prediction]:
    record = model.export.record
    read = [_read_image(path, record.normalize) for path in paths]
    images = [image for image in read if isinstance(image, np.ndarray)]
    probabilities_NK = model.predict(np.stack(images)) if images else np.empty((0, len(record.class_names)))
    of_images = iter(probabilities_NK)
    predictions = []
    for path, image in zip(paths, read, strict=True):
        if isinstance(image, Rejection):
            predictions.append(Prediction(path, "", 0.0, f"{image.reason}: {image.detail}"))
        else:
            probabilities_K = next(of_images)
            best = int(probabilities_K.argmax())
            predictions.append(Prediction(path, record.class_names[best], float(probabilities_K[best]), ""))
    return predictions


def _read_image(path: str, options: NormalizeOptions) -> np.ndarray | Rejection:
    """The normalized pixels of an image file as the model saw them in training: stored encoding included."""
    folder, _, name = path.rpartition("/")
    if not name:
        raise UsageError(f"{path!r} is not a file", "expected the path of an image file")
    store = open_store(folder or ("/" if path.startswith("/") else os.curdir))
    found = store.stat(name)
    if found is None:
        return Rejection(path, RejectReason.MISSING, "no such file", stage="read")
    if found.size_bytes > options.max_source_bytes:
        detail = f"{found.size_bytes} bytes; max_source_bytes is {options.max_source_bytes}"
        return Rejection(path, RejectReason.TOO_LARGE_BYTES, detail, found.size_bytes, stage="read")
    sample = process_image(SourceImage(path, found.size_bytes), store.read(name), options)
    if isinstance(sample, Rejection):
        return sample
    return decode_stored(sample.image, options.encoding, options.image_shape_HWC)
