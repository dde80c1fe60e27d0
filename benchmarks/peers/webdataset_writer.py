# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["webdataset==1.0.2", "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3"]
# ///
"""webdataset: one ShardWriter in each process, plain tar archives."""

from __future__ import annotations

import multiprocessing

from common import Job, list_images, parse_job, transform_file
from webdataset import ShardWriter


def main() -> None:
    job = parse_job()
    job.out.mkdir(parents=True)
    with multiprocessing.get_context("fork").Pool(job.num_workers) as pool:
        pool.starmap(_write_part, [(job, part) for part in range(job.num_workers)], chunksize=1)


def _write_part(job: Job, part: int) -> None:
    import cv2

    cv2.setNumThreads(1)
    with ShardWriter(f"{job.out}/shard-{part}-%06d.tar", maxcount=10_000, maxsize=128e6, verbose=0) as writer:
        for number, (path, label) in enumerate(list_images(job.images)[part :: job.num_workers]):
            image = transform_file(path, job.image_size, job.quality)
            writer.write({"__key__": f"{part}-{number:09d}", "jpg": image, "cls": label})


if __name__ == "__main__":
    main()
