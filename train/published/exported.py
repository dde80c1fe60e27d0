"""Reads an export: its record, and its files, verified byte by byte.

<models>/artifacts/<attempt>/saved_model/..., model.keras     files, written first
<models>/exports/00000001.json                                THE export: this record's appearance makes it visible
"""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.augment.options import AugmentOptions
from shardmill.checksummed import ChecksummedFile, verify_file
from shardmill.errors import IntegrityError, UsageError
from shardmill.options import NormalizeOptions
from shardmill.section import Section
from shardmill.storage import join_uri
from shardmill.stores import open_store
from shardmill.values import DatasetPin, LabelKind
from train.backends.backend import Predict, ServedModel
from train.contracts.values import Evaluation
from train.labels import LabelSpec
from train.records import numbers_in_words, read_record, record_numbers

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
    """The same figures of the reloaded SavedModel: measured when it was exported, and found equal to those."""
    parity_max_abs_diff: float
    """Largest difference between the reloaded export and the training model, in answers and logits; relative to the
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
        return self.served.answers


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
