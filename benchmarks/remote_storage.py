"""Compares ETL and reader over S3 and HDFS with a local folder, and the reader with a plain parallel download.

Both servers are those of the tests, on this machine: what is measured is our part of the way, not a network.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.servers import hdfs_root, s3_root
from shardmill.dataset.chunks import ChunkFetcher
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.loader.reader import read_batches
from shardmill.loader.row_source import ReaderOptions
from shardmill.stores import open_store
from tests.lab.datasets import upload
from tests.services.s3 import s3_client

_NUM_THREADS = 2
_PARALLEL_DOWNLOADS = 4
_PART_BYTES = 8 << 20
"""As `aws s3 cp` fetches a large object, by its own defaults."""
_WAYS = ("download, whole", "download, parts", "bytes of chunks", "chunks, verified", "batches, decoded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", required=True, type=Path)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--encoding", default="jpeg", help="with `raw`, a training decodes nothing")
    parser.add_argument("--copies", type=int, default=1, help="of each photograph: the more, the larger the shards")
    parser.add_argument("--etl-rounds", type=int, default=3)
    parser.add_argument("--reader-rounds", type=int, default=5)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        roots = {"local": str(folder / "local"), "s3": stack.enter_context(s3_root(folder)),
                 "hdfs": stack.enter_context(hdfs_root(folder))}  # fmt: skip
        images = _in_classes(arguments.images, folder / "images", arguments.copies)
        for root in roots.values():
            upload(images, f"{root}/images")
        _print_etl(roots, arguments)
        _print_readers(roots, arguments.reader_rounds)


def _in_classes(images: Path, folder: Path, copies: int) -> Path:
    """Links to photographs, which may lie anyhow, in a few class folders."""
    for number, file in enumerate(sorted(path for path in images.rglob("*") if path.is_file())):
        for copy in range(copies):
            target = folder / f"class_{number % 4}" / f"{copy}_{file.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file.resolve())
    return folder


def _print_etl(roots: dict[str, str], arguments: argparse.Namespace) -> None:
    """Whole jobs of the engine `local`, in turns; the last round's dataset stays for the reader."""
    seconds: dict[str, list[float]] = {name: [] for name in roots}
    for number in range(arguments.etl_rounds):
        for name, root in roots.items():
            started = time.perf_counter()
            chosen = {
                "dataset.uri": f"{root}/dataset-{number}",
                "etl.engine": "local",
                "etl.image_size": str(arguments.image_size),
                "etl.encoding": arguments.encoding,
                "etl.formats": '["parquet","tfrecord"]',
                "etl.split_fractions": "{train=1,validation=0,test=0}",
            }
            _shardmill("etl", f"{root}/images", "--workdir", f"{root}/work-{number}", *_settings(chosen))
            seconds[name].append(time.perf_counter() - started)
    dataset = open_dataset(f"{roots['local']}/dataset-0").manifest
    print(f"etl: {dataset.counts.accepted} images to {arguments.image_size} px, {arguments.etl_rounds} rounds in turns")
    for name, times in seconds.items():
        share = statistics.median(local / own for local, own in zip(seconds["local"], times, strict=True))
        print(f"  {name:6s} {dataset.counts.accepted / statistics.median(times):7.0f} images/s   {share:.0%} of local")
    digests = {open_dataset(f"{root}/dataset-0").manifest.content_digest for root in roots.values()}
    assert len(digests) == 1, "the same images give the same content"


