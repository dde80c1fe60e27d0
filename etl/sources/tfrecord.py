"""TFRecord files of tf.Example, as TensorFlow's dataset scripts and TFDS write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO

from etl.listed import ListingBatch, batches_of
from etl.sources.columns import choose_column
from etl.sources.containers import (
    ContainerReader,
    Containers,
    gone,
    image_file,
    is_packed,
    reading,
    splits_of,
    unpacked,
)
from etl.sources.extra import ExtraColumns
from etl.sources.names import TFRECORD_SUFFIXES
from etl.sources.records import Record, read_record, read_records
from etl.stored_file import open_file
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats.tf_example import (
    BYTES_LIST,
    FLOAT_LIST,
    INT64_LIST,
    FeatureList,
    decode_example,
    decode_lists,
)
from shardmill.printable import printable
from shardmill.storage import Store, StoredFile
from shardmill.typed_columns import LABEL
from shardmill.values import Rejection, RejectReason, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig

# In the order of preference.
_IMAGE_FEATURES = ("image/encoded", "image", "image_raw")
_LABEL_FEATURES = ("image/class/text", "image/class/label", "label", "class")
# Records of a block are read by one task, one after the other; a packed file is unpacked from its start for each block.
_BLOCK_RECORDS, _PACKED_BLOCK_RECORDS = 64, 4_096

Features = Mapping[str, bytes | memoryview | int]


class TfrecordSource:
    """Every record of the TFRecord files that `source.uri` names: a folder, one file, or a pattern."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._files = Containers(config.uri, TFRECORD_SUFFIXES)
        self._extra = ExtraColumns(config.extra_columns, config.label_kind)
        self.uri = self._files.uri

    def open(self, max_source_bytes: int) -> ContainerReader[BinaryIO]:
        """Reads records by their places."""

        def take(file: BinaryIO, image: SourceImage) -> bytes | Rejection:
            data = image_of(_features_of(read_record(file, image.place)), self._config.image_field)
            return image.rejected(RejectReason.BAD_ROW, "its record holds no image") if data is None else data

        return ContainerReader(self._files.store, unpacked, take)

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no file, or no such feature in the first record. Damage is a rejection."""
        return batches_of(self._entries(), lambda: self._extra.types)

    def _entries(self) -> Iterator[SourceImage | Rejection]:
        found = self._files.find()
        yield from found.rejections
        splits = splits_of(file.path for file in found.containers)
        names: _FeatureNames | None = None
        for file in found.containers:
            for image, features, data in _unless_gone(file, _list_file(self._files.store, file)):
                if isinstance(image, Rejection):
                    yield image
                    continue
                names = names or _choose_names(self._config, features, file.path)
                entry = names.entry(image, features, splits[file.path])
                yield self._with_extra(entry, data) if self._extra.given else entry

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
        text, problem = self._extra.of_record(
            {name: value for name, (value, _) in found.items()},
            entry.container,
            {name: kind for name, (_, kind) in found.items()},
        )
        return entry.rejected(RejectReason.BAD_ROW, problem, "list") if problem else replace(entry, extra=text)

    def _label_feature(self, features: Mapping[str, FeatureList]) -> str:
        usual = (name for name in _LABEL_FEATURES if name in features)
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


def image_of(features: Features, image_field: str) -> bytes | None:
    """The encoded image of a record, or None."""
    names = (image_field,) if image_field else _IMAGE_FEATURES
    found = next((features[name] for name in names if name in features), None)
    return None if found is None or isinstance(found, int) else bytes(found)


@dataclass(frozen=True, slots=True)
class _FeatureNames:
    """The records' own names; None for what the first of them lacks."""

    image: str
    label: str | None
    key: str | None

    def entry(self, image: SourceImage, features: Features, split: str | None) -> SourceImage | Rejection:
        """The record as a listed image, or why it is refused."""
        data = image_of(features, self.image)
        if data is None:
            return image.rejected(RejectReason.BAD_ROW, f"no feature {self.image} of bytes", "list")
        image = replace(image, size_bytes=len(data), split=split)
        if self.key is not None:
            key = _text_of(features.get(self.key))
            if key is None:
                return image.rejected(RejectReason.BAD_ROW, f"no feature {self.key}", "list")
            image = replace(image, key=f"{image.container}\0{key}")
        if self.label is None:
            return image
        label = _text_of(features.get(self.label))
        if label is None:
            return image.rejected(RejectReason.BAD_LABEL, f"no feature {self.label}", "list")
        return replace(image, label=label)


def _choose_names(config: SourceConfig, features: Features, file: str) -> _FeatureNames:
    names = list(features)
    image = choose_column(names, config.image_field, _IMAGE_FEATURES, "image_field")
    if image is None:
        raise UsageError(
            f"the first record of {printable(file)} has the features {', '.join(map(printable, names[:20]))}",
            f"expected an encoded image, called {' or '.join(_IMAGE_FEATURES)}",
            "name it with source.image_field",
        )
    # A label that is no class may be a list of floats, which are not among `features`.
    is_class = config.label_kind == "class"
    label = choose_column(names, config.label_field, _LABEL_FEATURES, "label_field") if is_class else None
    return _FeatureNames(image, label, choose_column(names, config.key_field, (), "key_field"))


def _unless_gone(
    file: StoredFile, records: Iterator[tuple[SourceImage | Rejection, Features, bytes]]
) -> Iterator[tuple[SourceImage | Rejection, Features, bytes]]:
    try:
        yield from records
    except FileNotFoundError:
        yield gone(file), {}, b""


def _list_file(store: Store, file: StoredFile) -> Iterator[tuple[SourceImage | Rejection, Features, bytes]]:
    """Each record with its features and bytes; a damaged one is a rejection, and so is all where the next is lost."""
    number = 0
    with open_file(store, file) as stream:
        try:
            with reading(file.path):
                for number, record in enumerate(read_records(unpacked(stream, file))):
                    image = _image_at(file, record.start, number)
                    try:
                        yield image, _features_of(record), record.data
                    except IntegrityError as error:
                        yield image.rejected(RejectReason.DAMAGED_CONTAINER, str(error), "list"), {}, b""
        except IntegrityError as error:
            detail = f"{error}; the records before that, about {number + 1}, are listed"
            yield image_file(file).rejected(RejectReason.DAMAGED_CONTAINER, detail, "list"), {}, b""


def _image_at(file: StoredFile, start: int, number: int) -> SourceImage:
    return SourceImage(
        key=f"{file.path}\0{number}",
        size_bytes=0,
        mtime_ns=file.mtime_ns,
        etag=file.etag,
        container=file.path,
        place=start,
        block=number // (_PACKED_BLOCK_RECORDS if is_packed(file.path) else _BLOCK_RECORDS),
    )


def _features_of(record: Record | None) -> Features:
    """Raises IntegrityError if the record is gone, has another checksum, or is no tf.Example."""
    if record is None or not record.is_intact:
        raise IntegrityError("its record has another checksum" if record else "the file ends before its record")
    return decode_example(memoryview(record.data))


def _text_of(value: bytes | memoryview | int | None) -> str | None:
    if isinstance(value, int):
        return str(value)
    return None if value is None else bytes(value).decode("utf-8", "replace").strip() or None
