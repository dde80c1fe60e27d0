# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "torch==2.12.1", "torchvision==0.27.1", "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3",
# ]
# ///
"""torchvision's ImageFolder with simplejpeg as its loader, in a DataLoader with two workers that stay."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import Job, measure, parse_job
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder


def main() -> None:
    job = parse_job()
    if job.convert:
        return
    measure(job, epochs(job))


def epochs(job: Job):
    def load(path: str) -> torch.Tensor:
        with open(path, "rb") as file:
            return torch.from_numpy(job.image(file.read()))

    dataset = ImageFolder(str(job.images), loader=load)
    loader = DataLoader(
        dataset, job.batch_size, shuffle=True, num_workers=job.num_threads, persistent_workers=True, prefetch_factor=4
    )

    def epoch(number: int) -> Iterator[torch.Tensor]:
        for images, _ in loader:
            yield images

    return epoch


if __name__ == "__main__":
    main()
