"""A committed dataset version, opened for reading: the manifest first, and nothing that it does not vouch for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shardmill.dataset.index import (
    INDEX_SCHEMA,
    LEDGER_SCHEMA,
    SplitIndex,
    rejections_of_table,
    shards_of_table,
)
from shardmill.dataset.manifest import Manifest, parse_manifest
from shardmill.dataset.segment import RESTORE, read_segment
from shardmill.dataset.versions import latest_version, pin_of, read_manifest_bytes
from shardmill.epoch_plan import EpochPlan, PlanSpec, plan_epoch, window_chunks_within
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import Store, join_uri
from shardmill.stores import open_store
from shardmill.values import DatasetPin, Rejection, ShardInfo

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One decoded row, for reports and parity checks."""

    image_HWC: np.ndarray
    label: int | None
    sample_id: int
    source: str


class Dataset:
    """One version of a dataset. Make it with `open_dataset` or `open_pinned`."""

    def __init__(self, store: Store, pin: DatasetPin, manifest: Manifest) -> None:
        self.store = store
        self.pin = pin
        self.manifest = manifest
        self._indexes: dict[tuple[str, str], SplitIndex] = {}

    @cached_property
    def shards(self) -> tuple[ShardInfo, ...]:
        """Every shard of the version in layout order, all formats, from the verified index segments."""
        manifest = self.manifest
        num_chunks = sum(split.num_chunks for split in manifest.splits.values()) * len(manifest.formats)
        shards = tuple(
            shard
            for segment in manifest.index_segments
            for shard in shards_of_table(read_segment(self.store, segment, INDEX_SCHEMA, num_chunks))
        )
        _check_totals(manifest, shards)
        return shards

    def index(self, split: str, format_name: str = "auto") -> SplitIndex:
        """The chunks of a split in one format. Raises UsageError where the dataset has no such split or format."""
        if split not in self.manifest.splits:
            raise UsageError(
                f"dataset {self.pin.uri}@{self.pin.version} has no split {split!r}",
                f"expected one of {', '.join(self.manifest.splits)}",
            )
        name = self.format_name(format_name)
        # Every epoch asks again; the chunks of a split do not change.
        if (split, name) not in self._indexes:
            shards = tuple(shard for shard in self.shards if (shard.split, shard.format) == (split, name))
            self._indexes[split, name] = SplitIndex(split, name, shards)
        return self._indexes[split, name]

    def format_name(self, wanted: str = "auto") -> str:
        """`wanted`, or for `auto` Parquet where the dataset has it. Raises UsageError where it has not `wanted`."""
        formats = self.manifest.formats
        if wanted == "auto":
            return "parquet" if "parquet" in formats else formats[0]
        if wanted not in formats:
            raise UsageError(
                f"dataset {self.pin.uri}@{self.pin.version} has no {wanted} shards",
                f"it holds {', '.join(formats)}",
                f'set etl.formats = ["{wanted}"] and run the ETL again, or read another format',
            )
        return wanted

    def files(self, split: str, format_name: str = "auto") -> list[str]:
        """URIs of a split's shards, for other tools; never give those "the folder": it holds other versions too."""
        return [join_uri(self.store.uri, shard.path) for shard in self.index(split, format_name).shards]

    def plan_spec(
        self, split: str, *, seed: int, global_batch_size: int, num_streams: int,
        window_budget_bytes: int = 256_000_000, shuffle: bool = True,
    ) -> PlanSpec:  # fmt: skip
        """What fixes every epoch over `split`; equal in every format. Raises UsageError for what cannot be planned."""
        index = self.index(split)
        return PlanSpec(
            layout_digest=self.manifest.layout_digest,
            split=split,
            seed=seed,
            global_batch_size=global_batch_size,
            num_streams=num_streams,
            window_chunks=window_chunks_within(window_budget_bytes, index.max_chunk_bytes, num_streams),
            shuffle=shuffle,
        )

    def plan_epoch(self, spec: PlanSpec, epoch: int) -> EpochPlan:
        """The order of one epoch."""
        return plan_epoch(spec, self.index(spec.split).chunk_rows, epoch)

    def check_files(self) -> int:
        """The bytes of all shards and row segments. Raises IntegrityError for one that is missing or cut."""
        num_bytes = 0
        for shard in self.shards:
            for path, size in ((shard.path, shard.num_bytes), (shard.rows_path, shard.rows_bytes)):
                found = self.store.stat(path)
                where = join_uri(self.store.uri, path)
                if found is None:
                    raise IntegrityError(f"shard {where} is missing", f"expected {size} bytes", RESTORE)
                if found.size_bytes != size:
                    raise IntegrityError(f"{where} has {found.size_bytes} bytes", f"expected {size}", RESTORE)
                num_bytes += size
        return num_bytes

    def read_rejections(self) -> list[Rejection]:
        """The rejects ledger."""
        rejected = self.manifest.counts.rejected
        return [
            rejection
            for segment in self.manifest.ledger_segments
            for rejection in rejections_of_table(read_segment(self.store, segment, LEDGER_SCHEMA, rejected))
        ]

    def read_samples(self, split: str, limit: int) -> list[StoredSample]:
        """The first `limit` rows of a split in layout order, verified and decoded."""
        return list(self._iterate_samples(split, limit))

    def _iterate_samples(self, split: str, limit: int) -> Iterator[StoredSample]:
        from shardmill.dataset.chunks import ChunkFetcher
        from shardmill.formats.encodings import decode_stored

        fetcher = ChunkFetcher(self.store, self.index(split))
        options = self.manifest.normalize
        remaining = limit
        for chunk in range(len(fetcher.index.chunks)):
            if remaining <= 0:
                return
            rows = fetcher.read_chunk(chunk)
            for place in range(min(remaining, len(rows.images))):
                label = int(rows.labels_N[place])
                yield StoredSample(
                    decode_stored(rows.images[place], options.encoding, options.image_shape_HWC),
                    None if label < 0 else label,
                    int(rows.sample_ids_N[place]),
                    rows.sources[place],
                )
            remaining -= len(rows.images)


