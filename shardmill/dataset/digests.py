"""The digests of a whole version: what it holds, how that is laid out, and what was refused."""

from __future__ import annotations

from collections.abc import Sequence

from shardmill.dataset.manifest import SplitInfo, canonical_digest
from shardmill.ids import add_digests, format_digest, key_hash
from shardmill.values import Rejection, ShardInfo


def layout_digest(content_digest: str, shards: Sequence[ShardInfo]) -> str:
    """Over the ordered chunks of each split; equal in every format, so any one of a dataset's formats will do."""
    chunks: dict[str, list[str]] = {}
    for shard in shards:
        chunks.setdefault(shard.split, []).extend(
            f"{c.num_rows}:{c.image_bytes}:{c.content_sha256}" for c in shard.chunks
        )
    return canonical_digest({"content": content_digest, "chunks": chunks})


def content_digest(
    columns: dict[str, str], class_names: Sequence[str], normalization_fingerprint: str, splits: dict[str, SplitInfo]
) -> str:
    """Order-free: columns, class names, normalization, and each split's number of rows and sum of row digests."""
    return canonical_digest(
        {
            "columns": columns,
            "class_names": list(class_names),
            "normalization": normalization_fingerprint,
            "splits": {name: [split.num_rows, split.row_digest_sum] for name, split in splits.items()},
        }
    )


def ledger_digest(rejections: Sequence[Rejection]) -> str:
    """Order-free digest of which input was refused for which reason."""
    return format_digest(add_digests(*(key_hash(f"{rejection.key}\0{rejection.reason}") for rejection in rejections)))
