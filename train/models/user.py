"""A user's own model, `package.module:function`: found, hashed, imported and called.

The driver chooses the folder of a training before any rank has started, and must import neither TensorFlow nor a user's
code for it: so modules are found without importing them, and the source of a model is hashed as bytes.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from shardmill.errors import UsageError

# A user's module that has the name of an installed one (a `train.py`, our package `train`) is imported below this.
USER_PACKAGE = "_shardmill_user"


@dataclass(frozen=True, slots=True)
class FoundModule:
    """Where a user's module lies."""

    home: str
    """The folder that holds its top-level package or module."""
    spec: ModuleSpec


def find_user_module(name: str, model: str) -> FoundModule:
    """The module, found without importing anything: in the working directory, then wherever Python looks.

    Raises UsageError with the folders that were searched.
    """
    folders = [os.getcwd(), *filter(None, sys.path), *_folder_of_finders(name.partition(".")[0])]
    for folder in folders:
        if (spec := find_below(folder, name)) is not None:
            return FoundModule(folder, spec)
    raise UsageError(
        f"train.model = {model!r}: there is no module {name!r}",
        f"looked in {', '.join(dict.fromkeys(folders))}",
        "start shardmill in the folder that holds the module, or set PYTHONPATH (on Spark also --py-files)",
    )


def _folder_of_finders(top: str) -> list[str]:
    """The folder of a package that is on no path: an editable install brings a finder of its own."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:
        return []
    if spec is None:
        return []
    files = [*(spec.submodule_search_locations or []), *([spec.origin] if spec.origin and spec.has_location else [])]
    return [os.path.dirname(files[0])] if files else []


def find_below(folder: str, name: str) -> ModuleSpec | None:
    """Where `a.b.c` lies below `folder`, found without importing `a` or `a.b`."""
    path, spec = [folder], None
    for part in name.split("."):
        # By its last name alone: a namespace package with dots in its name looks its parent up among imported modules.
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


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


def load_factory(name: str) -> Callable[..., Any]:
    """The function that `package.module:function` names. Raises UsageError with the reason and the folders searched."""
    module_name, _, function_name = name.partition(":")
    found = find_user_module(module_name, name)
    try:
        module = _import_user_module(module_name, found)
    except (Exception, SystemExit) as error:
        # A user's module may raise anything while it is imported; its sys.exit() must not end our command.
        raise UsageError(
            f"train.model = {name!r}: cannot import {module_name!r}: {type(error).__name__}: {error}",
            f"found it in {found.spec.origin}",
            "`python -c 'import MODULE'` in that folder shows the whole error",
        ) from error
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise UsageError(
            f"train.model = {name!r}: {module.__file__} has no function {function_name!r}",
            "expected package.module:function",
        )
    return factory


def _import_user_module(name: str, found: FoundModule) -> ModuleType:
    """Import what was found, and no other module of that name."""
    if found.home not in sys.path:
        # For what the module imports. Last: it must not hide a package of ours.
        sys.path.append(found.home)
    if _is_same_file(_spec_of_import(name), found.spec.origin):
        return importlib.import_module(name)
    package = sys.modules.get(USER_PACKAGE)
    if package is None or list(package.__path__) != [found.home]:
        for loaded in [each for each in sys.modules if each.partition(".")[0] == USER_PACKAGE]:
            del sys.modules[loaded]
        package = ModuleType(USER_PACKAGE)
        package.__path__ = [found.home]
        sys.modules[USER_PACKAGE] = package
    return importlib.import_module(f"{USER_PACKAGE}.{name}")


def _spec_of_import(name: str) -> str | None:
    """The file that `import name` would give."""
    for folder in filter(None, sys.path):
        if (spec := find_below(folder, name.partition(".")[0])) is not None:
            spec = find_below(folder, name)
            return spec.origin if spec is not None else None
    return None


def _is_same_file(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)


def call_factory(name: str, image_shape_HWC: tuple[int, int, int], num_classes: int) -> Any:
    """The Keras 3 model that the factory returns. Raises UsageError if it raises or returns something else."""
    import keras

    factory = load_factory(name)
    try:
        model = factory(image_shape=image_shape_HWC, num_classes=num_classes)
    except (Exception, SystemExit) as error:
        # Likewise a user's function.
        raise UsageError(
            f"train.model = {name!r}: the factory failed: {type(error).__name__}: {error}",
            f"it was called with image_shape={image_shape_HWC}, num_classes={num_classes}",
        ) from error
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"train.model = {name!r}: the factory returned {type(model).__module__}.{type(model).__name__}",
            "expected a Keras 3 model (keras.Model, keras.Sequential or a subclass)",
        )
    return model


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
