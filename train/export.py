"""From the final checkpoint of a training to an immutable, numbered export; and back to a model that predicts.

<models>/artifacts/<attempt>/saved_model/..., model.keras     files, written first
<models>/exports/00000001.json                                THE export: this record's appearance makes it visible
"""

from __future__ import annotations

import hashlib
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.dataset import Dataset, open_pinned
from shardmill.dataset.pin import DatasetPin
from shardmill.errors import IntegrityError, TrainingError, UsageError
from shardmill.options import NormalizeOptions, Section
from shardmill.storage import Store, check_relative_path, open_store
from train.checkpoint import WEIGHTS, FoundCheckpoint, rank_file, read_checkpoint
from train.config import TrainConfig
from train.models import build_model, input_scale
from train.models.identity import check_same_model, source_sha256
from train.records import put_record, read_record, record_numbers
from train.runtime import start_tensorflow
from train.serving import KerasCheck, ServingModel, load_saved_model, write_keras_file, write_saved_model
from train.values import Evaluation, ModelIdentity, TrainResult, World
from train.weights import assign_variables, weights_sha256

EXPORTS = "exports"
ARTIFACTS = "artifacts"
SAVED_MODEL = "saved_model"
KERAS_FILE = "model.keras"
MAX_PARITY_DIFF = 1e-5
NUM_PARITY_IMAGES = 64


class ExportedFile(Section):
    """A file that the record vouches for."""

    path: str
    """Relative to the models' root."""
    num_bytes: int
    sha256: str


class ExportRecord(Section):
    """All that there is to know of one export."""

    created_at: str
    """UTC, ISO 8601."""
    run_id: str
    artifact_dir: str
    """Relative to the models' root: holds `saved_model/` and `model.keras`."""
    files: tuple[ExportedFile, ...]
    keras_note: str
    """What a reader of `model.keras` must know (classes to register, or why there is none); most often empty."""
    model: str
    """`train.model` of the training."""
    class_names: tuple[str, ...]
    normalize: NormalizeOptions
    """How an image file becomes the uint8 pixels that the model takes."""
    normalization_fingerprint: str
    decoder_id: str
    channel_mean: tuple[float, ...]
    channel_std: tuple[float, ...]
    dataset: DatasetPin
    content_digest: str
    layout_digest: str
    training_dir: str
    checkpoint: str
    weights_sha256: str
    evaluation: Evaluation | None
    """Of the training model, on the dataset version that it was trained on; without its per-class figures."""
    parity_max_abs_diff: float
    """Largest difference between probabilities of the reloaded SavedModel and of the training model."""
    parity_num_images: int


@dataclass(frozen=True, slots=True)
class Export:
    """One numbered export."""

    number: int
    record: ExportRecord


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """An export, verified and loaded."""

    export: Export
    predict: Callable[[np.ndarray], np.ndarray]
    """images_NHWC uint8 of the normalized size -> probabilities_NK float32."""


def export_training(models_uri: str, config: TrainConfig, result: TrainResult, run_id: str) -> tuple[Export, bool]:
    """Export what a training ended with. -> the export, and whether it was there already (same training, same weights).

    Raises TrainingError where the export does not predict what the training model predicts, IntegrityError where the
    checkpoint was altered.
    """
    store = open_store(models_uri)
    for number in reversed(record_numbers(store, EXPORTS)):
        record = read_record(store, EXPORTS, number, ExportRecord)
        if (record.training_dir, record.weights_sha256) == (result.training_dir, result.weights_sha256):
            return Export(number, record), True
    dataset = open_pinned(result.dataset)
    serving = _restore(store, config, result, dataset)
    attempt = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="shardmill-export-") as scratch:
        record = _write_artifacts(store, serving, Path(scratch), f"{ARTIFACTS}/{attempt}", dataset)
    manifest = dataset.manifest
    record = ExportRecord(
        **record,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        run_id=run_id,
        model=config.model,
        class_names=manifest.class_names,
        normalize=manifest.normalize,
        normalization_fingerprint=manifest.normalization_fingerprint,
        decoder_id=manifest.decoder_id,
        channel_mean=serving.channel_mean,
        channel_std=serving.channel_std,
        dataset=result.dataset,
        content_digest=manifest.content_digest,
        layout_digest=manifest.layout_digest,
        training_dir=result.training_dir,
        checkpoint=result.checkpoint,
        weights_sha256=result.weights_sha256,
        evaluation=result.evaluation.without_classes() if result.evaluation else None,
    )
    number = max(record_numbers(store, EXPORTS), default=0) + 1
    while not put_record(store, EXPORTS, number, record):
        number += 1
    return Export(number, record), False


def read_export(models_uri: str, number: int) -> Export:
    """The record of one export. Raises UsageError that names those that exist, IntegrityError for an altered one."""
    store = open_store(models_uri)
    known = record_numbers(store, EXPORTS)
    if number not in known:
        has = f"it has {known[0]} to {known[-1]}" if known else "it has none"
        raise UsageError(f"{models_uri} has no export {number}", has, "`shardmill export` makes one")
    return Export(number, read_record(store, EXPORTS, number, ExportRecord))


