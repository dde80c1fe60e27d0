"""The bare loop of `predict_batch.py`: one of N processes that read, decode and predict every Nth file, and keep
nothing but the labels; with `--spark` or `--daft`, the same kernels in Spark's own `predict_batch_udf`, or in Daft.

python benchmarks/predict_loop.py MODELS FOLDER PLACE N [--spark | --daft]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from shardmill.augment.pixels import centre_of
from shardmill.formats.encodings import decode_stored
from shardmill.images.process import process_image
from shardmill.row_mapping import sample_encoding
from shardmill.values import ImageSample, SourceImage
from train.backends import BACKENDS
from train.contracts.world import World
from train.published.exported import current_export, load_exported

BATCH_SIZE = 64


def loaded(models: str) -> Callable[[Sequence[bytes]], np.ndarray]:
    """Files -> class numbers, by the model on one core."""
    export = current_export(models)
    record = export.record
    BACKENDS[record.backend].start(World(ranks_per_node=len(os.sched_getaffinity(0))), 0)
    predict = load_exported(models, export.number).predict
    options = record.normalize.model_copy(update={"encoding": sample_encoding(record.normalize)})

    def pixels(data: bytes) -> np.ndarray:
        sample = process_image(SourceImage("x.jpg", len(data)), data, options)
        assert isinstance(sample, ImageSample)
        return centre_of(decode_stored(sample.image, options.encoding, options.image_shape_HWC), record.size)

    def labels(files: Sequence[bytes]) -> np.ndarray:
        images_NHWC = np.zeros((BATCH_SIZE, *record.image_shape_HWC), np.uint8)
        for place, data in enumerate(files):
            images_NHWC[place] = pixels(data)
        return predict(images_NHWC)[: len(files)].argmax(axis=1)

    return labels


def loop(models: str, folder: str, place: int, num_processes: int) -> int:
    """The number of predicted files."""
    labels, num_done = loaded(models), 0
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())[place::num_processes]
    for start in range(0, len(files), BATCH_SIZE):
        num_done += len(labels([file.read_bytes() for file in files[start : start + BATCH_SIZE]]))
    return num_done


def udf(models: str, folder: str, num_slots: int) -> int:
    """The same by `pyspark.ml.functions.predict_batch_udf`, written to Parquet by Spark."""
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import SparkSession
    from pyspark.sql.types import IntegerType

    def make() -> Callable[[np.ndarray], np.ndarray]:
        known = loaded(models)
        return lambda contents: np.concatenate(
            [known(contents[start : start + BATCH_SIZE]) for start in range(0, len(contents), BATCH_SIZE)]
        ).astype(np.int32)

    builder = SparkSession.builder.master(f"local[{num_slots}]").config("spark.ui.enabled", "false")
    # By default a task gets 32 small files, fewer than a batch; and one Arrow batch all of a task's photographs.
    builder = builder.config("spark.sql.files.openCostInBytes", "0")
    builder = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", str(4 * BATCH_SIZE))
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    predict = predict_batch_udf(make, return_type=IntegerType(), batch_size=BATCH_SIZE)
    files = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(folder)
    out = f"{folder}-udf"
    files.select("path", predict("content").alias("label")).write.mode("overwrite").parquet(out)
    return spark.read.parquet(out).count()


def daft(models: str, folder: str, num_slots: int) -> int:
    """The same by a class of Daft, in as many processes, written to Parquet by Daft."""
    import daft
    from daft import DataType, Series, col
    from daft.functions import download

    @daft.cls(max_concurrency=num_slots, use_process=True)
    class Model:
        def __init__(self) -> None:
            self._known = loaded(models)

        @daft.method.batch(return_dtype=DataType.int64(), batch_size=BATCH_SIZE)
        def label(self, contents: Series) -> np.ndarray:
            return self._known(contents.to_pylist())

    out = f"{folder}-daft"
    frame = daft.from_glob_path(f"{folder}/*/*")
    label = Model().label(download(col("path")))
    frame.select(col("path"), label.alias("label")).write_parquet(out, write_mode="overwrite")
    return daft.read_parquet(f"{out}/*.parquet").count_rows()


def main() -> None:
    models, folder, place, num_processes, *how = sys.argv[1:]
    if how:
        count = {"--spark": udf, "--daft": daft}[how[0]](models, folder, int(num_processes))
    else:
        count = loop(models, folder, int(place), int(num_processes))
    sys.stdout.write(f"{count}\n")


if __name__ == "__main__":
    main()
