# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["obstore==0.12.1", "boto3==1.43.117", "tenacity==9.2.1", "pytest==9.2.0"]
# ///
"""Compares shardmill's S3 store, Amazon's client and obstore (Rust) on one server: ranged reads and PUT-if-absent.

    uv run --script benchmarks/object_clients.py

uv gives this script an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
from obstore.store import S3Store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.results import hardware
from benchmarks.servers import s3_root
from shardmill.stores import open_store
from tests.services.fault_proxy import Fault, in_turn, proxying
from tests.services.s3 import s3_client

_NUM_SHARDS, _SHARD_CHUNKS, _CHUNK_BYTES = 4, 16, 4 << 20
_PARALLEL = 4
"""Threads that fetch chunks, as a reader's do."""
_NUM_PUTS = 100
_BUCKET = "benchmark"
_KEYS = [f"shard-{number}" for number in range(_NUM_SHARDS)]
_CHUNKS = [(key, chunk * _CHUNK_BYTES) for key in _KEYS for chunk in range(_SHARD_CHUNKS)]
Get = Callable[[str, int], int]
"""Of an object, the bytes of a chunk from a start on -> how many came."""
Put = Callable[[str, bytes], object]
"""Of an object that is not there."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    num_rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, s3_root(Path(folder)) as root:
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        store, client = open_store(root), s3_client(endpoint)
        other = S3Store(_BUCKET, endpoint=endpoint, client_options={"allow_http": True})
        for key in _KEYS:
            store.put(key, os.urandom(_SHARD_CHUNKS * _CHUNK_BYTES))
        gets: dict[str, Get] = {
            "shardmill": lambda key, start: len(store.read_range(key, start, _CHUNK_BYTES)),
            "botocore": lambda key, start: len(
                client.get_object(Bucket=_BUCKET, Key=key, Range=f"bytes={start}-{start + _CHUNK_BYTES - 1}")[
                    "Body"
                ].read()
            ),
            "obstore": lambda key, start: len(obstore.get_range(other, key, start=start, length=_CHUNK_BYTES)),
        }
        puts: dict[str, Put] = {
            "shardmill": store.put_if_absent,
            "botocore": lambda key, data: client.put_object(Bucket=_BUCKET, Key=key, Body=data, IfNoneMatch="*"),
            "obstore": lambda key, data: obstore.put(other, key, data, mode="create", use_multipart=False),
        }
        print(hardware())
        num_bytes = len(_CHUNKS) * _CHUNK_BYTES
        _print_times("ranges", {name: lambda number, g=get: _fetch(g) for name, get in gets.items()}, num_rounds,
                     lambda seconds: f"{num_bytes / 1e6 / seconds:6.0f} MB/s", len(_CHUNKS))  # fmt: skip
        _print_times("PUT-if-absent", {name: lambda number, n=name: _create(puts[n], f"{n}-{number}") for name in puts},
                     num_rounds, lambda seconds: f"{seconds / _NUM_PUTS * 1e3:6.2f} ms", _NUM_PUTS)  # fmt: skip
        _print_lost_answer(endpoint)


def _fetch(get: Get) -> None:
    with ThreadPoolExecutor(_PARALLEL) as pool:
        assert set(pool.map(lambda chunk: get(*chunk), _CHUNKS)) == {_CHUNK_BYTES}


def _create(put: Put, prefix: str) -> None:
    for number in range(_NUM_PUTS):
        put(f"created/{prefix}-{number}", b"x" * 2_000)


def _print_times(
    what: str,
    ways: dict[str, Callable[[int], None]],
    num_rounds: int,
    in_words: Callable[[float], str],
    num_requests: int,
) -> None:
    """Medians; processor time is this process's, all of its threads together."""
    rounds: list[dict[str, tuple[float, float]]] = []
    for number in range(num_rounds + 1):
        measured = {}
        for name, way in ways.items():
            started, used = time.perf_counter(), time.process_time()
            way(number)
            measured[name] = time.perf_counter() - started, time.process_time() - used
        rounds.append(measured)
    # The first time, modules are imported and connections made.
    for name in ways:
        walls, cpus = zip(*(measured[name] for measured in rounds[1:]), strict=True)
        ratio = statistics.median(each["shardmill"][0] / each[name][0] for each in rounds[1:])
        cpu_ms = statistics.median(cpus) / num_requests * 1e3
        print(f"  {what:14s} {name:10s} {in_words(statistics.median(walls))}, {ratio:.2f} times as fast as ours, "
              f"{cpu_ms:.2f} ms of processor time each")  # fmt: skip


def _print_lost_answer(endpoint: str) -> None:
    """What obstore tells of a conditional PUT that was done, and whose answer was lost."""
    with proxying(endpoint) as proxy:
        store = S3Store(_BUCKET, endpoint=proxy.endpoint, client_options={"allow_http": True})
        proxy.choose = in_turn(Fault.DROPPED, method="PUT", path="lost")
        try:
            told = obstore.put(store, "lost", b"ours", mode="create", use_multipart=False)
        except Exception as error:
            told = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        print(f"  a lost answer, {proxy.told.total()} requests: obstore tells {told}")


if __name__ == "__main__":
    main()
