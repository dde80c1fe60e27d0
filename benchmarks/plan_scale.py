"""Measures what planning costs as a source grows: `shardmill etl --dry-run` over Parquet tables of fictitious names.

python benchmarks/plan_scale.py [--rows 100000 1000000 10000000] [--cores 1 2]
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_BATCH_ROWS = 500_000
_NUM_CLASSES = 1_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2])
    arguments = parser.parse_args()
    print("| rows | cores | seconds | microseconds a row | driver peak RSS, MB | work units | plan digest |")
    print("|---|---|---|---|---|---|---|")
    for num_rows in arguments.rows:
        digests = set()
        with tempfile.TemporaryDirectory() as folder:
            write_table(Path(folder) / "names.parquet", num_rows)
            for num_cores in arguments.cores:
                plan = planned(Path(folder), num_cores)
                digests.add(plan["plan_digest"])
                seconds, memory = plan["seconds"], plan["driver_peak_rss_bytes"] / 1e6
                figures = f"{seconds:.1f} | {1e6 * seconds / num_rows:.1f} | {memory:,.0f} | {plan['num_units']:,}"
                print(f"| {num_rows:,} | {num_cores} | {figures} | {plan['plan_digest'][:16]} |", flush=True)
        if len(digests) > 1:
            sys.exit(f"the plan of {num_rows:,} rows depends on the number of cores")


def write_table(file: Path, num_rows: int) -> None:
    """Names of 40 to 50 bytes, as an object store has them, in 1,000 classes."""
    with pq.ParquetWriter(file, pa.schema([("uri", pa.string()), ("label", pa.string())])) as writer:
        for first in range(0, num_rows, _BATCH_ROWS):
            numbers = pa.array(np.arange(first, min(first + _BATCH_ROWS, num_rows)))
            labels = pc.binary_join_element_wise(
                "class", pa.array(numbers.to_numpy() % _NUM_CLASSES).cast("string"), "_"
            )
            uris = pc.binary_join_element_wise("photos/2026", labels, numbers.cast("string"), "/")
            uris = pc.binary_join_element_wise(uris, "original.jpg", "_")
            writer.write_table(pa.table([uris, labels], names=["uri", "label"]))


def planned(folder: Path, num_cores: int) -> dict:
    """The document of the dry run, in a process that may use so many cores."""
    command = [sys.executable, "-m", "pipeline.cli", "etl", str(folder / "names.parquet"), "--dry-run", "--json"]
    command += ["--set", "source.kind=table", "--workdir", str(folder / "work")]
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, cores)
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
