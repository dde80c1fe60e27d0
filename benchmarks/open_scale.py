"""Measures what opening a large dataset costs a rank: manifest, index, plan, and the time to the first batch.

python benchmarks/open_scale.py [--chunks 100000 2500000 6000000] [--rows 100000] [--repeat 3]

The index of `--chunks` describes shards that do not exist, of 32 chunks each, 10^9 rows in all; it is written by the
functions that a build uses. The dataset of `--rows` is a real one, of raw images of 28x28 grey pixels.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from shardmill import open_dataset
from shardmill.dataset.index import INDEX_SCHEMA, INDEXES, SEGMENT_CHUNKS
from shardmill.dataset.manifest import encode_manifest, manifest_path
from shardmill.dataset.row_segments import put_segment
from shardmill.epoch_plan import plan_epoch
from shardmill.stores import open_store

_NUM_ROWS, _SHARD_CHUNKS, _CHUNK_BYTES = 10**9, 32, 4_000_000
_BATCH = {"global_batch_size": 256, "seed": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", nargs="*", type=int, default=[100_000, 2_500_000, 6_000_000])
    parser.add_argument("--rows", nargs="*", type=int, default=[100_000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "URI"), help="measure in this process")
    arguments = parser.parse_args()
    if arguments.one:
        what, uri = arguments.one
        return print(json.dumps(opened(uri) if what == "open" else first_batch(uri, int(what))), flush=True)
    print(f"load before: {os.getloadavg()[0]:.1f}; median of {arguments.repeat}, each in a new process")
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        if arguments.chunks:
            print(
                "| chunks | manifest, s | index, s | plan of an epoch, s | all, s | its CPU s | peak RSS, MB | "
                "before opening, MB | index, bytes a chunk | private of a second process: before, index, plan, MB |"
            )
            print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        for num_chunks in arguments.chunks:
            uri = write_index(Path(folder) / str(num_chunks), num_chunks)
            found = median(arguments.repeat, "open", uri)
            seconds = " | ".join(f"{found[name]:.2f}" for name in ("manifest", "index", "plan", "all", "cpu"))
            print(
                f"| {num_chunks:,} | {seconds} | {found['peak_mb']:,.0f} | {found['before_mb']:,.0f} | "
                f"{found['held']:.1f} | "
                + ", ".join(f"{found[name]:,.0f}" for name in ("private_before", "private_index", "private_plan"))
                + " |",
                flush=True,
            )
            shutil.rmtree(uri)
        if arguments.rows:
            print("| rows | at step | import, s | open, s | loader, s | first batch, s | from open on, s | its CPU s |")
            print("|---|---|---|---|---|---|---|---|", flush=True)
        for num_rows in arguments.rows:
            from tests.lab.datasets import make_dataset

            uri = make_dataset(
                Path(folder) / f"rows-{num_rows}", num_images=num_rows, image_size=28, encoding="raw",
                formats=("parquet",), chunk_bytes=4_000_000,
            )  # fmt: skip
            for step in (0, num_rows // 512, num_rows * 3 // 4 // 256):
                found = median(arguments.repeat, str(step), uri)
                seconds = " | ".join(
                    f"{found[name]:.2f}" for name in ("import", "open", "loader", "first", "all", "cpu")
                )
                print(f"| {num_rows:,} | {step} | {seconds} |", flush=True)


def median(repeat: int, *what: str) -> dict[str, float]:
    """Of each figure; a process for each time."""
    command = [sys.executable, __file__, "--one", *what]
    found = [json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) for _ in range(repeat)]
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def opened(uri: str) -> dict[str, float]:
    """Seconds from the URI to a plan, the peak of memory, and what of it is this process's own afterwards."""
    private_before = _private_mb()
    before_mb, cpu, started = _peak_mb(), time.process_time(), time.perf_counter()
    dataset = open_dataset(uri)
    manifest = time.perf_counter()
    index = dataset.index("train")
    chunk_rows = index.chunk_rows
    _ = index.max_chunk_bytes
    read = time.perf_counter()
    private_index = _private_mb()
    began = time.perf_counter()
    spec = dataset.plan_spec("train", seed=0, global_batch_size=1024, num_streams=64)
    plan = plan_epoch(spec, chunk_rows, 3)
    assert plan.num_rows == int(chunk_rows.sum())
    done = time.perf_counter() - (began - read)
    columns = (index.chunk_starts, index.stored_bytes, chunk_rows, index.image_bytes, index.chunk_crc32c)
    held = sum(column.nbytes for column in columns) + index.shards.nbytes + index.chunks_of_shard.nbytes
    return {
        "manifest": manifest - started,
        "index": read - manifest,
        "plan": done - read,
        "all": done - started,
        "cpu": time.process_time() - cpu,
        "peak_mb": _peak_mb(),
        "before_mb": before_mb,
        "held": held / index.num_chunks,
        "private_before": private_before,
        "private_index": private_index,
        "private_plan": _private_mb(),
    }


