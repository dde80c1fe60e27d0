# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = [
#     "webdataset==1.0.2", "torch==2.12.1", "simplejpeg==1.9.0", "opencv-python-headless==4.11.0.86", "numpy<3",
# ]
# ///
"""webdataset: tar shards, shuffled, decoded with simplejpeg and batched in two workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import webdataset
from common import SHUFFLE_ROWS, convert_once, measure, parse_job

NUM_SHARDS = 32


def main() -> None:
    job = parse_job()
    if job.convert:
        convert_once(job, _write)
        return
    urls = sorted(str(path) for path in job.own.glob("*.tar"))

    def decode(sample: dict) -> tuple[np.ndarray, int]:
        return job.image(sample["img"]), int(sample["cls"])

    def collate(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = zip(*samples, strict=True)
        return torch.from_numpy(np.stack(images)), torch.tensor(labels)

    dataset = (
        webdataset.WebDataset(urls, shardshuffle=len(urls), empty_check=False)
        .shuffle(SHUFFLE_ROWS)
        .map(decode)
        .batched(job.batch_size, collation_fn=collate)
    )
    loader = webdataset.WebLoader(
        dataset, batch_size=None, num_workers=job.num_threads, persistent_workers=True, prefetch_factor=4
    )

    def epoch(number: int) -> Iterator[torch.Tensor]:
        for images, _ in loader:
            yield images

    measure(job, epoch)


def _write(folder: Path, images: list[tuple[str, int]]) -> None:
    for part in range(NUM_SHARDS):
        with webdataset.TarWriter(str(folder / f"{part:04d}.tar")) as writer:
            for number, (path, label) in enumerate(images[part::NUM_SHARDS]):
                data = Path(path).read_bytes()
                writer.write({"__key__": f"{part:04d}-{number:06d}", "img": data, "cls": str(label).encode()})


if __name__ == "__main__":
    main()
