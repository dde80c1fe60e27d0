# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "litdata==0.2.76", "torch==2.12.1", "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3",
# ]
# ///
"""litdata: its chunks on the local disk, shuffled, in its StreamingDataLoader with two workers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import litdata
import torch
from common import Job, convert_once, measure, parse_job


def main() -> None:
    job = parse_job()
    if job.convert:
        convert_once(job, _write)
        return
    dataset = litdata.StreamingDataset(str(job.own), shuffle=True, drop_last=False, transform=partial(_decode, job))
    loader = litdata.StreamingDataLoader(
        dataset, batch_size=job.batch_size, num_workers=job.num_threads, persistent_workers=True, prefetch_factor=4
    )

    def epoch(number: int) -> Iterator[torch.Tensor]:
        for images, _ in loader:
            yield images

    measure(job, epoch)


def _decode(job: Job, row: dict) -> tuple[torch.Tensor, int]:
    return torch.from_numpy(job.image(row["image"])), row["label"]


def _sample(image: tuple[str, int]) -> dict[str, object]:
    path, label = image
    return {"image": Path(path).read_bytes(), "label": label}


def _write(folder: Path, images: list[tuple[str, int]]) -> None:
    litdata.optimize(_sample, images, output_dir=str(folder), num_workers=2, chunk_bytes="16MB", reorder_files=False)


if __name__ == "__main__":
    main()
