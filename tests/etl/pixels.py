"""A "model" for the tests of labels: the embedding of an image is its pixels, and it answers with the class of the
nearest mean of those that it was made with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.predict_job import predict_source
from etl.sources import COMMITTED
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.formats.encodings import decode_stored
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.samples import iterate_samples
from shardmill.row_mapping import MappedRow, RowMapping
from shardmill.typed_columns import ExtraColumn
from shardmill.values import DatasetPin, ImageSample, PredictedBy
from tests.lab.datasets import HERE

SIDE = 8
COLUMNS = (ExtraColumn("prediction", "string"), ExtraColumn("probability", "float32"))


def predict_pixels(
    dataset: Dataset, out: Path, names: Sequence[str] = (), trained_on: DatasetPin | None = None
) -> Dataset:
    """Predictions of a whole dataset by the means of its train split's classes, with an embedding for each image.

    `names`: what the model calls the classes; empty: as the dataset does. `trained_on`: what it says that it learned.
    """
    manifest = dataset.manifest
    train = list(iterate_samples(dataset, "train"))
    small_ND = np.array([_small(each.image_HWC) for each in train])
    labels_N = np.array([each.label for each in train])
    means_KD = [small_ND[labels_N == label].mean(axis=0).tolist() for label in range(len(manifest.class_names))]
    options = {"means": means_KD, "names": names or manifest.class_names, "shape": manifest.normalize.image_shape_HWC}
    mapping = RowMapping(
        opener="tests.etl.pixels:open_mapper",
        options=json.dumps(options),
        encoding="raw",
        fingerprint="1",
        columns=COLUMNS,
        vector_size=SIDE * SIDE,
        normalize=manifest.normalize,
        normalization_fingerprint=manifest.normalization_fingerprint,
        predicted_by=PredictedBy(
            "/models", 1, "0" * 64, trained_on or dataset.pin, tuple(column.name for column in COLUMNS), top=1,
            layer="pixels",
        ),
    )  # fmt: skip
    tree = EtlTree(
        source=SourceConfig(uri=dataset.pin.uri, kind=COMMITTED),
        dataset=DatasetConfig(uri=str(out)),
        etl=EtlConfig(engine=HERE),
    )
    predict_source(tree, mapping, run_id="r")
    return open_dataset(str(out))


def open_mapper(options: str, encoding: str) -> Nearest:
    return Nearest(**json.loads(options), encoding=encoding)


class Nearest:
    batch_size = 64

    def __init__(self, means: list[list[float]], names: list[str], shape: list[int], encoding: str) -> None:
        self._means_KD, self._names, self._shape_HWC = np.array(means), names, (shape[0], shape[1], shape[2])
        self._encoding = encoding

    def map(self, samples: Sequence[ImageSample]) -> list[MappedRow]:
        return [self._row(decode_stored(each.image, self._encoding, self._shape_HWC)) for each in samples]

    def _row(self, image_HWC: np.ndarray) -> MappedRow:
        small_D = _small(image_HWC)
        distances_K = np.square(self._means_KD - small_D).sum(axis=1)
        odds_K = np.exp(distances_K.min() - distances_K)
        nearest = int(odds_K.argmax())
        values = {"prediction": self._names[nearest], "probability": float(odds_K[nearest] / odds_K.sum())}
        return MappedRow(values, small_D.astype("<f4").tobytes())


def _small(image_HWC: np.ndarray) -> np.ndarray:
    """The values of one channel, from 0 to 1, shrunk."""
    return cv2.resize(image_HWC[..., 0], (SIDE, SIDE), interpolation=cv2.INTER_AREA).astype(np.float64).ravel() / 255
