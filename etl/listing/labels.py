"""What a listing says of its images, corrected and judged: labels from `etl.corrections`, classes by the label map,
which only grows from version to version, and boxes by what no row shows alone.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources import Lists
from etl.sources.columns import as_labels, as_texts, choose_column
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.names import TABLE_SUFFIXES, is_class_name
from etl.sources.table_rows import read_rows
from shardmill.errors import NoSuchRoot, RejectLimitExceeded, ShardmillError, UsageError
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.typed_columns import BOXES, LABEL, names_of
from shardmill.values import NO_BLOCK, Rejection, RejectReason
from shardmill.words import counted, first_of, from_cell, printable

if TYPE_CHECKING:
    from etl.config import EtlTree
    from etl.sources import Lists
    from shardmill.dataset.manifest import Manifest
    from shardmill.jobs.observer import Observer


_NUM_EXAMPLES = 3
_MAP_EXPECTED = "a class name in each line, a JSON list of names, or a JSON object from each name to its number"


def read_label_map(given: str | Sequence[str]) -> tuple[str, ...]:
    """The class names that `etl.label_map` gives, class number = position: a list, or a file of them; empty for none.

    Raises UsageError if the file is not there or is none of the accepted kinds, or a name occurs twice.
    """
    names = tuple(given) if not isinstance(given, str) else ()
    if isinstance(given, str) and given:
        try:
            text = _store_of(given).read(given.rpartition("/")[2]).decode("utf-8-sig")
            lines = tuple(line.strip() for line in text.splitlines() if line.strip())
            names = _names_of_json(json.loads(text)) if given.endswith(".json") else lines
        except (FileNotFoundError, NoSuchRoot):
            what, fix = "no such file", "check the path"
            raise UsageError(f"etl.label_map = {given!r}: {what}", f"expected {_MAP_EXPECTED}", fix) from None
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"etl.label_map = {given!r}: {error}", f"expected {_MAP_EXPECTED}", "correct the file"
            ) from None
        if not names:
            raise UsageError(
                f"etl.label_map = {given!r} contains no class", f"expected {_MAP_EXPECTED}", "correct the file"
            )
    twice = [name for place, name in enumerate(names) if name in names[:place]] if len(set(names)) < len(names) else []
    if twice:
        raise UsageError(
            f"etl.label_map names the class {twice[0]!r} twice", "expected each class once", "correct etl.label_map"
        )
    odd = next((name for name in names if not is_class_name(name)), None)
    if odd is not None:
        raise UsageError(
            f"etl.label_map has {printable(odd[:60])!r}, which is not a class name",
            "expected short names without control characters", "correct etl.label_map",
        )  # fmt: skip
    return names


def _store_of(uri: str) -> Store:
    """The store of a file's folder. Raises NoSuchRoot."""
    root = uri.rpartition("/")[0]
    return open_store(root or ("/" if uri.startswith("/") else "."))


def _names_of_json(value: Any) -> tuple[str, ...]:
    """Raises ValueError for anything but names, or names with the numbers from 0 on."""
    if isinstance(value, dict):
        if sorted(value.values(), key=str) != sorted(range(len(value)), key=str):
            raise ValueError(f"its numbers are not those from 0 to {len(value) - 1}, each once")
        value = sorted(value, key=value.__getitem__)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("it contains no class names")
    return tuple(value)


def grown_label_map(parent: Manifest | None, given: Sequence[str], found: Sequence[str]) -> tuple[str, ...]:
    """The label map of the next version: what is given, else the parent's classes and then the new ones found.
    A source without labels has none.

    `parent` is the latest version of the same source. Raises UsageError if the given map would change the number of
    one of its classes, or drop one: models and older versions know the classes by their numbers.
    """
    before = parent.class_names if parent is not None else ()
    if not given:
        return (*before, *(name for name in found if name not in before)) if found else tuple(found)
    moved = next((number for number, name in enumerate(before) if given[number : number + 1] != (name,)), None)
    if parent is not None and moved is not None:
        now = f"{given[moved]!r}" if moved < len(given) else "none"
        raise UsageError(
            f"etl.label_map has {now} as class {moved}, but version {parent.version} has {before[moved]!r}",
            "expected the classes of the latest version first, each with its number; a label map can only grow",
            "add new classes at the end of etl.label_map, or build into another dataset.uri",
        )
    return tuple(given) if found else ()


