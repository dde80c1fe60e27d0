# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "litdata==0.2.76", "torch==2.12.1", "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3",
# ]
# ///
"""litdata: `optimize` with two workers."""

from __future__ import annotations

from functools import partial

import litdata
from common import list_images, parse_job, transform_file


def _sample(image: tuple[str, int], image_size: int, quality: int) -> dict[str, object]:
    path, label = image
    return {"image": transform_file(path, image_size, quality), "label": label}


def main() -> None:
    job = parse_job()
    litdata.optimize(
        fn=partial(_sample, image_size=job.image_size, quality=job.quality),
        inputs=list_images(job.images),
        output_dir=str(job.out),
        num_workers=job.num_workers,
        chunk_bytes="128MB",
    )


if __name__ == "__main__":
    main()
