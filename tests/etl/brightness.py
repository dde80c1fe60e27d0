"""A "model" for the tests of predictions: the mean of an image's pixels, and what it says of the class."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import BuildOutcome
from etl.predict_job import predict_source
from shardmill.formats.encodings import decode_stored
from shardmill.images.decoder_id import normalization_fingerprint
from shardmill.jobs.config import DatasetConfig, SparkConfig
from shardmill.kernel import resolve_kernel
from shardmill.options import NormalizeOptions
from shardmill.row_mapping import MappedRow, RowMapping, sample_encoding
from shardmill.typed_columns import ExtraColumn
from shardmill.values import DatasetPin, ImageSample, PredictedBy
from tests.lab.datasets import HERE

NORMALIZE = NormalizeOptions(image_size=16, encoding="png", kernel=resolve_kernel("auto"))
COLUMNS = (ExtraColumn("prediction", "string"), ExtraColumn("probability", "float32"))


def mapping(opened: Path | None = None, *, export: int = 1, vector_size: int = 0) -> RowMapping:
    """`opened`: a folder in which each process that opens the model leaves a file."""
    options = {"opened": str(opened or ""), "vector_size": vector_size}
    return RowMapping(
        opener="tests.etl.brightness:open_mapper",
        options=json.dumps(options),
        encoding=sample_encoding(NORMALIZE),
        fingerprint=f"{export} {vector_size}",
        columns=COLUMNS,
        vector_size=vector_size,
        normalize=NORMALIZE,
        normalization_fingerprint=normalization_fingerprint(NORMALIZE),
        predicted_by=PredictedBy(
            models_uri="/models", export=export, weights_sha256="0" * 64,
            trained_on=DatasetPin("/dataset", 1, "0" * 64), columns=tuple(column.name for column in COLUMNS), top=1,
            layer="",
        ),
    )  # fmt: skip


def open_mapper(options: str, encoding: str) -> Brightness:
    given = json.loads(options)
    if given["opened"]:
        with open(Path(given["opened"]) / str(os.getpid()), "a") as file:
            file.write("opened\n")
    return Brightness(given["vector_size"], encoding)


class Brightness:
    batch_size = 8

    def __init__(self, vector_size: int, encoding: str) -> None:
        self._vector_size = vector_size
        self._encoding = encoding

    def map(self, samples: Sequence[ImageSample]) -> list[MappedRow]:
        assert 0 < len(samples) <= self.batch_size
        return [self._row(decode_stored(each.image, self._encoding, (16, 16, 3))) for each in samples]

    def _row(self, image_HWC: np.ndarray) -> MappedRow:
        mean = brightness(image_HWC)
        vector = (np.arange(self._vector_size, dtype="<f4") + np.float32(mean)).tobytes()
        return MappedRow({"prediction": f"channel {int(image_HWC.mean((0, 1)).argmax())}", "probability": mean}, vector)


def brightness(image_HWC: np.ndarray) -> float:
    return float(f"{image_HWC.mean() / 255:.6g}")


def predict(
    source: SourceConfig | Path,
    out: Path,
    made_by: RowMapping | None = None,
    engine: str = HERE,
    *,
    replace_source: bool = False,
    **etl: object,
) -> BuildOutcome:
    settings = {"engine": engine, "num_workers": 2, "unit_min_images": 20, **etl}
    tree = EtlTree(
        source=source if isinstance(source, SourceConfig) else SourceConfig(uri=str(source)),
        dataset=DatasetConfig(uri=str(out)),
        etl=EtlConfig(**settings),
        spark=SparkConfig(master="local[2]"),
    )
    return predict_source(tree, made_by or mapping(), run_id="r", replace_source=replace_source)
