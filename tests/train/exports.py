"""Exports without a training: real SavedModels of a linear classifier whose weights follow from the class means."""

from __future__ import annotations

import functools
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardmill.checksummed import checksum_file
from shardmill.dataset.dataset import open_dataset
from shardmill.loader.reader import read_split
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from train.api import ServedModel
from train.backends.keras.serving import SAVED_MODEL, ServingModel, load_saved_model, write_saved_model
from train.backends.model_spec import InputScale, ModelSpec
from train.labels import LabelSpec
from train.metrics.evaluate import evaluate_batches, scores_by
from train.published.exported import ARTIFACTS, EXPORTS, Export, ExportRecord
from train.records import put_record, record_numbers
from train.strategies.collective import SingleCollective


def put_export(
    models_uri: str, dataset_uri: str, *, is_good: bool = True, split: str | None = "test", caution: str = ""
) -> Export:
    """An export for a dataset: one that knows its classes by their mean images, or one that answers class 0."""
    store, dataset = open_store(models_uri), open_dataset(dataset_uri)
    manifest = dataset.manifest
    model = _nearest_mean(dataset_uri, dataset.pin.version, is_good=is_good)
    artifact_dir, files = f"{ARTIFACTS}/{secrets.token_hex(8)}", []
    for name, data in model.files.items():
        files.append(checksum_file(f"{artifact_dir}/{name}", data))
        store.put(files[-1].path, data)
    evaluation = None
    if split:
        labels = LabelSpec.of(manifest)
        scores = scores_by(model.served.outputs, labels.kind, model.served.outputs_are_logits)
        with read_split(dataset, split) as batches:
            evaluation = evaluate_batches(scores, batches, split, labels, SingleCollective()).without_classes()
    scale = _scale(manifest.normalize.image_shape_HWC)
    record = ExportRecord(created_at="", run_id="run", artifact_dir=artifact_dir, files=tuple(files), keras_note="",
                          model="nearest_mean", class_names=manifest.class_names, normalize=manifest.normalize,
                          normalization_fingerprint=manifest.normalization_fingerprint, decoder_id=manifest.decoder_id,
                          channel_mean=scale.mean, channel_std=scale.std, dataset=dataset.pin,
                          content_digest=manifest.content_digest, layout_digest=manifest.layout_digest, training_dir="",
                          checkpoint="", weights_sha256="", caution=caution, training_evaluation=evaluation,
                          evaluation=evaluation, parity_max_abs_diff=0.0, parity_num_images=0)  # fmt: skip
    number = max(record_numbers(store, EXPORTS), default=0) + 1
    assert put_record(store, EXPORTS, number, record)
    return Export(number, record)


@dataclass(frozen=True)
class _SavedModel:
    files: dict[str, bytes]
    served: ServedModel


@functools.cache
def _nearest_mean(dataset_uri: str, version: int, *, is_good: bool) -> _SavedModel:
    """Written once: tests of the gate put dozens of the same."""
    import keras

    dataset = open_dataset(f"{dataset_uri}@{version}")
    manifest = dataset.manifest
    num_classes, shape_HWC = len(manifest.class_names), manifest.normalize.image_shape_HWC
    samples = read_samples(dataset, "train", 1000)
    images = np.stack([sample.image_HWC for sample in samples]).reshape(len(samples), -1) - 128.0
    labels_N = np.array([sample.label for sample in samples])
    means_KF = np.stack([images[labels_N == label].mean(axis=0) for label in range(num_classes)])
    model = keras.Sequential([keras.Input(shape_HWC), keras.layers.Flatten(), keras.layers.Dense(num_classes)])
    # Nearest mean: |x - m|^2 is smallest if x.m - |m|^2/2 is largest.
    weights = [means_KF.T, -(means_KF**2).sum(axis=1) / 2] if is_good else [means_KF.T * 0, -np.arange(num_classes)]
    model.set_weights([each / 1e5 for each in weights])
    serving = ServingModel(model, True, ModelSpec(shape_HWC, LabelSpec.of(manifest), _scale(shape_HWC)))
    with tempfile.TemporaryDirectory() as scratch:
        write_saved_model(serving, Path(scratch, SAVED_MODEL))
        served = load_saved_model(Path(scratch, SAVED_MODEL))
        files = sorted(path for path in Path(scratch).rglob("*") if path.is_file())
        return _SavedModel({str(file.relative_to(scratch)): file.read_bytes() for file in files}, served)


def _scale(shape_HWC: tuple[int, int, int]) -> InputScale:
    return InputScale((128.0,) * shape_HWC[2], (1.0,) * shape_HWC[2])
