"""The label map: set by the config or found in the listing; it only grows from version to version."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources import Lists
from etl.sources.listed import ListingBatch
from etl.sources.names import is_class_name
from shardmill.errors import NoSuchRoot, RejectLimitExceeded, UsageError
from shardmill.stores import open_store
from shardmill.typed_columns import LABEL, names_of
from shardmill.values import Rejection, RejectReason
from shardmill.words import printable

if TYPE_CHECKING:
    from shardmill.dataset.manifest import Manifest

_NUM_EXAMPLES = 3
_EXPECTED = "a class name in each line, a JSON list of names, or a JSON object from each name to its number"


def read_label_map(given: str | Sequence[str]) -> tuple[str, ...]:
    """The class names that `etl.label_map` gives, class number = position: a list, or a file of them; empty for none.

    Raises UsageError if the file is not there or is none of the accepted kinds, or a name occurs twice.
    """
    names = _read_file(given) if isinstance(given, str) and given else tuple(given)
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


def _read_file(uri: str) -> tuple[str, ...]:
    root, _, name = uri.rpartition("/")
    try:
        text = open_store(root or ("/" if uri.startswith("/") else ".")).read(name).decode("utf-8-sig")
        names = _names_of_json(json.loads(text)) if uri.endswith(".json") else _names_of_lines(text)
    except (FileNotFoundError, NoSuchRoot):
        raise UsageError(f"etl.label_map = {uri!r}: no such file", f"expected {_EXPECTED}", "check the path") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"etl.label_map = {uri!r}: {error}", f"expected {_EXPECTED}", "correct the file") from None
    if not names:
        raise UsageError(f"etl.label_map = {uri!r} contains no class", f"expected {_EXPECTED}", "correct the file")
    return names


def _names_of_lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


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
    return tuple(given)


class WithKnownClasses:
    """A source of which only the classes of a given label map are taken."""

    def __init__(self, source: Lists, class_names: Sequence[str], unknown_class: Literal["reject", "error"]) -> None:
        self.uri = source.uri
        self._source = source
        self._known = pa.array(class_names, pa.string())
        self._unknown_class = unknown_class

    def list(self) -> Iterator[ListingBatch]:
        """List like the source, with a rejection for each image of another class. Raises RejectLimitExceeded if so
        configured.
        """
        for batch in self._source.list():
            yield self._judged(batch) if len(self._known) else batch

    def _judged(self, batch: ListingBatch) -> ListingBatch:
        is_unknown = self._is_unknown(batch)
        refused = [self._refused(row) for row in batch.images.filter(is_unknown).to_pylist()]
        if not refused:
            return batch
        if self._unknown_class == "error":
            examples = ", ".join(f"{printable(each.key)}: {each.detail}" for each in refused[:_NUM_EXAMPLES])
            raise RejectLimitExceeded(
                f"etl.label_map does not have every class, such as {examples}",
                'etl.unknown_class = "error" allows no other classes; nothing was published',
                'add the class at the end of etl.label_map, or set etl.unknown_class = "reject"',
            )
        is_known = pc.invert(is_unknown)
        groups = None if batch.groups is None else batch.groups.filter(is_known)
        rejections = (*batch.rejections, *refused)
        return replace(batch, images=batch.images.filter(is_known), rejections=rejections, groups=groups)

    def _is_unknown(self, batch: ListingBatch) -> pa.Array:
        if batch.extra_types.get(LABEL) == "list<string>":
            known = set(self._known.to_pylist())
            return pa.array([not known.issuperset(names_of(text)) for text in batch.images.column("extra").to_pylist()])
        labels = batch.images.column("label").combine_chunks()
        return pc.and_(labels.is_valid(), pc.invert(pc.is_in(labels, self._known)))

    def _refused(self, row: dict[str, Any]) -> Rejection:
        names = [row["label"]] if row["label"] is not None else names_of(row["extra"])
        unknown = next(name for name in names if name not in self._known.to_pylist())
        return Rejection(
            row["key"], RejectReason.UNKNOWN_CLASS, f"{printable(unknown)!r} is not in etl.label_map",
            row["size_bytes"], row["mtime_ns"], row["etag"], stage="list",
        )  # fmt: skip
