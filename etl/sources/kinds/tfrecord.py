"""TFRecord files of tf.Example, as TensorFlow's dataset scripts and TFDS write them."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.annotations import SIZE_FIELDS, ReaderOfMasks, in_column
from etl.sources.columns import EXACT_FLOATS, choose_column, class_of, single_text, text_of, whole_text
from etl.sources.containers import (
    ContainerReader,
    Containers,
    Packing,
    damaged,
    gone,
    image_in,
    open_file,
    packing_of,
    reading,
    refused_if_large,
)
from etl.sources.extra import ExtraColumns
from etl.sources.listed import LISTED_SCHEMA, ListingBatch, batches_of, in_two_passes
from etl.sources.names import TFRECORD_SUFFIXES
from etl.sources.path_labels import splits_of, with_warnings
from etl.sources.unused_labels import named_hints
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats.tf_example import BYTES_LIST, FLOAT_LIST, INT64_LIST, FeatureList, decode_lists
from shardmill.formats.tfrecord import masked_crc
from shardmill.storage import Store, StoredFile
from shardmill.typed_columns import BOX_LABELS, BOXES, LABEL, MASK
from shardmill.values import Rejection, RejectReason, SourceImage
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.config import BoxesConfig, SourceConfig
    from etl.sources import SourceReader


_HEADER, _CRC = struct.Struct("<QI"), struct.Struct("<I")
_MAX_RECORD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `start` is the first byte of its header."""

    start: int
    data: bytes
    is_intact: bool
    """Whether the data match the checksum that follows them."""


def packing_of_records(file: BinaryIO) -> Packing | None:
    """Return the compression of a file, None if it has none, detected by the checksum of its first length.

    A length may look like the first bytes of a compressed file. The file is left at its beginning.
    """
    file.seek(0)
    header = file.read(_HEADER.size)
    file.seek(0)
    is_plain = len(header) == _HEADER.size and masked_crc(header[:8]) == _HEADER.unpack(header)[1]
    return None if is_plain else packing_of(file)


def unpacked_records(file: BinaryIO) -> BinaryIO:
    """The unpacked bytes, or the file itself."""
    packing = packing_of_records(file)
    return file if packing is None else packing.open(file)


def read_records(file: BinaryIO) -> Iterator[Record]:
    """Every record from here on. Raises IntegrityError if the next one cannot be found, or the file ends in one."""
    start = file.tell()
    while (record := read_record(file, start)) is not None:
        yield record
        start += _HEADER.size + len(record.data) + _CRC.size


def read_record(file: BinaryIO, start: int) -> Record | None:
    """The record at byte `start`, None at the end of the file. Raises IntegrityError if there is no record."""
    file.seek(start)
    header = file.read(_HEADER.size)
    if not header:
        return None
    if len(header) < _HEADER.size:
        raise IntegrityError(f"the file ends inside the record at byte {start}")
    length, crc = _HEADER.unpack(header)
    # A length is trusted only after this: it says how much is read.
    if masked_crc(header[:8]) != crc or length > _MAX_RECORD_BYTES:
        is_zlib = start == 0 and header[0] & 0x0F == 8 and int.from_bytes(header[:2], "big") % 31 == 0
        hint = (
            ": it begins like zlib data (TensorFlow's compression_type ZLIB), but only plain or gzip files are "
            "supported"
        )
        raise IntegrityError(f"no record at byte {start}{hint if is_zlib else ''}")
    data = file.read(length)
    end = file.read(_CRC.size)
    if len(end) < _CRC.size:
        raise IntegrityError(f"the file ends inside the record at byte {start}")
    return Record(start, data, masked_crc(data) == _CRC.unpack(end)[0])


# More of one number say no more than two do.
_MAX_TEXTS = 2
_NUM_EXAMPLES = 3
_LABEL = LISTED_SCHEMA.get_field_index("label")


def joined(number: str, text: str) -> str:
    """Both as one label, until all of them are known; either may be empty."""
    return f"{number}\0{text}"


