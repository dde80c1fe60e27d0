"""Exports the checkpoint that a training recommends as an immutable, numbered export, loaded back and measured."""

from __future__ import annotations

import math
import secrets
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from shardmill.augment.pixels import centre_of
from shardmill.checksummed import ChecksummedFile, checksum_file
from shardmill.dataset.dataset import Dataset, open_pinned
from shardmill.errors import IntegrityError, TrainingError, UsageError
from shardmill.jobs.run_files import StageRecord
from shardmill.loader.reader import read_split
from shardmill.loader.samples import read_samples
from shardmill.storage import Store, join_uri
from shardmill.stores import open_store
from train.api import Backend, Learner, StatePart
from train.backends import BACKENDS
from train.backends.model_spec import model_spec
from train.checkpoints.checkpoint import open_checkpoint
from train.checkpoints.shards import WholeModel, read_whole_model
from train.config import TrainConfig
from train.contracts.values import Evaluation, ModelIdentity, TrainResult
from train.contracts.world import World
from train.labels import LabelSpec
from train.metrics.evaluate import evaluate_batches, scores_by
from train.models.user import check_same_model, source_sha256
from train.published.exported import (
    ARTIFACTS,
    EXPORTS,
    Export,
    ExportRecord,
    read_export,
    verify_export,
)
from train.records import put_record, record_numbers
from train.strategies.collective import SingleCollective

