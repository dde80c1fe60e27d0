"""Builds on a tmpfs that is too small, and again when there is room. argv: the source, the tmpfs."""

import subprocess
import sys
from pathlib import Path

from etl.config import EtlConfig
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import StorageError
from tests.lab.datasets import build_here

source, disk = sys.argv[1:]
dataset = f"{disk}/dataset"
small = EtlConfig(image_size=8, encoding="png", unit_min_images=6)
large = small.model_copy(update={"image_size": 100, "encoding": "raw"})

build_here(source, dataset, small)
try:
    build_here(source, dataset, large)
except StorageError as error:
    print(error)
verify_dataset(open_dataset(dataset), deep=True).raise_if_failed()
print("version", open_dataset(dataset).pin.version, "unpublished", len(list(Path(disk).rglob(".tmp-*"))))

subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
build_here(source, dataset, large)
verify_dataset(open_dataset(dataset), deep=True).raise_if_failed()
print("then", open_dataset(dataset).pin.version, open_dataset(dataset).manifest.content_digest)
