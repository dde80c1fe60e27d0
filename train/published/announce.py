"""What follows a promotion: the model card, and the registry. Neither can undo it; each promotion does both again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from shardmill.checksummed import verified_body, with_checksum
from shardmill.dataset.card import CARD, keep_card, quoted
from shardmill.errors import IntegrityError, ShardmillError
from shardmill.jobs.observer import WARNING, Observer
from shardmill.storage import Store, join_uri
from shardmill.stores import open_store
from shardmill.words import first_of, without_surrogates
from train.contracts.values import from_json
from train.published.exported import CURRENT, Export, ExportRecord, Pointer, read_export, read_history
from train.published.mlflow_registry import register_current
from train.published.promote import Promotion
from train.settings import GateConfig, RegistryConfig

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
            f"      value: {found.metric_value:.6f}",
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
    # One cell of a table, whatever names hold.
    cells = {key: " ".join(value.replace("|", "\\|").split()) for key, value in rows.items()}
    yield from (f"| {key} | {cell} |" for key, cell in cells.items())
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
    metrics = f"{found.metric.words} {found.metric_value:.4f}, loss {found.loss:.4f}"
    return f"{metrics} on {found.num_samples:,} samples of the split {found.split}"


def _limits(record: ExportRecord) -> str:
    measured = (
        "The figures are those of one split of the dataset above. Of images from elsewhere nothing is known: compare "
        "their distribution with `shardmill drift`, and the answers to their labels with `shardmill evaluate`."
    )
    return f"{record.caution[:1].upper()}{record.caution[1:]}. {measured}" if record.caution else measured


def _escaped(text: str) -> str:
    """As Markdown that shows it: names of classes are those of folders and columns, and may be anybody's."""
    return re.sub(r"([\\`*\[\]<>])", r"\\\1", text)


REGISTRY = f"{CURRENT}/registry.json"
"""The registry that follows these models, for commands whose config names none: a rollback, an export by its number."""


def announce(promotion: Promotion, gate: GateConfig, observer: Observer) -> Promotion:
    """Tell what is current now, also if this run has changed nothing: an earlier one may not have come to this.

    A store or a server that fails is a warning, and so is a model that is hardly of use.
    """
    if promotion.gate.caution and promotion.gate.is_passed:
        observer.event("promote.warning", {WARNING: promotion.gate.caution})
    if promotion.current is None:
        return promotion
    store = open_store(promotion.models_uri)
    for problem in refresh_model_card(store):
        observer.event("promote.warning", {WARNING: problem})
    try:
        registry = _followed(store, gate.registry)
    except (IntegrityError, ValueError) as error:
        problem = f"it is unknown which registry follows {promotion.models_uri}: {error}"
        observer.event("promote.warning", {WARNING: f"{problem}; promote with gate.registry.name to record it again"})
        return replace(promotion, registered="")
    if not registry.name:
        return promotion
    try:
        _record(store, registry)
        registered = register_current(promotion.models_uri, registry, lambda export: card_of(store, export))
    except Exception as error:  # whatever the client raises: the export is current
        named = f"{promotion.models_uri}@{promotion.current}"
        problem = f"export {promotion.current} was not registered as models:/{registry.name}: {error}"
        again = f"it is current, and `shardmill promote {named}` tries again to register it"
        observer.event("promote.warning", {WARNING: f"{problem}; {again}"})
        return replace(promotion, registered="")
    return replace(promotion, registered=registered)


def _followed(store: Store, given: RegistryConfig) -> RegistryConfig:
    """The config's registry; if it names none, that of an earlier promotion of these models.

    Raises IntegrityError or ValueError if its record cannot be read.
    """
    if given.name:
        return given
    try:
        return from_json(RegistryConfig, verified_body(store.read(REGISTRY), join_uri(store.uri, REGISTRY)))
    except FileNotFoundError:
        return given


def _record(store: Store, registry: RegistryConfig) -> None:
    data = with_checksum(registry.model_dump_json().encode())
    try:
        is_recorded = store.read(REGISTRY) == data
    except FileNotFoundError:
        is_recorded = False
    if not is_recorded:
        store.put(REGISTRY, data)
