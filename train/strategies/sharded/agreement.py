"""Compares the steps of ranks that read the same rows and divide layers: what each of them has whole must be alike.

Nothing else would notice a layer whose sum over ranks is missing, or that draws other numbers on each rank: each goes
on with a loss and with weights of its own. Compared are steps 1, 2, 4, 8, ..., which costs nothing in the long run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardmill.errors import UsageError
from train.backends.torch.chain import ANOTHER
from train.checkpoints.shards import Shard

if TYPE_CHECKING:
    from train.config import TrainConfig

# Ranks compute the same numbers by the same kernels; some kernels of GPUs add up in any order.
TOLERANCE = 1e-3
TOLERANCE_OF_16_BITS = 0.01


class Agreement:
    """Of one rank with those that read its rows.

    `gather`: every rank's bytes in rank order. `readers`: of each rank what it reads, by a number. `of_ranks`: the
    shards of the weights that each has; those in all lists of a group are whole along the axis that divides layers.
    """

    def __init__(
        self,
        config: TrainConfig,
        gather: Callable[[bytes], list[bytes]],
        rank: int,
        readers: Sequence[int],
        of_ranks: Sequence[Sequence[Shard]],
    ) -> None:
        self._config, self._gather = config, gather
        self._readers = readers
        mine = [set(of_ranks[each]) for each, reads in enumerate(readers) if reads == readers[rank]]
        common = set.intersection(*mine)
        self._places = [place for place, shard in enumerate(of_ranks[rank]) if shard in common and 0 not in shard.shape]
        self._num_steps = 0

    def check(self, figures: Any, gradients: Sequence[Any]) -> None:
        """After a backward pass; all ranks call it. `figures`: of its rows, the loss first. `gradients`: of each shard.

        Raises UsageError on every rank if some that read the same rows have different ones.
        """
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1):
            return
        loss, squares = float(figures[0]), sum(_square(gradients[place]) for place in self._places)
        told = [each.split() for each in self._gather(f"{loss.hex()} {math.sqrt(squares).hex()}".encode())]
        for what, values in zip(("losses", "gradients"), zip(*told, strict=True), strict=True):
            self._compare(what, [float.fromhex(each.decode()) for each in values])

    def _compare(self, what: str, values: Sequence[float]) -> None:
        tolerance = TOLERANCE if self._config.mixed_precision == "off" else TOLERANCE_OF_16_BITS
        for reads in sorted(set(self._readers)):
            group = {rank: values[rank] for rank, each in enumerate(self._readers) if each == reads}
            lowest, highest = min(group, key=lambda rank: group[rank]), max(group, key=lambda rank: group[rank])
            # What is not finite is a fault of its own.
            is_finite = all(map(math.isfinite, group.values()))
            allowed = tolerance * max(map(abs, group.values()))
            if not is_finite or group[highest] - group[lowest] <= allowed:
                continue
            raise UsageError(
                f"train.model = {self._config.model!r}: in step {self._num_steps}, ranks that divide its layers and "
                f"have the same rows have different {what}: rank {lowest} {group[lowest]:.6g}, rank {highest} "
                f"{group[highest]:.6g}",
                f"expected the same on every rank, within {tolerance:.1g} of it: whatever is not divided must be alike",
                "in parallelize(mesh), have what leaves a divided layer added up or gathered over the ranks, in both "
                f"passes; draw random numbers by SampleDropout, not by a seed of each rank; {ANOTHER}",
            )


def _square(gradient: Any) -> float:
    if any(each.is_partial() for each in getattr(gradient, "placements", ())):
        # Its sum over the ranks is yet to come.
        return 0.0
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return float(local.float().square().sum())
