"""Tensors that have shapes and no numbers (PyTorch's device `meta`): what ranks build of a model that they share.

One rank builds the model with numbers. All place it without them, which takes neither memory nor an exchange; then each
has memory for its shards alone, and is given their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardmill.registry import with_line_of_user
from train.backends.torch.runtime import import_torch

# Attributes of every module.
_STATE = frozenset({"_parameters", "_buffers", "_modules"})


def built_without_numbers(make: Callable[[], Any]) -> tuple[Any, str]:
    """-> (the module that `make` makes, on `meta`; ""), or (None; why it cannot be made there)."""
    torch = import_torch()
    try:
        with torch.device("meta"):
            module = make()
    except (Exception, SystemExit) as error:
        # What computes with numbers while it is built has none there; a user's own code may raise anything.
        return None, f"it computes while it is built: {with_line_of_user(error)}"
    if not isinstance(module, torch.nn.Module):
        return None, f"it is a {type(module).__name__}"
    if any(map(torch.nn.parameter.is_lazy, [*module.parameters(), *module.buffers()])):
        return None, "the shapes of its lazy layers follow from numbers"
    loose = next(_loose_tensors(module), "")
    return (None, f"{loose} is a tensor, and no parameter or buffer") if loose else (module, "")


def take_numbers(module: Any) -> dict[str, Any]:
    """Leave the parameters of a module without numbers. -> its parameters as they were, by name."""
    torch = import_torch()
    taken = dict(module.named_parameters())
    _replace(
        module,
        {
            id(each): torch.nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
            for each in taken.values()
        },
    )
    return taken


def give_memory(module: Any, device: Any) -> None:
    """Memory on `device` for whatever has no numbers; what they are is left to chance."""
    torch = import_torch()
    given: dict[int, Any] = {}
    for each in (*module.parameters(), *module.buffers()):
        if each.device.type == "meta":
            memory = torch.empty_like(each, device=device)
            is_parameter = isinstance(each, torch.nn.Parameter)
            given[id(each)] = torch.nn.Parameter(memory, each.requires_grad) if is_parameter else memory
    _replace(module, given)


def _replace(module: Any, by_id: Mapping[int, Any]) -> None:
    """A tensor that stands at two places stays one."""
    for each in module.modules():
        for name, tensor in [*each._parameters.items(), *each._buffers.items()]:
            if id(tensor) in by_id:
                # Some modules note what is set (recurrent layers).
                setattr(each, name, by_id[id(tensor)])


def _loose_tensors(module: Any) -> Iterator[str]:
    """Attributes of a module and its parts that PyTorch does not know as parts of its state."""
    torch = import_torch()
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            if name not in _STATE and any(isinstance(one, torch.Tensor) for one in values):
                yield f"{path}.{name}".lstrip(".")