def load_exported(models_uri: str, number: int) -> ExportedModel:
    """Fetch an export's SavedModel, verify every byte of it, load it. Raises IntegrityError that names the file."""
    export = read_export(models_uri, number)
    store = open_store(models_uri)
    prefix = f"{export.record.artifact_dir}/{SAVED_MODEL}/"
    with tempfile.TemporaryDirectory(prefix="shardmill-model-") as scratch:
        for file in export.record.files:
            if file.path.startswith(prefix):
                target = Path(scratch, check_relative_path(file.path)[len(prefix) :])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(_read_verified(store, file))
        return ExportedModel(export, load_saved_model(Path(scratch)))


def _read_verified(store: Store, file: ExportedFile) -> bytes:
    try:
        data = store.read(file.path)
    except FileNotFoundError:
        raise IntegrityError(f"{store.uri}/{file.path} is missing", f"expected {file.num_bytes} bytes") from None
    if (len(data), hashlib.sha256(data).hexdigest()) != (file.num_bytes, file.sha256):
        raise IntegrityError(
            f"{store.uri}/{file.path} was altered",
            f"expected {file.num_bytes} bytes, SHA-256 {file.sha256}",
            "export again from the training, or promote another export",
        )
    return data


def _restore(store: Store, config: TrainConfig, result: TrainResult, dataset: Dataset) -> ServingModel:
    """The training model with its final weights."""
    start_tensorflow(World(), config.seed)
    manifest = dataset.manifest
    # An export computes in float32, whatever the training saved time with; the weights are float32 in any case.
    config = config.model_copy(update={"mixed_precision": "off"})
    built = build_model(config, manifest.normalize.image_shape_HWC, len(manifest.class_names))
    found = find_final_checkpoint(store, result)
    source = f"the checkpoint {found.path}"
    now = ModelIdentity(source_sha256(config.model), built.config_sha256)
    check_same_model(result.model, now, config.model, source)
    scale = input_scale(config, manifest)
    assign_variables(built.model.trainable_variables, found.read(store, WEIGHTS), source)
    assign_variables(built.model.non_trainable_variables, found.read(store, rank_file(0)), source)
    if weights_sha256(built.model) != result.weights_sha256:
        raise IntegrityError(
            f"{source} gives weights {weights_sha256(built.model)}",
            f"expected {result.weights_sha256}, with which the training ended",
            "train.model must build the model that it built then",
        )
    return ServingModel(
        model=built.model,
        outputs_are_logits=built.outputs_are_logits,
        class_names=manifest.class_names,
        image_shape_HWC=manifest.normalize.image_shape_HWC,
        channel_mean=scale.mean,
        channel_std=scale.std,
    )


def find_final_checkpoint(store: Store, result: TrainResult) -> FoundCheckpoint:
    """The checkpoint with which a training ended. Raises IntegrityError where it is no longer whole."""
    try:
        return read_checkpoint(store, result.checkpoint)
    except IntegrityError as error:
        raise IntegrityError(
            f"the final checkpoint {store.uri}/{result.checkpoint} is missing or damaged",
            "the training says that it ended with it",
            f"delete {store.uri}/{result.training_dir}/result.json and train again: it goes on from what is whole",
        ) from error


def _write_artifacts(
    store: Store, serving: ServingModel, scratch: Path, artifact_dir: str, dataset: Dataset
) -> dict[str, Any]:
    """Write, reload and compare in `scratch`; then publish. -> the fields of the record that follow from it."""
    images_NHWC = _parity_images(dataset)
    write_saved_model(serving, scratch / SAVED_MODEL)
    expected_NK = serving.predict(images_NHWC)
    difference = float(np.abs(load_saved_model(scratch / SAVED_MODEL)(images_NHWC) - expected_NK).max())
    if not difference <= MAX_PARITY_DIFF:
        raise TrainingError(
            f"the exported SavedModel differs from the training model by {difference:g} on {len(images_NHWC)} images",
            f"expected at most {MAX_PARITY_DIFF:g}",
            "the model must compute the same with training=False each time",
        )
    agrees = KerasCheck(images_NHWC, expected_NK, MAX_PARITY_DIFF)
    keras_note = write_keras_file(serving, scratch / KERAS_FILE, agrees)
    files = []
    for file in sorted(path for path in scratch.rglob("*") if path.is_file()):
        data = file.read_bytes()
        path = f"{artifact_dir}/{file.relative_to(scratch).as_posix()}"
        files.append(ExportedFile(path=path, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
        store.put_file(path, file)
    return {
        "artifact_dir": artifact_dir,
        "files": tuple(files),
        "keras_note": keras_note,
        "parity_max_abs_diff": difference,
        "parity_num_images": len(images_NHWC),
    }


def _parity_images(dataset: Dataset) -> np.ndarray:
    split = next(name for name in ("test", "validation", "train") if name in dataset.manifest.splits)
    return np.stack([sample.image_HWC for sample in dataset.read_samples(split, NUM_PARITY_IMAGES)])