class ClassTexts:
    """Collects the class texts of all records; `named` then turns the labels into `joined` class names."""

    def __init__(self) -> None:
        self._texts: dict[str, set[str]] = {}
        self._names: dict[str, str] = {}

    def look(self, images: pa.Table) -> None:
        """Take in the labels of some images."""
        for label in pc.unique(images.column("label")).drop_null().to_pylist():
            number, _, text = label.partition("\0")
            texts = self._texts.setdefault(number, set()) if number else set()
            if text and len(texts) < _MAX_TEXTS:
                texts.add(text)

    def settle(self) -> None:
        """All labels are known: choose each class's name."""
        called = {number: next(iter(texts)) if len(texts) == 1 else number for number, texts in self._texts.items()}
        times = Counter(called.values())
        self._names = {number: name if times[name] == 1 else f"{name} ({number})" for number, name in called.items()}
        if len(set(self._names.values())) < len(self._names):
            self._names = {number: number for number in called}

    def named(self, images: pa.Table) -> ListingBatch:
        """The images with their final labels."""
        encoded = images.column("label").combine_chunks().dictionary_encode()
        names = pa.array(
            [self._name_of(*label.split("\0", 1)) for label in encoded.dictionary.to_pylist()], pa.string()
        )
        return ListingBatch(images.set_column(_LABEL, LISTED_SCHEMA.field(_LABEL), names.take(encoded.indices)))

    def _name_of(self, number: str, text: str) -> str:
        return text if not number or self._is_one_number else self._names[number]

    @property
    def _is_one_number(self) -> bool:
        """Whether the numbers tell no classes apart, and the texts do."""
        return len(self._texts) == 1 and len(next(iter(self._texts.values()))) > 1

    def warnings(self, number_feature: str, text_feature: str) -> Iterator[str]:
        """Warnings about numbers and texts that do not match."""
        if self._is_one_number:
            yield f"every {number_feature} is {next(iter(self._texts))}, so the classes are those of {text_feature}"
            return
        renamed = [name for number, name in self._names.items() if name not in (number, *self._texts[number])]
        if renamed:
            yield (
                f"several classes have one {text_feature}, and their {number_feature} distinguishes them: "
                f"{_some(sorted(renamed))}"
            )
        varied = [f"{number} ({', '.join(sorted(texts))})" for number, texts in self._texts.items() if len(texts) > 1]
        if varied:
            yield (
                f"{len(varied)} of the classes have images with different {text_feature}, and are named by their "
                f"{number_feature}: {_some(varied)}"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_EXAMPLES} more" if len(names) > _NUM_EXAMPLES else ""
    return ", ".join(map(printable, names[:_NUM_EXAMPLES])) + more


_SIDES = ("xmin", "ymin", "xmax", "ymax")
_SIZE_FEATURES = ("image/width", "image/height")
# As much as TensorFlow's own tools allow for rounding, on either side.
_LEAST_SHARE, _LARGEST_SHARE = -0.1, 1.1


def boxes_of_features(features: Mapping[str, FeatureList], config: BoxesConfig) -> dict[str, Any]:
    """A record's boxes in pixels, by the names of `BoxColumns.of_record`; empty if it has no box.

    Raises ValueError that says what is wrong with them.
    """
    shares = [_side(features, f"{config.field}/{side}") for side in _SIDES]
    counts = [len(each) for each in shares]
    if len(set(counts)) > 1:
        raise ValueError(f"its features {config.field}/{', /'.join(_SIDES)} have {', '.join(map(str, counts))} values")
    sizes = [_side(features, name) for name in _SIZE_FEATURES]
    width, height = (size[0] if len(size) == 1 and isinstance(size[0], int) else 0 for size in sizes)
    if counts[0] and not (width > 0 and height > 0):
        raise ValueError(f"no {' and '.join(_SIZE_FEATURES)}, which boxes in shares of them need")
    for odd in (share for each in shares for share in each):
        if isinstance(odd, float) and _LEAST_SHARE <= odd <= _LARGEST_SHARE:
            continue
        raise ValueError(f"a box has {odd!r}, expected shares of width and height, from 0 to 1")
    record: dict[str, Any] = {
        BOXES: [[x0 * width, y0 * height, x1 * width, y1 * height] for x0, y0, x1, y1 in zip(*shares, strict=True)]
    }
    if config.labels_field:
        labels = _side(features, config.labels_field)
        record[BOX_LABELS] = [each if isinstance(each, int | float) else text_of(bytes(each)) for each in labels]
    return record | (dict(zip(SIZE_FIELDS, (width, height), strict=True)) if width and height else {})


