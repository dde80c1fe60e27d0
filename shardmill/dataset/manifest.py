"""The manifest: the one small file whose appearance makes a dataset version visible, its checks and its digests."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from shardmill.checksummed import ChecksummedFile, check_relative_path
from shardmill.dataset.statistics import ChannelSums, ImageSizes
from shardmill.errors import IntegrityError
from shardmill.formats.rows import NO_IMAGES, OWN_COLUMNS, VECTOR, RowSchema
from shardmill.ids import canonical_digest
from shardmill.options import NormalizeOptions
from shardmill.section import Section
from shardmill.storage import join_uri
from shardmill.typed_columns import LABEL, LABEL_TYPES, ExtraColumn, are_types_known, vector_size
from shardmill.values import PredictedBy

SCHEMA_VERSION = 1
MANIFESTS = "manifests"

Operation = Literal["full", "incremental", "append", "compact", "expire", "rollback"]
"""The operation that created a version: a `full` build of its source, an `incremental` build of its changes, an
`append` of another source, or a rearrangement of an older version's rows.
"""


class SplitInfo(Section):
    """One split of a version."""

    num_rows: int = Field(ge=1)
    num_chunks: int = Field(ge=1)
    num_shards: int = Field(ge=1)
    """Number of shards in each format."""
    image_bytes: int = Field(ge=0)
    """Stored images of one format."""
    class_counts: tuple[int, ...]
    """Rows of each class, in the order of `class_names`."""
    row_digest_sum: str = Field(pattern="^[0-9a-f]{64}$")
    """Sum of the rows' SHA-256 modulo 2^256."""


class Counts(Section):
    """Every listed input is in exactly one of `accepted` and `rejected`."""

    listed: int = Field(ge=0)
    accepted: int = Field(ge=0)
    rejected: int = Field(ge=0)
    by_reason: dict[str, int]
    by_split: dict[str, int]
    duplicate_content: int = Field(ge=0)
    """Accepted inputs whose bytes another accepted input had already."""
    conflicting_label: int = Field(ge=0)
    """Accepted inputs whose bytes another accepted input has under another class."""
    leaked_content: int = Field(ge=0)
    """Accepted inputs whose bytes another accepted input has in another split; content hashes never put them there."""
    by_note: dict[str, int]


class SourceRef(Section):
    """The source that was listed."""

    uri: str
    """URI of the source; for several sources, their names."""
    kind: str
    parts: dict[str, str] = Field(default_factory=dict)
    """Name -> URI of each source, if there are several."""
    listing_fingerprint: str
    """Over every key, size, time or etag, label and split."""
    key_sum: str = Field(pattern="^[0-9a-f]{64}$")
    """Additive hash of all listed keys."""
    names_splits: bool
    """Whether the listing said of images in which split they are; content hashes decided otherwise."""

    @property
    def described(self) -> str:
        """Description for messages: the URI, or for several sources each name with its URI."""
        return ", ".join(f"{name} ({uri})" for name, uri in self.parts.items()) or self.uri

    def is_same_source(self, other: SourceRef) -> bool:
        """Whether both name one source, even if its content has changed."""
        return (self.kind, self.uri, self.parts) == (other.kind, other.uri, other.parts)

    def continues(self, earlier: SourceRef) -> bool:
        """Whether this is the earlier source, or holds all of its parts at their places and perhaps more."""
        if self.kind == earlier.kind and self.parts and earlier.parts:
            return earlier.parts.items() <= self.parts.items()
        return self.is_same_source(earlier)


class VersionRange(Section):
    """Versions `first` to `last`, both included."""

    first: int = Field(ge=1)
    last: int = Field(ge=1)


