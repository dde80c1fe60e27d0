"""Loads a user's own model, `package.module:function`: hashes its source and calls its factory.

The driver chooses the folder of a training before any rank has started, and must import neither TensorFlow nor a user's
code for it: so the source of a model is hashed as bytes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardmill.errors import UsageError
from shardmill.registry import find_below, with_line_of_user
from train.models import MODELS, MODULES
from train.models.modules import models_of

if TYPE_CHECKING:
    from train.config import TrainConfig

# What a model imports of ours (`train.layers`) is no more the user's than an installed library is, also where it lies
# beside the user's module: in a checkout.
_OURS = ("train", "shardmill")
_PACKAGES_OF_OURS = {
    **{each.target.partition(":")[0]: each.packages for each in (*MODELS.entries.values(), *MODULES.entries.values())},
    "train.layers.keras": ("keras",),
    "train.layers.torch": ("torch",),
}
"""What a factory needs that builds on a model or a layer of ours."""


def source_sha256(name: str) -> str:
    """Over the bytes of a factory's module, and of every module beside it that it imports, however indirectly.

    "Beside it" is the folder of its top-level package or module: installed libraries and ours are not the user's model.
    Empty for a model of ours or of a library, which its built configuration identifies. Raises UsageError if there is
    no such module.
    """
    if not MODELS.is_own(name):
        return ""
    module = name.partition(":")[0]
    digest = hashlib.sha256()
    for each, data in sorted(_own_sources(module, name).items()):
        digest.update(f"{each} {len(data)};".encode())
        digest.update(data)
    return digest.hexdigest()


def imported_packages(config: TrainConfig) -> set[str]:
    """The top-level packages that a user's factory and the modules beside it import, also by way of a module of ours;
    of other models, their entry's."""
    name = config.model
    if not MODELS.is_own(name):
        return set(models_of(config).entry(name).packages)
    sources = _own_sources(name.partition(":")[0], name)
    imported = {each for module, data in sources.items() for each in _imports(data, module, is_package=False)}
    by_ours = {package for each in imported & _PACKAGES_OF_OURS.keys() for package in _PACKAGES_OF_OURS[each]}
    return {each.partition(".")[0] for each in imported} | by_ours


def trains_module(config: TrainConfig) -> bool:
    """Whether the model is an `nn.Module` and no Keras model on PyTorch: one that can be counted without numbers."""
    return config.backend == "torch" and "keras" not in imported_packages(config)


def build_named(config: TrainConfig, image_shape_HWC: tuple[int, int, int], num_outputs: int) -> Any:
    """What the factory of `train.model` returns. Raises UsageError if it raises."""
    if MODELS.is_own(config.model):
        return call_factory(config.model, image_shape_HWC, num_outputs)
    seed = {} if MODELS.is_of_library(config.model) else {"seed": config.seed}
    return models_of(config)[config.model](image_shape_HWC, num_outputs, **seed)


def call_factory(name: str, image_shape_HWC: tuple[int, int, int], num_classes: int) -> Any:
    """Call the factory and return its model. Raises UsageError if it raises."""
    factory: Any = MODELS[name]
    if not callable(factory):
        raise UsageError(
            f"train.model = {name!r} is a {type(factory).__name__}",
            "expected a function that takes image_shape and num_classes and returns a model",
            "give the name of the factory after the colon",
        )
    try:
        model = factory(image_shape=image_shape_HWC, num_classes=num_classes)
    except (Exception, SystemExit) as error:
        # Likewise a user's function.
        raise UsageError(
            f"train.model = {name!r}: the factory failed: {with_line_of_user(error)}",
            f"it was called with image_shape={image_shape_HWC}, num_classes={num_classes}",
            "call it with these in a Python shell to see the whole error",
        ) from error
    return model


def _own_sources(module: str, name: str) -> dict[str, bytes]:
    """Module name -> bytes of its file, for `module` and what it imports from its own folder."""
    top, home = module.partition(".")[0], MODELS.find_own(name).home
    in_library = os.path.basename(home) in ("site-packages", "dist-packages")
    sources: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        package = each.partition(".")[0]
        is_foreign = package != top and (in_library or package in _OURS)
        spec = None if each in sources or is_foreign else find_below(home, each)
        if spec is None or spec.origin is None or spec.loader is None:
            continue
        loader: Any = spec.loader
        sources[each] = loader.get_data(spec.origin)
        # Importing a.b.c runs a and a.b, too.
        waiting += [each.rsplit(".", depth)[0] for depth in range(1, each.count(".") + 1)]
        waiting += _imports(sources[each], each, is_package=spec.submodule_search_locations is not None)
    return sources


# A training asks several times, and parsing takes most of the time of each answer.
@functools.lru_cache(maxsize=256)
def _imports(source: bytes, module: str, *, is_package: bool) -> tuple[str, ...]:
    """Names that may be modules, of all import statements in a module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    package = module if is_package else module.rpartition(".")[0]
    return tuple(_names(tree, package))


def _names(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            start = ".".join(part for part in ((base if node.level else ""), node.module or "") if part)
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)


def framework_of(config: TrainConfig) -> str:
    """The backend that config and model leave no choice about; empty if any would do. Imports no framework.

    A factory that imports PyTorch and not Keras needs `torch`.
    """
    if config.backend != "auto":
        return config.backend
    packages = imported_packages(config)
    return "torch" if "torch" in packages and not packages & {"keras", "tensorflow"} else ""
