"""Assigns a device to each rank: the only resolver for all launchers, called before any framework is imported.

On each host `devices_of_rank` shares out what the host shows, or takes what Spark gave the task; its process sees
nothing else. The ranks then tell each other (`agree_on_devices`): a map that cannot be meant ends the job.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardmill.environments.rank_environment import RankEnvironment
from shardmill.errors import UsageError
from train.backends.frameworks import gpu_problem
from train.config import TrainConfig
from train.contracts.activities import during, waiting
from train.contracts.values import Reporter
from train.contracts.world import RankDevices
from train.strategies import STRATEGIES, roles_of

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
DEVICES_VARIABLE = "SHARDMILL_DEVICES"
# CUDA ignores entries after the first invalid one; SLURM writes the last one.
NO_DEVICE = ("", "-1", "none", "NoDevFiles")
_DRIVERS_FILES = re.compile(r"nvidia\d+")


def visible_gpus(environment: Mapping[str, str], num_gpus: int) -> tuple[str, ...]:
    """Addresses of the GPUs that a process with this environment may use, of the `num_gpus` of its host: pure."""
    given = environment.get(CUDA_VARIABLE)
    if given is None:
        return tuple(str(number) for number in range(num_gpus))
    addresses: list[str] = []
    for address in given.split(","):
        if address.strip() in NO_DEVICE:
            break
        addresses.append(address.strip())
    return tuple(addresses)


def share_of_rank(available: Sequence[str], place: RankEnvironment, *, is_one: bool) -> tuple[str, ...]:
    """The devices of one rank among those that all ranks of its host see: pure.

    One, or (not `is_one`) an equal part of them. With fewer devices than ranks some get the same one, which
    `check_devices` refuses.
    """
    if not available:
        return ()
    if is_one or len(available) < place.ranks_per_node:
        return (available[place.local_rank % len(available)],)
    each = len(available) // place.ranks_per_node
    return tuple(available[place.local_rank * each : (place.local_rank + 1) * each])


def check_devices(wanted: str, ranks: Sequence[RankDevices]) -> None:
    """Raises UsageError with the numbers for a device that two ranks share, GPUs on only some ranks, or none: pure."""
    of_device: dict[tuple[str, str], list[int]] = {}
    for each in ranks:
        for device in each.devices:
            of_device.setdefault((each.host, device), []).append(each.rank)
    shared = {key: numbers for key, numbers in of_device.items() if len(numbers) > 1}
    if shared:
        (host, device), numbers = next(iter(shared.items()))
        num_ranks = sum(each.host == host for each in ranks)
        num_devices = sum(each_host == host for each_host, _ in of_device)
        raise UsageError(
            f"ranks {' and '.join(map(str, numbers))} would share GPU {device} of host {host}: "
            f"{num_ranks} ranks there, {num_devices} GPU(s)",
            "expected a GPU for each rank",
            "lower train.num_workers, request more GPUs, or set train.devices = 'cpu'",
        )
    without = [each for each in ranks if not each.devices]
    if without and (wanted == "gpu" or len(without) < len(ranks)):
        hosts = ", ".join(sorted({each.host for each in without}))
        raise UsageError(
            f"{len(ranks) - len(without)} of {len(ranks)} ranks have a GPU, with train.devices = {wanted!r}; "
            f"rank {', '.join(str(each.rank) for each in without)} on {hosts} has none",
            "expected one for each rank" if wanted == "gpu" else "expected all ranks on GPUs, or all on CPUs",
            f"make GPUs visible there ({CUDA_VARIABLE}, or Spark's resource `gpu`), or set train.devices = 'cpu'",
        )


def devices_of_rank(
    place: RankEnvironment, config: TrainConfig, assigned: Sequence[str] | None = None
) -> tuple[str, ...]:
    """The devices of a rank on this host; none: it computes on the CPU. `assigned`: what Spark gave its task.

    In `config` nothing is `auto` any more (train/planning/setup.py).

    Raises UsageError if GPUs are asked for and the framework here was built without them.
    """
    if config.devices == "cpu":
        return ()
    reason = gpu_problem(config.backend)
    if reason and config.devices == "gpu":
        raise UsageError(
            "train.devices = 'gpu'",
            f"but {reason}",
            "docs/training/speed.md says how to install for GPUs; or set 'auto'",
        )
    if reason or not roles_of(config)[place.rank].computes:
        return ()
    if assigned is not None:
        return tuple(assigned)
    is_one = STRATEGIES[config.strategy].devices_per_rank == "one"
    return share_of_rank(visible_gpus(os.environ, _num_gpus_here()), place, is_one=is_one)


def gpus_here(config: TrainConfig, backend: str) -> tuple[str, ...]:
    """Addresses of the GPUs that one rank of this backend could use in this process; none if it is to use the CPU."""
    if config.devices == "cpu" or gpu_problem(backend):
        return ()
    return visible_gpus(os.environ, _num_gpus_here())


def device_environment(
    place: RankEnvironment, config: TrainConfig, assigned: Sequence[str] | None = None
) -> dict[str, str]:
    """Variables that make a rank's process see its own devices and no others; set before any framework is imported."""
    devices = devices_of_rank(place, config, assigned)
    variables = {CUDA_VARIABLE: ",".join(devices) or "-1", DEVICES_VARIABLE: ",".join(devices)}
    if CUDA_VARIABLE not in os.environ:
        # The order of `nvidia-smi`, from which Spark's discovery scripts take addresses; CUDA's own is by speed.
        variables["CUDA_DEVICE_ORDER"] = os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return variables


