"""Which columns a dataset gets beside ours, and of which type its labels are, by what a listing found in the source."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from shardmill.errors import UsageError
from shardmill.typed_columns import LABEL, LABEL_TYPES, ExtraColumn, parse_extra
from shardmill.values import SourceLabelKind


def extra_columns(configured: Iterable[str], types: Mapping[str, str], source: str) -> tuple[ExtraColumn, ...]:
    """The columns of the dataset. Raises UsageError if one that the config names has no value, and so no type."""
    for name, _ in map(parse_extra, configured):
        if name not in types:
            raise UsageError(
                f"source.extra_columns names {name!r}, but no input of {source} has a value for it",
                "expected a column, a field or a feature of the source (docs/sources.md)",
                f'correct source.extra_columns, or give its type: "{name}:string"',
            )
    return tuple(sorted(ExtraColumn(name, kind) for name, kind in types.items() if name != LABEL))


def label_type_of(kinds: Collection[SourceLabelKind], types: Mapping[str, str], source: str) -> str:
    """The type of the dataset's labels. Raises UsageError if the source has none of the kind that the config names."""
    if len(kinds) > 1:
        raise UsageError(
            f"source.parts have labels of the kinds {', '.join(sorted(kinds))}", "expected one kind in all parts",
            "give each part the same label_kind",
        )  # fmt: skip
    [kind] = kinds
    if kind in ("class", "none"):
        return LABEL_TYPES["class"]
    if not types.get(LABEL):
        raise UsageError(
            f"source.label_kind = {kind!r}, but no input of {source} has such a label",
            "expected a column of them in a table, a Parquet or TFRecord file, or a field in a tar archive",
            "name it with source.label_field, or remove source.label_kind",
        )
    return LABEL_TYPES[kind] if kind == "multi_label" else types[LABEL]