def _side(features: Mapping[str, FeatureList], name: str) -> Sequence[Any]:
    """Writers leave a feature without values out."""
    return features[name].values if name in features else ()


# In the order of preference.
IMAGE_FEATURES = ("image/encoded", "image", "image_raw")
LABEL_FEATURES = ("image/class/text", "image/class/label", "image/class/synset", "label", "class")
_TEXT_FEATURE, _NUMBER_FEATURES = "image/class/text", ("image/class/label", "image/class/synset")

Features = Mapping[str, FeatureList]


def image_of(features: Features, name: str) -> tuple[bytes | None, str]:
    """The encoded image of a record, or its mask; or None and what is wrong with it."""
    feature = features.get(name) or FeatureList(BYTES_LIST, ())
    if feature.kind != BYTES_LIST or not feature.values:
        return None, f"no feature {name} of bytes"
    if len(feature.values) > 1:
        return None, f"{name} has {len(feature.values)} values, expected one encoded image"
    return bytes(feature.values[0]), ""


@dataclass(frozen=True, slots=True)
class FeatureNames:
    """The records' own names; None for what the first of them lacks."""

    image: str
    label: str | None
    text: str | None
    """Name of the class, if `label` is its number."""
    key: str | None
    has_classes: bool
    """Whether classes are asked for."""
    hints: tuple[str, ...] = ()
    """Features that seem to be labels, if none is taken."""

    @property
    def wanted(self) -> frozenset[str]:
        """The features that are read of each record."""
        unexpected = LABEL_FEATURES if self._expects_none else ()
        return frozenset(name for name in (self.image, self.label, self.text, self.key, *unexpected) if name)

    @property
    def _expects_none(self) -> bool:
        return self.has_classes and self.label is None

    def entry(self, image: SourceImage, features: Features, split: str | None) -> SourceImage | Rejection:
        """The record as a listed image, or why it is refused. Raises UsageError for a label that came unexpected."""
        data, problem = image_of(features, self.image)
        if data is None:
            return image.rejected(RejectReason.BAD_ROW, problem, "list")
        image = replace(image, size_bytes=len(data), split=split)
        if self.key is not None:
            key, problem = _key_of(features, self.key)
            if key is None:
                return image.rejected(RejectReason.BAD_ROW, problem, "list")
            image = replace(image, key=whole_text(key))
        if self._expects_none:
            self._refuse_label(image, features)
        if self.label is None:
            return image
        label, problem = class_of(_values(features, self.label), f"feature {self.label}")
        if self.text is not None:
            text = _only_text(features, self.text)
            label = joined(label or "", text) if label or text else None
        return image.rejected(RejectReason.BAD_LABEL, problem, "list") if label is None else replace(image, label=label)

    def _refuse_label(self, image: SourceImage, features: Features) -> None:
        label = next((name for name in LABEL_FEATURES if _values(features, name)), None)
        if label is not None:
            raise UsageError(
                f"{printable(image.key)} has the feature {label}, but the first record has no label",
                "expected a label in each record, or in none",
                f"set source.label_field={label}: records without it are then rejected",
            )


def choose_names(config: SourceConfig, features: Features, file: str) -> FeatureNames:
    """The names by the first record's features. Raises UsageError if it has no image, or not what the config names."""
    names = [name for name in features if features[name].values]
    image = choose_column(names, config.image_field, IMAGE_FEATURES, "image_field")
    if image is None:
        raise UsageError(
            f"the first record of {printable(file)} has the features {', '.join(map(printable, names[:20]))}",
            f"expected an encoded image, called {' or '.join(IMAGE_FEATURES)}",
            "name it with source.image_field",
        )
    has_classes = config.label_kind == "class"
    label = choose_column(names, config.label_field, LABEL_FEATURES, "label_field") if has_classes else None
    number = next((name for name in _NUMBER_FEATURES if name in names), None)
    # Two classes may have one text, unless the config says that texts are what is meant.
    text = label if label == _TEXT_FEATURE and number and not config.label_field else None
    key = choose_column(names, config.key_field, (), "key_field")
    hints = tuple(named_hints(names, file)) if has_classes and label is None else ()
    return FeatureNames(image, number if text else label, text, key, has_classes, hints)


