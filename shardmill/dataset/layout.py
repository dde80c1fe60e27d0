"""Counts and hashes the layout of a version, the order of its chunks, shard by shard."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shardmill.storage_errors import as_storage_error

if TYPE_CHECKING:
    from shardmill.values import ShardInfo

# Of each split: what says of 100,000 chunks is in memory, and of more in a file.
MAX_IN_MEMORY_BYTES = 8_000_000
_BLOCK_BYTES = 1_000_000


class Layout:
    """Grows by the shards of one format, in layout order; chunks are equal in every format, so any one will do."""

    def __init__(self, shards: Iterable[ShardInfo] = ()) -> None:
        self.num_shards: Counter[str] = Counter()
        """Number of shards of each split."""
        self.num_chunks: Counter[str] = Counter()
        self._texts: dict[str, tempfile.SpooledTemporaryFile[bytes]] = {}
        for shard in shards:
            self.add(shard)

    def add(self, shard: ShardInfo) -> None:
        """Raises StorageError if the disk with the temporary folder is full."""
        with as_storage_error(tempfile.gettempdir()):
            texts = self._texts.get(shard.split)
            if texts is None:
                # Closed, and with it deleted, when this value goes.
                texts = self._texts[shard.split] = tempfile.SpooledTemporaryFile(MAX_IN_MEMORY_BYTES)  # noqa: SIM115
            for chunk in shard.chunks:
                text = json.dumps(f"{chunk.num_rows}:{chunk.image_bytes}:{chunk.content_sha256}")
                texts.write(f"{',' if self.num_chunks[shard.split] else ''}{text}".encode())
                self.num_chunks[shard.split] += 1
        self.num_shards[shard.split] += 1

    def digest(self, content_digest: str, class_names: Sequence[str], classes: Sequence[str]) -> str:
        """The layout digest: over the ordered chunks of each split, and over the label map `class_names`, unless that
        is the `classes` which the content digest covers, numbered in the order of their names.

        It is that of one canonical JSON object, which is never whole in memory.
        """
        numbers = {} if tuple(class_names) == tuple(classes) else {"class_names": list(class_names)}
        rest = json.dumps({"content": content_digest, **numbers}, sort_keys=True, separators=(",", ":"))
        found = hashlib.sha256(b'{"chunks":{')
        with as_storage_error(tempfile.gettempdir()):
            for place, (split, texts) in enumerate(sorted(self._texts.items(), key=lambda each: each[0])):
                found.update(f"{',' if place else ''}{json.dumps(split)}:[".encode())
                texts.seek(0)
                while block := texts.read(_BLOCK_BYTES):
                    found.update(block)
                found.update(b"]")
        found.update(f"}},{rest[1:]}".encode())
        return found.hexdigest()