def with_known_classes(
    batches: Iterable[ListingBatch], class_names: Sequence[str], unknown_class: Literal["reject", "error"]
) -> Iterator[ListingBatch]:
    """Only the classes of a given label map, with a rejection for each image of another one. Raises
    RejectLimitExceeded if so configured.
    """
    known, names = pa.array(class_names, pa.string()), frozenset(class_names)

    def refused(row: dict[str, Any]) -> Rejection:
        unknown = next(each for each in _names_of_row(row) if each not in names)
        return Rejection(
            row["key"], RejectReason.UNKNOWN_CLASS, f"{printable(unknown)!r} is not in etl.label_map",
            row["size_bytes"], row["mtime_ns"], row["etag"], stage="list",
        )  # fmt: skip

    for batch in batches:
        if batch.extra_types.get(LABEL) == "list<string>":
            texts = batch.images.column("extra").to_pylist()
            is_known = pa.array([names.issuperset(names_of(text)) for text in texts], pa.bool_())
        else:
            labels = batch.images.column("label").combine_chunks()
            is_known = pc.or_(labels.is_null(), pc.is_in(labels, known))
        others = [refused(row) for row in batch.images.filter(pc.invert(is_known)).to_pylist()]
        if not others:
            yield batch
            continue
        if unknown_class == "error":
            examples = ", ".join(f"{printable(each.key)}: {each.detail}" for each in others[:_NUM_EXAMPLES])
            raise RejectLimitExceeded(
                f"etl.label_map does not have every class, such as {examples}",
                'etl.unknown_class = "error" allows no other classes; nothing was published',
                'add the class at the end of etl.label_map, or set etl.unknown_class = "reject"',
            )
        groups, rejections = batch.groups, (*batch.rejections, *others)
        groups = None if groups is None else groups.filter(is_known)
        yield replace(batch, images=batch.images.filter(is_known), rejections=rejections, groups=groups)


def _names_of_row(row: dict[str, Any]) -> Sequence[str]:
    return [row["label"]] if row["label"] is not None else names_of(row["extra"])


_TABLE_EXPECTED = "a table with the columns source and label, such as `shardmill mislabels --csv` writes"


@dataclass(frozen=True, slots=True)
class Corrections:
    """The labels that a table gives."""

    uri: str
    label_of_key: dict[str, str]


def corrections_of(tree: EtlTree) -> Corrections | None:
    """What `etl.corrections` gives; None for nothing. Raises UsageError for a table that cannot be used."""
    uri = tree.etl.corrections
    if uri and tree.source.label_kinds() != {"class"}:
        raise UsageError(
            f"etl.corrections = {uri!r}, and source.label_kind is {', '.join(sorted(tree.source.label_kinds()))}",
            "expected images with one class each",
            "correct the labels in the source",
        )
    return read_corrections(uri) if uri else None


def read_corrections(uri: str) -> Corrections:
    """Rows without a label change nothing. Raises UsageError for a table without the columns, with a line that is no
    row, or with two labels of one key.
    """
    expected, name = f"expected {_TABLE_EXPECTED}", uri.rpartition("/")[2]
    try:
        store = _store_of(uri)
        file = store.stat(name)
    except NoSuchRoot:
        file = None
    if file is None or not name.lower().endswith(TABLE_SUFFIXES):
        what = "no such file" if file is None else f"expected a name that ends in {', '.join(TABLE_SUFFIXES)}"
        raise UsageError(f"etl.corrections = {uri!r}: {what}", expected, "check the path")
    label_of_key: dict[str, str] = {}
    for rows in read_rows(store, file):
        if isinstance(rows, Rejection):
            raise UsageError(f"etl.corrections = {uri!r}: {rows.detail}", expected, "correct the table")
        keys, labels = (_column(rows, column, uri) for column in ("source", "label"))
        texts = as_labels(labels, (), uri).to_pylist()
        for cell, text in zip(as_texts(keys).to_pylist(), texts, strict=True):
            if cell is None or text is None:
                continue
            key, label = from_cell(cell), from_cell(text)
            if label_of_key.setdefault(key, label) != label:
                raise UsageError(
                    f"etl.corrections = {uri!r} gives {printable(key)} the labels {label_of_key[key]!r} and {label!r}",
                    "expected one label for an image",
                    "correct the table",
                )
    return Corrections(uri, label_of_key)


