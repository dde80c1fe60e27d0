"""The rows that every shard format writes and reads, and the one rule that cuts them into chunks and shards.

Where rows are cut follows from the stored image bytes alone, so all formats of a dataset have the same chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any, overload

import numpy as np

from shardmill.ids import row_digest
from shardmill.typed_columns import (
    BOX_LABEL_TYPE,
    BOX_TYPE,
    LABEL_TYPES,
    MASK_TYPE,
    ExtraColumn,
    stored_labels,
    stored_values,
    vector_size,
)
from shardmill.values import ImageSample, LabelKind, SourceImage, Value

OWN_COLUMNS = ("image", "sample_id", "label", "height", "width", "source", "source_sha256", "notes")
"""The columns that every dataset has; all others are the user's."""
OWN_NAMES = (
    "class_name", "source_bytes", "source_mtime_ns", "source_etag", "source_height", "source_width",
    "source_read_bytes", "row_sha256", "channel_sums", "channel_square_sums", "laplacian_square_sum",
    "difference_hash", "extra", "listed_extra", "images", "labels", "weights", "sample_ids",
)  # fmt: skip
"""What else the metadata and the batches of every dataset call their own."""
VECTOR = "embedding"
"""Of predictions: the column of each row's vector, whose bytes are in the place of an image's."""
NO_IMAGES = ""
"""In place of an encoding: rows of predictions."""

OWN_FEATURES = (
    "image/encoded", "image/format", "image/height", "image/width", "image/channels", "image/filename",
    "image/key/sha256", "image/notes", "image/sample_id", "image/class/label", "image/class/text",
)  # fmt: skip
"""The features of tf.Example that store them."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One row of a shard: where it came from, its class number, and the normalized image."""

    source: SourceImage
    label_id: int | None
    sample: ImageSample
    digest: bytes
    """`row_digest` of the row; every format, the segments and the manifest's sums take it from here."""
    listed_extra: str = ""
    """Of a row with boxes or a mask: the text of its values as its source lists them, before these have moved."""
    mask: bytes = b""

    @classmethod
    def of(
        cls, source: SourceImage, label_id: int | None, sample: ImageSample, listed_extra: str = "", mask: bytes = b""
    ) -> StoredRow:
        """The row of one accepted image. The text of its values names the mask by its digest."""
        digest = row_digest(source.sample_id, source.label, sample.image, source.extra)
        return cls(source, label_id, sample, digest, listed_extra, mask)

    @property
    def image_bytes(self) -> int:
        return len(self.sample.image)


