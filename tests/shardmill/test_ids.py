"""Ids and digests follow from content alone, also where two keys collide or a name is not UTF-8."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill import ids

keys = st.lists(st.text(st.characters(exclude_categories=()), min_size=1), unique=True, max_size=20)


@given(keys)
def test_ids_are_the_first_eight_bytes_of_the_keys_sha256(names: list[str]):
    names = [name for name in names if _encodable(name)]
    for name in names:
        digest = hashlib.sha256(ids.key_bytes(name)).digest()
        sample_id = ids.sample_id_of(name)
        assert struct.pack(">q", sample_id) == digest[:8]
        assert ids.format_sample_id(sample_id) == digest[:8].hex()
        following = ids.next_sample_id(name, sample_id)
        assert struct.pack(">q", following) == digest[8:16]
        assert struct.pack(">q", ids.next_sample_id(name, following)) == digest[16:24]


def test_the_next_id_is_another_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ids, "sample_id_of", lambda key, block=0: [7, 7, 8, 9][block])
    assert ids.next_sample_id("a", 7) == 8
    assert ids.next_sample_id("a", 8) == 9


def test_row_digests_tell_rows_apart():
    digests = {
        ids.row_digest(1, "a", b"x"),
        ids.row_digest(2, "a", b"x"),
        ids.row_digest(1, "b", b"x"),
        ids.row_digest(1, None, b"x"),
        ids.row_digest(1, "", b"x"),
        ids.row_digest(1, "", b"a" + b"x"),
    }
    assert len(digests) == 6


@given(st.permutations(["a", "b", "c", "d"]))
def test_sums_do_not_depend_on_the_order(order: list[str]):
    assert ids.add_digests(*map(ids.key_hash, order)) == ids.add_digests(*map(ids.key_hash, sorted(order)))
    assert len(ids.format_digest(ids.add_digests(*map(ids.key_hash, order)))) == 64


def _encodable(name: str) -> bool:
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