def undone(version: int, earlier: str, given: str) -> Iterator[str]:
    """A warning if a version was built with corrections that the next build's table, `given`, does not have."""
    if not earlier or earlier == given:
        return
    try:
        missing = {*read_corrections(earlier).label_of_key}
        missing -= {*read_corrections(given).label_of_key} if given else set()
        number = f"{counted(len(missing), 'label')} of"
    except ShardmillError:
        missing, number = {earlier}, "the labels of a table that cannot be read now,"
    if missing:
        now = f"etl.corrections = {given!r} does not have" if given else "etl.corrections is not set any more, without"
        yield (
            f"{now} {number} {earlier!r}, with which version {version} was built: the labels of the source come back; "
            f"{'add them to the table' if given else f'set etl.corrections={earlier}'} to keep them"
        )


def _column(rows: pa.Table, name: str, uri: str) -> pa.ChunkedArray:
    found = choose_column(rows.column_names, "", [name], "")
    if found is None:
        given = first_of([repr(each) for each in rows.column_names], 8)
        raise UsageError(
            f"etl.corrections = {uri!r} has no column {name!r}, only {given}",
            f"expected {_TABLE_EXPECTED}",
            "name it so",
        )
    return rows.column(found)


def with_corrections(
    source: Lists, corrections: Corrections, class_names: Sequence[str], observer: Observer
) -> Iterator[ListingBatch]:
    """List the source, some images with another label than it gives. `class_names`: of the label map; empty for none.

    Raises UsageError at its end if no key was there, or a label is no class.
    """
    label_of_key = corrections.label_of_key
    keys, labels = pa.array(list(label_of_key), pa.string()), pa.array(list(label_of_key.values()), pa.string())
    is_found_M, listed, num_changed = np.zeros(len(keys), bool), set[str | None](), 0
    column = LISTED_SCHEMA.get_field_index("label")
    for batch in source.list():
        before = batch.images.column("label").combine_chunks()
        listed.update(pc.unique(before).to_pylist())
        # An image without a class is of a dataset without any.
        places = pc.index_in(batch.images.column("key").combine_chunks(), value_set=keys)
        places = pc.if_else(before.is_valid(), places, pa.scalar(None, pa.int32()))
        is_found_M[places.drop_null().to_numpy()] = True
        after = pc.coalesce(labels.take(places), before)
        num_changed += pc.sum(pc.not_equal(after, before)).as_py() or 0
        yield replace(batch, images=batch.images.set_column(column, LISTED_SCHEMA.field(column), after))
    # A typing error must not make a class of its own; a label map names those that have no image yet.
    known = set(class_names or filter(None, listed))
    key, label = next((each for each in label_of_key.items() if each[1] not in known), ("", ""))
    if label:
        near = difflib.get_close_matches(label, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"etl.corrections = {corrections.uri!r} gives {printable(key)} the label {label!r}",
            f"expected one of the classes {first_of(sorted(known), 8)}{hint}",
            "correct the table, or name all classes in etl.label_map, the new one at its end",
        )
    unknown = [printable(keys[place].as_py()) for place in np.flatnonzero(~is_found_M).tolist()]
    warnings = _of_absent(unknown, source.uri, corrections) if unknown or not len(keys) else ()
    yield ListingBatch(LISTED_SCHEMA.empty_table(), warnings=warnings)
    observer.event("etl.corrected", {"labels": num_changed, "rows": len(keys)})


