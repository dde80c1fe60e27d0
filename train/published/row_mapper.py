"""An export as a `RowMapping`: what a batch job stores of each image, and the model that each worker loads once.

`pipeline.commands.predict` and `etl/predict_job.py` hand `mapping_of` to the ETL, whose workers find
`open_mapper` by the name in the mapping. Shape legend: N batch, H height, W width, C channels, K classes or numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import numpy as np

from shardmill.errors import IntegrityError, UsageError
from shardmill.ids import canonical_digest
from shardmill.row_mapping import MappedRow, RowMapping, sample_encoding
from shardmill.stores import open_store
from shardmill.typed_columns import ExtraColumn
from shardmill.values import ImageSample, PredictedBy, Value
from train.api import Predict, PredictWithLayer
from train.backends import BACKENDS
from train.contracts.world import World
from train.labels import LabelSpec
from train.published.exported import Export, ExportRecord, load_exported, load_with_layer, read_export
from train.published.predict import LIKELY, check_served, exact_name, pixels_of, ranked

_OPENER = "train.published.row_mapper:open_mapper"
# Float32 has seven digits or so; of the last one the next machine may make another.
_DIGITS = 6
_MAX_VECTOR_SIZE = 65_536
# One core gains nothing from more, and the last batch of each work unit is filled up: units with few new images have
# no other.
_BATCH_SIZE = 16


def mapping_of(model: str, top: int = 1, layer: str = "") -> RowMapping:
    """The predictions of a model as `exact_name` takes it: the number of its export is decided here, for all workers.

    `top`: how many classes to store; all of them if there are fewer.

    Loads no model unless a layer is named, whose output is then stored too. Raises UsageError if `top` is below 1,
    there is no such model or layer, or this machine decodes images differently.
    """
    if top < 1:
        raise UsageError(f"{top} classes to store of each image", "expected at least 1", "omit --top for the first one")
    exact = exact_name(model)
    uri, _, number = exact.rpartition("@")
    # Workers have other working directories.
    uri = open_store(uri).uri
    export = read_export(uri, int(number))
    record = export.record
    check_served(model, record)
    # Equal answers are those of one mapping.
    top = 1 if record.labels.are_numbers else min(top, len(record.class_names))
    columns, vector_size = _columns(record.labels, top), _layer_size(uri, export, layer) if layer else 0
    predicted_by = PredictedBy(
        models_uri=uri,
        export=export.number,
        weights_sha256=record.weights_sha256,
        trained_on=record.dataset,
        columns=tuple(column.name for column in columns),
        top=top,
        layer=layer,
    )
    limits = {"top": top, "layer": layer, "digits": _DIGITS, "batch_size": _BATCH_SIZE}
    deciding = {"record": record.model_dump(mode="json"), **limits}
    place = {"models_uri": uri, "export": export.number, "weights_sha256": record.weights_sha256}
    options = json.dumps({**place, "top": top, "layer": layer})
    return RowMapping(
        _OPENER,
        options,
        sample_encoding(record.normalize),
        canonical_digest(deciding),
        columns,
        vector_size=vector_size,
        normalize=record.normalize,
        normalization_fingerprint=record.normalization_fingerprint,
        predicted_by=predicted_by,
    )


def open_mapper(options: str, encoding: str) -> ExportMapper:
    """The model of `mapping_of`, loaded in this process for one core.

    Raises IntegrityError for altered files, and for another model that has taken the place of the driver's.
    """
    given = json.loads(options)
    place, layer = (given["models_uri"], given["export"]), given["layer"]
    record = _same_record(*place, given["weights_sha256"])
    # One thread and deterministic kernels: there is a worker for each core.
    BACKENDS[record.backend].start(World(ranks_per_node=len(os.sched_getaffinity(0))), 0)
    predict = load_with_layer(*place, layer) if layer else _without_layer(load_exported(*place).predict)
    # Files may have been replaced between the two.
    _same_record(*place, given["weights_sha256"])
    return ExportMapper(record, predict, given["top"], encoding)


def _same_record(models_uri: str, number: int, weights_sha256: str) -> ExportRecord:
    record = read_export(models_uri, number).record
    if record.weights_sha256 != weights_sha256:
        raise IntegrityError(
            f"{models_uri}@{number} has weights with the digest {record.weights_sha256[:12]}",
            f"expected {weights_sha256[:12]}, with which this job began: the folder was made anew meanwhile",
            "run the job again: it predicts all images with one model",
        )
    return record


def _without_layer(predict: Predict) -> PredictWithLayer:
    return lambda images_NHWC: (predict(images_NHWC), np.empty((len(images_NHWC), 0), np.float32))


def _layer_size(models_uri: str, export: Export, layer: str) -> int:
    """The length of a layer's output. Raises UsageError for a layer that is not there, or has too many numbers."""
    BACKENDS[export.record.backend].start(World(), 0)
    images_NHWC = np.zeros((1, *export.record.image_shape_HWC), np.uint8)
    size = load_with_layer(models_uri, export.number, layer)(images_NHWC)[1].shape[1]
    if not 0 < size <= _MAX_VECTOR_SIZE:
        raise UsageError(
            f"the output of layer {layer!r} has {size} numbers for each image",
            f"expected 1 to {_MAX_VECTOR_SIZE}",
            "choose a layer behind the pooling",
        )
    return size


