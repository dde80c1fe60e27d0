"""Computes the metrics of a training's model on one split."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from shardmill.loader.reader import BatchReader, read_epoch
from shardmill.values import Batch
from train.contracts.activities import Activity, during, each_announced, reading
from train.contracts.epochs import evaluation_spec, row_source
from train.contracts.values import Evaluation
from train.evaluation.evaluate import evaluate_batches, scores_by, write_confusion
from train.rank.session import Session


def evaluate_split(session: Session, split: str) -> Evaluation:
    """Every rank reads the same streams as in training, each in stored order, and adds up its part of the sums."""
    dataset, learner = session.dataset, session.member.learner
    reporter, evaluating = session.reporter, Activity(f"the evaluation on {split}", repeats=True)

    def outputs_of(images_NHWC: np.ndarray) -> np.ndarray:
        with during(reporter, evaluating):
            return learner.outputs(images_NHWC)

    # A silo that may not read the pinned dataset adds nothing.
    with _opened(session, split) if session.streams else nullcontext(()) as read:
        batches = each_announced(reporter, reading(f"reading a batch of the split {split}", dataset.store), read)
        return evaluate_batches(
            scores_by(outputs_of, session.labels.kind, learner.outputs_are_logits),
            batches if session.member.data.is_first else map(_without_rows, batches),
            split,
            session.labels,
            session.member,
        )


def _opened(session: Session, split: str) -> BatchReader[Batch]:
    dataset, config, evaluated = session.dataset, session.task.config, session.evaluated
    spec = evaluation_spec(dataset, config, split)
    if split not in evaluated:
        # Room in memory is for one.
        evaluated.clear()
        evaluated[split] = row_source(config, dataset, spec, session.streams, config.augment.unchanged)
    return read_epoch(evaluated[split], dataset.plan_epoch(spec, 0))


def _without_rows(batch: Batch) -> Batch:
    """For a member whose model answers together with that of another, who counts them."""
    return replace(batch, weights_N=np.zeros_like(batch.weights_N))


def evaluate_finally(session: Session) -> Evaluation | None:
    """The figures on data that no decision has seen; None if there is no such split.

    Rank 0 alone has those of each class, and writes to a file how the classes were confused.
    """
    split = session.dataset.manifest.evaluation_split
    if split is None:
        return None
    evaluation = evaluate_split(session, split)
    if session.member.rank != 0:
        return evaluation.without_classes()
    if evaluation.confused is not None:
        write_confusion(session.checkpoints.store, session.task.training_dir, evaluation.confused)
    return replace(evaluation, confused=None)
