"""Measures ETL and training through an S3 server that fails one request in ten, compared with one that does not.

    .venv/bin/python benchmarks/failing_storage.py

The drill of tests/test_s3_faults.py, in rounds: each way once, all through the same proxy, which passes everything or
spoils what the drill's two mixes say. The ratio of a round is of runs a few seconds apart.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.results import hardware
from benchmarks.servers import s3_root
from shardmill.stores.bucket_requests import DEADLINES
from tests.lab.datasets import upload, write_images
from tests.services.fault_proxy import FaultProxy, proxying
from tests.services.versitygw import connect_to
from tests.test_s3_faults import MIXES, MIXES_DEADLINE_SECONDS, build_and_train

_UNDISTURBED = "undisturbed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = range(parser.parse_args().rounds + 1)
    with tempfile.TemporaryDirectory() as temporary, s3_root(Path(temporary)) as root:
        write_images(Path(temporary, "images"), num_images=80)
        source = upload(Path(temporary, "images"), f"{root}/images")
        with proxying(os.environ["AWS_ENDPOINT_URL"]) as proxy, pytest.MonkeyPatch.context() as patch:
            patch.setenv(DEADLINES["s3"], MIXES_DEADLINE_SECONDS)
            connect_to(proxy.endpoint, patch)
            # The first time, frameworks are imported and graphs made.
            times = [_round(source, root, number, proxy) for number in rounds][1:]
    print(f"{hardware()}, load {os.getloadavg()[0]:.1f}")
    for name in times[0]:
        ratios = sorted(each[name] / each[_UNDISTURBED] for each in times)
        seconds = statistics.median(each[name] for each in times)
        print(f"{name:11s} {seconds:5.1f} s, {statistics.median(ratios):.2f} times ({ratios[0]:.2f}-{ratios[-1]:.2f})")


def _round(source: str, root: str, number: int, proxy: FaultProxy) -> dict[str, float]:
    """Seconds of each way."""
    choices = {_UNDISTURBED: lambda method, path: None, **{name: mix(number) for name, mix in MIXES.items()}}
    seconds, results = {}, set()
    for name, choose in choices.items():
        proxy.choose, proxy.told = choose, Counter()
        started = time.perf_counter()
        results.add(build_and_train(source, f"{root}/{number}-{name}")[:2])
        seconds[name] = time.perf_counter() - started
        num_spoiled = proxy.told.total() - proxy.told[None]
        print(
            f"  {name:11s} {seconds[name]:5.1f} s, {num_spoiled} of {proxy.told.total()} requests spoiled", flush=True
        )
    assert len(results) == 1, "the same images give the same dataset"
    return seconds


if __name__ == "__main__":
    main()