def _of_absent(unknown: Sequence[str], source_uri: str, corrections: Corrections) -> tuple[str, ...]:
    """The warning of a table that names images that are not there, or none at all."""
    uri = corrections.uri
    if not corrections.label_of_key:
        return (f"etl.corrections = {uri!r} corrects nothing: its column label is empty",)
    images = f"{counted(len(unknown), 'image')} that {source_uri} does not have: {first_of(unknown, _NUM_EXAMPLES)}"
    if len(unknown) < len(corrections.label_of_key):
        return (f"etl.corrections = {uri!r} names {images}",)
    raise UsageError(
        f"etl.corrections = {uri!r} names only {images}",
        "expected the keys of this source's images",
        "the column source of `shardmill mislabels --csv` has them",
    )


# Of the texts of `encode_values`: four floats for each box.
_SIDES = rf'"{BOXES}":\[(?P<sides>[^\]]*)\]'
# Rounded shares exceed 1, and a corner with width and height ends at 2 at the most.
_IS_OF_PIXELS, _HAS_FRACTION = r"(^|,)-?([2-9](\.\d+)?(,|$)|\d\d)", r"\.\d*[1-9]|e-"
# A few boxes may really be that small; a file of them, or of parts of a pixel each tenth image, is a mistake.
_MIN_ROWS, _MAX_FRACTION = 8, 0.1


def with_judged_boxes(batches: Iterable[ListingBatch], uri: str) -> Iterator[ListingBatch]:
    """The same. Raises UsageError if boxes cannot be meant: they are shares of 1, or none of them can be read."""
    has_boxes, num_rows, num_tiny, num_refused = False, 0, 0, 0
    for batch in batches:
        if BOXES in batch.extra_types:
            has_boxes = True
            rows, tiny = _look_at_boxes(batch.images, uri)
            num_rows, num_tiny = num_rows + rows, num_tiny + tiny
        num_refused += sum(each.reason is RejectReason.BAD_ROW for each in batch.rejections)
        yield batch
    if has_boxes and not num_rows and num_refused:
        raise UsageError(
            f"no image of {uri} has a box, and {counted(num_refused, 'row')} were refused",
            "expected boxes that can be read in one row at least",
            "`shardmill check-source` shows what is wrong with them (docs/boxes.md)",
        )
    if num_tiny > _MAX_FRACTION * num_rows:
        raise _are_shares(num_tiny, num_rows, uri)
    if num_tiny:
        warning = f"the boxes of {counted(num_tiny, 'image')} lie in the first pixel: are they shares of 1?"
        yield ListingBatch(LISTED_SCHEMA.empty_table(), warnings=(warning,))


def _look_at_boxes(images: pa.Table, uri: str) -> tuple[int, int]:
    """Rows with boxes, and those of them whose boxes lie in the first pixel."""
    sides = pc.struct_field(pc.extract_regex(images.column("extra"), _SIDES), "sides")
    is_file = pc.equal(images.column("block"), NO_BLOCK)
    rows = pa.table({"file": pc.if_else(is_file, "", images.column("container")), "sides": sides})
    rows = rows.filter(pc.match_substring_regex(rows.column("sides"), "[1-9]"))
    is_tiny = pc.invert(pc.match_substring_regex(rows.column("sides"), _IS_OF_PIXELS))
    is_part = pc.and_(is_tiny, pc.match_substring_regex(rows.column("sides"), _HAS_FRACTION))
    files = rows.append_column("is_tiny", is_tiny).group_by("file")
    for each in files.aggregate([("is_tiny", "min"), ("is_tiny", "count")]).to_pylist():
        if each["is_tiny_min"] and each["is_tiny_count"] >= _MIN_ROWS:
            raise _are_shares(each["is_tiny_count"], each["is_tiny_count"], each["file"] or uri)
    return rows.num_rows, pc.sum(is_part, min_count=0).as_py()


def _are_shares(num_tiny: int, num_rows: int, where: str) -> UsageError:
    return UsageError(
        f"the boxes of {num_tiny} of {num_rows} images of {where} lie in the first pixel",
        "expected pixels, not shares of width and height",
        "multiply x by the width of the image and y by its height",
    )
