"""A numbered export as it lies in the models' store, which of them is current, and its model, loaded in this process.

<models>/current/00000001.json      the highest number is the current one; older ones tell the history

A pointer can be set by one writer only; what is loaded was verified byte by byte.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from shardmill.augment.options import AugmentOptions
from shardmill.checksummed import ChecksummedFile, check_relative_path, read_checksummed, verify_file
from shardmill.errors import IntegrityError, UsageError
from shardmill.options import NormalizeOptions
from shardmill.registry import load_object
from shardmill.section import Section
from shardmill.storage import Store, join_uri
from shardmill.stores import open_store
from shardmill.values import DatasetPin, LabelKind
from train.api import LayerOutput, Predict, PredictWithLayer, ServedModel
from train.backends import BACKENDS
from train.contracts.values import Evaluation
from train.labels import LabelSpec
from train.records import numbers_in_words, put_record, read_record, record_numbers

EXPORTS = "exports"
ARTIFACTS = "artifacts"


class ExportRecord(Section):
    """All facts of one export."""

    created_at: str
    """UTC, ISO 8601."""
    run_id: str
    artifact_dir: str
    """Relative to the models' root: holds `saved_model/` and `model.keras`, or what another backend writes."""
    files: tuple[ChecksummedFile, ...]
    """Their paths are relative to the models' root."""
    keras_note: str
    """Note for readers of `model.keras` (classes to register, or why there is no file); usually empty."""
    backend: str = "keras"
    """Backend that wrote the files and reads them."""
    model: str
    """`train.model` of the training."""
    class_names: tuple[str, ...]
    label_kind: LabelKind = "class"
    vector_size: int = 0
    """Size of vector labels."""
    normalize: NormalizeOptions
    """Options that convert an image file to the uint8 pixels that the model takes."""
    size: int = 0
    """Height and width of the centre of those pixels that the model takes (`train.augment.size`); 0: all of them."""
    normalization_fingerprint: str
    decoder_id: str
    channel_mean: tuple[float, ...]
    channel_std: tuple[float, ...]
    dataset: DatasetPin
    content_digest: str
    layout_digest: str
    training_dir: str
    checkpoint: str
    weights_sha256: str
    training_evaluation: Evaluation | None
    """Metrics that the training recorded on its dataset version, without per-class values."""
    caution: str = ""
    """Why the gate must not let it pass by itself, as the training said; most often empty."""
    evaluation: Evaluation | None
    """The same metrics of the reloaded SavedModel: measured when it was exported, and found equal to those."""
    parity_max_abs_diff: float
    """Largest difference between the reloaded export and the training model, in predictions and logits; relative to the
    largest logit or number, if that is over 1."""
    parity_num_images: int

    @property
    def image_shape_HWC(self) -> tuple[int, int, int]:
        """The shape of the images that the model takes."""
        return self.unchanged.shape_of(self.normalize.image_shape_HWC)

    @property
    def unchanged(self) -> AugmentOptions:
        """How a dataset's stored images are read for the model."""
        return AugmentOptions(preset="none", size=self.size)

    @property
    def labels(self) -> LabelSpec:
        """Labels of the export's predictions."""
        return LabelSpec(self.label_kind, self.class_names, self.vector_size)


@dataclass(frozen=True, slots=True)
class Export:
    """One numbered export."""

    number: int
    record: ExportRecord


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """An export, verified and loaded."""

    export: Export
    served: ServedModel
    """The served model, which takes images of the normalized size."""

    @property
    def predict(self) -> Predict:
        """Return predictions for a batch of images."""
        return self.served.predictions


def read_export(models_uri: str, number: int) -> Export:
    """The record of one export. Raises UsageError that names those that exist, IntegrityError for an altered one."""
    known = require_exports(models_uri)
    if number not in known:
        raise UsageError(
            f"{models_uri} has no export {number}",
            f"it has {numbers_in_words(known)}",
            "name one of them, or run `shardmill export` to create another one",
        )
    return Export(number, read_record(open_store(models_uri), EXPORTS, number, ExportRecord))


def require_exports(models_uri: str) -> list[int]:
    """The numbers of all exports, ascending. Raises UsageError if there is none: then this is not a models folder."""
    numbers = record_numbers(open_store(models_uri), EXPORTS)
    if not numbers:
        below = join_uri(models_uri, "models")
        fix = "`shardmill run` writes models to WORKDIR/models unless models.uri is set"
        if record_numbers(open_store(below), EXPORTS):
            fix = f"did you mean {below}?"
        raise UsageError(f"{models_uri} holds no exports", "expected a models folder or URI", fix)
    return numbers


def newest_export(models_uri: str) -> Export:
    """The export with the highest number. Raises UsageError if there is none."""
    return read_export(models_uri, require_exports(models_uri)[-1])


def verify_export(models_uri: str, export: Export) -> None:
    """Raises IntegrityError that names the first file that is missing or altered."""
    store = open_store(models_uri)
    for file in export.record.files:
        verify_file(store, file)


def number_of_artifact(models_uri: str, artifact: str) -> int:
    """The export whose files lie in `artifacts/<artifact>`. Raises IntegrityError if no record names that folder."""
    store = open_store(models_uri)
    for number in reversed(record_numbers(store, EXPORTS)):
        if read_record(store, EXPORTS, number, ExportRecord).artifact_dir == f"{ARTIFACTS}/{artifact}":
            return number
    raise IntegrityError(
        f"no export of {models_uri} names {ARTIFACTS}/{artifact}",
        "files that no export record names are never loaded",
        f"name an export by its number: {models_uri}@N",
    )


CURRENT = "current"


