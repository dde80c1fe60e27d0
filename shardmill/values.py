"""Frozen values that describe one image on its way from the listing to the training step.

Shape legend: N batch, H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

Scalar = int | float | str | bool
Value = Scalar | list[Scalar] | None
"""One value of a column that a dataset has beside ours; None for null. A list has no nulls."""

LabelKind = Literal["class", "multi_label", "float", "float_vector"]
"""The kind of an image's label."""

SourceLabelKind = LabelKind | Literal["none"]
"""The kind of labels to read from a source: one of the label kinds, or none even if the source has labels."""


class RejectReason(StrEnum):
    """The closed list of reasons in the rejects ledger. `docs/rejects.md` explains each one."""

    # Found while listing, before any byte is read
    NOT_AN_IMAGE_NAME = "not_an_image_name"
    PATH_NOT_UTF8 = "path_not_utf8"
    DANGLING_SYMLINK = "dangling_symlink"
    SYMLINK_OUTSIDE_ROOT = "symlink_outside_root"
    SYMLINK_DIRECTORY = "symlink_directory"
    SYMLINK_LOOP = "symlink_loop"
    NOT_REGULAR_FILE = "not_regular_file"
    BAD_LABEL = "bad_label"
    UNKNOWN_CLASS = "unknown_class"
    TOO_LARGE_BYTES = "too_large_bytes"
    DUPLICATE_KEY = "duplicate_key"
    BAD_ROW = "bad_row"
    # Found while reading
    MISSING = "missing"
    UNREADABLE = "unreadable"
    SOURCE_CHANGED = "source_changed"
    OPTED_OUT = "opted_out"
    DAMAGED_CONTAINER = "damaged_container"
    # Found while decoding
    EMPTY_FILE = "empty_file"
    NOT_AN_IMAGE = "not_an_image"
    TRUNCATED = "truncated"
    CORRUPT_SCAN = "corrupt_scan"
    CHECKSUM = "checksum"
    BAD_HEADER = "bad_header"
    UNSUPPORTED_FORMAT = "unsupported_format"
    UNSUPPORTED_MODE = "unsupported_mode"
    UNSAFE_FORMAT = "unsafe_format"
    TOO_MANY_PIXELS = "too_many_pixels"
    TOO_SMALL = "too_small"
    ASPECT_RATIO = "aspect_ratio"
    DECODER_ERROR = "decoder_error"
    DECODER_CRASH = "decoder_crash"
    DECODER_TIMEOUT = "decoder_timeout"
    DECODER_MEMORY = "decoder_memory"
    ANNOTATED_SIZE = "annotated_size"
    BAD_MASK = "bad_mask"
    # Found once all images were read
    DUPLICATE_CONTENT = "duplicate_content"


# Transient: these describe a moment, not the input; another run may get another answer.
TRANSIENT_REASONS = frozenset({RejectReason.MISSING, RejectReason.UNREADABLE, RejectReason.SOURCE_CHANGED})
# What is wrong with an image's boxes or mask may be corrected, and nothing that is listed of the image shows it.
ANNOTATION_REASONS = frozenset({RejectReason.ANNOTATED_SIZE, RejectReason.BAD_MASK})

NO_SUCH_FILE = "no such file"
"""Detail of an input that is `missing` though it has not vanished: a table names it, and nothing else was known of it.
It counts as rejected, not as a sign that the source changes at this moment."""
OTHER_SIZE = "size_bytes of its row"
"""Beginning of the detail of a file that is not as large as its table says: it, or the table, is of another time."""

# Not faults, so not counted against `etl.max_reject_fraction`: files that were never meant as images, and small images
# where the config asks for larger ones (`etl.min_source_side_pixels`, `etl.min_source_bytes`; both are off by default).
REASONS_OUTSIDE_REJECT_FRACTION = frozenset(
    {RejectReason.DUPLICATE_CONTENT, RejectReason.NOT_AN_IMAGE_NAME, RejectReason.TOO_SMALL}
)


UNKNOWN_SIZE = -1
"""Size of a source that its listing does not tell, such as a row of a table of names."""
NO_BLOCK = -1
"""Block of an image that is all of its container: a file that a table names, in a row with a key of its own."""


