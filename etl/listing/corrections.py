"""Labels that a person has corrected: `etl.corrections` names a table of keys and classes, whatever the source is."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.columns import as_labels, as_texts, choose_column
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.names import TABLE_SUFFIXES
from etl.sources.table_rows import read_rows
from shardmill.errors import NoSuchRoot, ShardmillError, UsageError
from shardmill.stores import open_store
from shardmill.values import Rejection
from shardmill.words import counted, first_of, from_cell, printable

if TYPE_CHECKING:
    from etl.config import EtlTree
    from etl.sources import Lists
    from shardmill.jobs.observer import Observer

_EXPECTED = "a table with the columns source and label, such as `shardmill mislabels --csv` writes"
_NUM_EXAMPLES = 3


def corrected(source: Lists, tree: EtlTree, class_names: Sequence[str], observer: Observer) -> Lists:
    """The source with the labels that `etl.corrections` gives; the source itself if it gives none.

    `class_names`: of the label map; empty for none. Raises UsageError for a table that cannot be used.
    """
    uri = tree.etl.corrections
    if not uri:
        return source
    if tree.source.label_kinds() != {"class"}:
        raise UsageError(
            f"etl.corrections = {uri!r}, and source.label_kind is {', '.join(sorted(tree.source.label_kinds()))}",
            "expected images with one class each",
            "correct the labels in the source",
        )
    return _WithCorrections(source, read_corrections(uri), class_names, observer)


@dataclass(frozen=True, slots=True)
class Corrections:
    """The labels that a table gives."""

    uri: str
    label_of_key: dict[str, str]


def read_corrections(uri: str) -> Corrections:
    """Rows without a label change nothing. Raises UsageError for a table without the columns, with a line that is no
    row, or with two labels of one key.
    """
    label_of_key: dict[str, str] = {}
    for rows in _rows(uri):
        keys, labels = (_column(rows, name, uri) for name in ("source", "label"))
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


def _rows(uri: str) -> Iterator[pa.Table]:
    root, _, name = uri.rpartition("/")
    try:
        store = open_store(root or ("/" if uri.startswith("/") else "."))
        file = store.stat(name)
    except NoSuchRoot:
        file = None
    if file is None or not name.lower().endswith(TABLE_SUFFIXES):
        what = "no such file" if file is None else f"expected a name that ends in {', '.join(TABLE_SUFFIXES)}"
        raise UsageError(f"etl.corrections = {uri!r}: {what}", f"expected {_EXPECTED}", "check the path")
    for rows in read_rows(store, file):
        if isinstance(rows, Rejection):
            raise UsageError(f"etl.corrections = {uri!r}: {rows.detail}", f"expected {_EXPECTED}", "correct the table")
        yield rows


def _column(rows: pa.Table, name: str, uri: str) -> pa.ChunkedArray:
    found = choose_column(rows.column_names, "", [name], "")
    if found is None:
        given = first_of([repr(each) for each in rows.column_names], 8)
        raise UsageError(
            f"etl.corrections = {uri!r} has no column {name!r}, only {given}", f"expected {_EXPECTED}", "name it so"
        )
    return rows.column(found)


class _WithCorrections:
    """A source of which some images have another label than it gives."""

    def __init__(self, source: Lists, corrections: Corrections, class_names: Sequence[str], observer: Observer) -> None:
        self.uri = source.uri
        self._source = source
        self._corrections = corrections
        self._class_names = class_names
        self._observer = observer
        self._keys = pa.array(list(corrections.label_of_key), pa.string())
        self._labels = pa.array(list(corrections.label_of_key.values()), pa.string())

    def list(self) -> Iterator[ListingBatch]:
        """List like the source. Raises UsageError at its end if no key was there, or a label is no class."""
        is_found_M, listed, num_changed = np.zeros(len(self._keys), bool), set(), 0
        for batch in self._source.list():
            before = batch.images.column("label").combine_chunks()
            listed.update(pc.unique(before).to_pylist())
            # An image without a class is of a dataset without any.
            places = pc.if_else(before.is_valid(), self._places(batch.images), pa.scalar(None, pa.int32()))
            is_found_M[places.drop_null().to_numpy()] = True
            after = pc.coalesce(self._labels.take(places), before)
            num_changed += pc.sum(pc.not_equal(after, before)).as_py() or 0
            column = LISTED_SCHEMA.get_field_index("label")
            yield replace(batch, images=batch.images.set_column(column, LISTED_SCHEMA.field(column), after))
        self._check_classes(listed)
        yield ListingBatch(LISTED_SCHEMA.empty_table(), warnings=self._warnings(is_found_M))
        self._observer.event("etl.corrected", {"labels": num_changed, "rows": len(self._keys)})

    def _places(self, images: pa.Table) -> pa.Array:
        return pc.index_in(images.column("key").combine_chunks(), value_set=self._keys)

    def _check_classes(self, listed: set[str | None]) -> None:
        """A typing error must not make a class of its own; a label map names those that have no image yet."""
        known = set(self._class_names or filter(None, listed))
        key, label = next((each for each in self._corrections.label_of_key.items() if each[1] not in known), ("", ""))
        if not label:
            return
        near = difflib.get_close_matches(label, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"etl.corrections = {self._corrections.uri!r} gives {printable(key)} the label {label!r}",
            f"expected one of the classes {first_of(sorted(known), 8)}{hint}",
            "correct the table, or name all classes in etl.label_map, the new one at its end",
        )

    def _warnings(self, is_found_M: np.ndarray) -> tuple[str, ...]:
        uri = self._corrections.uri
        if not len(is_found_M):
            return (f"etl.corrections = {uri!r} corrects nothing: its column label is empty",)
        unknown = [printable(self._keys[place].as_py()) for place in np.flatnonzero(~is_found_M).tolist()]
        if not unknown:
            return ()
        images = f"{counted(len(unknown), 'image')} that {self.uri} does not have: {first_of(unknown, _NUM_EXAMPLES)}"
        if is_found_M.any():
            return (f"etl.corrections = {uri!r} names {images}",)
        raise UsageError(
            f"etl.corrections = {uri!r} names only {images}",
            "expected the keys of this source's images",
            "the column source of `shardmill mislabels --csv` has them",
        )
