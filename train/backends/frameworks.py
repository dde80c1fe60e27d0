"""The installed frameworks: whether they are built for GPUs, by their package metadata alone, and how they are imported
faster.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from shardmill.errors import UsageError
from train.contracts.world import World


def gpu_problem(backend: str) -> str | None:
    """Why this backend's framework, as it is installed here, cannot use a GPU; None if it can, or that is not known."""
    reason = {"keras": _tensorflow, "torch": _torch}.get(backend)
    return reason() if reason else None


def check_seen(world: World, framework: str, num_seen: int) -> None:
    """Raises UsageError if the framework does not see the GPUs that this rank was given, and would use the CPU."""
    if world.devices and num_seen != len(world.devices):
        given = world.placement[world.rank]
        raise UsageError(
            f"{given}: {framework} sees {num_seen} GPU(s) there",
            f"expected {len(world.devices)}",
            "check nvidia-smi and the framework's CUDA libraries on that host; or set train.devices = 'cpu'",
        )


def _tensorflow() -> str | None:
    try:
        version = metadata.version("tensorflow-cpu")
    except metadata.PackageNotFoundError:
        return None
    return f"tensorflow-cpu {version} is installed, which was built without CUDA"


def _torch() -> str | None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    if re.search(r"^(cuda|hip)\b[^=]*= '", text, re.MULTILINE):
        return None
    return f"torch {metadata.version('torch')} is installed, which was built without CUDA"


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside, Python looks for no garbage: imports make none, and a million objects that stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
