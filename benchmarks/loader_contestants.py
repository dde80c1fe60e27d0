"""The contestants of `loaders.py`: the limits, shardmill's loaders, and peers in separate environments."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loader_data import WORKLOADS, Workload
from peer_script import install, python_of, version_of

HERE = Path(__file__).parent
BATCH_SIZE, NUM_THREADS = 256, 2
_ALL, _JPEG, _RAW = tuple(WORKLOADS), ("full256", "crop224"), ("raw32", "raw224")


@dataclass(frozen=True)
class Contestant:
    """A script that reads epochs of a workload in a process of its own."""

    name: str
    title: str
    script: str
    environment: Mapping[str, str] = field(default_factory=dict)
    workloads: tuple[str, ...] = _ALL
    num_threads: int = NUM_THREADS

    @property
    def is_peer(self) -> bool:
        return self.script.startswith("loader_peers/")

    @property
    def version(self) -> str:
        """The release of a peer that its script asks for, first of all; empty for our own contestants."""
        return version_of(HERE / self.script) if self.is_peer else ""

    @property
    def process_environment(self) -> dict[str, str]:
        """Of its process. Peers say what they do in many places; none of it is measured."""
        root = {"PYTHONPATH": str(HERE.parent)} if not self.is_peer else {}
        quiet = {"DO_NOT_TRACK": "true", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
        return {**os.environ, "PYTHONPATH": str(HERE / "loader_peers"), **root, **quiet, **self.environment}

    def install(self) -> None:
        """What a peer's script declares. Raises CalledProcessError."""
        if self.is_peer:
            install(HERE / self.script)

    def command(self, workload: Workload, scratch: Path, epochs: int, seconds: float, *, convert: bool) -> list[str]:
        """`convert`: only write the images in the peer's own format, if it has one."""
        numbers = {
            "stored-size": workload.stored_size, "size": workload.size, "encoding": workload.encoding,
            "num-threads": self.num_threads, "batch-size": BATCH_SIZE, "epochs": epochs, "seconds": seconds,
            "images": workload.images(scratch), "dataset": workload.dataset(scratch),
            "own": scratch / workload.folder / f"for-{self.name}",
        }  # fmt: skip
        python = python_of(HERE / self.script) if self.is_peer else sys.executable
        arguments = [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
        return [python, str(HERE / self.script), *arguments, *(["--convert"] if convert else [])]


def _limit(name: str, title: str, workloads: tuple[str, ...], kernel: str, num_threads: int = 2) -> Contestant:
    return Contestant(name, title, "loader_limits.py", {"LOADER_KERNEL": kernel}, workloads, num_threads)


def _ours(name: str, title: str, workloads: tuple[str, ...] = _ALL, num_threads: int = 2, **choices: str) -> Contestant:
    environment = {f"LOADER_{choice.upper()}": value for choice, value in choices.items()}
    return Contestant(name, f"shardmill, {title}", "loader_ours.py", environment, workloads, num_threads)


def _peer(name: str, title: str, workloads: tuple[str, ...] = _ALL) -> Contestant:
    return Contestant(name, title, f"loader_peers/{name}.py", {}, workloads)


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        _limit("limit", "limit: the native kernel, bytes in RAM, 2 threads", _JPEG, "native"),
        _limit("limit_wheels", "limit: simplejpeg and OpenCV, bytes in RAM, 2 threads", _JPEG, "wheels"),
        _limit("limit_copy", "limit: copied out of RAM, 1 thread", _RAW, "native", 1),
        _limit("limit_copy_2", "limit: copied out of RAM, 2 threads", _RAW, "native"),
        _ours("parquet", "Parquet"),
        _ours("tfrecord", "TFRecord", format="tfrecord"),
        _ours("parquet_1", "Parquet, 1 thread", _RAW, 1),
        _ours("tfrecord_1", "TFRecord, 1 thread", _RAW, 1, format="tfrecord"),
        _ours("parquet_wheels", "Parquet, wheels only", kernel="wheels"),
        _ours("tfrecord_wheels", "TFRecord, wheels only", format="tfrecord", kernel="wheels"),
        _ours("torch", "Parquet, torch_loader", hand_over="torch"),
        _ours("tensorflow", "Parquet, tf_dataset", hand_over="tensorflow"),
        _ours("jax", "Parquet, jax_loader", hand_over="jax"),
        _peer("imagefolder", "torch ImageFolder, simplejpeg", _JPEG),
        _peer("tf_data", "tf.data from our TFRecord"),
        _peer("webdataset_tar", "webdataset"),
        _peer("mosaic", "MosaicML Streaming"),
        _peer("litdata_chunks", "litdata"),
        _peer("spdl_files", "SPDL, simplejpeg", _JPEG),
        _peer("dali_cpu", "DALI on the CPU", _JPEG),
        _peer("grain_records", "grain"),
        _peer("lancedb_stream", "LanceDB StreamingDataset"),
        _peer("ffcv_beton", "FFCV"),
        _peer("ray_data", "Ray Data from our Parquet"),
        _peer("petastorm_batches", "petastorm make_batch_reader from our Parquet"),
        _peer("petastorm_rows", "petastorm make_reader"),
    )
}
