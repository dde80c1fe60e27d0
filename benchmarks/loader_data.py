"""The datasets of `loaders.py`, built from a folder of photographs, and kept for the next run with what peers read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workloads import WORKLOADS as SOURCES
from workloads import find_photos

from shardmill import open_dataset
from shardmill.dataset.chunks import ChunkFetcher


@dataclass(frozen=True)
class Workload:
    """Which stored images a loader reads, and what it makes of them."""

    name: str
    title: str
    folder: str
    """Of its dataset, below the scratch folder."""
    source: str
    num_images: int
    stored_size: int
    encoding: str
    size: int

    def dataset(self, scratch: Path) -> Path:
        return scratch / self.folder / "dataset"

    def images(self, scratch: Path) -> Path:
        """One folder per class, each with files that hold what the dataset stores."""
        return scratch / self.folder / "exported"

    def build(self, photos: Sequence[Path], scratch: Path) -> None:
        """The dataset in both formats, and its stored images as files, unless an earlier call made them."""
        dataset = self.dataset(scratch)
        if not dataset.is_dir():
            files = SOURCES[self.source].files(photos, scratch, self.num_images)
            settings = {
                "image_size": self.stored_size, "encoding": self.encoding, "jpeg_quality": 95,
                "formats": '["parquet","tfrecord"]',
                "split_fractions.train": 1.0, "split_fractions.validation": 0.0, "split_fractions.test": 0.0,
            }  # fmt: skip
            overrides = [part for name, value in settings.items() for part in ("--set", f"etl.{name}={value}")]
            etl = [str(Path(sys.executable).parent / "shardmill"), "etl", str(files), "--workdir", str(dataset.parent)]
            subprocess.run([*etl, *overrides], check=True, stdout=sys.stderr)
        if not self.images(scratch).is_dir():
            _export(dataset, self.images(scratch), self.encoding)


def _export(dataset_folder: Path, folder: Path, encoding: str) -> None:
    unfinished = folder.with_name(f".unfinished-{folder.name}-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    dataset = open_dataset(f"{dataset_folder}@1")
    fetcher = ChunkFetcher(dataset.store, dataset.index("train"), dataset.manifest.row_schema)
    number, suffix = 0, "jpg" if encoding == "jpeg" else encoding
    for name in dataset.class_names:
        (unfinished / name).mkdir(parents=True)
    for chunk in range(fetcher.index.num_chunks):
        rows = fetcher.read_chunk(chunk)
        for image, label in zip(rows.images, rows.labels_N.tolist(), strict=True):
            (unfinished / dataset.class_names[label] / f"{number:06d}.{suffix}").write_bytes(image)
            number += 1
    unfinished.rename(folder)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("full256", "JPEG of 256 px, decoded as stored", "jpeg256", "photos", 10_000, 256, "jpeg", 256),
        Workload("crop224", "JPEG of 256 px -> crop of 224 px, flip", "jpeg256", "photos", 10_000, 256, "jpeg", 224),
        Workload("raw32", "raw pixels, 32x32", "raw32", "small", 60_000, 32, "raw", 32),
        Workload("raw224", "raw pixels, 224x224", "raw224", "photos", 5_000, 224, "raw", 224),
    )
}  # fmt: skip

__all__ = ["WORKLOADS", "Workload", "find_photos"]
