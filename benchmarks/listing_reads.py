"""Counts the requests and bytes with which work units read a growing listing, at a store that serves ranges.

python benchmarks/listing_reads.py [--rows 100000 1000000 10000000]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from etl.config import EtlConfig
from etl.listing.list_source import list_source
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.units.units import ListingLocation, plan_units, read_unit
from shardmill.jobs.observer import SilentObserver
from shardmill.registry import Entry
from shardmill.stores import STORES
from tests.counting_store import BYTES_READ, CALLS, CountingStore

_BATCH_ROWS, _NUM_CLASSES, _IMAGE_BYTES = 65_536, 1_000, 110_000
_SCHEME = "far"


class FarStore(CountingStore):
    """Counts requests, and is read by ranges as an object store is."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri.replace(f"{_SCHEME}://", "counted://"))
        self.uri, self.local_root = uri, None


class Names:
    """Names of 40 to 50 bytes, as an object store has them, in no order that hashes keep."""

    uri = "nowhere"

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def list(self) -> Iterator[ListingBatch]:
        for first in range(0, self._num_rows, _BATCH_ROWS):
            numbers = pa.array(np.arange(first, min(first + _BATCH_ROWS, self._num_rows)))
            classes = pa.array(numbers.to_numpy() % _NUM_CLASSES).cast("string")
            labels = pc.binary_join_element_wise("class", classes, "_")  # pyright: ignore[reportAttributeAccessIssue]
            names = pc.binary_join_element_wise(  # pyright: ignore[reportAttributeAccessIssue]
                "photos/2026", labels, numbers.cast("string"), "original.jpg", "/"
            )
            known = {"key": names, "size_bytes": pa.repeat(_IMAGE_BYTES, len(numbers)), "label": labels}
            yield ListingBatch(
                pa.table([_column(field, known, len(numbers)) for field in LISTED_SCHEMA], LISTED_SCHEMA)
            )


def _column(field: pa.Field, known: dict[str, pa.Array], num_rows: int) -> pa.Array:
    if field.name in known:
        return known[field.name]
    if field.nullable:
        return pa.nulls(num_rows, field.type)
    return pa.repeat(pa.scalar("" if pa.types.is_string(field.type) else 0, field.type), num_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        _measure(arguments.one)
        return
    print("| images | list, s | driver peak RSS, MB | segments | units | requests | of a unit | MB read | bytes each |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for num_rows in arguments.rows:
        subprocess.run([sys.executable, __file__, "--one", str(num_rows)], check=True)


def _measure(num_rows: int) -> None:
    started = time.monotonic()
    listing = list_source(Names(num_rows), seed=0, max_source_bytes=10**8, observer=SilentObserver())
    seconds, peak = time.monotonic() - started, _peak_rss_bytes()
    units = plan_units(listing, EtlConfig(image_size=256), "config")
    STORES.entries[_SCHEME] = Entry("benchmarks.listing_reads:FarStore", "counts its calls")
    place = ListingLocation(f"{_SCHEME}://{listing.folder}", listing.segments)
    num_read = sum(len(read_unit(place, unit, 0)) for unit in units)
    assert num_read == num_rows
    num_requests, num_bytes = CALLS.total(), sum(BYTES_READ.values())
    of_driver = f"{num_rows:,} | {seconds:.1f} | {peak / 1e6:,.0f} | {len(listing.segments)}"
    of_units = f"{len(units):,} | {num_requests:,} | {num_requests / len(units):.1f}"
    print(f"| {of_driver} | {of_units} | {num_bytes / 1e6:,.0f} | {num_bytes / num_rows:.0f} |", flush=True)


def _peak_rss_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
