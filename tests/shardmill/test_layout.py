"""The layout digest is that of one canonical JSON object, although no such object is ever made."""

from __future__ import annotations

import random

import pytest

from shardmill.dataset.layout import Layout
from shardmill.ids import canonical_digest
from shardmill.values import ChunkInfo, ShardInfo


def shard(split: str, rng: random.Random) -> ShardInfo:
    digests = [
        rng.choice(["ab", 'q"uote', "\\", "\x00", "ü"]) + rng.randbytes(4).hex() for _ in range(rng.randint(1, 5))
    ]
    chunks = tuple(ChunkInfo(0, 1, rng.randrange(99), rng.randrange(99), 0, digest) for digest in digests)
    return ShardInfo(split, "parquet", "p", 1, "", 1, 0, 0, 0, "r", 1, "", chunks)


@pytest.mark.parametrize("max_in_memory", [10**6, 50])
@pytest.mark.parametrize("class_names", [["a", "b"], ["b", "ä", "a"], []])
def test_the_digest_is_that_of_the_whole_object(
    class_names: list[str], max_in_memory: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shardmill.dataset.layout.MAX_IN_MEMORY_BYTES", max_in_memory)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    shards = [shard(rng.choice(["validation", "train", "test"]), rng) for _ in range(rng.randrange(40))]
    chunks: dict[str, list[str]] = {}
    for each in shards:
        texts = [f"{chunk.num_rows}:{chunk.image_bytes}:{chunk.content_sha256}" for chunk in each.chunks]
        chunks.setdefault(each.split, []).extend(texts)
    numbers = {} if class_names == sorted(class_names) else {"class_names": class_names}
    layout = Layout(shards)
    for _ in range(2):
        found = layout.digest("c", class_names, sorted(class_names))
        assert found == canonical_digest({"content": "c", "chunks": chunks, **numbers})
    assert layout.num_chunks == {split: len(texts) for split, texts in chunks.items()}
    assert layout.num_shards.total() == len(shards)
