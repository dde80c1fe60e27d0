"""The config tree as a TOML file: resolved, as `config show` prints it, or commented, as `init` writes it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from pipeline.choices import choices_of
from shardmill.section import field_docstrings

if TYPE_CHECKING:
    from tomlkit import TOMLDocument
    from tomlkit.container import Container
    from tomlkit.items import Item, Table

# Keys without a usable default; `models.uri` falls back to `<workdir>/models`.
REQUIRED_KEYS = ("source.uri", "dataset.uri")
FIRST_KEYS = frozenset(
    {
        "source.uri", "source.kind", "dataset.uri", "models.uri", "etl.image_size", "etl.resize_mode", "etl.encoding",
        "etl.max_reject_fraction", "etl.duplicates", "spark.master", "train.model", "train.init_from", "train.epochs",
        "train.global_batch_size", "train.optimizer", "train.learning_rate", "train.num_workers", "train.strategy",
        "train.augment.images", "gate.min_accuracy",
    }
)  # fmt: skip
"""The keys that people change first, which a new config file explains."""
ALL_KEYS = "`shardmill init --all FILE` writes all keys like this, `shardmill config show` prints all."
COMMENT_WIDTH = 116

Comments = Literal["none", "choices", "all"]


def to_toml(tree: BaseModel, *, with_choices: bool = False) -> str:
    """The tree with every default, as TOML that gives the same tree again; `with_choices` adds each key's choices."""
    import tomlkit

    document = tomlkit.document()
    _fill(document, tree, "", "choices" if with_choices else "none", None)
    return _text(document)


def commented_toml(tree: BaseModel, keys: frozenset[str] | None = None) -> str:
    """A config file to start from: each key with its meaning, and commented out if it has its default.

    `keys`: only these, and what is not at its default; None for all.
    """
    import tomlkit

    document = tomlkit.document()
    which = "every key" if keys is None else f"each of the {len(keys)} most common keys"
    for line in (
        f"shardmill: {which} with its meaning and its default. Uncomment what you change.",
        *([] if keys is None else [ALL_KEYS]),
        "`source.uri` and `dataset.uri` must be set; `models.uri` is `models` in the work directory unless set.",
        "A relative path is resolved against the directory in which shardmill is started, not that of this file.",
        "`shardmill run FILE` runs the whole pipeline; `shardmill config show FILE` prints what it resolves to.",
    ):
        document.add(tomlkit.comment(line))
    _fill(document, tree, "", "all", keys)
    return _text(document)


def _text(document: TOMLDocument) -> str:
    # A path that is not UTF-8 holds surrogates: TOML has no way to write them, and no record may fail for it.
    return document.as_string().strip().encode("utf-8", "backslashreplace").decode() + "\n"


def _fill(
    target: Container | Table, section: BaseModel, path: str, comments: Comments, keys: frozenset[str] | None
) -> None:
    """Add the keys of `section`, then its inner sections as tables of their own, if they have a key to show."""
    import tomlkit

    fields, docstrings = type(section).model_fields, field_docstrings(type(section))
    values = {name: getattr(section, name) for name in fields}
    inner = {name: value for name, value in values.items() if isinstance(value, BaseModel)}
    for name, field in fields.items():
        if name in inner:
            continue
        is_default = values[name] == field.get_default(call_default_factory=True, validated_data=values)
        if keys is not None and is_default and f"{path}{name}" not in keys:
            continue
        for line in _comment_lines(docstrings.get(name, ""), comments, field.annotation, *field.metadata):
            target.add(tomlkit.comment(line))
        item = _item(values[name])
        if comments == "all" and is_default and f"{path}{name}" not in REQUIRED_KEYS:
            target.add(tomlkit.comment(f"{name} = {item.as_string()}"))
        else:
            target.add(name, item)
    for name, below in inner.items():
        table = tomlkit.table()
        if comments == "all":
            table.comment(" ".join((type(below).__doc__ or "").split()))
        _fill(table, below, f"{path}{name}.", comments, keys)
        if keys is None or table.as_string().strip():
            target.add(name, table)


def _item(value: Any) -> Item:
    import tomlkit

    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        # A table of its own would end the section in whose middle it stands.
        table = tomlkit.inline_table()
        table.update({name: _item(each) for name, each in value.items()})
        return table
    return tomlkit.item(list(value) if isinstance(value, tuple) else value)


def _comment_lines(description: str, comments: Comments, *annotations: Any) -> Iterator[str]:
    """The key's meaning, and its choices: a `Literal`'s in one line, a registry's with a line of help each."""
    if comments == "none":
        return
    meaning = description if comments == "all" else ""
    one_of = choices_of(*annotations)
    names = [] if one_of else list(dict.fromkeys(_literals(*annotations)))
    if names:
        meaning += f" One of: {', '.join(names)}."
    elif one_of:
        meaning += " One of:"
    yield from textwrap.wrap(" ".join(meaning.split()), width=COMMENT_WIDTH)
    if one_of:
        width = max(map(len, one_of.choices))
        yield from (f"  {name:{width}}  {help}" for name, help in one_of.choices.items())


def _literals(*annotations: Any) -> Iterator[str]:
    for annotation in annotations:
        if get_origin(annotation) is Literal:
            yield from get_args(annotation)
        else:
            yield from _literals(*get_args(annotation))
