"""What `train.model` names: found without importing it, built, identified by its source, and checked to be the same on
every rank, in a checkpoint and in an export.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import os
from collections.abc import Iterator, Set
from importlib.util import find_spec
from typing import Any

from shardmill.errors import UsageError
from shardmill.registry import Registry, find_below, with_line_of_user
from train.config import TrainConfig
from train.contracts.values import ModelIdentity
from train.models import MODELS, MODULES

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


def framework_of(config: TrainConfig, packages: Set[str]) -> str:
    """The backend that config and model leave no choice about; empty if any would do. Imports no framework.

    `packages`: those of the model (`imported_packages`). A factory that imports PyTorch and not Keras needs `torch`.
    """
    if config.backend != "auto":
        return config.backend
    return "torch" if "torch" in packages and not packages & {"keras", "tensorflow"} else ""


def find_model(name: str) -> str:
    """The file that defines a user's own model; "built in" for ours, a library's name for its own.

    Raises UsageError if there is no such model.
    """
    if not MODELS.is_own(name):
        if problem := MODELS.problem_with(name):
            raise UsageError(f"train.model = {name!r}", problem)
        return name.partition(":")[0] if MODELS.is_of_library(name) else "built in"
    module_name, _, function = name.partition(":")
    spec = MODELS.find_own(name).spec
    origin = spec.origin
    if origin is None or not origin.endswith(".py"):
        # A compiled module, or a namespace: what it defines is known only after importing it.
        return origin or module_name
    try:
        # A module may lie in a zip archive.
        loader: Any = spec.loader
        tree = ast.parse(loader.get_data(origin))
    except SyntaxError as error:
        raise UsageError(f"train.model = {name!r}: {origin}:{error.lineno}: {error.msg}") from None
    bound = set(_bound_names(tree))
    if function not in bound and "*" not in bound and "__getattr__" not in bound:
        near = difflib.get_close_matches(function, bound, n=1)
        raise UsageError(
            f"train.model = {name!r}: {origin} has no function {function!r}",
            "expected package.module:function",
            f"did you mean {module_name}:{near[0]}?" if near else "",
        )
    return origin


def _bound_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def check_source(name: str, source_of_driver: str) -> None:
    """Raises UsageError if the source of the model here is not the one that the driver found."""
    source = source_sha256(name)
    if source != source_of_driver:
        raise UsageError(
            f"train.model = {name!r}: the source here has SHA-256 {source}",
            f"expected {source_of_driver}, which the driver found",
            "give all machines the same file (--py-files), and do not change it while a training starts",
        )


def check_same_model(then: ModelIdentity, now: ModelIdentity, name: str, where: str) -> None:
    """Raises UsageError if `where` holds the weights of another model than `train.model` is now."""
    differences = then.differences(now)
    if differences:
        raise UsageError(
            f"{where} contains weights of a different model than train.model = {name!r} builds now: "
            f"{'; '.join(differences)}",
            "expected the same factory, settings and Keras version as then",
            "restore them, or train again (`shardmill train --fresh`)",
        )


def inputs_hint(config: TrainConfig) -> str:
    """The most frequent cause when a user's model does not learn, as the end of a sentence; empty for a model of ours.

    It cannot be seen in the model itself.
    """
    if not MODELS.is_own(config.model):
        return ""
    if config.standardize:
        arrives, otherwise = "as (x - mean) / std per channel of the train split", "pixels from 0 to 255"
    else:
        arrives, otherwise = "with pixels from 0 to 255", "(x - mean) / std"
    wanted = str(not config.standardize).lower()
    return f"; the model gets float32 images {arrives}; one that expects {otherwise} wants train.standardize = {wanted}"


def models_of(config: TrainConfig) -> Registry[Any]:
    """The registry whose entry `train.model` is built: a Keras model of ours may have a twin that is a module."""
    if config.model not in MODULES or config.backend == "keras":
        return MODELS
    # With neither framework it is PyTorch that is to be installed.
    return MODULES if config.needs_module or find_spec("tensorflow") is None else MODELS


def no_module(config: TrainConfig) -> UsageError:
    """The error for a Keras model with such a strategy."""
    twins = " or ".join(f'"{name}"' for name in MODULES)
    return UsageError(
        f"train.model = {config.model!r} is a Keras model, and train.strategy = {config.strategy!r} holds parts of a "
        "PyTorch module on its ranks",
        "expected an nn.Module",
        f"set train.model = {twins} or torchvision.models:NAME, or give a factory that returns an nn.Module",
    )
