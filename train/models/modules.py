"""What a strategy that divides an `nn.Module` among its ranks (`Strategy.needs_module`) builds, and what it refuses."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shardmill.errors import UsageError
from shardmill.registry import Registry
from train.models import MODELS, MODULES

if TYPE_CHECKING:
    from train.config import TrainConfig


def models_of(config: TrainConfig) -> Registry[Any]:
    """The registry whose entry `train.model` is built: a Keras model of ours may have a twin that is a module."""
    if config.model not in MODULES or config.backend == "keras":
        return MODELS
    return MODULES if config.needs_module or _has_torch_alone() else MODELS


def _has_torch_alone() -> bool:
    return find_spec("tensorflow") is None and find_spec("torch") is not None


def no_module(config: TrainConfig) -> UsageError:
    """The error for a Keras model with such a strategy."""
    twins = " or ".join(f'"{name}"' for name in MODULES)
    return UsageError(
        f"train.model = {config.model!r} is a Keras model, and train.strategy = {config.strategy!r} holds parts of a "
        "PyTorch module on its ranks",
        "expected an nn.Module",
        f"set train.model = {twins} or torchvision.models:NAME, or give a factory that returns an nn.Module",
    )
