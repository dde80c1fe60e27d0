"""A step whose loss or gradient is not finite: which samples are behind it, and what a person is told."""

from __future__ import annotations

import json

import numpy as np

from shardmill.errors import TrainingError
from shardmill.ids import format_sample_id
from shardmill.values import Batch
from train.backends.backend import StepOutcome
from train.models.identity import inputs_hint
from train.progress import Progress
from train.session import Session

MAX_NAMED_SAMPLES = 5


def not_finite_error(session: Session, progress: Progress, batch: Batch, outcome: StepOutcome) -> TrainingError:
    """All ranks call it; the model answers for this very batch once more, so that its samples can be named."""
    config, cursor, member = session.task.config, progress.cursor, session.member
    is_bad_N = ~np.isfinite(member.learner.outputs(batch.images_NHWC)).all(axis=1) & (batch.weights_N > 0)
    here = [format_sample_id(sample_id) for sample_id in batch.sample_ids_N[is_bad_N].tolist()]
    bad = [each for of_rank in member.gather_bytes(json.dumps(here).encode()) for each in json.loads(of_rank)]
    samples = f"the model's outputs are not finite for {len(bad)} samples: {', '.join(bad[:MAX_NAMED_SAMPLES])}"
    return TrainingError(
        f"loss {outcome.loss}, gradient norm {outcome.gradient_norm} at epoch {cursor.epoch}, step {cursor.step} "
        f"(global step {session.global_step(progress)}); the update was not applied; "
        + (samples if bad else "the model's outputs are finite for every sample"),
        "expected finite numbers",
        f"lower train.learning_rate, or set train.gradient_clip_norm or train.warmup_steps{inputs_hint(config)}",
    )