class Pointer(Section):
    """One change of the current export."""

    export: int
    previous: int | None
    """The export to which a rollback goes; None for the first."""
    replaced: int | None
    """The export that was current until now."""
    decision: Literal["promoted", "chosen", "rolled_back"]
    """By the gate, by a user who named the export, or by a rollback."""
    reason: str
    accuracy: float | None
    """Metric of the export on its evaluation split: top-1 accuracy, or the equivalent for its labels."""
    run_id: str
    created_at: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, slots=True)
class History:
    """Every change of the current export, oldest first; None in place of a record that cannot be read."""

    pointers: tuple[Pointer | None, ...]
    next_number: int
    damage: str
    """Why the newest record cannot be read; empty if it can."""

    @property
    def readable(self) -> list[Pointer]:
        return [pointer for pointer in self.pointers if pointer is not None]

    @property
    def current(self) -> Pointer | None:
        """The current export; None if there is none, or if it is unknown (`damage`)."""
        return self.pointers[-1] if self.pointers else None

    @property
    def stack(self) -> list[int]:
        """The exports to which rollbacks go back, oldest first, and on top the current one."""
        stack: list[int] = []
        for pointer in self.readable:
            below = [] if pointer.previous is None else [pointer.previous]
            if pointer.decision == "rolled_back":
                del stack[-1:]
                if stack[-1:] != [pointer.export]:
                    # What it undid cannot be read.
                    stack = [*below, pointer.export]
            else:
                # The record before it may have been damaged.
                stack = [*(stack if stack[-1:] == below else below), pointer.export]
        return stack

    def was_rolled_back(self, export: int) -> bool:
        """Was this export rolled back, and not made current since? If in doubt, it was."""
        out: set[int | None] = set()
        seen: set[int] = set()
        for pointer in self.pointers:
            if pointer is None:
                # It may have been the rollback of any export that was current by then.
                out |= seen
                continue
            if pointer.decision == "rolled_back":
                out.add(pointer.replaced)
            out.discard(pointer.export)
            seen.add(pointer.export)
        return export in out


def read_history(store: Store, *, is_layout_free: bool = False) -> History:
    """The pointer and all before it. A damaged record is not an error: it must not prevent setting a new one.

    Raises UsageError if the newest is intact but of another layout; with `is_layout_free` that counts as damage.
    """
    numbers = record_numbers(store, CURRENT)
    pointers: list[Pointer | None] = []
    newest_error: IntegrityError | UsageError | None = None
    for number in numbers:
        try:
            pointers.append(read_record(store, CURRENT, number, Pointer))
            # Only the newest record decides what is current: damage of an older one is superseded by this one.
            newest_error = None
        except (IntegrityError, UsageError) as error:
            pointers.append(None)
            newest_error = error
    if isinstance(newest_error, UsageError) and not is_layout_free:
        fix = f"use that version, or `shardmill promote {store.uri}@N`"
        raise UsageError(newest_error.what, newest_error.expected, fix)
    return History(tuple(pointers), max(numbers, default=0) + 1, newest_error.what if newest_error else "")


def set_current(store: Store, history: History, pointer: Pointer) -> bool:
    """Publish `pointer` behind `history`; False if another writer did so first."""
    # The number after the history that was judged, not the next free one: if another writer took it, that judgement is
    # out of date.
    return put_record(store, CURRENT, history.next_number, pointer)


def unknown_current(models_uri: str, history: History) -> IntegrityError:
    """The error for a damaged newest record: it is unknown which export is current."""
    return IntegrityError(
        history.damage,
        "this file records which export is current",
        f"choose one: `shardmill promote {models_uri}@N`",
    )


def now() -> str:
    """When a pointer is set: UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def current_export(models_uri: str) -> Export:
    """The current export. Raises UsageError if there is none, IntegrityError if that is unknown."""
    history = read_history(open_store(models_uri))
    if history.damage:
        raise unknown_current(models_uri, history)
    if history.current is None:
        require_exports(models_uri)
        raise UsageError(
            f"{models_uri} has no current model",
            "expected a promoted export",
            "run `shardmill promote`, or name an export: URI@1",
        )
    return read_export(models_uri, history.current.export)


def load_exported(models_uri: str, number: int) -> ExportedModel:
    """Fetch an export's served form, verify every byte of it, load it. Raises IntegrityError that names the file."""
    export = read_export(models_uri, number)
    backend = BACKENDS[export.record.backend]
    with _fetched(models_uri, export, backend.served) as folder:
        return ExportedModel(export, backend.load_served(folder))


def load_with_layer(models_uri: str, number: int, layer: str) -> PredictWithLayer:
    """Like `load_exported`, with the output of a layer. Raises UsageError if the export has none of that name."""
    export = read_export(models_uri, number)
    output: LayerOutput = load_object(BACKENDS[export.record.backend].layer_output)
    with _fetched(models_uri, export, output.file) as folder:
        if not (folder / output.file).exists():
            raise UsageError(
                f"{models_uri}@{number} has no {output.file}: {export.record.keras_note}",
                "expected one, from which a layer can be taken",
                "predict without --layer",
            )
        return output.load(folder / output.file, layer)


@contextmanager
def _fetched(models_uri: str, export: Export, name: str) -> Iterator[Path]:
    """A temporary folder with one file or folder of an export, every byte verified."""
    store, root = open_store(models_uri), f"{export.record.artifact_dir}/"
    with tempfile.TemporaryDirectory(prefix="shardmill-model-") as scratch:
        for file in export.record.files:
            if file.path == root + name or file.path.startswith(f"{root}{name}/"):
                target = Path(scratch, check_relative_path(file.path)[len(root) :])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(read_checksummed(store, file))
        yield Path(scratch)
