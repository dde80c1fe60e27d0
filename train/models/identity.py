"""What a model is, beyond its name: the source of its factory, and the configuration of what the factory built.

The driver chooses a training's folder before any rank has started, and must not import TensorFlow or a user's code for
it: so the source is hashed as bytes. What was built is known only on the ranks, and is compared when a training goes on
and when it is exported: it also notices what the source does not show (another layer library, a changed setting that
the factory reads, a change of our own models).
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from typing import Any

from shardmill.errors import UsageError
from train.models.user import USER_PACKAGE, find_below, find_user_module
from train.values import ModelIdentity


def source_sha256(name: str) -> str:
    """Over the bytes of a factory's module, and of every module beside it that it imports, however indirectly.

    "Beside it" is the folder of its top-level package or module: installed libraries are not the user's model. Empty
    for a model of ours, which its built configuration identifies. Raises UsageError if there is no such module.
    """
    if ":" not in name:
        return ""
    module = name.partition(":")[0]
    digest = hashlib.sha256()
    for each, data in sorted(_own_sources(module, name).items()):
        digest.update(f"{each} {len(data)};".encode())
        digest.update(data)
    return digest.hexdigest()


def config_sha256(model: Any) -> str:
    """Over the configuration and the variables' shapes of a built Keras model, compiled optimizer and loss included.

    Names that Keras counts up in each process do not matter, nor dtypes: an export computes in float32 what was trained
    in another precision. A model that cannot tell its configuration counts by its layers and variables.
    """
    try:
        with warnings.catch_warnings():
            # Of a lambda that it cannot be loaded again; nobody loads this.
            warnings.simplefilter("ignore")
            config = json.loads(model.to_json())
    except Exception:  # a user's get_config may raise anything, and subclassed models need not have one
        config = [type(layer).__name__ for layer in model.layers]
    variables = [[list(variable.shape), bool(variable.trainable)] for variable in model.variables]
    # Whether a user's module needed a name of its own depends on what else is installed.
    text = json.dumps([_canonical(config), variables], sort_keys=True).replace(f"{USER_PACKAGE}.", "")
    return hashlib.sha256(text.encode()).hexdigest()


def identify_model(name: str, built_config_sha256: str, source_of_driver: str) -> ModelIdentity:
    """What this rank has built. Raises UsageError if its source is not the one that the driver found."""
    source = source_sha256(name)
    if source != source_of_driver:
        raise UsageError(
            f"train.model = {name!r}: the source here has SHA-256 {source}",
            f"expected {source_of_driver}, which the driver found",
            "give all machines the same file (--py-files), and do not change it while a training starts",
        )
    return ModelIdentity(source, built_config_sha256)


def check_same_model(then: ModelIdentity, now: ModelIdentity, name: str, where: str) -> None:
    """Raises UsageError if `where` holds the weights of another model than `train.model` is now."""
    differences = then.differences(now)
    if differences:
        raise UsageError(
            f"{where} holds the weights of another model than train.model = {name!r} builds now: "
            f"{'; '.join(differences)}",
            "expected the factory, its settings and Keras as they were then",
            "restore them, or train again (`shardmill train --fresh`)",
        )


def _own_sources(module: str, name: str) -> dict[str, bytes]:
    """Module name -> bytes of its file, for `module` and what it imports from its own folder."""
    top, home = module.partition(".")[0], find_user_module(module, name).home
    in_library = os.path.basename(home) in ("site-packages", "dist-packages")
    sources: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        is_foreign = in_library and each.partition(".")[0] != top
        spec = None if each in sources or is_foreign else find_below(home, each)
        if spec is None or spec.origin is None or spec.loader is None:
            continue
        loader: Any = spec.loader
        sources[each] = loader.get_data(spec.origin)
        # Importing a.b.c runs a and a.b, too.
        waiting += [each.rsplit(".", depth)[0] for depth in range(1, each.count(".") + 1)]
        waiting += _imports(sources[each], each, is_package=spec.submodule_search_locations is not None)
    return sources


def _imports(source: bytes, module: str, *, is_package: bool) -> Iterator[str]:
    """Names that may be modules, of all import statements in a module."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            start = ".".join(part for part in ((base if node.level else ""), node.module or "") if part)
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)


def _canonical(config: Any) -> Any:
    """The configuration with every layer's name replaced by its place in the order of appearance, without dtypes."""
    places: dict[str, str] = {}

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("name"), str):
                places.setdefault(value["name"], f"#{len(places)}")
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rename(inner) for key, inner in value.items() if key != "dtype"}
        if isinstance(value, list):
            return [rename(inner) for inner in value]
        return places.get(value, value) if isinstance(value, str) else value

    collect(config)
    return rename(config)