def _print_readers(roots: dict[str, str], num_rounds: int) -> None:
    """A plain download, whole and in parts, the bytes of all chunks, all chunks, all batches.

    We cache nothing; the machine's page cache has the servers' files.
    """
    print(
        f"reader: {num_rounds} rounds in turns; {_PARALLEL_DOWNLOADS} requests at once, {_NUM_THREADS} reader threads"
    )
    for name, root in roots.items():
        uri = f"{root}/dataset-0"
        dataset = open_dataset(uri)
        shards = [file for file in open_store(uri).list("shards") if file.path.endswith(".parquet")]
        num_bytes = sum(file.size_bytes for file in shards)
        print(f"  {name}: {len(shards)} shards, {num_bytes / 1e6:.0f} MB")
        wholes = [(file.path, 0, file.size_bytes) for file in shards]
        parts = [
            (path, start, min(_PART_BYTES, size - start))
            for path, _, size in wholes
            for start in range(0, size, _PART_BYTES)
        ]
        ways = (
            lambda number, u=uri, s=wholes: _download(u, s),
            lambda number, u=uri, s=parts: _download(u, s),
            lambda number, d=dataset: _get_ranges(d),
            lambda number, d=dataset: _fetch(d),
            lambda number, d=dataset: _read(d, number),
        )
        # The first time, modules are imported and connections made.
        rounds = [[_seconds(partial(way, number)) for way in ways] for number in range(num_rounds + 1)][1:]
        for place, what in enumerate(_WAYS):
            rate = num_bytes / 1e6 / statistics.median(times[place] for times in rounds)
            shares = [statistics.median(times[plain] / times[place] for times in rounds) for plain in (0, 1)]
            print(f"  {name:6s} {what:17s} {rate:7.0f} MB/s   {shares[0]:.0%} and {shares[1]:.0%} of the downloads")


def _download(uri: str, places: Sequence[tuple[str, int, int]]) -> None:
    """What the server gives: bytes from a start on, several requests at once, by the clients' own means."""
    if uri.startswith("s3://"):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        client = s3_client(os.environ["AWS_ENDPOINT_URL"])

        def get(path: str, start: int, num_bytes: int) -> int:
            place = {"Range": f"bytes={start}-{start + num_bytes - 1}"} if num_bytes == _PART_BYTES or start else {}
            return len(client.get_object(Bucket=bucket, Key=f"{prefix}/{path}", **place)["Body"].read())
    elif uri.startswith("hdfs://"):
        from hdfs_native import Client

        authority, _, prefix = uri.removeprefix("hdfs://").partition("/")
        hdfs = Client(f"hdfs://{authority}")

        def get(path: str, start: int, num_bytes: int) -> int:
            return len(hdfs.read(f"/{prefix}/{path}").read_range(start, num_bytes))
    else:

        def get(path: str, start: int, num_bytes: int) -> int:
            with open(Path(uri, path), "rb") as file:
                return len(os.pread(file.fileno(), num_bytes, start))

    with ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
        assert list(pool.map(lambda place: get(*place), places)) == [num_bytes for _, _, num_bytes in places]


def _get_ranges(dataset: Dataset) -> None:
    """The bytes of every chunk, each by a request."""
    index = dataset.index("train")

    def get(chunk: int) -> int:
        known = index.chunk(chunk)
        return len(dataset.store.read_range(index.shard(known.shard).path, known.place.start, known.place.num_bytes))

    with ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
        list(pool.map(get, range(index.num_chunks)))


def _fetch(dataset: Dataset) -> None:
    """Every chunk once, verified, not decoded."""
    fetcher = ChunkFetcher(dataset.store, dataset.index("train"), dataset.manifest.row_schema)

    def fetch(chunk: int) -> int:
        return len(fetcher.read_chunk(chunk).images)

    with ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
        list(pool.map(fetch, range(fetcher.index.num_chunks)))


def _read(dataset: Dataset, epoch: int) -> None:
    spec = dataset.plan_spec("train", seed=0, global_batch_size=64, num_streams=8)
    options = ReaderOptions(format="parquet", num_threads=_NUM_THREADS)
    with read_batches(dataset, dataset.plan_epoch(spec, epoch), options=options) as batches:
        num_rows = sum(int(batch.weights_N.sum()) for batch in batches)
    assert num_rows == dataset.manifest.counts.accepted


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _shardmill(*words: str) -> None:
    command = [sys.executable, "-m", "pipeline.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]


def _settings(settings: dict[str, str]) -> list[str]:
    return [word for item in settings.items() for word in ("--set", "=".join(item))]


if __name__ == "__main__":
    main()
