"""Rejects settings of a strategy, launcher or schedule that is not the chosen one: they would be silently ignored."""

from __future__ import annotations

from shardmill.errors import UsageError
from train.config import TrainConfig
from train.settings.kinds import EXECUTION


def check_unused(config: TrainConfig) -> None:
    """Raises UsageError for one that decides numbers, or how a strategy executes. Those of execution of a launcher may
    stay set: the same config runs here and on a cluster."""
    for section, options in TrainConfig.options_fields().items():
        chosen = getattr(config, options.chosen_by.rpartition(".")[2])
        given, defaults = getattr(config, section), options.defaults()
        may_stay = options.chosen_by == "train.launcher"
        set_here = [
            f"train.{section}.{name} = {getattr(given, name)!r}"
            for name, field in type(given).model_fields.items()
            if getattr(given, name) != getattr(defaults, name) and not (may_stay and EXECUTION in field.metadata)
        ]
        if set_here and chosen != options.name:
            raise UsageError(
                f"{', '.join(set_here)} with {options.chosen_by} = {chosen!r}",
                "which does not use it",
                f"remove it, or set {options.chosen_by} = {options.name!r}",
            )
