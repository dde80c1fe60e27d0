"""Checks that a model is still the same: on every rank, in a checkpoint, in an export."""

from __future__ import annotations

from shardmill.errors import UsageError
from train.config import TrainConfig
from train.contracts.values import ModelIdentity
from train.models import MODELS
from train.models.user import source_sha256


def check_source(name: str, source_of_driver: str) -> None:
    """Raises UsageError if the source of the model here is not the one that the driver found."""
    source = source_sha256(name)
    if source != source_of_driver:
        raise UsageError(
            f"train.model = {name!r}: the source here has SHA-256 {source}",
            f"expected {source_of_driver}, which the driver found",
            "give all machines the same file (--py-files), and do not change it while a training starts",
        )


def check_same_model(then: ModelIdentity, now: ModelIdentity, name: str, where: str) -> None:
    """Raises UsageError if `where` holds the weights of another model than `train.model` is now."""
    differences = then.differences(now)
    if differences:
        raise UsageError(
            f"{where} contains weights of a different model than train.model = {name!r} builds now: "
            f"{'; '.join(differences)}",
            "expected the same factory, settings and Keras version as then",
            "restore them, or train again (`shardmill train --fresh`)",
        )


def inputs_hint(config: TrainConfig) -> str:
    """The most frequent cause when a user's model does not learn, as the end of a sentence; empty for a model of ours.

    It cannot be seen in the model itself.
    """
    if not MODELS.is_own(config.model):
        return ""
    if config.standardize:
        arrives, otherwise = "as (x - mean) / std per channel of the train split", "pixels from 0 to 255"
    else:
        arrives, otherwise = "with pixels from 0 to 255", "(x - mean) / std"
    wanted = str(not config.standardize).lower()
    return f"; the model gets float32 images {arrives}; one that expects {otherwise} wants train.standardize = {wanted}"
