"""Checks that all ranks hold the same plan: if one had another version or seed, rows would be read twice or never."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardmill.epoch_plan import PlanSpec
    from shardmill.loader.ranks import Ranks
    from shardmill.values import DatasetPin


def check_same_plan(ranks: Ranks, spec: PlanSpec, pins: Mapping[DatasetPin, bool]) -> None:
    """Compare the plans through the process group, if there is one; every process of it makes the loader then, those
    that read the same rows, too.

    `pins`: the datasets, each with whether it was opened as `URI@N`. Without a group, all must be: each rank has looked
    up a latest version on its own.
    Ranks that were passed to the loader are not checked. Raises UsageError, on every rank.
    """
    if ranks.are_given or (ranks.world_size == 1 and ranks.gather is None):
        return
    versions = [f"{pin.uri}@{pin.version}" for pin in pins]
    if ranks.gather is None:
        for (pin, names_version), version in zip(pins.items(), versions, strict=True):
            if names_version:
                continue
            raise UsageError(
                f"{pin.uri} without a version, on rank {ranks.rank} of {ranks.world_size}",
                "expected the same version on every rank, and each would look up the latest one for itself",
                f"open {version}, or pass rank and world_size, or initialise the process group before",
            )
        return
    mine = (
        f"{', '.join(versions)}, split {spec.split!r}, seed {spec.seed}, global_batch_size {spec.global_batch_size}, "
        f"num_streams {spec.num_streams}, plan {spec.fingerprint[:8]}"
    )
    plans = ranks.gather(mine)
    other = next((rank for rank, plan in enumerate(plans) if plan != plans[0]), None)
    if other is not None:
        raise UsageError(
            f"the ranks have different plans: rank 0 {plans[0]}; rank {other} {plans[other]}",
            "expected the same dataset version and the same arguments on every rank",
            f"open {next(iter(pins)).uri}@N; for a loader on one rank only, pass rank = 0 and world_size = 1, or to "
            "jax_loader a sharding over that rank's devices",
        )