class Manifest(Section):
    """Contract 1: one committed version of a dataset."""

    schema_version: Literal[1] = 1
    version: int = Field(ge=1)
    commit_id: str
    """Names the attempt that wrote this file, so that it recognises its own commit."""
    run_id: str
    created_at: str
    """UTC, ISO 8601; in no digest."""
    operation: Operation = "full"
    parent_version: int | None
    restored_version: int | None = None
    """For a rollback: the version whose files this one refers to."""
    expired_versions: tuple[VersionRange, ...] = ()
    """All versions that had expired when this one was committed: their manifests stay, their files may be deleted."""
    content_digest: str = Field(pattern="^[0-9a-f]{64}$")
    layout_digest: str = Field(pattern="^[0-9a-f]{64}$")
    columns: dict[str, str]
    """Parquet columns and their types, the user's own included."""
    formats: tuple[str, ...]
    class_names: tuple[str, ...]
    """The label map: class number = position. Empty in a dataset without labels."""
    splits: dict[str, SplitInfo]
    counts: Counts
    channel_sums: ChannelSums
    sizes: ImageSizes
    """Image sizes of all splits."""
    normalize: NormalizeOptions
    normalization_fingerprint: str
    decoder_id: str
    config: dict[str, Any]
    config_fingerprint: str
    source: SourceRef
    """The newest source; its `key_sum` is that of all inputs of the version."""
    other_sources: tuple[SourceRef, ...] = ()
    """Sources whose images existed when `source` was appended."""
    index_segments: tuple[ChecksummedFile, ...]
    ledger_segments: tuple[ChecksummedFile, ...]
    ledger_digest: str
    """Order-free digest of (key, reason) of every rejection."""
    predicted_by: PredictedBy | None = None
    """Of predictions, which have no images: what made them."""

    @field_validator("columns")
    @classmethod
    def _column_types_are_known(cls, columns: dict[str, str]) -> dict[str, str]:
        if not are_types_known(columns, OWN_COLUMNS):
            raise ValueError(f"columns of types that this version of shardmill supports, not {columns}")
        return columns

    @property
    def digested_classes(self) -> tuple[str, ...]:
        """The classes that its digests cover."""
        return digested_classes(self.class_names, self.splits)

    @property
    def empty_classes(self) -> tuple[str, ...]:
        """Classes of the label map of which no split has an image."""
        used = set(self.digested_classes)
        return tuple(name for name in self.class_names if name not in used)

    @property
    def evaluation_split(self) -> str | None:
        """The split whose samples no training decision has seen, as far as there is one; None without any."""
        return next((name for name in ("test", "validation") if name in self.splits), None)

    @property
    def origin_version(self) -> int | None:
        """The version whose rows this one holds by what made it; None for a build, which has rows of its own."""
        if self.operation == "rollback":
            return self.restored_version
        return self.parent_version if self.operation in ("compact", "expire") else None

    @property
    def row_schema(self) -> RowSchema:
        """The schema that all rows of the version share."""
        extra = (each for each in self.columns.items() if each[0] not in OWN_COLUMNS and not vector_size(each[1]))
        return RowSchema(
            self.normalize.encoding if "image" in self.columns else NO_IMAGES,
            self.normalize.one_shape_HWC,
            self.class_names,
            extra=tuple(ExtraColumn(*each) for each in sorted(extra)),
            label_type=self.columns.get(LABEL, LABEL_TYPES["class"]),
            vector_size=vector_size(self.columns.get(VECTOR, "")),
        )

    @property
    def channel_mean(self) -> tuple[float, ...]:
        """Per channel, over train, on the 0..255 scale; of the pixels before encoding."""
        return self.channel_sums.mean()

    @property
    def channel_std(self) -> tuple[float, ...]:
        """Per channel, over train, on the 0..255 scale; of the pixels before encoding."""
        return self.channel_sums.std()

    def has_expired(self, version: int) -> bool:
        """Whether `version` had expired when this one was committed."""
        return any(each.first <= version <= each.last for each in self.expired_versions)

    def is_equivalent_to(self, other: Manifest) -> bool:
        """Whether committing this after `other` would change nothing that a reader can see."""

        def visible(each: Manifest) -> tuple[object, ...]:
            digests = (each.content_digest, each.layout_digest, each.ledger_digest)
            return (*digests, sorted(each.formats), each.counts, each.expired_versions, each.predicted_by)

        return visible(self) == visible(other)


def manifest_path(version: int) -> str:
    """Return the path of version `version` below the dataset root."""
    return f"{MANIFESTS}/{version:08d}.json"


def encode_manifest(manifest: Manifest) -> bytes:
    """The canonical bytes of a manifest, its own SHA-256 among them; no envelope of `shardmill.checksummed`, as people
    compare manifests line by line, and a pin is the SHA-256 of the whole file."""
    body = manifest.model_dump(mode="json")
    body["manifest_digest"] = canonical_digest(body)
    return _canonical(body)


def parse_manifest(data: bytes, version: int, uri: str) -> Manifest:
    """Check and decode a manifest's bytes."""
    where = join_uri(uri, manifest_path(version))
    restore = "restore the file from a copy; no other file can replace it"
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{where} is not JSON ({error})", "the manifest was cut or altered", restore) from None
    if not isinstance(body, dict):
        raise IntegrityError(f"{where} is not a manifest", "expected a JSON object", restore)
    if body.get("schema_version") != SCHEMA_VERSION:
        raise IntegrityError(
            f"{where} has schema version {body.get('schema_version')!r}",
            f"this version of shardmill reads version {SCHEMA_VERSION}",
            "read it with the version of shardmill that wrote it, or a newer one",
        )
    # The digest is over the canonical form; comparing the bytes as well refuses a file that was only reformatted.
    stated = body.pop("manifest_digest", None)
    actual = canonical_digest(body)
    if stated != actual or _canonical({**body, "manifest_digest": stated}) != data:
        raise IntegrityError(f"{where} was altered: digest {actual}", f"expected {stated}", restore)
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise IntegrityError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}", "", restore) from None
    if manifest.version != version:
        raise IntegrityError(f"{where} claims to be version {manifest.version}", f"expected {version}", restore)
    for segment in (*manifest.index_segments, *manifest.ledger_segments):
        check_relative_path(segment.path)
    return manifest


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, indent=1, ensure_ascii=False).encode() + b"\n"


def digested_classes(class_names: Sequence[str], splits: dict[str, SplitInfo]) -> tuple[str, ...]:
    """The classes that the digests cover, sorted by name: those that have an image in any split.

    A class that has lost its last image stays in the label map, and a full build of the same source never sees it.
    """
    counts = [split.class_counts for split in splits.values()]
    return tuple(sorted(name for label, name in enumerate(class_names) if any(each[label] for each in counts)))


def content_digest(
    columns: dict[str, str], classes: Sequence[str], normalization_fingerprint: str, splits: dict[str, SplitInfo]
) -> str:
    """Order-free: columns, classes, normalization, and each split's number of rows and sum of row digests.

    `classes`: the `digested_classes`.
    """
    return canonical_digest(
        {
            "columns": columns,
            "class_names": list(classes),
            "normalization": normalization_fingerprint,
            "splits": {name: [split.num_rows, split.row_digest_sum] for name, split in splits.items()},
        }
    )


def child_of(latest: Manifest, operation: Operation, run_id: str, *, content: Manifest, **changes: Any) -> Manifest:
    """The draft of the version after `latest`, with the rows of `content`; `changes` are further fields of it."""
    return content.model_copy(
        update={
            "version": latest.version + 1,
            "parent_version": latest.version,
            "operation": operation,
            "restored_version": None,
            "expired_versions": latest.expired_versions,
            "commit_id": uuid.uuid4().hex,
            "run_id": run_id,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            **changes,
        }
    )
