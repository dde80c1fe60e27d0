"""Computes identifiers from content alone: sample ids from source keys, digests of stored rows and of plain values."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from typing import Any

DIGEST_MODULUS = 1 << 256


def key_bytes(key: str) -> bytes:
    """A source key's raw bytes; names that are not UTF-8 come as surrogate escapes."""
    return key.encode("utf-8", "surrogateescape")


def sample_id_of(key: str, block: int = 0) -> int:
    """The signed big-endian integer in 8 bytes of SHA-256 over the key's bytes; `block` 1 takes the next 8, up to 3."""
    digest = hashlib.sha256(key_bytes(key)).digest()
    return struct.unpack_from(">q", digest, 8 * block)[0]


def next_sample_id(key: str, taken: int) -> int:
    """The id of a key whose id `taken` a smaller key has: the next 8 bytes of its hash."""
    later = itertools.dropwhile(lambda each: each != taken, (sample_id_of(key, block) for block in itertools.count()))
    return next(each for each in later if each != taken)


def format_sample_id(sample_id: int) -> str:
    """A sample id as people see it: 16 hex digits of its big-endian bytes."""
    return struct.pack(">q", sample_id).hex()


def row_digest(sample_id: int, label: str | None, image: bytes, extra: str = "") -> bytes:
    """SHA-256 over (sample id, label, extra columns, stored image bytes): what a dataset's `content_digest` sums.

    `label` is a class name, or the text of any other kind of label; `extra` is the text of the extra columns' values.
    """
    name = b"" if label is None else b"=" + label.encode()
    if extra:
        # No label holds a NUL, so no label equals another one with extra columns.
        name += b"\0" + extra.encode()
    digest = hashlib.sha256(struct.pack(">qI", sample_id, len(name)) + name)
    digest.update(image)
    return digest.digest()


def key_hash(key: str) -> int:
    """A key's term in the additive hash that proves that no input was lost or counted twice."""
    return int.from_bytes(hashlib.sha256(key_bytes(key)).digest(), "big")


def add_digests(*terms: int) -> int:
    """A sum that does not depend on the order of its terms, modulo 2^256."""
    return sum(terms) % DIGEST_MODULUS


def format_digest(value: int) -> str:
    """A sum of digests as 64 hex digits."""
    return f"{value:064x}"


def canonical_digest(value: dict[str, Any]) -> str:
    """SHA-256 over a value as JSON in its one canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
