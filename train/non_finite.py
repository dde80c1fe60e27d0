"""A step whose loss or gradient is not finite: which samples are behind it, and whether the training goes on."""

from __future__ import annotations

import json

import numpy as np

from shardmill.errors import TrainingError
from shardmill.ids import format_sample_id
from shardmill.jobs.observer import WARNING
from shardmill.values import Batch
from train.backends.backend import StatePart, StepOutcome
from train.models.identity import inputs_hint
from train.progress import Progress
from train.session import Session

MAX_NAMED_SAMPLES = 5


def own_state(session: Session) -> list[np.ndarray]:
    """What a forward pass of the next batch changes by itself (moving statistics), if it may be skipped."""
    learner = session.member.learner
    if session.task.config.on_non_finite == "stop" or not learner.moving_statistics():
        return []
    return learner.arrays(StatePart.OWN)


def leave_out(
    session: Session, progress: Progress, batch: Batch, outcome: StepOutcome, state_before: list[np.ndarray]
) -> None:
    """All ranks call it after a step that was not applied: go on as if its batch had not been, if that is allowed.

    `state_before`: that of `own_state`. Raises TrainingError that names samples and the way out.
    """
    config, cursor, learner = session.task.config, progress.cursor, session.member.learner
    if state_before:
        learner.assign(StatePart.OWN, state_before, "the step before")
    what = _told(session, progress, batch, outcome)
    in_a_row = progress.skipped.in_a_row
    if config.on_non_finite == "stop" or in_a_row == config.max_skipped_in_a_row:
        raise TrainingError(
            what + (f"; as were {in_a_row} updates just before it" if in_a_row else ""),
            "expected finite numbers",
            f"lower train.learning_rate, or set train.gradient_clip_norm or train.warmup_steps{inputs_hint(config)}",
        )
    fields = {"epoch": cursor.epoch, "step": cursor.step, "skipped_steps": progress.skipped.total + 1}
    # One warning is enough; the summary counts.
    session.event("step_skipped", {**fields, ("reason" if progress.skipped.total else WARNING): what})


def _told(session: Session, progress: Progress, batch: Batch, outcome: StepOutcome) -> str:
    """What happened, and for which samples: the model answers for this very batch once more."""
    cursor, member = progress.cursor, session.member
    is_bad_N = ~np.isfinite(member.learner.outputs(batch.images_NHWC)).all(axis=1) & (batch.weights_N > 0)
    bad_ids = batch.sample_ids_N[is_bad_N].tolist() if member.data.is_first else []
    here = [format_sample_id(sample_id) for sample_id in bad_ids]
    bad = [each for of_rank in member.gather_bytes(json.dumps(here).encode()) for each in json.loads(of_rank)]
    samples = f"the model's outputs are not finite for {len(bad)} samples: {', '.join(bad[:MAX_NAMED_SAMPLES])}"
    return (
        f"loss {outcome.loss}, gradient norm {outcome.gradient_norm} at epoch {cursor.epoch}, step {cursor.step} "
        f"(global step {session.global_step(progress)}); the update was not applied; "
        + (samples if bad else "the model's outputs are finite for every sample")
    )
