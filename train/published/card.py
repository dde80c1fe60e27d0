"""The model card: README.md in the models folder, about the current export; replaced at each promotion."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardmill.errors import ShardmillError
from shardmill.own_card import CARD, keep_card, quoted
from shardmill.printable import without_surrogates
from shardmill.storage import Store, join_uri
from shardmill.words import first_of
from train.published.current import Pointer, read_history
from train.published.exported import Export, ExportRecord, read_export

_MARK = "# Written by shardmill at each promotion; remove this line to keep a text of your own. Change "
_NUM_CLASSES_SHOWN = 50


def refresh_model_card(store: Store) -> tuple[str, ...]:
    """Replace the card unless it is about the current export; one sentence for what prevented it, if anything did.

    It never raises for a store that fails: the export is current.
    """
    try:
        if read_history(store).current is not None:
            # The number of the change, not of the export: a rollback brings an export back for another reason.
            keep_card(
                store, _MARK, lambda: read_history(store).next_number - 1, lambda change: _current_card(store, change)
            )
    except (ShardmillError, OSError) as error:
        return (f"the model card {join_uri(store.uri, CARD)} was not written: {error}",)
    return ()


def _current_card(store: Store, change: int) -> str:
    pointer = read_history(store).current
    assert pointer is not None  # changes are never taken back
    return model_card(store.uri, read_export(store.uri, pointer.export), pointer, change)


def card_of(store: Store, export: Export) -> str:
    """The card of an export that is current, or was until a moment ago: with the newest decision for it."""
    history = read_history(store)
    pointer = next(each for each in reversed(history.readable) if each.export == export.number)
    return model_card(store.uri, export, pointer, history.next_number - 1)


def model_card(models_uri: str, export: Export, pointer: Pointer, change: int) -> str:
    """The card: front matter as the Hugging Face Hub reads it, then a text."""
    name = " ".join(models_uri.rstrip("/").rpartition("/")[2].split())
    lines = ["---", f"{_MARK}{change}", *_front_matter(name, export.record), "---", ""]
    return without_surrogates("\n".join([*lines, *_text(models_uri, name, export, pointer), ""]))


def _front_matter(name: str, record: ExportRecord) -> Iterator[str]:
    yield from (f"library_name: {record.backend}", "tags:", "- shardmill")
    if record.label_kind == "class":
        yield "pipeline_tag: image-classification"
    found = record.evaluation
    if found is not None and record.label_kind == "class":
        yield from (
            "model-index:",
            f"- name: {quoted(name)}",
            "  results:",
            "  - task:",
            "      type: image-classification",
            "    dataset:",
            f"      name: {quoted(f'{record.dataset.uri}@{record.dataset.version}')}",
            f"      type: {record.content_digest}",
            f"      split: {found.split}",
            "    metrics:",
            "    - type: accuracy",
            f"      value: {found.figure:.6f}",
        )


def _text(models_uri: str, name: str, export: Export, pointer: Pointer) -> Iterator[str]:
    record = export.record
    height, width, channels = record.image_shape_HWC
    rows = {
        "answers": _answers(record),
        "architecture": f"`{record.model}`, {record.backend}",
        "images": (
            f"{height} x {width} x {channels}, made by shardmill's ETL (`{record.normalize.resize_mode}`); the model "
            "standardizes them"
        ),
        "evaluation": _evaluation(record),
        "dataset": f"`{record.dataset.uri}@{record.dataset.version}`",
        "content digest of the dataset": f"`{record.content_digest}`",
        "weights": f"SHA-256 `{record.weights_sha256}`",
        "files": f"`{join_uri(models_uri, record.artifact_dir)}`, every one with its SHA-256 in the export's record",
        "training": f"`{join_uri(models_uri, record.training_dir)}`, by run `{record.run_id}` {record.created_at}",
        "decision": f"{pointer.decision}, {pointer.created_at}, by run `{pointer.run_id}`: {pointer.reason}",
    }
    yield from (f"# {name}, export {export.number}", "", "| | |", "|---|---|")
    yield from (f"| {key} | {_cell(value)} |" for key, value in rows.items())
    yield from ("", "```bash", f"shardmill predict {models_uri}@{export.number} IMAGE...", "```", "", "## Limits", "")
    yield _limits(record)


def _answers(record: ExportRecord) -> str:
    if record.labels.are_numbers:
        return str(record.labels)
    return f"{record.labels}: {_escaped(first_of(record.class_names, _NUM_CLASSES_SHOWN))}"


def _evaluation(record: ExportRecord) -> str:
    found = record.evaluation
    if found is None:
        return "none: the dataset has no split for it"
    figures = f"{found.metric.words} {found.figure:.4f}, loss {found.loss:.4f}"
    return f"{figures} on {found.num_samples:,} samples of the split {found.split}"


def _limits(record: ExportRecord) -> str:
    measured = (
        "The figures are those of one split of the dataset above. Of images from elsewhere nothing is known: compare "
        "their distribution with `shardmill drift`, and the answers to their labels with `shardmill evaluate`."
    )
    return f"{record.caution[:1].upper()}{record.caution[1:]}. {measured}" if record.caution else measured


def _escaped(text: str) -> str:
    """As Markdown that shows it: names of classes are those of folders and columns, and may be anybody's."""
    return re.sub(r"([\\`*\[\]<>])", r"\\\1", text)


def _cell(text: str) -> str:
    """One cell of a table, whatever names hold."""
    return " ".join(text.replace("|", "\\|").split())
