"""The contestants of `etl_peers.py`: shardmill on each engine, the hardware limit, and peers in
separate environments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from peer_script import find_uv, install, python_of, version_of

HERE = Path(__file__).parent
NUM_WORKERS = 2


@dataclass(frozen=True)
class Job:
    """What a contestant is to do."""

    images: Path
    out: Path
    image_size: int
    quality: int


@dataclass(frozen=True)
class Contestant:
    """A command that does a job, and how many images it has written afterwards."""

    name: str
    title: str
    command: Callable[[Job], list[str]]
    count: Callable[[Job], int] | None
    """None: it writes nothing."""
    environment: Mapping[str, str]

    @property
    def process_environment(self) -> dict[str, str]:
        """Of its process; bytecode is cached for all or the start of each would be measured with its compilation."""
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**inherited, "DO_NOT_TRACK": "true", **self.environment}


OURS = HERE.parent / ".venv" / "benchmark"
"""An environment of our own, as a user installs it: with the development's, pyarrow loads pandas in each process."""


def prepare(contestant: Contestant) -> None:
    """Install what a peer's script declares, or shardmill. Raises CalledProcessError."""
    if contestant.name in _OWN_ENGINES:
        environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(OURS)}
        packages = ["sync", "--quiet", "--frozen", "--inexact", "--no-dev", "--extra", "spark"]
        subprocess.run([find_uv(), *packages], cwd=HERE.parent, env=environment, check=True, stdout=sys.stderr)
        # Without a compiler the kernel is left out, as `make setup` does.
        native = ["pip", "install", "--quiet", "--python", str(OURS), "--no-deps", str(HERE.parent / "native")]
        subprocess.run([find_uv(), *native], check=False, stdout=sys.stderr)
    if contestant.name in _SCRIPTS:
        install(_script_of(contestant.name))


def _ours(engine: str, kernel: str = "auto") -> Callable[[Job], list[str]]:
    def command(job: Job) -> list[str]:
        settings = {"engine": engine, "kernel": kernel, "image_size": job.image_size, "jpeg_quality": job.quality}
        overrides = [part for name, value in settings.items() for part in ("--set", f"etl.{name}={value}")]
        return [
            str(OURS / "bin" / "shardmill"),
            "etl",
            str(job.images),
            "--workdir",
            str(job.out),
            "--json",
            *overrides,
        ]

    return command


def _count_ours(job: Job) -> int:
    from shardmill import open_dataset

    return open_dataset(str(job.out / "dataset")).manifest.counts.accepted


def _limit(kernel: str) -> Callable[[Job], list[str]]:
    return lambda job: [
        *(sys.executable, str(HERE / "limit.py"), "--kernel", kernel, "--num-workers", str(NUM_WORKERS)),
        *("--images", str(job.images), "--image-size", str(job.image_size), "--quality", str(job.quality)),
    ]


def _peer(script: str) -> Callable[[Job], list[str]]:
    path = HERE / "peers" / script
    return lambda job: [
        *(python_of(path), str(path), "--num-workers", str(NUM_WORKERS), "--out", str(job.out)),
        *("--images", str(job.images), "--image-size", str(job.image_size), "--quality", str(job.quality)),
    ]


def _count_tar(job: Job) -> int:
    count = 0
    for path in job.out.glob("*.tar"):
        with tarfile.open(path) as archive:
            count += sum(member.name.endswith(".jpg") and member.size > 0 for member in archive)
    return count


def _count_parquet(job: Job) -> int:
    tables = (pq.read_table(path, columns=["image"]) for path in job.out.glob("*.parquet"))
    return sum(table.num_rows - table.column("image").null_count for table in tables)


def _count_index(field: str, size: str) -> Callable[[Job], int]:
    return lambda job: sum(each[size] for each in json.loads((job.out / "index.json").read_text())[field])


_SCRIPTS: dict[str, tuple[str, str, Callable[[Job], int]]] = {
    "webdataset": ("webdataset_writer.py", "webdataset ShardWriter", _count_tar),
    "mds": ("mds_writer.py", "MosaicML MDSWriter", _count_index("shards", "samples")),
    "litdata": ("litdata_optimize.py", "litdata.optimize", _count_index("chunks", "chunk_size")),
    "img2dataset": ("img2dataset_files.py", "img2dataset", _count_tar),
    "daft": ("daft_frame.py", "Daft", _count_parquet),
    "ray": ("ray_data.py", "Ray Data", _count_parquet),
    "plain_spark": ("plain_spark.py", "plain Spark", _count_parquet),
}


def peer_version(name: str) -> str:
    """The release of a peer that its script asks for; empty for our own contestants."""
    return version_of(_script_of(name)) if name in _SCRIPTS else ""


def _script_of(name: str) -> Path:
    return HERE / "peers" / _SCRIPTS[name][0]


_OWN_ENGINES = ("local", "local_wheels", "spark")
CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("limit", "limit: our kernels in a loop", _limit("ours"), None, {}),
        Contestant("limit_wheels", "limit: our kernels in a loop, wheels only", _limit("ours_wheels"), None, {}),
        Contestant("wheels", "the peers' kernels in a loop", _limit("wheels"), None, {}),
        Contestant("local", "shardmill, engine local", _ours("local"), _count_ours, {}),
        Contestant("local_wheels", "shardmill, engine local, wheels only", _ours("local", "wheels"), _count_ours, {}),
        Contestant("spark", "shardmill, engine spark", _ours("spark"), _count_ours, {}),
        *(Contestant(name, title, _peer(script), count, {}) for name, (script, title, count) in _SCRIPTS.items()),
    )
}
