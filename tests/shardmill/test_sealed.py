"""Files that we vouch for: every altered byte is noticed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardmill.errors import IntegrityError, SecurityRefusal
from shardmill.sealed import read_sealed, seal, seal_file, unseal
from shardmill.storage import open_store


def test_an_envelope_is_json_and_opens_again():
    body = b'{"accuracy": 0.5}'
    sealed = seal(body)
    assert json.loads(sealed)["body"] == {"accuracy": 0.5}
    assert unseal(sealed, "here") == body


def test_every_flipped_bit_and_every_cut_of_an_envelope_is_noticed():
    sealed = seal(b'{"accuracy": 0.3667}')
    damaged = [
        sealed[:place] + bytes([sealed[place] ^ (1 << bit)]) + sealed[place + 1 :]
        for place in range(len(sealed))
        for bit in range(8)
    ]
    damaged += [sealed[:length] for length in range(len(sealed))] + [sealed + b" "]
    for data in damaged:
        with pytest.raises(IntegrityError, match="here was altered"):
            unseal(data, "here")


def test_a_sealed_file_is_read_only_as_it_was(tmp_path: Path):
    store = open_store(tmp_path)
    store.put("models/a.bin", b"weights")
    file = seal_file("a.bin", b"weights")
    assert read_sealed(store, file, "models") == b"weights"
    with pytest.raises(IntegrityError, match="altered"):
        read_sealed(store, replace(file, sha256="0" * 64), "models")
    with pytest.raises(IntegrityError, match=r"b\.bin is missing"):
        read_sealed(store, replace(file, path="b.bin"), "models")
    with pytest.raises(SecurityRefusal):
        read_sealed(store, replace(file, path="../models/a.bin"), "models")
