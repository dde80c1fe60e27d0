"""The blocks of a PyTorch module: its repeated parts, which are recomputed, gathered or sharded as one; and its links,
between which a pipeline may cut it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from train.backends.torch.runtime import import_torch


def blocks_of(model: Any) -> list[Any]:
    """The outermost modules of each class with parts of its own that the model uses more than once."""
    is_repeated = repeated_in(model)

    def found(module: Any) -> Iterator[Any]:
        if is_repeated(module):
            yield module
        else:
            for child in module.children():
                yield from found(child)

    # A module may stand at two places.
    return list({id(module): module for child in model.children() for module in found(child)}.values())


def repeated_in(model: Any) -> Callable[[Any], bool]:
    """-> whether a module is of a class with parts of its own that the model uses more than once."""
    uses = Counter(type(module) for module in model.modules() if _is_block(module))
    return lambda module: _is_block(module) and uses[type(module)] > 1


def _is_block(module: Any) -> bool:
    """Whether a module has parts and a forward pass of its own, which a chain of layers has not."""
    nn = import_torch().nn
    chains = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    is_chain = isinstance(module, chains) and type(module).forward in {chain.forward for chain in chains}
    return bool(list(module.children())) and not is_chain and "forward" not in vars(module)


def links_of(module: Any) -> list[Any]:
    """What a module says that it computes in a row; empty if it says nothing."""
    nn = import_torch().nn

    def links(module: Any) -> list[Any]:
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            return [link for child in module.children() for link in links(child)]
        return [module]

    if hasattr(module, "stages"):
        return [link for each in module.stages() for link in links(each)]
    found = links(module)
    return [] if found == [module] else found
