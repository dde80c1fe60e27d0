"""Converts `train.class_weights` to one loss weight per class, in the dataset's order of classes."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from shardmill.errors import UsageError

if TYPE_CHECKING:
    from shardmill.dataset.manifest import Manifest
    from shardmill.formats.rows import RowSchema
    from train.config import TrainConfig


def class_weights(config: TrainConfig, manifest: Manifest) -> tuple[float, ...]:
    """One for each class; empty if all count alike. Raises UsageError for what the dataset does not have.

    `balanced`: N / (K * N_k) for class k with N_k of the N samples of the train split, as in King and Zeng, "Logistic
    Regression in Rare Events Data" (2001): all classes that have samples count alike together.
    """
    given, names = config.class_weights, manifest.row_schema.class_names
    if not given:
        return ()
    check_class_weights(config, manifest.row_schema)
    if given == "balanced":
        counts = manifest.splits["train"].class_counts
        # A class without a sample has no loss to weigh.
        return tuple(sum(counts) / (len(counts) * max(1, count)) for count in counts)
    return tuple(given.get(name, 1.0) for name in names)


def check_class_weights(config: TrainConfig, schema: RowSchema) -> None:
    """Raises UsageError for classes that the dataset does not have; a listing of the source tells them already."""
    given, names = config.class_weights, schema.class_names
    if not given:
        return
    if schema.label_kind != "class":
        raise UsageError(
            f"train.class_weights = {given!r}, but the labels are of kind {schema.label_kind!r}",
            "expected one class per image",
            "remove train.class_weights",
        )
    if given != "balanced" and (unknown := [name for name in given if name not in names]):
        near = difflib.get_close_matches(unknown[0], names, n=1, cutoff=0.4)
        raise UsageError(
            f"train.class_weights names {', '.join(map(repr, unknown))}",
            f"expected classes of the dataset: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}",
            f"did you mean {near[0]!r}?" if near else "remove it: a class without a weight has weight 1",
        )