def open_dataset(uri: str) -> Dataset:
    """Open `URI` at its latest version, or `URI@N` at version N.

    Raises UsageError if there is no such dataset or version, IntegrityError for what was not committed or was altered.
    """
    root, version = split_version(uri)
    store = open_store(root)
    if version is None:
        version = latest_version(store) or 1
    data = read_manifest_bytes(store, version)
    return Dataset(store, pin_of(store, version, data), parse_manifest(data, version, store.uri))


def open_pinned(pin: DatasetPin) -> Dataset:
    """Open exactly the version that a driver resolved. Raises IntegrityError where its manifest is another one."""
    store = open_store(pin.uri)
    data = read_manifest_bytes(store, pin.version)
    found = pin_of(store, pin.version, data)
    if found.manifest_sha256 != pin.manifest_sha256:
        raise IntegrityError(
            f"the manifest of {pin.uri}@{pin.version} has SHA-256 {found.manifest_sha256}",
            f"expected {pin.manifest_sha256}, which this job's driver resolved",
            "all ranks must see one dataset; restore the manifest",
        )
    return Dataset(store, pin, parse_manifest(data, pin.version, store.uri))


def split_version(uri: str) -> tuple[str, int | None]:
    """`URI@3` as (`URI`, 3), a URI without version as (`URI`, None)."""
    root, at, version = uri.rpartition("@")
    # Of ASCII digits only: `int` would also read other scripts', and refuse a superscript two.
    return (root, int(version)) if at and re.fullmatch("[0-9]{1,18}", version) else (uri, None)


def _check_totals(manifest: Manifest, shards: tuple[ShardInfo, ...]) -> None:
    """Raise IntegrityError unless the index holds what the manifest counted, split by split in each format."""
    found: dict[tuple[str, str], list[ShardInfo]] = {}
    for shard in shards:
        found.setdefault((shard.split, shard.format), []).append(shard)
    expected = {(split, name) for split in manifest.splits for name in manifest.formats}
    if set(found) != expected:
        raise IntegrityError(f"the index holds {sorted(found)}", f"the manifest counts {sorted(expected)}")
    for (split, name), mine in found.items():
        info = manifest.splits[split]
        counted = (info.num_shards, info.num_chunks, info.num_rows, info.image_bytes)
        actual = (
            len(mine),
            sum(len(shard.chunks) for shard in mine),
            sum(shard.num_rows for shard in mine),
            sum(chunk.image_bytes for shard in mine for chunk in shard.chunks),
        )
        if actual != counted:
            raise IntegrityError(
                f"the index of split {split} ({name}) has shards, chunks, rows and image bytes {actual}",
                f"the manifest counts {counted}",
            )