@dataclass(frozen=True, slots=True)
class SourceImage:
    """One listed input, before any of its bytes were read."""

    key: str
    """Path relative to the source root, `/`-separated; bytes that are not UTF-8 are kept as surrogate escapes.

    For an image in a container: the container's path, NUL, and the member's name, row number or key.
    """
    size_bytes: int
    """Listed size, or `UNKNOWN_SIZE`."""
    mtime_ns: int = 0
    etag: str = ""
    label: str | None = None
    """Class name, or None in a dataset without labels."""
    split: str | None = None
    """Named by a `train/`, `val/`, `test/` folder; None means that the content hash decides."""
    sample_id: int = 0
    """Signed 64-bit id, derived from `key` and made unique over the listing."""
    container: str = ""
    """The file that holds the image, relative to the source root; empty if the image is a file of its own, at `key`."""
    place: int = 0
    """Row number or byte offset in the container; the row of the table that lists a file."""
    block: int = 0
    """Images of one block of a container are read by one work unit, so that no archive is scanned twice.

    `NO_BLOCK` for a container that is itself the image: each row that names it reads it whole.
    """
    extra: str = ""
    """The values of the extra columns, as `encode_values` writes them; empty in a dataset without any."""
    known_sha256: str = ""
    known_mask_sha256: str = ""
    """Of its row in the latest version, listed with another size or time; empty unless bytes are compared."""

    @property
    def is_in_block(self) -> bool:
        """Whether it is read from a container, beside its neighbours there."""
        return self.container != "" and self.block != NO_BLOCK

    def rejected(self, reason: RejectReason, detail: str, stage: str = "read", source_sha256: str = "") -> Rejection:
        """The ledger's row for this input."""
        return Rejection(
            self.key, reason, detail, self.size_bytes, self.mtime_ns, self.etag, source_sha256=source_sha256,
            stage=stage, container=self.container, place=self.place, block=self.block,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ImageSample:
    """One accepted, normalized image: what a row of a shard stores."""

    image: bytes
    """The stored encoding (`jpeg`, `png`, `webp`, or `raw` uint8 HWC)."""
    height: int
    width: int
    channels: int
    source_sha256: str
    channel_sums: tuple[int, ...]
    """Per channel, the exact sum of the normalized uint8 pixels before encoding."""
    channel_square_sums: tuple[int, ...]
    notes: tuple[str, ...] = ()
    source_height: int = 0
    """Height of the upright source, before it was cropped and resized; 0 without an image."""
    source_width: int = 0
    source_bytes: int = 0
    """Size as read; a listing may not have known it."""
    laplacian_square_sum: int | None = None
    """Sum of the squared Laplacian of the normalized pixels' luma: little in a blurred image. None without an
    image."""
    difference_hash: int | None = None
    """`shardmill.images.look.difference_hash`, as a signed 64-bit number; None if it is too plain for one."""
    orientation: int = 1
    """EXIF's, by which the source was turned upright. A row does not keep it."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """One refused input, with a reason from the closed list: a row of the ledger."""

    key: str
    reason: RejectReason
    detail: str
    size_bytes: int = 0
    mtime_ns: int = 0
    etag: str = ""
    source_sha256: str = ""
    stage: str = "decode"
    """`list`, `read` or `decode`."""
    container: str = ""
    """Container from which the image can be read again, as in its `SourceImage`, like `place` and `block`."""
    place: int = 0
    block: int = 0

    @property
    def source(self) -> SourceImage:
        """The input as it was listed, as far as a reader needs it."""
        where = {"container": self.container, "place": self.place, "block": self.block}
        return SourceImage(self.key, self.size_bytes, self.mtime_ns, self.etag, **where)


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """One run of rows that is read at once: a Parquet row group, or a run of TFRecords."""

    start: int
    """First byte of the chunk in its shard."""
    num_bytes: int
    num_rows: int
    image_bytes: int
    """Sum of the stored images' sizes; equal in every format, so plans may depend on it."""
    crc32c: int
    content_sha256: str
    """SHA-256 over the chunk's row digests in order; equal in every format."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One immutable file of one split, written by one attempt at one work unit: all but its chunks."""

    split: str
    format: str
    path: str
    """Relative to the dataset root."""
    size_bytes: int
    sha256: str
    num_rows: int
    footer_start: int
    footer_bytes: int
    footer_crc32c: int
    rows_path: str
    rows_bytes: int
    rows_sha256: str


@dataclass(frozen=True, slots=True)
class ShardInfo(ShardFile):
    """A shard with its chunks."""

    chunks: tuple[ChunkInfo, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of a training step, in planned order.

    Padding rows have weight 0, label 0 and sample id 0; their pixels repeat another row's.
    """

    images_NHWC: np.ndarray
    labels_N: np.ndarray
    """Class numbers, int64; shares of classes, float32 (N, classes), if rows are mixed (`shardmill.augment.mixing`).
    Labels of other kinds are float32: multi-labels 0 or 1, (N, classes); floats (N,); vectors (N, length)."""
    weights_N: np.ndarray
    sample_ids_N: np.ndarray
    epoch: int
    step: int
    extra: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values of each extra column, one per row: a number, text or list; None for null and padding."""

    def take(self, rows: slice | np.ndarray) -> Batch:
        """These rows in this order; those of a slice are not copied."""
        numbers = range(len(self.labels_N))[rows] if isinstance(rows, slice) else rows
        return replace(
            self,
            images_NHWC=self.images_NHWC[rows],
            labels_N=self.labels_N[rows],
            weights_N=self.weights_N[rows],
            sample_ids_N=self.sample_ids_N[rows],
            extra={name: [values[number] for number in numbers] for name, values in self.extra.items()},
        )


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A position in the planned order: `step` steps of `epoch` are done. With the plan's fingerprint, all of resume."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class DatasetPin:
    """A dataset version, resolved once by a job's driver and passed to every rank, so that all read the same one."""

    uri: str
    version: int
    manifest_sha256: str
    """SHA-256 of the manifest file."""


@dataclass(frozen=True, slots=True)
class PredictedBy:
    """The model whose answers a version holds in place of images."""

    models_uri: str
    export: int
    weights_sha256: str
    trained_on: DatasetPin
    columns: tuple[str, ...]
    """The columns that it has made; the others are those of any dataset, or of the source."""
    top: int
    layer: str
    """Layer whose output each row holds as `embedding`; empty for none."""
    predicted: DatasetPin | None = None
    """The dataset version of which every image was predicted; None for another source."""

    def __str__(self) -> str:
        return f"{self.models_uri}@{self.export}"


@dataclass(frozen=True, slots=True)
class Nonce:
    """A file that only its driver knows of; plain text, so that it travels to ranks and tasks as JSON."""

    uri: str
    """The root that hosts must share with the driver."""
    path: str
    value: str
