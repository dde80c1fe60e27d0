# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "petastorm==0.13.1", "pyspark==3.5.8", "pyarrow==14.0.2", "pandas<3", "setuptools<81",
#     "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<2",
# ]
# ///
"""petastorm's make_reader from a dataset in its own format: rows in a random order, made by two threads.

Its codec for images would store other bytes, so a JPEG is an array of its stored bytes, which a transform decodes with
simplejpeg.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
from common import Job, convert_once, measure, parse_job
from petastorm import make_reader
from petastorm.codecs import NdarrayCodec, ScalarCodec
from petastorm.etl.dataset_metadata import materialize_dataset
from petastorm.transform import TransformSpec
from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType

ROW_GROUP_MB, NUM_FILES = 16, 8


def main() -> None:
    job = parse_job()
    if job.convert:
        convert_once(job, lambda folder, images: _write(job, folder, images))
        return
    cv2.setNumThreads(1)
    measure(job, lambda number: _epoch(job, number))


def _epoch(job: Job, number: int) -> Iterator[np.ndarray]:
    def decode(row: dict) -> dict:
        return {"image": job.image(row["image"]), "label": row["label"]}

    spec = TransformSpec(decode, edit_fields=[("image", np.uint8, job.shape_HWC, False)])
    with make_reader(
        f"file://{job.own}", transform_spec=None if job.encoding == "raw" else spec, reader_pool_type="thread",
        workers_count=job.num_threads, shuffle_rows=True, shuffle_row_groups=True, seed=number, num_epochs=1,
    ) as reader:  # fmt: skip
        waiting: list[np.ndarray] = []
        for row in reader:
            waiting.append(row.image)
            if len(waiting) == job.batch_size:
                yield np.stack(waiting)
                waiting.clear()
        if waiting:
            yield np.stack(waiting)


def _write(job: Job, folder: Path, images: list[tuple[str, int]]) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    shape = job.shape_HWC if job.encoding == "raw" else (None,)
    image = UnischemaField("image", np.uint8, shape, NdarrayCodec(), False)
    label = UnischemaField("label", np.int32, (), ScalarCodec(IntegerType()), False)
    schema = Unischema("Images", [image, label])

    def row(image: tuple[str, int]):
        path, label = image
        pixels = np.fromfile(path, np.uint8)
        return dict_to_spark_row(
            schema, {"image": pixels.reshape(job.shape_HWC) if job.encoding == "raw" else pixels, "label": label}
        )

    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    with materialize_dataset(spark, f"file://{folder}", schema, ROW_GROUP_MB):
        rows = spark.sparkContext.parallelize(images, NUM_FILES).map(row)
        frame = spark.createDataFrame(rows, schema.as_spark_schema())
        frame.write.mode("overwrite").option("compression", "none").parquet(f"file://{folder}")
    spark.stop()


if __name__ == "__main__":
    main()
