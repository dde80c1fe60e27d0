"""Opens a committed dataset version for reading, by its URI or exactly as a job's driver resolved it: its manifest, and
only files that the manifest verifies.
"""

from __future__ import annotations

from functools import cached_property

from shardmill.dataset.index import SplitIndex, check_files, files_of, read_index, read_shards
from shardmill.dataset.manifest import Manifest, parse_manifest
from shardmill.dataset.versions import (
    check_not_expired,
    latest_version,
    pin_of,
    read_manifest_bytes,
    split_version,
)
from shardmill.epoch_plan import WINDOW_BUDGET_BYTES, EpochPlan, PlanSpec, plan_epoch, window_bytes_within
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import Store, join_uri
from shardmill.stores import open_store
from shardmill.values import DatasetPin, ShardInfo


class Dataset:
    """One version of a dataset; `shardmill.dataset.dataset` makes it."""

    def __init__(self, store: Store, pin: DatasetPin, manifest: Manifest) -> None:
        self.store = store
        self.pin = pin
        self.manifest = manifest

    def __repr__(self) -> str:
        return f"<dataset {self.pin.uri}@{self.pin.version}>"

    @cached_property
    def _indexes(self) -> dict[tuple[str, str], SplitIndex]:
        return read_index(self.store, self.manifest)

    @cached_property
    def shards(self) -> tuple[ShardInfo, ...]:
        """Every shard of the version in layout order, all formats, from the verified index segments."""
        return read_shards(self.store, self.manifest)

    def index(self, split: str, format_name: str = "auto") -> SplitIndex:
        """The chunks of a split in one format. Raises UsageError if the dataset does not have that split or format."""
        if split not in self.manifest.splits:
            raise UsageError(
                f"dataset {self.pin.uri}@{self.pin.version} has no split {split!r}",
                f"expected one of {', '.join(self.manifest.splits)}",
            )
        return self._indexes[split, self.format_name(format_name)]

    def shards_of(self, split: str, format_name: str = "auto") -> tuple[ShardInfo, ...]:
        """The shards of a split in one format with all of their chunks as values: to verify or to rewrite them.

        Raises as `index` does, which is for readers.
        """
        key = (self.index(split, format_name).split, self.format_name(format_name))
        return tuple(shard for shard in self.shards if (shard.split, shard.format) == key)

    def format_name(self, wanted: str = "auto") -> str:
        """`wanted`; for `auto` Parquet if the dataset has it. Raises UsageError for a format that it does not have."""
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

    def files(self, split: str, format: str = "auto") -> list[str]:
        """URIs of a split's shards, for other tools; never give those the folder: it holds other versions too."""
        return [join_uri(self.store.uri, path) for path in self.index(split, format).paths]

    def require_images(self) -> None:
        """Raise UsageError for a version of predictions."""
        if self.manifest.predicted_by is not None:
            raise UsageError(
                f"{self.pin.uri}@{self.pin.version} holds predictions, and no images",
                "expected a dataset of images",
                "read its Parquet files: `shardmill inspect DATASET --files`",
            )

    def plan_spec(
        self, split: str, *, seed: int, global_batch_size: int, num_streams: int,
        window_bytes: int | None = None, shuffle: bool = True,
    ) -> PlanSpec:  # fmt: skip
        """Return the values that determine every epoch over `split`; equal in every format.

        `window_bytes`: the most that a shuffle window of one stream may have, which is one chunk at least; by default
        those of all streams share the budget of one rank. Raises UsageError for an impossible plan.
        """
        self.require_images()
        index = self.index(split)
        if window_bytes is None:
            window_bytes = window_bytes_within(WINDOW_BUDGET_BYTES, [range(num_streams)])
        return PlanSpec(
            layout_digest=self.manifest.layout_digest,
            split=split,
            seed=seed,
            global_batch_size=global_batch_size,
            num_streams=num_streams,
            window_chunks=max(1, window_bytes // max(1, index.max_chunk_bytes)),
            shuffle=shuffle,
        )

    def plan_epoch(self, spec: PlanSpec, epoch: int) -> EpochPlan:
        """The order of one epoch."""
        return plan_epoch(spec, self.index(spec.split).chunk_rows, epoch)

    def check_files(self) -> int:
        """The bytes of all shards and row segments. Raises IntegrityError for one that is missing or cut."""
        return check_files(self.store, files_of(self.shards))


def open_dataset(uri: str) -> Dataset:
    """Open `URI` at its latest version, or `URI@N` at version N.

    Raises UsageError if there is no such dataset or version, or it has expired; IntegrityError for what was not
    committed or was altered.
    """
    root, named = split_version(uri)
    store = open_store(root)
    version = (latest_version(store) or 1) if named is None else named
    data = read_manifest_bytes(store, version)
    if named is not None:
        check_not_expired(store, version)
    return Dataset(store, pin_of(store, version, data), parse_manifest(data, version, store.uri))


def has_version(uri: str) -> bool:
    """Whether a dataset is there; at an empty URI there is none."""
    return bool(uri) and latest_version(open_store(split_version(uri)[0])) > 0


def first_alike(pin: DatasetPin) -> DatasetPin:
    """The first version that names the very files of this one, in their order: an expiry or a rollback copies nothing.

    It can be read as long as this one can: versions with the same files expire together.
    """
    store = open_store(pin.uri)
    manifest = open_pinned(pin).manifest
    while manifest.operation in ("expire", "rollback") and manifest.origin_version is not None:
        try:
            data = read_manifest_bytes(store, manifest.origin_version)
            origin = parse_manifest(data, manifest.origin_version, store.uri)
        except (IntegrityError, UsageError):
            break  # `verify` says so; this version can be read without it
        if origin.index_segments != manifest.index_segments:
            break
        pin, manifest = pin_of(store, origin.version, data), origin
    return pin


def open_pinned(pin: DatasetPin) -> Dataset:
    """Open exactly the version that a driver resolved. Raises IntegrityError if its manifest is another one."""
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
