"""Points to `inspect --quality` at the end of a build that has measured something to look at, in one warning."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from shardmill.data_faults.quality import find_faults
from shardmill.data_faults.row_looks import LOOKED_AT, looks_of_rows
from shardmill.dataset.index import read_shards
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.row_segments import read_rows
from shardmill.errors import ShardmillError
from shardmill.storage import Store
from shardmill.values import ShardInfo
from shardmill.words import counted

# The row segments of more would take seconds to read from a bucket; the command reads any number of them.
_MAX_ROWS = 100_000
_NUM_AT_ONCE = 8


def fault_warnings(store: Store, manifest: Manifest) -> Iterator[str]:
    """One sentence or none, from the row segments alone."""
    if manifest.predicted_by is not None or not 0 < manifest.counts.accepted <= _MAX_ROWS:
        return
    try:
        parts = _rows_of_splits(store, manifest)
    except (ShardmillError, FileNotFoundError):
        # The version is committed; `verify` reports damage.
        return
    found = find_faults(looks_of_rows(manifest, parts))
    sentences = [each.words for each in found.telltales]
    if found.suspects:
        num_images = len({(each.split, each.row_in_split) for each in found.suspects})
        by_fault = Counter(each.fault for each in found.suspects)
        named = ", ".join(f"{fault} {times:,}" for fault, times in by_fault.items())
        verb = "differs" if num_images == 1 else "differ"
        sentences.append(f"{counted(num_images, 'accepted image')} {verb} from the others as faults often do ({named})")
    if sentences:
        place = shlex.quote(f"{store.uri}@{manifest.version}")
        yield f"{'; '.join(sentences)}: `shardmill inspect {place} --quality` names them"


def _rows_of_splits(store: Store, manifest: Manifest) -> list[pa.Table]:
    shards = [each for each in read_shards(store, manifest) if each.format == manifest.formats[0]]

    def read(shard: ShardInfo) -> pa.Table:
        return read_rows(store, shard, manifest.row_schema, LOOKED_AT)

    with ThreadPoolExecutor(_NUM_AT_ONCE, "shardmill-looks") as pool:
        tables = list(pool.map(read, shards))
    of_splits: dict[str, list[pa.Table]] = {split: [] for split in manifest.splits}
    for shard, rows in zip(shards, tables, strict=True):
        of_splits[shard.split].append(rows)
    return [pa.concat_tables(parts) for parts in of_splits.values() if parts]
