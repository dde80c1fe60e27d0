"""Writes the dataset card: a `README.md` for people, by which Hugging Face `datasets` loads the latest version's files.

It is written after a commit, and no digest covers it: without it a version is as whole as with it.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from shardmill.dataset.index import INDEX_SCHEMA
from shardmill.dataset.manifest import Manifest, manifest_path
from shardmill.dataset.row_segments import read_segment
from shardmill.dataset.versions import latest_version, read_manifest
from shardmill.errors import ShardmillError
from shardmill.formats.rows import OWN_COLUMNS
from shardmill.options import ENCODINGS
from shardmill.storage import Store, join_uri
from shardmill.typed_columns import LABEL, LABEL_TYPES, MASK_TYPE, scalar_of, vector_size
from shardmill.words import without_surrogates

MAX_SHARDS = 100_000
"""Of a larger version the card names no shards: reading 10 MB of YAML takes minutes."""

_MARK = "# Written by shardmill at each commit; remove this line to keep a text of your own. Version "


def refresh_card(store: Store, manifest: Manifest | None = None) -> tuple[str, ...]:
    """Replace the card unless it is that of the latest version; one sentence for the problem that prevented it, if any.

    `manifest`: of a version that the caller knows, so that only later ones are asked for. It never raises for a store
    that fails: the version is committed.
    """
    try:
        known = read_manifest(store, latest_version(store)) if manifest is None else manifest

        def latest() -> int:
            later = (number for number in itertools.count(known.version) if not store.stat(manifest_path(number + 1)))
            return next(later)

        def text(version: int) -> str:
            return card_text(store, known if version == known.version else read_manifest(store, version))

        is_ours = keep_card(store, _MARK, latest, text)
    except (ShardmillError, OSError) as error:
        return (f"the dataset card {join_uri(store.uri, CARD)} was not written: {error}",)
    return () if is_ours else (_stays(store),)


def _stays(store: Store) -> str:
    return (
        f"{join_uri(store.uri, CARD)} was not written by shardmill and stays as it is: if it names shards in "
        "`configs`, Hugging Face `datasets` reads those of an older version"
    )


def card_text(store: Store, manifest: Manifest) -> str:
    """The card of a version: YAML front matter and a short text. Raises IntegrityError for a damaged index."""
    name = store.uri.rstrip("/").rpartition("/")[2]
    lines = ["---", f"{_MARK}{manifest.version}", f"pretty_name: {quoted(name)}"]
    num_shards = sum(split.num_shards for split in manifest.splits.values())
    is_named = "parquet" in manifest.formats and num_shards <= MAX_SHARDS
    if is_named:
        lines += [*_configs(store, manifest), *_features(manifest)]
    text = "\n".join([*lines, "---", "", *_description(name, manifest, is_named=is_named), ""])
    return without_surrogates(text)


def _configs(store: Store, manifest: Manifest) -> Iterator[str]:
    """Exactly the shards of the version, in layout order: folders hold those of other versions as well."""
    max_rows = sum(split.num_chunks for split in manifest.splits.values()) * len(manifest.formats)
    schema = pa.schema([INDEX_SCHEMA.field(name) for name in ("split", "format", "shard")])
    paths: dict[str, list[str]] = {split: [] for split in manifest.splits}
    for segment in manifest.index_segments:
        table = read_segment(store, segment, schema, max_rows)
        table = table.filter(pc.equal(table.column("format"), "parquet"))
        for split, of_split in paths.items():
            of_split += pc.unique(table.filter(pc.equal(table.column("split"), split)).column("shard")).to_pylist()
    yield from ("configs:", "- config_name: default", "  data_files:")
    for split, of_split in paths.items():
        yield from (f"  - split: {split}", "    path:", *(f"    - {quoted(path)}" for path in of_split))


def _features(manifest: Manifest) -> Iterator[str]:
    """The types of all columns in the order of a shard, as `datasets` writes them itself."""
    yield from ("dataset_info:", "  config_name: default", "  features:")
    others = sorted(set(manifest.columns).difference(OWN_COLUMNS))
    for name in (*(name for name in OWN_COLUMNS if name in manifest.columns), *others):
        yield f"  - name: {quoted(name)}"
        yield from _feature(manifest, name)


def _feature(manifest: Manifest, name: str) -> list[str]:
    kind = manifest.columns[name]
    shape_HWC = manifest.normalize.one_shape_HWC
    if name == "image":
        if ENCODINGS[manifest.normalize.encoding].is_fixed_size and shape_HWC is not None:
            return [f"    dtype: fixed_size_binary[{math.prod(shape_HWC)}]"]
        return ["    dtype: image"]
    if name == LABEL and manifest.class_names:
        classes = [f"{quoted(str(number))}: {quoted(each)}" for number, each in enumerate(manifest.class_names)]
        outer = "list" if kind == LABEL_TYPES["multi_label"] else "dtype"
        return [f"    {outer}:", "      class_label:", "        names:", *(f"          {each}" for each in classes)]
    if vector_size(kind):
        return ["    list: float32"]
    if kind == MASK_TYPE:
        return ["    dtype: image"]
    return [f"    {'dtype' if scalar_of(kind) == kind else 'list'}: {scalar_of(kind)}"]


def _description(name: str, manifest: Manifest, *, is_named: bool) -> Iterator[str]:
    classes = f", {len(manifest.class_names)} classes" if manifest.class_names else ""
    yield from (
        f"# {' '.join(name.split())}",
        "",
        f"Version {manifest.version} of a dataset of shardmill: {_content(manifest)}{classes}.",
        "",
        "| split | images | shards |",
        "|---|---|---|",
        *(f"| {split} | {info.num_rows:,} | {info.num_shards:,} |" for split, info in manifest.splits.items()),
        "",
        "`shardmill.open_dataset(FOLDER)` verifies every byte that it reads.",
    )
    if is_named:
        yield "`datasets.load_dataset(FOLDER)` of Hugging Face reads the same images, classes and splits, unverified."
    else:
        yield "Other tools get their files from `shardmill inspect FOLDER --files`."


def _content(manifest: Manifest) -> str:
    if manifest.predicted_by is not None:
        return f"predictions of the model {manifest.predicted_by}"
    options = manifest.normalize
    size = f"{options.image_size} x {options.image_size} pixels" if options.one_shape_HWC else "different sizes"
    return f"{options.color} images of {size} as {options.encoding}"


CARD = "README.md"
_MAX_RACES = 8


def keep_card(store: Store, mark: str, latest: Callable[[], int], text_of: Callable[[int], str]) -> bool:
    """Replace the card unless it is that of the latest number; False if it is a person's own.

    Another writer may make a later number meanwhile, and may have written its card before ours: the last one to write
    looks again.
    """
    for _ in range(_MAX_RACES):
        number = latest()
        if not put_card(store, mark, number, partial(text_of, number)):
            return False
        if number == latest():
            break
    return True


def put_card(store: Store, mark: str, number: int, text: Callable[[], str]) -> bool:
    """Write the card of `number` unless there is that of a later one; False if it is a person's own.

    `mark`: how the line begins that says who wrote it; `number` ends that line.
    """
    try:
        present = store.read(CARD).decode(errors="replace")
    except FileNotFoundError:
        present = mark
    if mark not in present:
        return False
    written = re.search(f"{re.escape(mark)}([0-9]{{1,18}})\n", present)
    if written is None or int(written[1]) < number:
        store.put(CARD, text().encode())
    return True


def quoted(text: str) -> str:
    """A double-quoted YAML string. YAML takes JSON's escapes, but no pairs of surrogates and no raw control
    characters.
    """
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in without_surrogates(quoted))
