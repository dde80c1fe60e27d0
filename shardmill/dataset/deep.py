"""Verifies the rules of a version that need its bytes: reads every chunk, decodes every image, recomputes every sum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shardmill.checksummed import verify_file
from shardmill.dataset.chunks import with_fetchers
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.index import shard_file
from shardmill.dataset.segment import RESTORE, require
from shardmill.dataset.shard import chunk_digest
from shardmill.formats.encodings import decode_row, decode_stored_mask
from shardmill.formats.rows import ChunkRows
from shardmill.ids import row_digest
from shardmill.images.look import difference_hash, laplacian_square_sum, luma
from shardmill.options import ENCODINGS
from shardmill.storage import join_uri
from shardmill.typed_columns import MASK, stored_labels
from shardmill.values import ShardInfo, Value


def read_everything(
    dataset: Dataset, rows_of: Callable[[ShardInfo], pa.Table], on_shard: Callable[[int, int], None] | None
) -> str:
    """Every byte of every shard against its checksums, and every row against its row segment, which `rows_of` reads."""
    num_bytes = num_rows = 0
    for number, (shard, fetcher, first_chunk) in enumerate(with_fetchers(dataset, dataset.manifest.formats)):
        where = join_uri(dataset.store.uri, shard.path)
        known = rows_of(shard).to_pylist()
        place = 0
        # First chunk by chunk, so that an error names the damaged chunk; then the whole file, for what no chunk covers.
        for chunk, info in enumerate(shard.chunks):
            rows = fetcher.read_chunk(first_chunk + chunk)
            recorded = known[place : place + info.num_rows]
            digests = _row_digests(dataset, rows, recorded, where)
            same = chunk_digest(digests) == info.content_sha256
            require(same, f"chunk {chunk} of shard {where} does not hold the committed rows")
            image_bytes = sum(len(image) for image in rows.images)
            require(image_bytes == info.image_bytes, f"chunk {chunk} of shard {where} holds {image_bytes} image bytes")
            _check_rows(dataset, rows, recorded, f"chunk {chunk} of shard {where}")
            place += info.num_rows
        verify_file(dataset.store, shard_file(shard), fix=RESTORE)
        num_bytes, num_rows = num_bytes + shard.size_bytes, num_rows + place
        if on_shard is not None:
            on_shard(number + 1, len(dataset.shards))
    return f"{num_bytes} bytes, {num_rows} rows"


def _row_digests(dataset: Dataset, rows: ChunkRows, known: list[dict], where: str) -> list[bytes]:
    """Of the rows as stored, but for their extra columns: their text is the row segment's, which `_check_rows` holds
    against the values.
    """
    names = dataset.manifest.class_names
    is_class = dataset.manifest.row_schema.has_class
    # Labels that are no classes are among the rows' values, and in the digest with them.
    labels = rows.labels_N.tolist() if is_class else [-1] * len(known)
    require(all(-1 <= label < len(names) for label in labels), f"shard {where} has a label without a class")
    return [
        row_digest(sample_id, names[label] if label >= 0 else None, bytes(image), row.get("extra", ""))
        for sample_id, label, image, row in zip(rows.sample_ids_N.tolist(), labels, rows.images, known, strict=True)
    ]


def _check_rows(dataset: Dataset, rows: ChunkRows, known: list[dict], where: str) -> None:
    """Each row is the one in the row segment, and decodes; a lossless one to the pixels that were summed."""
    options, schema = dataset.manifest.normalize, dataset.manifest.row_schema
    for place, row in enumerate(known):
        label = int(rows.labels_N[place]) if schema.has_class else -1
        stored = (int(rows.sample_ids_N[place]), None if label < 0 else label, rows.sources[place])
        expected = (row["sample_id"], row["label"], row["source"])
        require(stored == expected, f"{where} holds the row {stored}, its row segment {expected}")
        if not schema.has_class:
            [expected] = stored_labels([row["extra"]], schema.label_type, schema.class_names)
            found = rows.labels_N[place]
            same = _is_same(found.tolist() if isinstance(found, np.ndarray | np.generic) else found, expected)
            require(same, f"{where}: {row['source']!r} has the label {found}, its row segment {expected}")
        [values] = schema.values_of([row.get("extra", "")])
        for name, column in rows.extra.items():
            stored: Any = column[place]
            if schema.has_mask and name == MASK:
                stored = hashlib.sha256(stored).hexdigest()
            same = _is_same(stored, values.get(name))
            require(same, (f"{where}: {row['source']!r} has {name} = {stored!r}, its row segment a different value"))
        if not schema.has_images:
            continue
        image_HWC = decode_row(rows.images[place], options)
        if schema.has_mask:
            height, width, _ = image_HWC.shape
            masks: Sequence[Any] = rows.extra[MASK]
            decode_stored_mask(masks[place], (height, width))
        if options.one_shape_HWC is None:
            size = {"height": image_HWC.shape[0], "width": image_HWC.shape[1]}
            require(
                size == {name: row[name] for name in size}, (f"{where}: {row['source']!r} has a different size: {size}")
            )
        # The sums are of the pixels before encoding; what a JPEG decodes to is close to them, and never the same.
        if ENCODINGS[options.encoding].is_lossless:
            pixels = image_HWC.astype(np.int64)
            sums = (pixels.sum(axis=(0, 1)).tolist(), (pixels**2).sum(axis=(0, 1)).tolist())
            same = sums == (row["channel_sums"], row["channel_square_sums"])
            require(same, f"{where}: the pixels of {row['source']!r} do not match the channel sums")
            luma_HW = luma(image_HWC)
            look = (laplacian_square_sum(luma_HW), difference_hash(luma_HW))
            same = look == (row["laplacian_square_sum"], row["difference_hash"])
            require(same, f"{where}: the pixels of {row['source']!r} do not match their sharpness and hash")


def _is_same(stored: Value, expected: Value) -> bool:
    """Whether a format holds a value as well as it can: floats of TFRecord have 32 bits."""
    if isinstance(expected, list) and isinstance(stored, list):
        return len(stored) == len(expected) and all(map(_is_same, stored, expected))
    if isinstance(expected, float) and isinstance(stored, float):
        return bool(np.isclose(stored, expected, rtol=1e-6, equal_nan=True)) or stored == np.float32(expected)
    return stored == expected