@dataclass(frozen=True, slots=True)
class RowSchema:
    """The properties that all rows of a dataset share."""

    encoding: str
    one_shape_HWC: tuple[int, int, int] | None
    """Shape of all images; None if their sizes differ."""
    class_names: tuple[str, ...]
    """The label map: class number = position. Empty in a dataset without labels."""
    extra: tuple[ExtraColumn, ...] = ()
    """The user's own columns, sorted by name."""
    label_type: str = LABEL_TYPES["class"]
    """Type of the column `label`; see `LABEL_TYPES`."""
    vector_size: int = 0
    """Of rows without images: the length of each row's vector."""

    @property
    def has_images(self) -> bool:
        """Whether rows hold images; else they are predictions."""
        return self.encoding != NO_IMAGES

    @property
    def has_class(self) -> bool:
        """Whether a label is one class, or none; others are among the rows' values."""
        return self.label_type == LABEL_TYPES["class"]

    @property
    def label_kind(self) -> LabelKind:
        """Kind of the labels; a dataset without labels has the kind `class`, and no class names."""
        if vector_size(self.label_type):
            return "float_vector"
        return next(kind for kind, name in LABEL_TYPES.items() if name == self.label_type)

    @property
    def has_values(self) -> bool:
        """Whether rows have a text of values (`SourceImage.extra`)."""
        return bool(self.extra) or not self.has_class

    @property
    def has_boxes(self) -> bool:
        """Whether rows have boxes."""
        return any(column.type == BOX_TYPE for column in self.extra)

    @property
    def has_box_labels(self) -> bool:
        """Whether boxes have classes."""
        return any(column.type == BOX_LABEL_TYPE for column in self.extra)

    @property
    def has_mask(self) -> bool:
        """Whether each row has a mask."""
        return any(column.type == MASK_TYPE for column in self.extra)

    @property
    def has_annotations(self) -> bool:
        """Whether rows have what moves with the pixels, so that it differs from what a source lists."""
        return self.has_boxes or self.has_mask

    def values_of(self, texts: Iterable[str]) -> list[dict[str, Value]]:
        """The values of the extra columns that a shard stores, from the rows' texts; of a mask its digest."""
        numbers = {name: number for number, name in enumerate(self.class_names)}
        return [stored_values(text, self.extra, numbers) for text in texts]

    def labels_of(self, rows: Sequence[StoredRow]) -> list[Value]:
        """The labels that a shard stores: class numbers, lists of them, floats or vectors."""
        if self.has_class:
            return [row.label_id for row in rows]
        return stored_labels([row.source.extra for row in rows], self.label_type, self.class_names)

    def class_counts(self, label_ids: Iterable[int | None], texts: Iterable[str]) -> tuple[int, ...]:
        """Rows of each class; a row with several classes counts in each. `texts`: of the rows' values."""
        found = Counter(label_ids)
        if self.label_type == LABEL_TYPES["multi_label"]:
            labels = stored_labels(list(texts), self.label_type, self.class_names)
            found = Counter(number for numbers in labels for number in numbers)  # pyright: ignore
        return tuple(found[number] for number in range(len(self.class_names)))


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A run of bytes in a shard."""

    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WrittenShard:
    """Positions of the chunks and the footer that a format wrote."""

    chunks: tuple[ByteRange, ...]
    footer: ByteRange


class Slices(Sequence[memoryview]):
    """Values where they lie in the bytes of a chunk: value n is `data[starts_N[n] : stops_N[n]]`."""

    def __init__(self, data: bytes | memoryview, starts_N: np.ndarray, stops_N: np.ndarray) -> None:
        self.data = memoryview(data)
        self.starts_N = starts_N
        self.stops_N = stops_N

    def __len__(self) -> int:
        return len(self.starts_N)

    @overload
    def __getitem__(self, number: int) -> memoryview: ...
    @overload
    def __getitem__(self, number: slice) -> Slices: ...
    def __getitem__(self, number: int | slice) -> memoryview | Slices:
        if isinstance(number, slice):
            return Slices(self.data, self.starts_N[number], self.stops_N[number])
        return self.data[self.starts_N[number] : self.stops_N[number]]


class Scattered(Sequence[memoryview]):
    """Values where they lie in the bytes of several chunks: value n is `data[slots_N[n]][starts_N[n] : stops_N[n]]`."""

    def __init__(
        self, data: Sequence[memoryview], slots_N: np.ndarray, starts_N: np.ndarray, stops_N: np.ndarray
    ) -> None:
        self.data = data
        self.slots_N = slots_N
        self.starts_N = starts_N
        self.stops_N = stops_N

    def __len__(self) -> int:
        return len(self.slots_N)

    @overload
    def __getitem__(self, number: int) -> memoryview: ...
    @overload
    def __getitem__(self, number: slice) -> Scattered: ...
    def __getitem__(self, number: int | slice) -> memoryview | Scattered:
        if isinstance(number, slice):
            return Scattered(self.data, self.slots_N[number], self.starts_N[number], self.stops_N[number])
        return self.data[self.slots_N[number]][self.starts_N[number] : self.stops_N[number]]

    def __iter__(self) -> Iterator[memoryview]:
        data = self.data
        places = zip(self.slots_N.tolist(), self.starts_N.tolist(), self.stops_N.tolist(), strict=True)
        return (data[slot][start:stop] for slot, start, stop in places)


def slices_of(values: Sequence[bytes | memoryview]) -> Slices:
    """The values as slices of one run of bytes: a copy, unless they are already."""
    if isinstance(values, Slices):
        return values
    stops_N = np.cumsum([len(value) for value in values], dtype=np.int64)
    return Slices(b"".join(values), np.append(0, stops_N[:-1]), stops_N)


class Texts(Sequence[str]):
    """Texts in UTF-8 that are found and decoded when they are asked for, which most never are."""

    def __init__(self, find: Callable[[], Sequence[bytes | memoryview]], num_texts: int) -> None:
        self._find = find
        self._num_texts = num_texts

    @cached_property
    def _encoded(self) -> Sequence[bytes | memoryview]:
        return self._find()

    def __len__(self) -> int:
        return self._num_texts

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(self._num_texts))]
        return str(self._encoded[number], "utf-8")


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """One chunk as read back, still encoded."""

    images: Sequence[bytes | memoryview]
    """`Slices` are the fastest for readers."""
    labels_N: np.ndarray
    """Class numbers, int64, -1 in a dataset without labels; else float32, or lists of class numbers as objects."""
    sample_ids_N: np.ndarray
    sources: Sequence[str]
    extra: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    """The values of each extra column."""


@dataclass(frozen=True, slots=True)
class ShardFormat:
    """A shard format: how it writes a whole shard, and how it reads one chunk from bytes that were verified before."""

    suffix: str
    write_shard: Callable[[IO[bytes], Sequence[Sequence[StoredRow]], RowSchema], WrittenShard]
    """Write all chunks to an empty file that can be read and sought."""
    open_footer: Callable[[ByteRange, bytes], object]
    """Parse a shard's footer once; what it returns is passed to every `read_chunk` of that shard."""
    read_chunk: Callable[[object, int, ByteRange, Any, RowSchema], ChunkRows]
    """(footer, number of the chunk in its shard, its range, its bytes, schema) -> rows, or IntegrityError."""
    takes_views: bool = False
    """Whether a chunk's bytes may also be a memoryview: of memory that is used again when nothing refers to it."""


