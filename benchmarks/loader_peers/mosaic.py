# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "mosaicml-streaming==0.13.0", "torch==2.12.1",
#     "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3",
# ]
# ///
"""MosaicML Streaming: MDS shards on the local disk, shuffled by its default, in a DataLoader with two workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from common import Job, convert_once, measure, parse_job
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from torch.utils.data import DataLoader


class Images(StreamingDataset):
    def __init__(self, job: Job) -> None:
        super().__init__(local=str(job.own), shuffle=True, batch_size=job.batch_size)
        self.job = job

    def __getitem__(self, place: int):
        row = super().__getitem__(place)
        return torch.from_numpy(self.job.image(row["image"])), row["label"]


def main() -> None:
    job = parse_job()
    if job.convert:
        convert_once(job, _write)
        return
    # What a process that was killed left behind.
    clean_stale_shared_memory()
    dataset = Images(job)
    loader = DataLoader(
        dataset, job.batch_size, num_workers=job.num_threads, persistent_workers=True, prefetch_factor=4
    )

    def epoch(number: int) -> Iterator[torch.Tensor]:
        for images, _ in loader:
            yield images

    measure(job, epoch)


def _write(folder: Path, images: list[tuple[str, int]]) -> None:
    with MDSWriter(out=str(folder), columns={"image": "bytes", "label": "int"}, size_limit=1 << 24) as writer:
        for path, label in images:
            writer.write({"image": Path(path).read_bytes(), "label": label})


if __name__ == "__main__":
    main()
