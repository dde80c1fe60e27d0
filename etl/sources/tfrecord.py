"""TFRecord files of tf.Example, as TensorFlow's dataset scripts and TFDS write them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa

from etl.sources.class_texts import ClassTexts
from etl.sources.containers import ContainerReader, Containers, damaged, gone, refused_if_large
from etl.sources.extra import ExtraColumns
from etl.sources.feature_boxes import boxes_of_features
from etl.sources.features import IMAGE_FEATURES, LABEL_FEATURES, FeatureNames, Features, choose_names, image_of
from etl.sources.file_splits import splits_of, with_warnings
from etl.sources.listed import LISTED_SCHEMA, ListingBatch, batches_of
from etl.sources.mask_places import ReaderOfMasks, in_column
from etl.sources.names import TFRECORD_SUFFIXES
from etl.sources.packing import reading
from etl.sources.records import Record, packing_of_records, read_record, read_records, unpacked_records
from etl.sources.spool import in_two_passes
from etl.sources.stored_file import open_file
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats.tf_example import BYTES_LIST, FLOAT_LIST, INT64_LIST, FeatureList, decode_lists
from shardmill.storage import Store, StoredFile
from shardmill.typed_columns import BOXES, LABEL, MASK
from shardmill.values import Rejection, RejectReason, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig
    from etl.sources import SourceReader

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
            signs = names.signs if names is not None else ()
            yield ListingBatch(LISTED_SCHEMA.empty_table(), label_signs=signs)
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
        own_names = {name: self._label_feature(features) if name == LABEL else name for name in self._extra.given}
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
        text, problem = self._extra.of_record(
            values, entry.container, {name: kind for name, (_, kind) in found.items()}
        )
        return entry.rejected(RejectReason.BAD_ROW, problem, "list") if problem else replace(entry, extra=text)

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

    def _label_feature(self, features: Mapping[str, FeatureList]) -> str:
        usual = (name for name in LABEL_FEATURES if name in features)
        return self._config.label_field or next(usual, "")


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
                image = _image_at(file, record.start, number, number // block_records)
                problem = "" if record.is_intact else "its record has another checksum"
                yield image.rejected(RejectReason.DAMAGED_CONTAINER, problem, "list") if problem else image, record.data
    except FileNotFoundError:
        yield gone(file), b""
    except IntegrityError as error:
        detail = f"{error}{where}; the records before that, about {number + 1}, are listed"
        yield damaged(file, detail), b""


def _image_at(file: StoredFile, start: int, number: int, block: int) -> SourceImage:
    return SourceImage(
        key=f"{file.path}\0{number}",
        size_bytes=0,
        mtime_ns=file.mtime_ns,
        etag=file.etag,
        container=file.path,
        place=start,
        block=block,
    )


def _features_of(record: Record | None, wanted: Collection[str]) -> Features:
    """Raises IntegrityError if the record is gone, has another checksum, or is not a tf.Example."""
    if record is None or not record.is_intact:
        raise IntegrityError("its record has another checksum" if record else "the file ends before its record")
    return decode_lists(memoryview(record.data), wanted)
