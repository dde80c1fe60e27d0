"""Counts what an append of ten images costs as a dataset grows: requests to its store, and the driver's processor time.

python benchmarks/append_growth.py [--appends 200] [--store local s3]

One dataset per store, appended to by builds in this process (so that all of their time is the driver's). Each figure is
a median of the appends around it, the work of the units (ten images of 16 x 16 pixels) included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.results import hardware
from benchmarks.servers import fixture
from shardmill.dataset.dataset import open_dataset
from shardmill.stores import STORES
from tests import counting_store
from tests.etl.appending import build
from tests.lab.datasets import write_images
from tests.services.s3 import s3_client, s3_server

_SHOWN, _AROUND = (5, 25, 50, 100, 200), 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--appends", type=int, default=max(_SHOWN))
    parser.add_argument("--store", nargs="+", default=["local", "s3"])
    arguments = parser.parse_args()
    print(hardware())
    for kind in arguments.store:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with fixture(s3_server, folder / "s3") if kind == "s3" else nullcontext() as endpoint:
                _print(kind, _costs(folder, endpoint, arguments.appends + _AROUND))


def _costs(folder: Path, endpoint: object, num_appends: int) -> list[tuple[Counter[str], float, int]]:
    """Of each append: requests by kind, seconds, and the shards of its version."""
    STORES.entries[counting_store.SCHEME] = counting_store.ENTRY
    uri = f"{counting_store.SCHEME}://{folder}/dataset"
    if endpoint is not None:
        s3_client(str(endpoint)).create_bucket(Bucket="growth")
        uri = "s3://growth/dataset"
    costs = []
    for number in range(num_appends + 1):
        write_images(folder / f"source-{number}", num_images=100 if number == 0 else 10, seed=number)
        for path in (folder / f"source-{number}").rglob("*.png"):
            path.rename(path.with_stem(f"{number}-{path.stem}"))
        counting_store.CALLS.clear()
        log, began = _log_bytes(folder), time.process_time()
        build(folder, f"source-{number}", dataset_uri=uri, shard_max_bytes=128_000_000, chunk_bytes=4_000_000)
        seconds = time.process_time() - began
        requests = counting_store.CALLS.copy() if endpoint is None else _requests(folder, log)
        costs.append((requests, seconds, len(open_dataset(uri).shards)))
    return costs[1:]


def _log_bytes(folder: Path) -> int:
    logs = list((folder / "s3").glob("*.log"))
    return logs[0].stat().st_size if logs else 0


def _requests(folder: Path, start: int) -> Counter[str]:
    """What moto has logged of them since."""
    [log] = (folder / "s3").glob("*.log")
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    return Counter(line.split('"')[1].split()[0] for line in lines if " HTTP/1.1" in line)


def _print(kind: str, costs: list[tuple[Counter[str], float, int]]) -> None:
    names = sorted({name for requests, _, _ in costs for name in requests})
    print(f"\n{kind}\n\n| append | shards | {' | '.join(names)} | all requests | driver CPU, s |")
    print("|---|---|" + "---|" * (len(names) + 2))
    for number in (each for each in _SHOWN if each + _AROUND <= len(costs)):
        near = costs[number - 1 - _AROUND : number + _AROUND]
        counts = [f"{statistics.median(requests[name] for requests, _, _ in near):g}" for name in names]
        total = statistics.median(requests.total() for requests, _, _ in near)
        seconds = statistics.median(seconds for _, seconds, _ in near)
        print(f"| {number} | {costs[number - 1][2]} | {' | '.join(counts)} | {total:g} | {seconds:.3f} |", flush=True)


if __name__ == "__main__":
    main()
