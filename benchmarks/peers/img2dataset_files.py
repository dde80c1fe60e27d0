# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["img2dataset==1.47.0", "pyarrow"]
# ///
"""img2dataset: a list of file:// URLs -> webdataset, its own decode, crop, area resize and encode (JPEG 4:2:0)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from common import list_images, parse_job
from img2dataset import download


def main() -> None:
    job = parse_job()
    images = list_images(job.images)
    with tempfile.TemporaryDirectory() as folder:
        table = pa.table({"url": [f"file://{path}" for path, _ in images], "label": [label for _, label in images]})
        pq.write_table(table, Path(folder) / "urls.parquet")
        download(
            url_list=str(Path(folder) / "urls.parquet"),
            input_format="parquet",
            url_col="url",
            save_additional_columns=["label"],
            output_folder=str(job.out),
            output_format="webdataset",
            image_size=job.image_size,
            resize_mode="center_crop",
            encode_quality=job.quality,
            processes_count=job.num_workers,
            thread_count=16,
            # Its unit of work: no process may stay without one.
            number_sample_per_shard=min(10_000, -(-len(images) // job.num_workers)),
        )


if __name__ == "__main__":
    main()