# What a row without image and vector takes at least.
_ROW_BYTES = 128


class ChunkCutter:
    """The rule that cuts rows into chunks, for rows that come one by one: a chunk is closed as soon as its images reach
    `chunk_bytes`.
    """

    # Closed by size alone, never by a limit of rows: so chunks are equal in every format, and so are plans.
    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._rows: list[StoredRow] = []
        self._num_bytes = 0

    def add(self, row: StoredRow) -> list[StoredRow]:
        """The chunk that this row closes; empty if it closes none."""
        self._rows.append(row)
        self._num_bytes += row.image_bytes or _ROW_BYTES
        return self.rest() if self._num_bytes >= self._chunk_bytes else []

    def rest(self) -> list[StoredRow]:
        """The rows of the chunk that is open, which is closed."""
        rows, self._rows, self._num_bytes = self._rows, [], 0
        return rows


def cut_chunks(rows: Iterable[StoredRow], chunk_bytes: int) -> Iterable[list[StoredRow]]:
    """The chunks of rows that come in order; see `ChunkCutter`."""
    cutter = ChunkCutter(chunk_bytes)
    for row in rows:
        if chunk := cutter.add(row):
            yield chunk
    if chunk := cutter.rest():
        yield chunk


def cut_shards(chunks: Iterable[list[StoredRow]], shard_max_bytes: int) -> Iterable[list[list[StoredRow]]]:
    """Runs of chunks, each closed before its images would exceed `shard_max_bytes` (one chunk always fits)."""
    shard: list[list[StoredRow]] = []
    size = 0
    for chunk in chunks:
        chunk_size = sum(row.image_bytes or _ROW_BYTES for row in chunk)
        if shard and size + chunk_size > shard_max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(chunk)
        size += chunk_size
    if shard:
        yield shard
