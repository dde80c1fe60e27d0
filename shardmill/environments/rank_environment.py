"""A rank's place in the world, in variables that every launcher sets and no framework owns."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """One rank among all, and among those of its host."""

    rank: int
    world_size: int
    local_rank: int
    ranks_per_node: int

    def environment(self) -> dict[str, str]:
        """Return the variables that `read_rank_environment` reads."""
        return {name: str(value) for name, value in zip(OURS, astuple(self), strict=True)}


OURS = ("SHARDMILL_RANK", "SHARDMILL_WORLD_SIZE", "SHARDMILL_LOCAL_RANK", "SHARDMILL_LOCAL_WORLD_SIZE")
HOROVODS = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")


def read_rank_environment(names: tuple[str, str, str, str] = OURS) -> RankEnvironment:
    """The place that the launcher gave this process."""
    return RankEnvironment(*(int(os.environ[name]) for name in names))
