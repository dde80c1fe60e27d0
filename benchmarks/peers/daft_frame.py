# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["daft==0.7.26", "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3"]
# ///
"""Daft: parallel downloads, a Python function in its workers, its own Parquet writer.

Its own image expressions were slower here (resize by a triangle filter), and its JPEG encoder takes no quality.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("DO_NOT_TRACK", "true")

import daft
from common import list_images, parse_job, transform
from daft import DataType, Series, col
from daft.functions import download


def main() -> None:
    job = parse_job()
    labels = {Path(path).parent.name: label for path, label in list_images(job.images)}

    @daft.func.batch(return_dtype=DataType.binary(), use_process=False, batch_size=64)
    def resized(contents: Series) -> list[bytes]:
        return [transform(data, job.image_size, job.quality) for data in contents.to_pylist()]

    @daft.func.batch(return_dtype=DataType.int64())
    def label_of(paths: Series) -> list[int]:
        return [labels[path.rsplit("/", 2)[1]] for path in paths.to_pylist()]

    frame = daft.from_glob_path(f"{job.images}/*/*")
    frame = frame.select(resized(download(col("path"))).alias("image"), label_of(col("path")).alias("label"))
    frame.write_parquet(str(job.out), compression="none")


if __name__ == "__main__":
    import cv2

    cv2.setNumThreads(1)
    main()
