"""Handles a step whose loss or gradient is not finite: finds the samples that cause it, and decides whether to
continue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardmill.errors import TrainingError
from shardmill.ids import format_sample_id
from shardmill.jobs.observer import WARNING
from shardmill.values import Batch
from train.backends.backend import StatePart
from train.contracts.progress import Progress
from train.contracts.step_outcome import StepOutcome
from train.contracts.values import from_json, to_json
from train.models.identity import inputs_hint
from train.rank.session import Session

MAX_NAMED_SAMPLES = 5


def own_state(session: Session) -> list[np.ndarray]:
    """Copy the state that a forward pass changes by itself (moving statistics), if the batch may be skipped."""
    learner = session.member.learner
    if session.task.config.non_finite.action == "stop" or not learner.moving_statistics():
        return []
    return learner.arrays(StatePart.OWN)


def leave_out(
    session: Session,
    progress: Progress,
    batch: Batch,
    outcome: StepOutcome,
    num_rows: int,
    state_before: list[np.ndarray],
) -> None:
    """All ranks call it after a step that was not applied: continue as if its batch did not exist, if that is allowed.

    `num_rows`: of the global batch. `state_before`: that of `own_state`. Raises TrainingError that names samples and
    the way out.
    """
    config, cursor, learner = session.task.config, progress.cursor, session.member.learner
    if state_before:
        learner.assign(StatePart.OWN, state_before, "the step before")
    what = _what_happened(session, progress, batch, outcome, num_rows)
    in_a_row = progress.skipped.in_a_row
    if config.non_finite.action == "stop" or in_a_row == config.non_finite.max_skipped_in_a_row:
        raise TrainingError(
            what + (f"; as were {in_a_row} updates just before it" if in_a_row else ""),
            "expected finite numbers",
            f"lower train.learning_rate, or set train.gradient_clip_norm or train.warmup_steps{inputs_hint(config)}",
        )
    fields = {"epoch": cursor.epoch, "step": cursor.step, "skipped_steps": progress.skipped.total + 1}
    # One warning is enough; the summary counts.
    session.event("step_skipped", {**fields, ("reason" if progress.skipped.total else WARNING): what})


def _what_happened(session: Session, progress: Progress, batch: Batch, outcome: StepOutcome, num_rows: int) -> str:
    """Describe what happened, and for which samples: evaluates the model on this batch once more."""
    cursor, member = progress.cursor, session.member
    is_bad_N = ~np.isfinite(member.learner.outputs(batch.images_NHWC)).all(axis=1) & (batch.weights_N > 0)
    here = _names(batch, np.flatnonzero(is_bad_N)) if member.data.is_first else ()
    bad = [each for of_rank in member.gather_bytes(json.dumps(here).encode()) for each in json.loads(of_rank)]
    samples = f"the model's outputs are not finite for {len(bad)} samples: {', '.join(bad[:MAX_NAMED_SAMPLES])}"
    if not bad:
        samples = f"the model's outputs are finite for every sample; {_what_gradients_show(session, batch, num_rows)}"
    return (
        f"loss {outcome.loss}, gradient norm {outcome.gradient_norm} at epoch {cursor.epoch}, step {cursor.step} "
        f"(global step {session.global_step(progress)}); the update was not applied; {samples}"
    )


@dataclass(frozen=True, slots=True)
class OwnGradient:
    """A rank's findings about its part of a step."""

    is_finite: bool
    bad: tuple[str, ...]
    """Samples whose gradient by itself is not finite; the first `MAX_NAMED_SAMPLES`."""
    num_samples: int
    first: tuple[str, ...]
    """First names among all its samples."""


def _what_gradients_show(session: Session, batch: Batch, num_rows: int) -> str:
    """Of which samples the gradient is not finite, as far as that can be found out by computing it again."""
    member = session.member
    mine = _search(session, batch, num_rows)
    gathered = member.gather_bytes(to_json(mine) if member.data.is_first else b"null")
    ranks = {rank: from_json(OwnGradient, each) for rank, each in enumerate(gathered) if each != b"null"}
    found = {rank: each for rank, each in ranks.items() if not each.is_finite}
    bad = [name for each in found.values() for name in each.bad]
    if bad:
        is_cut = any(len(each.bad) == MAX_NAMED_SAMPLES for each in found.values())
        number = f"{'at least ' if is_cut else ''}{len(bad)} {'sample' if len(bad) == 1 else 'samples'}"
        return f"the gradient of {number} by itself is not finite: {', '.join(bad[:MAX_NAMED_SAMPLES])}"
    if found:
        return "; ".join(
            f"the gradient of the {each.num_samples} samples of rank {rank} is not finite, that of each by itself is: "
            f"{', '.join(each.first)}{', ...' if each.num_samples > len(each.first) else ''}"
            for rank, each in found.items()
        )
    return (
        "recomputed, the gradient of every rank is finite too: the cause is their sum or the random numbers of "
        "that step"
    )


def _search(session: Session, batch: Batch, num_rows: int) -> OwnGradient:
    """Halve this rank's rows where their gradient is not finite, down to single ones.

    All ranks compute equally often: layers that are synchronized exchange data in every step.
    """
    member = session.member
    own_state = member.learner.arrays(StatePart.OWN) if session.task.config.non_finite.action == "skip" else []
    rows = np.flatnonzero(batch.weights_N > 0)
    is_finite = member.own_gradient_is_finite(batch, num_rows)
    undecided = [] if is_finite else _halves(rows)
    bad: list[int] = []
    while member.sum_array(np.array([len(undecided)], np.int64))[0]:
        part = undecided.pop() if undecided else rows[:0]
        part_is_finite = member.own_gradient_is_finite(_only(batch, part), num_rows)
        if len(part) == 1 and not part_is_finite:
            bad.append(int(part[0]))
        elif not part_is_finite:
            undecided += _halves(part)
        if len(bad) == MAX_NAMED_SAMPLES:
            undecided = []
    if own_state:
        member.learner.assign(StatePart.OWN, own_state, "the step before")
    return OwnGradient(is_finite, _names(batch, bad), len(rows), _names(batch, rows[:MAX_NAMED_SAMPLES]))


def _halves(rows: np.ndarray) -> list[np.ndarray]:
    """The first one last."""
    return [half for half in reversed(np.array_split(rows, 2)) if len(half)]


def _only(batch: Batch, rows: np.ndarray) -> Batch:
    """These rows, repeated up to the same shape, so that nothing is compiled again; without any, all."""
    if not len(rows):
        return batch
    taken = np.resize(rows, len(batch.weights_N))
    return replace(
        batch,
        images_NHWC=batch.images_NHWC[taken],
        labels_N=batch.labels_N[taken],
        weights_N=batch.weights_N[taken],
        sample_ids_N=batch.sample_ids_N[taken],
    )


def _names(batch: Batch, rows: Sequence[int] | np.ndarray) -> tuple[str, ...]:
    return tuple(format_sample_id(batch.sample_ids_N[row].item()) for row in rows)