class ExportMapper:
    """`shardmill.row_mapping.RowMapper` of an export."""

    batch_size = _BATCH_SIZE

    def __init__(self, record: ExportRecord, predict: PredictWithLayer, top: int, encoding: str) -> None:
        self._record = record
        self._encoding = encoding
        self._predict = predict
        self._top = top

    def map(self, samples: Sequence[ImageSample]) -> list[MappedRow]:
        """Decode the images as evaluation does, and predict them all at once."""
        images_NHWC = np.zeros((self.batch_size, *self._record.image_shape_HWC), np.uint8)
        for place, sample in enumerate(samples):
            images_NHWC[place] = pixels_of(sample, self._encoding, self._record)
        # Always as many: kernels round by the size of a batch, and a new one is compiled for each.
        predictions_NK, layer_ND = self._predict(images_NHWC)
        rows = zip(predictions_NK[: len(samples)], layer_ND[: len(samples)].astype("<f4"), strict=True)
        return [MappedRow(self._values(predictions_K), layer_D.tobytes()) for predictions_K, layer_D in rows]

    def _values(self, predictions_K: np.ndarray) -> dict[str, Value]:
        labels = self._record.labels
        if labels.are_numbers:
            return {"outputs": [*_rounded(predictions_K)]}
        best_first = ranked(predictions_K, labels, self._top)
        names = [labels.class_names[index] for index in best_first]
        probabilities = _rounded(predictions_K[best_first])
        top: dict[str, Value] = {"top_labels": [*names], "top_probabilities": [*probabilities]}
        if labels.kind == "multi_label":
            num_likely = int((predictions_K[best_first] >= LIKELY).sum())
            return {"predictions": [*names[:num_likely]], **top}
        return {"prediction": names[0], "probability": probabilities[0], **(top if self._top > 1 else {})}


def _columns(labels: LabelSpec, top: int) -> tuple[ExtraColumn, ...]:
    """The columns that `ExportMapper` gives values for."""
    ranked = {"top_labels": "list<string>", "top_probabilities": "list<float32>"}
    if labels.are_numbers:
        types = {"outputs": "list<float32>"}
    elif labels.kind == "multi_label":
        types = {"predictions": "list<string>", **ranked}
    else:
        types = {"prediction": "string", "probability": "float32", **(ranked if top > 1 else {})}
    return tuple(ExtraColumn(*each) for each in sorted(types.items()))


def _rounded(numbers_N: np.ndarray) -> list[float]:
    return [float(f"{number:.{_DIGITS}g}") for number in numbers_N.tolist()]