def first_batch(uri: str, step: int) -> dict[str, float]:
    """Seconds of each part until a loop has its first batch."""
    started = time.clock_gettime(time.CLOCK_BOOTTIME)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    imported = started - ticks / os.sysconf("SC_CLK_TCK")
    begin, cpu = time.perf_counter(), time.process_time()
    dataset = open_dataset(uri)
    opened = time.perf_counter()
    loader = dataset.batches("train", **_BATCH)
    loader.seek(1, step)
    made = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    first = time.perf_counter()
    loader.close()
    return {
        "import": imported, "open": opened - begin, "loader": made - opened, "first": first - made,
        "all": first - begin, "cpu": time.process_time() - cpu,
    }  # fmt: skip


def write_index(folder: Path, num_chunks: int) -> str:
    """A committed version with an index of so many chunks; returns its URI."""
    # Not at the top: what is measured imports shardmill alone.
    from tests.lab.datasets import make_dataset

    uri = make_dataset(folder, num_images=60, formats=("parquet",))
    dataset, store = open_dataset(uri), open_store(uri)
    rng = np.random.default_rng(0)
    numbers = np.arange(num_chunks)
    rows = np.full(num_chunks, _NUM_ROWS // num_chunks) + (numbers < _NUM_ROWS % num_chunks)
    sizes = rng.integers(_CHUNK_BYTES, _CHUNK_BYTES + 100_000, num_chunks)
    image_bytes = sizes - 50_000
    segments = []
    # Whole shards in each segment, as a build has them.
    step = SEGMENT_CHUNKS // _SHARD_CHUNKS * _SHARD_CHUNKS
    for first in range(0, num_chunks, step):
        here = slice(first, min(first + step, num_chunks))
        segments.append(put_segment(store, INDEXES, _table(numbers[here], sizes[here], rows[here], image_bytes[here])))
    info = dataset.manifest.splits["train"].model_copy(
        update={
            "num_rows": int(rows.sum()), "num_chunks": num_chunks, "num_shards": -(-num_chunks // _SHARD_CHUNKS),
            "image_bytes": int(image_bytes.sum()),
        }
    )  # fmt: skip
    manifest = dataset.manifest.model_copy(update={"splits": {"train": info}, "index_segments": tuple(segments)})
    (Path(uri) / manifest_path(1)).write_bytes(encode_manifest(manifest))
    return uri


def _table(numbers: np.ndarray, sizes: np.ndarray, rows: np.ndarray, image_bytes: np.ndarray) -> pa.Table:
    """A segment of the index, as `index_table` makes it of objects."""
    rng = np.random.default_rng(int(numbers[0]))
    shard = (numbers - numbers[0]) // _SHARD_CHUNKS
    counts = np.bincount(shard)
    first_chunk = np.cumsum(counts) - counts
    before = np.cumsum(sizes) - sizes
    starts = 4 + before - before[first_chunk][shard]
    ends = 4 + np.add.reduceat(sizes, first_chunk)

    def hexes(num: int) -> list[str]:
        text = rng.bytes(32 * num).hex()
        return [text[place : place + 64] for place in range(0, len(text), 64)]

    def of_shard(values: list | np.ndarray) -> pa.Array:
        return pa.array(values).take(pa.array(shard))

    name = numbers[first_chunk] // _SHARD_CHUNKS
    columns = {
        "split": pa.array(["train"]).take(pa.array(np.zeros(len(numbers), int))),
        "format": pa.array(["parquet"]).take(pa.array(np.zeros(len(numbers), int))),
        "shard": of_shard([f"shards/train/u{each:07d}-0123456789abcdef-0.parquet" for each in name.tolist()]),
        "chunk_start": starts,
        "chunk_bytes": sizes,
        "chunk_rows": rows,
        "chunk_image_bytes": image_bytes,
        "chunk_crc32c": rng.integers(0, 1 << 32, len(numbers)),
        "chunk_sha256": hexes(len(numbers)),
        "shard_bytes": of_shard(ends + 20_000),
        "shard_sha256": of_shard(hexes(len(counts))),
        "shard_rows": of_shard(np.add.reduceat(rows, first_chunk)),
        "footer_start": of_shard(ends),
        "footer_bytes": of_shard(np.full(len(counts), 20_000)),
        "footer_crc32c": of_shard(rng.integers(0, 1 << 32, len(counts))),
        "rows_file": of_shard([f"rows/train/u{each:07d}-0123456789abcdef-0-parquet.parquet" for each in name.tolist()]),
        "rows_bytes": of_shard(np.full(len(counts), 500_000)),
        "rows_sha256": of_shard(hexes(len(counts))),
    }
    return pa.table([pa.array(columns[field.name], field.type) for field in INDEX_SCHEMA], schema=INDEX_SCHEMA)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def _private_mb() -> float:
    """What no other process shares; memory that allocators could give back is not counted."""
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")) / 1000


if __name__ == "__main__":
    main()
