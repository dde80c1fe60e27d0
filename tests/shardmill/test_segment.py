"""A segment is what its record vouches for; whatever its bytes are, reading them ends in a table or one clear error."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from shardmill.checksummed import checksum_file
from shardmill.dataset.segment import put_segment, read_segment, table_bytes
from shardmill.errors import IntegrityError
from shardmill.stores import open_store

SCHEMA = pa.schema([("key", pa.string()), ("sums", pa.list_(pa.int64())), ("number", pa.int64())])
ROWS = [{"key": f"a/{n}.jpg", "sums": [n, n], "number": n} for n in range(20)]
_SEED = random.SystemRandom().randrange(2**32)


def test_stored_objects_are_read(tmp_path: Path):
    store, table = open_store(str(tmp_path)), pa.Table.from_pylist(ROWS, SCHEMA)
    file = put_segment(store, "rows", table)
    assert read_segment(store, file, SCHEMA, 20) == table
    fewer = pa.schema([SCHEMA.field("number"), SCHEMA.field("key")])
    assert read_segment(store, file, fewer, 20) == table.select(["number", "key"])


@pytest.mark.parametrize("key", [None, pa.array([["a"]] * 20), pa.array(range(20)), pa.array([{"a": "b"}] * 20)])
def test_one_without_a_text_that_is_expected_is_refused(key: pa.Array | None, tmp_path: Path):
    table = pa.Table.from_pylist(ROWS, SCHEMA).drop_columns(["key"])
    if key is not None:
        table = table.append_column("key", key)
    store = open_store(str(tmp_path))
    with pytest.raises(IntegrityError, match=r"has columns \['sums', 'number'"):
        read_segment(store, put_segment(store, "rows", table), SCHEMA, 20)


def test_any_bytes_that_a_record_vouches_for_are_a_table_or_an_error(tmp_path: Path):
    print(f"seed {_SEED}")
    rng, whole, store = random.Random(_SEED), table_bytes(pa.Table.from_pylist(ROWS, SCHEMA)), open_store(str(tmp_path))
    num_refused = 0
    for _ in range(2_000):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(whole))] = rng.randrange(256)
        store.put("file", bytes(damaged))
        try:
            read_segment(store, checksum_file("file", bytes(damaged)), SCHEMA, 20)
        except IntegrityError:
            num_refused += 1
    assert num_refused > 200
