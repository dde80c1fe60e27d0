# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "ray[data]==2.60.0", "pyarrow<25", "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3",
# ]
# ///
"""Ray Data: `read_binary_files`, `map_batches`, `write_parquet`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import ray
from common import list_images, parse_job


def main() -> None:
    job = parse_job()
    labels = {Path(path).parent.name: label for path, label in list_images(job.images)}

    def resized(batch: dict[str, np.ndarray]) -> dict[str, list[object]]:
        import cv2
        from common import transform

        cv2.setNumThreads(1)
        return {
            "image": [transform(data, job.image_size, job.quality) for data in batch["bytes"]],
            "label": [labels[path.rsplit("/", 2)[1]] for path in batch["path"]],
        }

    ray.init(num_cpus=job.num_workers, include_dashboard=False, logging_level="warning")
    images = ray.data.read_binary_files(str(job.images), include_paths=True)
    images.map_batches(resized, batch_size=64).write_parquet(str(job.out))
    ray.shutdown()


if __name__ == "__main__":
    main()
