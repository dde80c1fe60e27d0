"""Merges the small shards of a version into full ones, as a new version with equal content."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shardmill.dataset.commit import publish
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.index import Layout, write_index
from shardmill.dataset.leases import writing
from shardmill.dataset.manifest import Manifest, child_of
from shardmill.dataset.shard import Copies, publish_rows, read_stored_rows
from shardmill.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Compaction:
    """The result of `compact_dataset`."""

    manifest: Manifest
    """The version that holds the rows now: the old one if there was nothing to merge."""
    num_shards_before: int
    """Number of shards in all splits before, in one format."""
    num_shards_after: int
    num_rows_copied: int

    @property
    def is_unchanged(self) -> bool:
        return not self.num_rows_copied


def compact_dataset(dataset: Dataset, run_id: str) -> Compaction:
    """Commit a version whose small shards are merged, with the rows of `dataset`, its latest version.

    Full shards are named again, not copied. Without at least two small shards in a split there is no new version.
    Raises IntegrityError for any altered byte among the merged shards, CommitConflict if another writer published
    first, or `gc` is at work.
    """
    # The lease keeps `gc` away from what no manifest names yet.
    with writing(dataset.store, f"compact, run {run_id},") as lease:
        before = {split: _by_position(dataset, split) for split in dataset.manifest.splits}
        after = {split: _merge_small(dataset, shards) for split, shards in before.items()}
        counts = (_count(before), _count(after))
        if before == after:
            return Compaction(dataset.manifest, *counts, 0)

        # The rows are the parent's, so are their sums; only where they lie is new.
        manifest = publish(dataset.store, _draft(dataset, after, run_id), lease.check)
        return Compaction(manifest, *counts, _num_rows_copied(before, after))


def _num_rows_copied(before: dict[str, list[Copies]], after: dict[str, list[Copies]]) -> int:
    old = {copies[0].path for shards in before.values() for copies in shards}
    return sum(copies[0].num_rows for shards in after.values() for copies in shards if copies[0].path not in old)


@dataclass(frozen=True, slots=True)
class _Limits:
    """The limits at which the original build cuts chunks and shards; a compacted dataset uses the same ones."""

    chunk_bytes: int
    shard_max_bytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> _Limits:
        try:
            return cls(int(manifest.config["chunk_bytes"]), int(manifest.config["shard_max_bytes"]))
        except (KeyError, TypeError, ValueError):
            raise IntegrityError(
                f"the config of version {manifest.version} lacks chunk_bytes or shard_max_bytes",
                "expected the section etl of the run that built it",
                "run `shardmill etl`, which builds a version with these settings",
            ) from None

    def is_small(self, copies: Copies) -> bool:
        return 2 * sum(chunk.image_bytes for chunk in copies[0].chunks) < self.shard_max_bytes


def _by_position(dataset: Dataset, split: str) -> list[Copies]:
    """The shards of a split in layout order, each with its copies in the other formats."""
    shards = [dataset.shards_of(split, name) for name in dataset.manifest.formats]
    same_rows = [tuple(chunk.content_sha256 for chunk in shard.chunks) for shard in shards[0]]
    for others in shards[1:]:
        if [tuple(chunk.content_sha256 for chunk in shard.chunks) for shard in others] != same_rows:
            raise IntegrityError(
                f"the shards of split {split} hold different rows in {others[0].format} and {shards[0][0].format}",
                "expected the same rows in every format",
                "run `shardmill verify`",
            )
    return list(zip(*shards, strict=True))


def _merge_small(dataset: Dataset, shards: list[Copies]) -> list[Copies]:
    """The full shards of a split as they are, and new ones with the rows of the small ones; or all as they are."""
    limits = _Limits.of(dataset.manifest)
    small = [copies for copies in shards if limits.is_small(copies)]
    if len(small) < 2:
        return shards
    schema = dataset.manifest.row_schema
    rows = (row for copies in small for row in read_stored_rows(dataset.store, copies[0], schema))
    merged = publish_rows(dataset.store, "compact", rows, small[0], schema, **asdict(limits))
    # Chunks that are large for their shards may fit no better than before.
    return (
        [*(copies for copies in shards if not limits.is_small(copies)), *merged] if len(merged) < len(small) else shards
    )


def _draft(dataset: Dataset, after: dict[str, list[Copies]], run_id: str) -> Manifest:
    manifest = dataset.manifest
    shards = [shard for copies_of_split in after.values() for copies in copies_of_split for shard in copies]
    layout = Layout(shard for shard in shards if shard.format == manifest.formats[0])
    splits = {
        split: info.model_copy(update={"num_shards": layout.num_shards[split], "num_chunks": layout.num_chunks[split]})
        for split, info in manifest.splits.items()
    }
    return child_of(
        manifest,
        "compact",
        run_id,
        content=manifest,
        splits=splits,
        layout_digest=layout.digest(manifest.content_digest, manifest.class_names, manifest.digested_classes),
        index_segments=write_index(dataset.store, shards),
    )


def _count(shards: dict[str, list[Copies]]) -> int:
    return sum(map(len, shards.values()))
