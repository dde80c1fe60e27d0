"""Resolves `train.freeze`: which weights it names, and for which epochs they are frozen."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.values import Cursor
from shardmill.words import first_of
from train.contracts.activities import Activity

if TYPE_CHECKING:
    from train.backends.backend import Learner
    from train.config import TrainConfig

ALL_BUT_HEAD = "all_but_head"
MAX_NAMED = 6


def freeze(learner: Learner, config: TrainConfig, cursor: Cursor) -> None:
    """Before the steps from `cursor` on: what follows from the cursor alone is the same after a resume."""
    if cursor.epoch < config.unfreeze_epoch:
        learner.freeze()
    elif cursor.epoch == config.unfreeze_epoch > 0 and cursor.step == 0:
        learner.unfreeze()


def step_activity(config: TrainConfig, epoch: int) -> Activity:
    """Return the activity of a step of that epoch. A step with more weights is another activity: it is traced again."""
    has_more = 0 < config.unfreeze_epoch <= epoch
    return Activity("a step with what was frozen" if has_more else "a step", repeats=True)


def never_unfrozen(config: TrainConfig) -> str:
    """A warning if `train.unfreeze_epoch` lies behind the last epoch, else empty.

    No error: a short training tests a config, and a longer one may continue it.
    """
    if config.unfreeze_epoch < config.epochs:
        return ""
    return (
        f"train.unfreeze_epoch = {config.unfreeze_epoch}, counted from 0, but the training ends after train.epochs = "
        f"{config.epochs}: the weights that train.freeze names stay frozen"
    )


def frozen_names(config: TrainConfig, names: Sequence[str], head: Collection[str]) -> set[str]:
    """Return the elements of `names` that a pattern of `train.freeze` matches; `head`: the names of the last layer.

    Raises UsageError for a pattern that matches nothing, and if nothing is left to train.
    """
    frozen: set[str] = set()
    for pattern in config.freeze:
        if pattern == ALL_BUT_HEAD:
            found = set(names) - set(head)
        else:
            found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            shown = first_of(names, MAX_NAMED)
            near = difflib.get_close_matches(pattern, [ALL_BUT_HEAD, *names], n=1, cutoff=0.6)
            raise UsageError(
                f"train.freeze = {pattern!r} matches no weight of train.model = {config.model!r}",
                f"it has {shown}",
                f"did you mean {near[0]!r}?" if near else f"give a pattern such as 'conv*', or {ALL_BUT_HEAD!r}",
            )
        frozen |= found
    if frozen >= set(names):
        raise UsageError(
            f"train.freeze = {list(config.freeze)!r} freezes all weights of train.model = {config.model!r}",
            "expected at least one weight",
            f"give fewer patterns, or {ALL_BUT_HEAD!r}",
        )
    return frozen
