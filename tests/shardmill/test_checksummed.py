"""Files that we vouch for: every altered byte is noticed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardmill.checksummed import checksum_file, read_checksummed, verified_body, verify_file, with_checksum
from shardmill.errors import IntegrityError, SecurityRefusal
from shardmill.stores import open_store


def test_an_envelope_is_json_and_opens_again():
    body = b'{"accuracy": 0.5}'
    envelope = with_checksum(body)
    assert json.loads(envelope)["body"] == {"accuracy": 0.5}
    assert verified_body(envelope, "here") == body


def test_every_flipped_bit_and_every_cut_of_an_envelope_is_noticed():
    envelope = with_checksum(b'{"accuracy": 0.3667}')
    damaged = [
        envelope[:place] + bytes([envelope[place] ^ (1 << bit)]) + envelope[place + 1 :]
        for place in range(len(envelope))
        for bit in range(8)
    ]
    damaged += [envelope[:length] for length in range(len(envelope))] + [envelope + b" "]
    for data in damaged:
        with pytest.raises(IntegrityError, match="here was altered; .*; restore it"):
            verified_body(data, "here", fix="restore it")


def test_a_checksummed_file_is_read_only_as_it_was(tmp_path: Path):
    store = open_store(tmp_path)
    store.put("models/a.bin", b"weights")
    file = checksum_file("a.bin", b"weights")
    assert read_checksummed(store, file, "models") == b"weights"
    verify_file(store, file, "models")
    for look in (read_checksummed, verify_file):
        for wrong in (replace(file, sha256="0" * 64), replace(file, size_bytes=1 << 50), replace(file, size_bytes=0)):
            with pytest.raises(IntegrityError, match="altered"):
                look(store, wrong, "models")
        with pytest.raises(IntegrityError, match=r"b\.bin is missing"):
            look(store, replace(file, path="b.bin"), "models")
        with pytest.raises(SecurityRefusal):
            look(store, replace(file, path="../models/a.bin"), "models")


def test_a_file_is_checked_in_blocks(tmp_path: Path):
    store, block = open_store(tmp_path), 8_000_000
    for size in (0, 1, block - 1, block, block + 1, 2 * block, 2 * block + 9):
        data = os.urandom(size)
        store.put("file", data)
        verify_file(store, checksum_file("file", data))
        if size:
            store.put("file", data[:-1] + bytes([data[-1] ^ 1]))
            with pytest.raises(IntegrityError, match="altered"):
                verify_file(store, checksum_file("file", data))
