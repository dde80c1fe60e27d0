"""Points to `inspect --quality` at the end of a build that has measured something to look at, in one warning."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa

from shardmill.data_faults.quality import find_faults
from shardmill.data_faults.row_looks import LOOKED_AT, looks_of_rows
from shardmill.dataset.index import read_shards
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.row_segments import MAX_KEPT_ROWS, RowReader
from shardmill.errors import ShardmillError
from shardmill.words import counted


def fault_warnings(reader: RowReader, manifest: Manifest) -> Iterator[str]:
    """One sentence or none, from the row segments alone."""
    if manifest.predicted_by is not None or not 0 < manifest.counts.accepted <= MAX_KEPT_ROWS:
        return
    try:
        parts = _rows_of_splits(reader, manifest)
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
        place = shlex.quote(f"{reader.store.uri}@{manifest.version}")
        yield f"{'; '.join(sentences)}: `shardmill inspect {place} --quality` names them"


def _rows_of_splits(reader: RowReader, manifest: Manifest) -> list[pa.Table]:
    shards = [each for each in read_shards(reader.store, manifest) if each.format == manifest.formats[0]]
    of_splits: dict[str, list[pa.Table]] = {split: [] for split in manifest.splits}
    for shard, rows in zip(shards, reader.read_each(shards, LOOKED_AT), strict=True):
        of_splits[shard.split].append(rows)
    return [pa.concat_tables(parts) for parts in of_splits.values() if parts]
