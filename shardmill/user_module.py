"""A user's own module: found without importing it, in the working directory first, then imported and no other.

What names it (a model, a launcher, a source) may be looked at before anything heavy or foreign is imported: so that the
driver can hash a model's source, and preflight can say that there is none.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

# A user's module that has the name of an installed one (a `train.py`, our package `train`) is imported below this.
USER_PACKAGE = "_shardmill_user"


@dataclass(frozen=True, slots=True)
class FoundModule:
    """Where a user's module lies."""

    home: str
    """The folder that holds its top-level package or module."""
    spec: ModuleSpec


def find_user_module(name: str) -> FoundModule:
    """The module, found without importing anything: in the working directory, then wherever Python looks.

    Raises ModuleNotFoundError whose message is the folders that were searched.
    """
    folders = [os.getcwd(), *filter(None, sys.path), *_folder_of_finders(name.partition(".")[0])]
    for folder in folders:
        if (spec := find_below(folder, name)) is not None:
            return FoundModule(folder, spec)
    raise ModuleNotFoundError(", ".join(dict.fromkeys(folders)), name=name)


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


def import_user_module(name: str, found: FoundModule) -> ModuleType:
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
