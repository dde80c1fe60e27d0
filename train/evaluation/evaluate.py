"""Exact figures over one split: every sample counted once at any world size, summed over ranks, divided once.

The loss is the negative log-likelihood of the labels (of numbers the mean squared error), whatever loss the training
minimised, so that models compare. Shape legend: N batch, H height, W width, C channels, K outputs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardmill.sealed import seal
from shardmill.storage import Store
from shardmill.values import Batch
from train.evaluation.scores import Scores
from train.labels import LabelSpec
from train.records import read_if_whole
from train.tallies import TALLIES
from train.tallies.tally import Exchange, Tally
from train.values import CONFUSION, Confusion, Evaluation, to_json


def tally_of(labels: LabelSpec) -> Tally:
    """An empty tally for labels of that kind."""
    return TALLIES[labels.kind](labels)


def evaluate_batches(
    scores_of: Scores, batches: Iterable[Batch], split: str, labels: LabelSpec, exchange: Exchange
) -> Evaluation:
    """Figures of a model over the batches of one split; all ranks call it, each with its own, and all get the same.

    Raises TrainingError if an output is not a number.
    """
    tally = tally_of(labels)
    for batch in batches:
        tally.add(scores_of(batch.images_NHWC), batch)
    return tally.evaluation(split, exchange)


def evaluation_section(evaluation: Evaluation | None) -> dict[str, Any] | None:
    """The figures that a run's summary holds; None if there was no split to evaluate on."""
    if evaluation is None:
        return None
    names = ["split", "num_samples", "loss", "accuracy", "top5_accuracy"]
    if evaluation.metric.name not in names:
        names.append(evaluation.metric.name)
    return {name: getattr(evaluation, name) for name in names}


def write_confusion(store: Store, training_dir: str, confused: Confusion) -> None:
    """In a file of its own: it grows with the square of the number of classes."""
    store.put(f"{training_dir}/{CONFUSION}", seal(to_json(confused)))


def read_confusion(store: Store, training_dir: str) -> Confusion | None:
    """What `write_confusion` wrote; None if there is none, or it was altered: it is for people to look at."""
    return read_if_whole(Confusion, store, f"{training_dir}/{CONFUSION}")
