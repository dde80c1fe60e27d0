# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "mosaicml-streaming==0.13.0", "torch==2.12.1", "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86",
#     "numpy<3",
# ]
# ///
"""MosaicML Streaming: one MDSWriter in each process and `merge_index`, as its guide to parallel conversion does."""

from __future__ import annotations

import multiprocessing

from common import Job, list_images, parse_job, transform_file
from streaming import MDSWriter
from streaming.base.util import merge_index


def main() -> None:
    job = parse_job()
    with multiprocessing.get_context("fork").Pool(job.num_workers) as pool:
        pool.starmap(_write_part, [(job, part) for part in range(job.num_workers)], chunksize=1)
    merge_index(str(job.out), keep_local=True)


def _write_part(job: Job, part: int) -> None:
    import cv2

    cv2.setNumThreads(1)
    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(job.out / str(part)), columns=columns, size_limit=1 << 27) as writer:
        for path, label in list_images(job.images)[part :: job.num_workers]:
            writer.write({"image": transform_file(path, job.image_size, job.quality), "label": label})


if __name__ == "__main__":
    main()
