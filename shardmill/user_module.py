"""Finds a user's own module without importing it, in the working directory first, then imports exactly that file.

What names it (a model, a launcher, a source) may be looked at before anything heavy or foreign is imported: so that the
driver can hash a model's source, and preflight can say that there is none. If it fails, the error names its line.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import traceback
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

# A user's module that has the name of an installed one (a `train.py`, our package `train`) is imported below this, if
# need be with a number behind it: each folder with such modules has a package of its own.
USER_PACKAGE = "_shardmill_user"
_USER_PACKAGE = re.compile(rf"\b{USER_PACKAGE}(_\d+)?\.")
APPLICATIONS = "_applications"
"""The folder of this package that holds `etl`, `train` and `pipeline` in a wheel; pyproject.toml puts them there."""

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)
_STACK = re.compile(r'^( *)File ".+", line \d+, in .*\n?(?:\n?\1 +.*\n?)*', re.MULTILINE)
_AROUND_STACKS = re.compile(
    r"^(Traceback \(most recent call last\):|in user code:|Graph execution error:|Detected at node .* defined at .*"
    r"|\t? *\[\[.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class FoundModule:
    """The location of a user's module."""

    home: str
    """The folder that holds its top-level package or module."""
    spec: ModuleSpec


def applications_home() -> str:
    """The folder on the path, or the ZIP, that holds the applications of this `shardmill`."""
    package = os.path.dirname(os.path.abspath(__file__))
    installed = os.path.join(package, APPLICATIONS)
    # A checkout and the ZIP of `make bundle` have them beside `shardmill`.
    return installed if os.path.isdir(installed) else os.path.dirname(package)


def find_user_module(name: str) -> FoundModule:
    """The module, found without importing anything: in the working directory, then wherever Python looks.

    Raises ModuleNotFoundError whose message is the folders that were searched.
    """
    # Our applications come first on a process's own path, and here last: people mean their own `train.py`.
    ours = applications_home()
    others = [folder for folder in sys.path if folder not in ("", ours)]
    folders = [os.getcwd(), *others, ours, *_folder_of_finders(name.partition(".")[0])]
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
    """Locate `a.b.c` below `folder`, without importing `a` or `a.b`."""
    return _find_along([folder], name)


def _find_along(path: list[str], name: str) -> ModuleSpec | None:
    spec = None
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
    return importlib.import_module(f"{_package_of(found.home)}.{name}")


def without_user_package(text: str) -> str:
    """Names of modules as their user writes them."""
    return _USER_PACKAGE.sub("", text)


def _package_of(home: str) -> str:
    """The package that represents a folder of modules. It stays: what a module imports later is looked up below it."""
    known = _user_packages()
    if home not in known:
        package = ModuleType(USER_PACKAGE if not known else f"{USER_PACKAGE}_{len(known) + 1}")
        package.__path__ = [home]
        sys.modules[package.__name__] = package
        known[home] = package.__name__
    return known[home]


def _user_packages() -> dict[str, str]:
    """Folder -> the name of the package that stands for it, of those that there are."""
    names = (each for each in list(sys.modules) if _USER_PACKAGE.fullmatch(f"{each}."))
    return {sys.modules[name].__path__[0]: name for name in names}


def hidden_by_another(error: BaseException) -> str:
    """Why a user's import found another package than the one beside it, and what to do; empty for any other error.

    `train/model.py` that says `from train.blocks import Block` gets ours: Python has one module of a name.
    """
    wanted = ""
    if isinstance(error, ImportError):
        wanted = error.name or ""
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        wanted = error.obj.__name__
    top = wanted.partition(".")[0]
    taken = _spec_of_import(top) if top else None
    for home in _user_packages() if taken else ():
        own = find_below(home, top)
        if own is None or _is_same_file(own.origin, taken):
            continue
        [*folders] = own.submodule_search_locations or ()
        if folders:
            return (
                f"`{top}` resolves to {taken}, not {folders[0]}: rename that folder, or use relative imports inside it"
            )
        return f"`{top}` resolves to {taken}, not {own.origin}: rename that file"
    return ""


def _spec_of_import(name: str) -> str | None:
    """The file that `import name` would give."""
    # Along the whole path at once: a folder without `__init__.py` counts only if no other holds a package of its name.
    spec = _find_along(list(filter(None, sys.path)), name)
    return spec.origin if spec is not None else None


def _is_same_file(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)


def line_of_user(error: BaseException) -> str:
    """`file:line` of the innermost line that belongs neither to us nor to a library, of the error or of what caused it;
    empty if there is none."""
    each: BaseException | None = error
    while each is not None:
        frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(each.__traceback__)]
        if isinstance(each, SyntaxError) and each.filename:
            frames.append((each.filename, each.lineno or 0))
        # TensorFlow raises from its own graph or a copy of the user's code, and writes into the message where that is.
        if own := _last_own(_written_frames(str(each))) or _last_own(frames):
            return own
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return ""


def with_line_of_user(error: BaseException) -> str:
    """Describe an exception of user code: `Type: message (file:line)`, with a hint if a module name is
    already taken.
    """
    line, hidden = line_of_user(error), hidden_by_another(error)
    words = f"{type(error).__name__}: {message_of(error)}" + (f" ({line})" if line else "")
    return f"{words}; {hidden}" if hidden else words


def message_of(error: BaseException) -> str:
    """Return the message of an error in one line: from Keras without colours and call arguments, from TensorFlow
    without the stacks of the graph and of its Python function.
    """
    message = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).partition("\n\nArguments received by ")[0]
    if _FRAME.search(message):
        lines = _AROUND_STACKS.sub("", _STACK.sub("", message)).splitlines()
        message = " ".join(dict.fromkeys(filter(None, (line.strip() for line in lines))))
    return " ".join(message.split()).removeprefix(f"{type(error).__name__}: ")


def line_of_user_in_dump(text: str) -> str:
    """Like `line_of_user`, for stacks that `faulthandler` wrote, innermost line first; empty for none."""
    dumped = re.findall(r'^  File "(.+)", line (\d+) in ', text, re.MULTILINE)
    return _last_own([(file, int(line)) for file, line in reversed(dumped)])


def _last_own(frames: list[tuple[str, int]]) -> str:
    own = [f"{file}:{line}" for file, line in frames if not file.startswith(_not_the_users())]
    return own[-1] if own else ""


def _written_frames(text: str) -> list[tuple[str, int]]:
    return [(file, int(line)) for file, line in _FRAME.findall(text)]


@functools.cache
def _not_the_users() -> tuple[str, ...]:
    """Return the path prefixes of shardmill's and libraries' files."""
    # Its tables take a millisecond, which every command would spend; few have an error to tell.
    import sysconfig

    return (
        f"{Path(__file__).parent}/",
        *(f"{applications_home()}/{package}/" for package in ("train", "etl", "pipeline")),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        "<",
    )