def _key_of(features: Features, name: str) -> tuple[str | None, str]:
    values = _values(features, name)
    if any(isinstance(value, float) and abs(value) >= EXACT_FLOATS[32] for value in values):
        return (
            None,
            f"feature {name} is a float of 32 bits with more digits than that keeps; expected an integer or text",
        )
    return single_text(values, f"feature {name}")


def _values(features: Features, name: str) -> list:
    return list(features[name].values) if name in features else []


def _only_text(features: Features, name: str) -> str:
    values = _values(features, name)
    found = text_of(bytes(values[0])) if len(values) == 1 and not isinstance(values[0], int | float) else None
    return (found or "").replace("\0", "")


# Records of a block are read by one task, one after the other; a packed file is unpacked from its start for each block.
_BLOCK_RECORDS, _PACKED_BLOCK_RECORDS = 64, 4_096


class TfrecordSource:
    """Every record of the TFRecord files that `source.uri` names: a folder, one file, or a pattern."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config.without_box_labels
        self._files = Containers(config.uri, TFRECORD_SUFFIXES)
        self._extra = ExtraColumns.of_source(config)
        self._has_found_boxes = False
        self.uri = self._files.uri

    def open(self, max_source_bytes: int) -> SourceReader:
        """Reads records by their places."""
        config = self._config
        images = self._reader((config.image_field,) if config.image_field else IMAGE_FEATURES, max_source_bytes)
        if not config.mask_field:
            return images
        return ReaderOfMasks(images, self._reader((config.mask_field,), max_source_bytes))

    def _reader(self, names: Sequence[str], max_bytes: int) -> ContainerReader[BinaryIO]:
        """Of the first of these features that a record has."""

        def take(file: BinaryIO, image: SourceImage) -> bytes | Rejection:
            features = _features_of(read_record(file, image.place), frozenset(names))
            name = next((name for name in names if name in features and features[name].values), names[0])
            data, problem = image_of(features, name)
            if data is None:
                return image.rejected(RejectReason.BAD_ROW, problem)
            return refused_if_large(image, len(data), max_bytes) or data

        return ContainerReader(self._files.store, lambda stream, file: unpacked_records(stream), take)

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no file, no such feature in the first record, or no box in any. Damage is a
        rejection.
        """
        found = self._files.find()
        yield ListingBatch(LISTED_SCHEMA.empty_table(), found.rejections)
        names = self._names_of_first(found.containers)
        splits = splits_of(file.path for file in found.containers)
        entries = self._with_boxes(
            entry for file in found.containers for entry in self._entries(file, names, splits.of[file.path])
        )
        batches = with_warnings(batches_of(entries, lambda: self._extra.types), splits.look_alikes)
        if names is None or names.text is None or names.label is None:
            yield from batches
            hints = names.hints if names is not None else ()
            yield ListingBatch(LISTED_SCHEMA.empty_table(), label_hints=hints)
            return
        texts = ClassTexts()

        def settled() -> Callable[[pa.Table], ListingBatch]:
            texts.settle()
            return texts.named

        yield from in_two_passes(batches, texts.look, settled)
        yield ListingBatch(LISTED_SCHEMA.empty_table(), warnings=tuple(texts.warnings(names.label, names.text)))

    def _names_of_first(self, files: Sequence[StoredFile]) -> FeatureNames | None:
        """By the first sound record that there is; None without any."""
        for file in files:
            for image, data in _list_file(self._files.store, file):
                with suppress(IntegrityError):
                    if not isinstance(image, Rejection):
                        return choose_names(self._config, decode_lists(memoryview(data)), file.path)
        return None

    def _entries(
        self, file: StoredFile, names: FeatureNames | None, split: str | None
    ) -> Iterator[SourceImage | Rejection]:
        """Each record of a file as an image, or why it is refused."""
        for image, data in _list_file(self._files.store, file):
            if isinstance(image, Rejection):
                yield image
                continue
            try:
                features = decode_lists(memoryview(data), None if names is None else names.wanted)
                assert names is not None, "a record that is sound has given the names"
                entry = names.entry(image, features, split)
                yield self._with_extra(entry, data) if self._extra.has_values else entry
            except IntegrityError as error:
                yield image.rejected(RejectReason.DAMAGED_CONTAINER, str(error), "list")

    def _with_extra(self, entry: SourceImage | Rejection, data: bytes) -> SourceImage | Rejection:
        if isinstance(entry, Rejection):
            return entry
        features, types = decode_lists(memoryview(data)), self._extra.types
        label = self._config.label_field or next((name for name in LABEL_FEATURES if name in features), "")
        own_names = {name: label if name == LABEL else name for name in self._extra.given}
        found = {
            name: _typed(features[own], self._extra.given[name] or types.get(name, ""))
            for name, own in own_names.items()
            if own in features
        }
        values = {name: value for name, (value, _) in found.items()}
        try:
            values |= self._annotations(features)
        except ValueError as error:
            return entry.rejected(RejectReason.BAD_ROW, str(error), "list")
        return self._extra.of_record(entry, values, {name: kind for name, (_, kind) in found.items()})

    def _annotations(self, features: Features) -> dict[str, Any]:
        """The boxes of a record and the place of its mask. Raises ValueError that says what is wrong with them."""
        values: dict[str, Any] = {}
        if self._config.boxes.field:
            values |= boxes_of_features(features, self._config.boxes)
            self._has_found_boxes |= bool(values[BOXES])
        if self._config.mask_field:
            mask, problem = image_of(features, self._config.mask_field)
            if mask is None:
                raise ValueError(problem)
            values[MASK] = in_column(self._config.mask_field)
        return values

    def _with_boxes(self, entries: Iterator[SourceImage | Rejection]) -> Iterator[SourceImage | Rejection]:
        """The same entries. Raises UsageError behind them if boxes are asked for, and none of many images has one."""
        num_images = 0
        for entry in entries:
            num_images += not isinstance(entry, Rejection)
            yield entry
        field = self._config.boxes.field
        if field and num_images and not self._has_found_boxes:
            raise UsageError(
                f"source.boxes.field = {field!r}, but no record of {self.uri} has a box there",
                f"expected features {field}/xmin, /ymin, /xmax and /ymax", "correct source.boxes.field",
            )  # fmt: skip


