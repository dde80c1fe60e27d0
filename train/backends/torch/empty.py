"""A PyTorch module with shapes and no numbers: it takes no memory, so that the models of any machine can be counted."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from shardmill.errors import ShardmillError
from train.backends.backend import ModelSpec
from train.backends.torch.freeze import freeze
from train.backends.torch.model import classifier_of, start_keras_if_imported
from train.backends.torch.optimizers import new_optimizer, state_tensors
from train.backends.torch.runtime import import_torch
from train.config import TrainConfig
from train.models.modules import no_module
from train.models.user import build_named


def empty_module(config: TrainConfig, spec: ModelSpec) -> Any:
    """What `train.model` names, on PyTorch's device `meta`, with `train.freeze` applied.

    A factory that computes with numbers builds its module with numbers first. Raises UsageError if it does not build,
    and for a Keras model.
    """
    torch = import_torch()
    start_keras_if_imported(config)
    make = partial(build_named, config, spec.image_shape_HWC, spec.labels.num_outputs)
    try:
        with torch.device("meta"):
            module = make()
    except ShardmillError:
        module = make()
    if not isinstance(module, torch.nn.Module) or hasattr(module, "trainable_variables"):
        raise no_module(config)
    module = module.to("meta").train()
    if any(isinstance(each, torch.nn.UninitializedParameter) for each in module.parameters()):
        with torch.no_grad():
            module(torch.zeros((2, spec.image_shape_HWC[2], *spec.image_shape_HWC[:2]), device="meta"))
    freeze(config, module, False)
    return module


def empty_classifier(module: Any, spec: ModelSpec) -> Any:
    """`module` as a step calls it: uint8 images_NHWC -> outputs_NK."""
    return classifier_of(module, is_keras=False, spec=spec).to("meta").train()


def optimizer_bytes(config: TrainConfig, module: Any, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The optimizer's state of trainable weights by name, of which it updates elements of these shapes.

    Raises UsageError for an optimizer that PyTorch does not have.
    """
    torch = import_torch()
    named = {name: weight for name, weight in module.named_parameters() if name in shapes}
    updated = [
        torch.nn.Parameter(torch.empty(shapes[name], dtype=each.dtype, device="meta")) for name, each in named.items()
    ]
    optimizer = new_optimizer(config, module, list(named.values()), updated)
    return sum(tensor.nbytes for tensor in state_tensors(optimizer, updated))
