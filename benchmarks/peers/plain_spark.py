# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "pyspark==4.0.5", "pandas<3", "pyarrow", "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3",
# ]
# ///
"""Spark as its own documentation does it: `binaryFile`, a pandas UDF, `write.parquet`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pandas as pd
from common import parse_job
from pyspark.sql import SparkSession
from pyspark.sql.functions import col, element_at, pandas_udf, split


def main() -> None:
    job = parse_job()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master(f"local[{job.num_workers}]")
        .config("spark.driver.memory", "6g")
        .config("spark.ui.enabled", "false")
        # Batches of the default 10,000 rows would hold a gigabyte of photos.
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "256")
        # A listing job of a task per folder would take longer than listing.
        .config("spark.sql.sources.parallelPartitionDiscovery.threshold", "100000")
        # By default a file counts as 4 MB, so that partitions of small ones would hold 32 each.
        .config("spark.sql.files.openCostInBytes", "65536")
        .config("spark.sql.parquet.compression.codec", "none")
        .getOrCreate()
    )

    @pandas_udf("binary")  # type: ignore[call-overload]
    def resized(contents: Iterator[pd.Series]) -> Iterator[pd.Series]:
        import cv2
        from common import transform

        cv2.setNumThreads(1)
        for content in contents:
            yield content.map(lambda data: transform(data, job.image_size, job.quality))

    frame = spark.read.format("binaryFile").option("recursiveFileLookup", "true").load(str(job.images))
    label = element_at(split(col("path"), "/"), -2).alias("label")
    frame.select(resized("content").alias("image"), label).write.parquet(str(job.out))
    spark.stop()


if __name__ == "__main__":
    main()