def _typed(feature: FeatureList, known: str) -> tuple[Any, str]:
    """The value of a feature and its type: a list if it has not exactly one value, or had not in a record before."""
    scalar = {BYTES_LIST: "string", FLOAT_LIST: "float32", INT64_LIST: "int64"}[feature.kind]
    values = [_utf8_text(each) if scalar == "string" else each for each in feature.values]
    if known.startswith("list<") or len(values) > 1:
        return values, f"list<{scalar}>"
    return (values[0], scalar) if values else (None, "")


def _utf8_text(value: memoryview) -> str | bytes:
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        return bytes(value)  # it will be a problem of its record


def _list_file(store: Store, file: StoredFile) -> Iterator[tuple[SourceImage | Rejection, bytes]]:
    """Each record with its bytes; a damaged one is a rejection, and so is all where the next is lost."""
    number, where = 0, ""
    try:
        with open_file(store, file) as stream, reading(file.path):
            packing = packing_of_records(stream)
            where = f" of its unpacked {packing.name} data" if packing else ""
            block_records = _PACKED_BLOCK_RECORDS if packing else _BLOCK_RECORDS
            for number, record in enumerate(read_records(unpacked_records(stream))):
                image = image_in(file, number, record.start, number // block_records)
                problem = "" if record.is_intact else "its record has another checksum"
                yield image.rejected(RejectReason.DAMAGED_CONTAINER, problem, "list") if problem else image, record.data
    except FileNotFoundError:
        yield gone(file), b""
    except IntegrityError as error:
        detail = f"{error}{where}; the records before that, about {number + 1}, are listed"
        yield damaged(file, detail), b""


def _features_of(record: Record | None, wanted: Collection[str]) -> Features:
    """Raises IntegrityError if the record is gone, has another checksum, or is not a tf.Example."""
    if record is None or not record.is_intact:
        raise IntegrityError("its record has another checksum" if record else "the file ends before its record")
    return decode_lists(memoryview(record.data), wanted)
