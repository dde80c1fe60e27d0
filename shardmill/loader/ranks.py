"""Finds the rank and world size of this process: as passed, otherwise from frameworks and launchers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardmill.environments import find_rank_environment
from shardmill.errors import UsageError


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank, and their number."""

    rank: int
    world_size: int
    gather: Callable[[str], list[str]] | None = None
    """The text of every process, through the framework's group of them; None if there is no group."""
    are_given: bool = False
    """The caller has passed them."""


def find_ranks(rank: int | None, world_size: int | None) -> Ranks:
    """`rank` of `world_size`, if they are given; else as a framework, a launcher's variables or TF_CONFIG say.

    A framework counts only if it was imported and initialised: nothing is imported to find out. Raises UsageError if
    one number is given without the other, or they do not belong together.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(
            f"rank = {rank} with world_size = {world_size}",
            "expected both, or neither to take them from the environment",
            "give the other one, too",
        )
    if rank is not None and world_size is not None:
        found = Ranks(rank, world_size, are_given=True)
    else:
        found = _of_this_process()
    if not 0 <= found.rank < found.world_size:
        raise UsageError(
            f"rank = {found.rank} with world_size = {found.world_size}",
            "expected a rank from 0 to world_size - 1",
            "ranks are counted from 0",
        )
    return found


def _of_this_process() -> Ranks:
    found = _of_frameworks()
    if found is not None:
        return found
    if (started := find_rank_environment(os.environ)) is not None:
        return Ranks(started[1].rank, started[1].world_size)
    return _of_tf_config(os.environ["TF_CONFIG"]) if "TF_CONFIG" in os.environ else Ranks(0, 1)


def _of_frameworks() -> Ranks | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size(), partial(_gather_by_torch, distributed))
    for name in ("horovod.torch", "horovod.tensorflow"):
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            return Ranks(horovod.rank(), horovod.size(), horovod.allgather_object)
    # Asking JAX for its process index before `jax.distributed.initialize` would start it as one process for good.
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        count = jax.process_count()
        return Ranks(jax.process_index(), count, gather_by_jax if count > 1 else None)
    return None


def _gather_by_torch(distributed: Any, text: str) -> list[str]:
    texts = [""] * distributed.get_world_size()
    distributed.all_gather_object(texts, text)
    return texts


def gather_by_jax(text: str) -> list[str]:
    """The text of every process of JAX: two small computations over all devices, which every process takes part in."""
    from jax.experimental.multihost_utils import process_allgather

    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(process_allgather(np.array([len(data)], np.int32))).reshape(-1)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(data)] = data
    rows = np.asarray(process_allgather(padded)).reshape(len(sizes), -1)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes.tolist(), strict=True)]


def _of_tf_config(text: str) -> Ranks:
    """TensorFlow's cluster in JSON: the chief is rank 0, the workers follow in their order."""
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        ranks = [(kind, index) for kind in ("chief", "master", "worker") for index in range(len(cluster.get(kind, ())))]
        return Ranks(ranks.index((task["type"], int(task["index"]))), len(ranks))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"the environment variable TF_CONFIG = {text!r}",
            "expected JSON whose `task` is the chief or a worker of its `cluster`, because others read no batches",
            "correct it, or give rank and world_size",
        ) from None
