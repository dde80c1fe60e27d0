"""Measures the driver's memory in a commit as a dataset grows: duplicates, unit results and the previous version.

python benchmarks/driver_memory.py [--rows 1000000 10000000] [--engines local spark]

All of it is made up: one row in twenty repeats the bytes of another one, for ten rows there is one rejection, and a
work unit is 1,280 images of 100 kB in two formats and 1,000 classes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa

from etl.checks.duplicates import count_copies, find_copies
from etl.config import EtlConfig
from etl.engines import ENGINES, EngineSettings
from etl.listing.listing import NUM_BUCKETS, Listing
from etl.units.results import Finished
from shardmill.checksummed import ChecksummedFile
from shardmill.dataset.build import SplitSums, UnitResult, decode_unit_result, encode_unit_result
from shardmill.dataset.index import INDEX_SCHEMA, Layout, shards_of_table, write_index
from shardmill.dataset.ledger import RejectionLog, write_ledger
from shardmill.dataset.row_segments import ROWS_SCHEMA, put_segment, read_segment
from shardmill.dataset.statistics import ImageSizes, SizeCounts
from shardmill.jobs.config import SparkConfig
from shardmill.stores import open_store
from shardmill.values import ChunkInfo, Rejection, RejectReason, ShardInfo

_ROWS_PER_SEGMENT = 20_000
_CHUNKS_PER_UNIT, _ROWS_PER_CHUNK, _IMAGE_BYTES, _NUM_CLASSES = 32, 40, 100_000, 1_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1_000_000, 10_000_000])
    parser.add_argument("--engines", nargs="+", default=["local", "spark"])
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measured(arguments.measure[0], Path(arguments.measure[1]))))
        return
    print("| rows | what | found | seconds | driver peak RSS, MB |")
    print("|---|---|---|---|---|")
    for num_rows in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            write_segments(Path(folder), num_rows)
            ways = [f"{kind}, {engine}" for kind in ("count", "find") for engine in arguments.engines]
            for way in [*ways, "reject", "index", "load"]:
                command = [sys.executable, __file__, "--measure", way, folder]
                done = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
                found, seconds, memory = done["found"], done["seconds"], done["rss_bytes"] / 1e6
                print(f"| {num_rows:,} | {way} | {found:,} | {seconds:.1f} | {memory:,.0f} |", flush=True)


def measured(way: str, folder: Path) -> dict[str, float]:
    """In this process: what was found, the seconds, and the peak of memory."""
    store, config, started = open_store(folder / "dataset"), EtlConfig(), time.monotonic()
    shards = [ShardInfo(**{**each, "chunks": ()}) for each in json.loads((folder / "shards.json").read_text())]
    num_rows = sum(shard.num_rows for shard in shards)
    if way == "index":
        listing = Listing(
            folder, (), RejectionLog(folder), Counter(), np.zeros(NUM_BUCKETS), np.zeros((NUM_BUCKETS, 8)), (), "", ()
        )
        finished = Finished(listing, map(unit_result, range(num_rows // (_CHUNKS_PER_UNIT * _ROWS_PER_CHUNK))))
        layout = Layout(shard for result in finished.results for shard in result.shards if shard.format == "parquet")
        layout.digest("", (), ())
        index = write_index(store, (shard for result in finished.results for shard in result.shards))
        (folder / "index.json").write_text(json.dumps([asdict(segment) for segment in index]))
        found = layout.num_chunks["train"]
    elif way == "load":
        # As a later run holds them, all at once.
        index = [ChecksummedFile(**each) for each in json.loads((folder / "index.json").read_text())]
        tables = (read_segment(store, segment, INDEX_SCHEMA, num_rows) for segment in index)
        loaded = tuple(shard for table in tables for shard in shards_of_table(table))
        found = sum(len(shard.chunks) for shard in loaded)
    elif way == "reject":
        log = RejectionLog(folder, rejections(num_rows // 10))
        write_ledger(store, log)
        found = len(log)
    else:
        kind, _, engine = way.partition(", ")
        settings = EngineSettings(SparkConfig(), 0)

        def group(asked):
            return ENGINES[engine].group_rows(asked, settings)

        if kind == "count":
            found = count_copies(store, shards, config, group).duplicates
        else:
            found = sum(part.num_rows for part in find_copies(store, shards, config, group))
    seconds = time.monotonic() - started
    return {
        "found": found, "seconds": seconds, "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def write_segments(folder: Path, num_rows: int) -> None:
    store, rng, shards = open_store(folder / "dataset"), np.random.default_rng(0), []
    for first in range(0, num_rows, _ROWS_PER_SEGMENT):
        numbers_N = np.arange(first, min(first + _ROWS_PER_SEGMENT, num_rows))
        repeats_N = rng.random(len(numbers_N)) < 0.05
        contents_N = np.where(repeats_N, rng.integers(0, num_rows, len(numbers_N)), numbers_N)
        columns = {
            "sample_id": numbers_N,
            "source": [f"photos/2026/class_{number % 1000}/{number}_original.jpg" for number in numbers_N.tolist()],
            "source_bytes": numbers_N % 100_000,
            "source_mtime_ns": numbers_N,
            "source_etag": [""] * len(numbers_N),
            "source_sha256": [f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" * 4 for number in contents_N.tolist()],
            "label": numbers_N % 1000,
            "row_sha256": [number.to_bytes(32, "big") for number in numbers_N.tolist()],
            "notes": [""] * len(numbers_N),
            "channel_sums": [[1, 2, 3]] * len(numbers_N),
            "channel_square_sums": [[1, 2, 3]] * len(numbers_N),
        }
        table = pa.table([pa.array(columns[field.name], field.type) for field in ROWS_SCHEMA], schema=ROWS_SCHEMA)
        file = put_segment(store, "rows", table)
        shards.append(
            asdict(
                ShardInfo("train", "parquet", "", 0, "", len(numbers_N), 0, 0, 0, file.path, file.size_bytes,
                          file.sha256, ())
            )
        )  # fmt: skip
    (folder / "shards.json").write_text(json.dumps(shards))


def unit_result(place: int) -> UnitResult:
    """One shard in each of two formats, and one split."""
    names = [f"train/{place:06d}-000-0123456789ab-{format_name}" for format_name in ("parquet", "tfrecord")]
    chunk_bytes, num_rows = _ROWS_PER_CHUNK * _IMAGE_BYTES, _CHUNKS_PER_UNIT * _ROWS_PER_CHUNK
    chunks = tuple(
        ChunkInfo(chunk_bytes * number, chunk_bytes, _ROWS_PER_CHUNK, chunk_bytes, place * 977 + number,
                  f"{(place * 64 + number) * 0x9E3779B97F4A7C15 % 2**256:064x}")
        for number in range(_CHUNKS_PER_UNIT)
    )  # fmt: skip
    sums = SplitSums(
        "train", num_rows, num_rows * _IMAGE_BYTES, tuple(range(_NUM_CLASSES)), "0" * 64, num_rows * 65_536,
        (2**40,) * 3, (2**50,) * 3, ImageSizes(source=SizeCounts(), stored=SizeCounts()),
    )  # fmt: skip
    shards = tuple(
        ShardInfo(
            "train", format_name, f"shards/{name}", chunk_bytes * _CHUNKS_PER_UNIT + 9_000, "0" * 64, num_rows,
            chunk_bytes * _CHUNKS_PER_UNIT, 9_000, place, f"rows/{name}.parquet", 90_000, "0" * 64, chunks,
        )
        for format_name, name in zip(("parquet", "tfrecord"), names, strict=True)
    )  # fmt: skip
    # As it comes from a task.
    return decode_unit_result(encode_unit_result(UnitResult(place, "0" * 64, shards, (sums,), (), "0" * 64, ())))


def rejections(number: int) -> Iterator[Rejection]:
    """In no order."""
    for place in range(number):
        key = f"photos/2026/{place * 7919 % number:09d}_original.jpg"
        yield Rejection(key, RejectReason.NOT_AN_IMAGE, "the first bytes are those of no image", 1_000, 1, "e")


if __name__ == "__main__":
    main()