def check_devices_here(config: TrainConfig, num_ranks_here: int) -> str:
    """`check_devices` for the ranks that start on this host, before any does. -> what they compute on, in words."""
    if any(each.devices for each in devices_here(config, num_ranks_here)):
        return "GPU"
    reason = gpu_problem(config.backend)
    has_unused = visible_gpus(os.environ, _num_gpus_here()) and config.devices != "cpu"
    return f"CPU (this host has a GPU, but {reason})" if has_unused and reason else "CPU"


def devices_here(config: TrainConfig, num_ranks_here: int) -> tuple[RankDevices, ...]:
    """Return the devices of the ranks that start on this host. Raises as `check_devices` does."""
    places = [RankEnvironment(rank, len(roles_of(config)), rank, num_ranks_here) for rank in range(num_ranks_here)]
    ranks = tuple(RankDevices(place.rank, socket.gethostname(), devices_of_rank(place, config)) for place in places)
    check_devices(config.devices, _computing(ranks, config))
    return ranks


def agree_on_devices(
    place: RankEnvironment, config: TrainConfig, exchange: Callable[[bytes], list[bytes]], reporter: Reporter
) -> tuple[RankDevices, ...]:
    """Return the devices of all ranks, the same on all ranks; rank 0 reports them. Raises as `check_devices` does, on
    all alike.
    """
    mine = tuple(filter(None, os.environ.get(DEVICES_VARIABLE, "").split(",")))
    with during(reporter, waiting("the ranks' first meeting")):
        told = exchange(json.dumps([place.rank, socket.gethostname(), mine]).encode())
    ranks = tuple(RankDevices(rank, host, tuple(devices)) for rank, host, devices in map(json.loads, told))
    check_devices(config.devices, _computing(ranks, config))
    if place.rank == 0:
        reporter.event("devices", {"map": "; ".join(map(str, ranks))})
    return ranks


def _computing(ranks: Sequence[RankDevices], config: TrainConfig) -> list[RankDevices]:
    roles = roles_of(config)
    return [each for each in ranks if roles[each.rank].computes]


def _num_gpus_here() -> int:
    """As NVIDIA's driver shows them to this host or container."""
    return sum(bool(_DRIVERS_FILES.fullmatch(file.name)) for file in Path("/dev").glob("nvidia*"))
