"""The ways in which ranks combine gradients; a new one is one entry here, and the shared tests run over it."""

from __future__ import annotations

import difflib

from shardmill.errors import UsageError
from train.strategies.horovod import HOROVOD
from train.strategies.single import SINGLE
from train.strategies.strategy import Collective, Strategy

__all__ = ["STRATEGIES", "Collective", "Strategy", "find_strategy"]

STRATEGIES: dict[str, Strategy] = {"single": SINGLE, "horovod": HOROVOD}


def find_strategy(name: str, num_ranks: int) -> Strategy:
    """The strategy of that name, if it allows the world size. Raises UsageError otherwise."""
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(STRATEGIES)}"
        raise UsageError(f"train.strategy = {name!r}", f"expected one of {', '.join(STRATEGIES)}", hint)
    strategy = STRATEGIES[name]
    if not strategy.allows_world_size(num_ranks):
        wider = [other for other, entry in STRATEGIES.items() if entry.allows_world_size(num_ranks)]
        raise UsageError(
            f"train.strategy = {name!r} with train.num_workers = {num_ranks}",
            f"expected at most {strategy.max_ranks} worker",
            f'set train.strategy = "{wider[0]}", or train.num_workers = {strategy.max_ranks}',
        )
    return strategy