MAX_PARITY_DIFF = 1e-5
NUM_PARITY_IMAGES = 64
# An export may differ from the training model by rounding alone: other batch sizes choose other kernels, a GPU's
# multiply in 10 bits of mantissa. Where training computed in 16 bits and the export in 32, more of it.
LOSS_TOLERANCE = 0.01
"""Relative tolerance of the recorded loss, and absolute below a loss of 1."""
METRIC_TOLERANCE = 0.005
"""Tolerance of accuracy or mean average precision; or one sample, if that is more."""
MIXED_PRECISION_FACTOR = 5


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The comparison of a reloaded export with its training."""

    parity_max_abs_diff: float
    parity_num_images: int
    evaluation: Evaluation | None
    portable_note: str


@dataclass(frozen=True, slots=True)
class ExportOutcome:
    """An export of a training."""

    export: Export
    models_uri: str
    skipped: bool
    """True if it existed already: of the same training, with the same weights."""


def export_training(models_uri: str, config: TrainConfig, result: TrainResult, run_id: str) -> ExportOutcome:
    """Export what a training ended with, once.

    Raises TrainingError if the export does not predict what the training model predicts, IntegrityError if the
    checkpoint was altered, or if the export's metrics on the evaluated split are not those that the training recorded.
    """
    earlier = _find_whole_export(models_uri, result)
    if earlier is not None:
        return ExportOutcome(earlier, models_uri, skipped=True)
    store, dataset, backend = open_store(models_uri), open_pinned(result.dataset), BACKENDS[result.export_backend]
    learner = _restore(backend, store, config, result, dataset)
    with tempfile.TemporaryDirectory(prefix="shardmill-export-") as scratch:
        # Compared with the training model while nothing is visible yet, then published below a name of its own.
        comparison = _write_and_compare(backend, learner, Path(scratch), dataset, config, result)
        artifact_dir = f"{ARTIFACTS}/{secrets.token_hex(8)}"
        files = _publish(store, Path(scratch), artifact_dir)
    manifest, spec = dataset.manifest, model_spec(dataset.manifest, config)
    record = ExportRecord(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        run_id=run_id,
        artifact_dir=artifact_dir,
        files=files,
        backend=result.export_backend,
        keras_note=comparison.portable_note,
        model=config.model,
        class_names=spec.labels.class_names,
        label_kind=spec.labels.kind,
        vector_size=spec.labels.vector_size,
        normalize=manifest.normalize,
        size=config.augment.size,
        normalization_fingerprint=manifest.normalization_fingerprint,
        decoder_id=manifest.decoder_id,
        channel_mean=spec.scale.mean,
        channel_std=spec.scale.std,
        dataset=result.dataset,
        content_digest=manifest.content_digest,
        layout_digest=manifest.layout_digest,
        training_dir=result.training_dir,
        checkpoint=result.checkpoint,
        weights_sha256=result.weights_sha256,
        caution=result.caution,
        training_evaluation=result.evaluation.without_classes() if result.evaluation else None,
        evaluation=comparison.evaluation,
        parity_max_abs_diff=comparison.parity_max_abs_diff,
        parity_num_images=comparison.parity_num_images,
    )
    number = max(record_numbers(store, EXPORTS), default=0) + 1
    while not put_record(store, EXPORTS, number, record):
        number += 1
    return ExportOutcome(Export(number, record), models_uri, skipped=False)


def export_record(outcome: ExportOutcome) -> StageRecord:
    """Return the export's part of a run's summary."""
    export = outcome.export
    section = {
        "number": export.number,
        "path": join_uri(outcome.models_uri, export.record.artifact_dir),
        "parity_max_abs_diff": export.record.parity_max_abs_diff,
        "parity_num_images": export.record.parity_num_images,
        "keras_note": export.record.keras_note,
        "weights_sha256": export.record.weights_sha256,
    }
    status = "skipped" if outcome.skipped else "done"
    return StageRecord(stage="export", status=status, sections={"export": section})


def check_metrics(measured: Evaluation, recorded: Evaluation, precision: str, *, rounding: float = 0.0) -> None:
    """Raises IntegrityError, with both metrics, if an export does not answer as well (or as badly) as was recorded.

    `precision`: that of the training, as `train.mixed_precision` names it.
    `rounding`: by how much numbers may differ that are predictions; a model without error would have to answer exactly.
    """
    factor = MIXED_PRECISION_FACTOR if precision != "off" else 1
    metric, value = recorded.metric, recorded.metric_value
    if metric.higher_is_better:
        loss_limit = factor * LOSS_TOLERANCE * max(1.0, recorded.loss)
        metric_limit = factor * max(METRIC_TOLERANCE, 1 / recorded.num_samples)
    else:
        # Errors have a unit: what is small is known relative to them alone.
        loss_limit = factor * LOSS_TOLERANCE * recorded.loss + rounding * (2 * math.sqrt(recorded.loss) + rounding)
        metric_limit = factor * LOSS_TOLERANCE * value + rounding
    # Not `>`: a metric that is not a number must fail, too. Sums of floats do not decide about the last sample.
    agree = (
        measured.num_samples == recorded.num_samples
        and abs(measured.loss - recorded.loss) <= loss_limit + 1e-9
        and abs(measured.metric_value - value) <= metric_limit + 1e-9
    )
    if not agree:
        raise IntegrityError(
            f"the export has loss {measured.loss:.4f} and {metric.words} {measured.metric_value:.4f} on "
            f"{measured.num_samples} {measured.split} samples; the training recorded {recorded.loss:.4f} and "
            f"{value:.4f} on {recorded.num_samples}",
            f"expected them within {loss_limit:.4g} and {metric_limit:.4g}",
            "the model's code or the training's result has changed since: train again",
        )


def _find_whole_export(models_uri: str, result: TrainResult) -> Export | None:
    """The newest export of the same training with the same weights; a damaged one is skipped, and created again."""
    for number in reversed(record_numbers(open_store(models_uri), EXPORTS)):
        try:
            export = read_export(models_uri, number)
            record = export.record
            if (record.training_dir, record.weights_sha256) == (result.training_dir, result.weights_sha256):
                verify_export(models_uri, export)
                return export
        except (IntegrityError, UsageError):
            # Damaged, or of another version of this program.
            continue
    return None


def _restore(backend: Backend, store: Store, config: TrainConfig, result: TrainResult, dataset: Dataset) -> Learner:
    """The training model with its final weights."""
    backend.start(World(), config.seed)
    # An export computes in float32, whatever the training saved time with; the weights are float32 in any case.
    config = config.model_copy(update={"mixed_precision": "off"})
    learner = backend.build(config, model_spec(dataset.manifest, config))
    saved = _read_weights(store, result)
    source = f"the checkpoint {result.checkpoint}"
    now = ModelIdentity(source_sha256(config.model), learner.config_sha256)
    check_same_model(result.model, now, config.model, source)
    learner.assign(StatePart.WEIGHTS, saved.weights, source)
    learner.assign(StatePart.OWN, saved.own, source)
    if learner.weights_sha256() != result.weights_sha256:
        raise IntegrityError(
            f"{source} gives weights {learner.weights_sha256()}",
            f"expected {result.weights_sha256}, which the training recorded",
            "make train.model build the same model as in the training",
        )
    return learner


def _read_weights(store: Store, result: TrainResult) -> WholeModel:
    """The weights that a training recommends. Raises IntegrityError if its checkpoint is missing or damaged."""
    try:
        found = open_checkpoint(store, result.checkpoint)
        return read_whole_model(found.files(store))
    except IntegrityError as error:
        raise IntegrityError(
            f"the training's checkpoint {store.uri}/{result.checkpoint} is missing or damaged",
            "the training's result names it",
            (
                f"delete {store.uri}/{result.training_dir}/result.json and train again: it resumes from the last "
                "complete checkpoint"
            ),
        ) from error


def _write_and_compare(
    backend: Backend,
    learner: Learner,
    scratch: Path,
    dataset: Dataset,
    config: TrainConfig,
    result: TrainResult,
) -> _Comparison:
    """Write both forms into `scratch`, load them again, and compare them with the model and with what was recorded."""
    images_NHWC = _parity_images(dataset, config.augment.size)
    learner.write_served(scratch)
    served = backend.load_served(scratch)
    outputs_NK = learner.outputs(images_NHWC)
    # Numbers and logits may be large, and float32 rounds them accordingly.
    size = max(1.0, float(np.abs(outputs_NK).max()))
    differences = [
        served.outputs(images_NHWC) - outputs_NK,
        served.predictions(images_NHWC) - learner.predictions(images_NHWC),
    ]
    difference = max(float(np.abs(each).max()) for each in differences) / size
    if not difference <= MAX_PARITY_DIFF:
        raise TrainingError(
            f"the exported model differs from the training model by {difference:g} on {len(images_NHWC)} images",
            f"expected at most {MAX_PARITY_DIFF:g}",
            "make the model deterministic when it is called with training=False",
        )
    measured, recorded = None, result.evaluation
    if recorded is not None:
        labels = LabelSpec.of(dataset.manifest)
        scores = scores_by(served.outputs, labels.kind, served.outputs_are_logits)
        augment = config.augment.unchanged
        with read_split(dataset, recorded.split, format=config.format, augment=augment) as batches:
            measured = evaluate_batches(scores, batches, recorded.split, labels, SingleCollective())
        measured = measured.without_classes()
        # In what it was trained, not in what was asked for: `auto` may stand for float32.
        precision = result.mixed_precision or config.mixed_precision
        check_metrics(measured, recorded, precision, rounding=MAX_PARITY_DIFF * size)
    note = learner.write_portable(scratch, images_NHWC, MAX_PARITY_DIFF * size)
    return _Comparison(difference, len(images_NHWC), measured, note)


def _publish(store: Store, scratch: Path, artifact_dir: str) -> tuple[ChecksummedFile, ...]:
    """Copy every file of `scratch` below `artifact_dir`. What a killed export leaves there, no record ever names."""
    files = []
    for file in sorted(path for path in scratch.rglob("*") if path.is_file()):
        files.append(checksum_file(f"{artifact_dir}/{file.relative_to(scratch).as_posix()}", file.read_bytes()))
        store.put_file(files[-1].path, file)
    return tuple(files)


def _parity_images(dataset: Dataset, size: int) -> np.ndarray:
    split = dataset.manifest.evaluation_split or "train"
    samples = read_samples(dataset, split, NUM_PARITY_IMAGES)
    return np.stack([centre_of(sample.image_HWC, size) for sample in samples])
