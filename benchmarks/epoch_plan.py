"""Measures what the plan of an epoch costs a rank: seconds and memory, by the number of chunks that hold 10^9 rows.

python benchmarks/epoch_plan.py [--chunks 1000000 5000000 20000000]
"""

from __future__ import annotations

import argparse
import hashlib
import resource
import subprocess
import sys
import time

import numpy as np

from shardmill.epoch_plan import PlanSpec, plan_epoch

_NUM_ROWS = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", nargs="+", type=int, default=[1_000_000, 5_000_000, 20_000_000])
    parser.add_argument("--one", type=int, help="measure in this process")
    arguments = parser.parse_args()
    if arguments.one:
        return print(measured(arguments.one), flush=True)
    print("| chunks | rows a chunk | seconds | peak RSS, MB | of it before the plan | chunk order, SHA-256 |")
    print("|---|---|---|---|---|---|", flush=True)
    for num_chunks in arguments.chunks:
        # The peak is a process's own.
        subprocess.run([sys.executable, __file__, "--one", str(num_chunks)], check=True)


def measured(num_chunks: int) -> str:
    """One row of the table. Memory before the plan: Python, NumPy, and the rows of each chunk."""
    chunk_rows = np.full(num_chunks, _NUM_ROWS // num_chunks, dtype=np.int64)
    before_mb = _peak_mb()
    started = time.perf_counter()
    plan = plan_epoch(PlanSpec("layout", "train", 0, 1024, 64, 4), chunk_rows, 3)
    seconds, peak_mb = time.perf_counter() - started, _peak_mb()
    digest = hashlib.sha256(plan.chunk_order.astype(np.int64)).hexdigest()[:16]
    memory = f"{peak_mb:,.0f} | {before_mb:,.0f}"
    return f"| {num_chunks:,} | {_NUM_ROWS // num_chunks:,} | {seconds:.2f} | {memory} | `{digest}` |"


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


if __name__ == "__main__":
    main()
