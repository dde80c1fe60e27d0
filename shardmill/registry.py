"""Extension points: a registry names its entries as `module:object` and loads each on first use.

A new format, source, engine, store, strategy, launcher or model is one file and one `Entry` (docs/extending.md). Config
fields take their choices from the registry (`OneOf`); `init`, `config show`, `doctor` and the shared tests read the
same entries.

A user's own module is found without importing it, in the working directory first; then exactly that file is imported.
What names it (a model, a launcher, a source) may be looked at before anything heavy or foreign is imported: so that the
driver can hash a model's source, and preflight can say that there is none. If it fails, the error names its line.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from shardmill.errors import UsageError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema


Value = TypeVar("Value")
Value_co = TypeVar("Value_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """One way to do the registry's job, not loaded yet."""

    target: str
    """`package.module:object`."""
    help: str
    """One line for people: `init`, `doctor` and error messages show it."""
    extra: str = ""
    """The extra of this package that installs `packages`; empty if the base installation has them."""
    packages: tuple[str, ...] = ()
    """Importable names that must be installed before the entry can work."""
    options: str = ""
    """`package.module:class` of the entry's own settings, a `Section`; empty for none. Only entries of a registry with
    an `options_prefix` may have some. Every config imports that module: it needs nothing of `packages`."""

    suffixes: tuple[str, ...] = ()
    """Suffixes, in lower case, of files that this entry reads. A file, or a folder of such files, then selects it
    automatically.
    """
    claims: str = ""
    """`package.module:function`, URI -> whether a file with such a suffix is this entry's; empty: every one is."""
    version_log: str = ""
    """The folder in which tables that this entry reads keep their versions, or a pattern of files in it; a URI may name
    a version (`TABLE@N`). A folder with such a folder in it, or a URI with the entry's name as scheme (of a table in a
    catalog), selects the entry automatically."""

    def missing_packages(self) -> tuple[str, ...]:
        """Return the packages of `packages` that are not installed, without importing anything."""
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)


@dataclass(frozen=True, slots=True)
class ExtensionPoint:
    """What a registry is for; the table of docs/extending.md is generated from these."""

    help: str
    """What is chosen, in one line."""
    defines: str
    """`package.module:object`: the class that an entry's object implements, or a function to imitate."""


_OWN = Entry("", "your own")
# Names of a library in an error message.
MAX_LISTED = 6


class Library(Protocol[Value_co]):
    """The objects of an installed package that may be chosen."""

    def names(self) -> tuple[str, ...]:
        """Return the names that the installed release has, sorted, without importing it."""
        ...

    def __getitem__(self, name: str) -> Value_co:
        """One of them. Imports the package."""
        ...


class Registry(Mapping[str, Value], Generic[Value]):
    """Name -> entry, loaded on first use. Iterating gives the built-in names; `key` is the config key that takes them.

    `values()` and `items()` load every entry, so they raise UsageError if a package of any one is missing; `entries`
    describes them without loading.

    If `takes_own` is set, a user's own object `package.module:object` is accepted wherever a built-in name is. A
    registry whose names are stored in datasets does not set it: opening a dataset must not import what its manifest
    names. `own` is the entry of such an object but for its target: what else must be installed for it.

    `libraries` are installed packages whose objects have no entry each: `module:name`, by the name of the module. The
    target of a library's entry is a `Library`.

    `options_prefix`: what the names of the sections of entries' settings begin with, in front of the entry's name, in a
    config section that derives from `with_options_of` this registry. None: its entries have no settings.

    `point` describes the extension point to people who add an entry; None if users choose no entry of this registry.
    """

    def __init__(
        self,
        key: str,
        entries: dict[str, Entry],
        *,
        takes_own: bool = False,
        own: Entry = _OWN,
        libraries: Mapping[str, Entry] | None = None,
        options_prefix: str | None = None,
        point: ExtensionPoint | None = None,
    ) -> None:
        for name in (name for name, entry in entries.items() if entry.options and options_prefix is None):
            raise UsageError(
                f"the entry {name!r} of {key} declares options",
                "expected none, because the config has no sections for the entries of this key",
                f"add its settings to the section that has the key {key}",
            )
        self.key = key
        self.entries = entries
        self.takes_own = takes_own
        self.libraries = dict(libraries or {})
        self.options_prefix = options_prefix
        self.point = point
        self._own = own
        self._loaded: dict[str, tuple[Entry, Value]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> Value:
        """The entry's object. Raises UsageError for an unknown name, or if a package that it needs is missing."""
        loaded = self._loaded.get(name)
        # Encodings are looked up once per image: to hash an entry takes long.
        if loaded is not None and loaded[0] is self.entries.get(name):
            return loaded[1]
        entry = self.usable(name)
        if self.is_own(name):
            return self._load_own(name)
        if self.is_of_library(name):
            return load_object(entry.target)[name.partition(":")[2]]
        self._loaded[name] = entry, load_object(entry.target)
        return self._loaded[name][1]

    def installed(self) -> dict[str, Value]:
        """The built-in entries whose packages are here, by name, loaded: what a message may advise to choose."""
        return {name: self[name] for name, entry in self.entries.items() if not entry.missing_packages()}

    def entry(self, name: str) -> Entry:
        """The entry of a built-in name, a library, or a user's own object. Raises UsageError for an unknown name."""
        if name in self.entries:
            return self.entries[name]
        problem = self.problem_with(name)
        if problem:
            raise UsageError(f"{self.key} = {name!r}", problem)
        return self.libraries[name.partition(":")[0]] if self.is_of_library(name) else replace(self._own, target=name)

    def usable(self, name: str) -> Entry:
        """The entry, after checking that the packages it needs are installed; loads nothing. Raises UsageError."""
        entry = self.entry(name)
        missing = entry.missing_packages()
        if missing:
            raise UsageError(
                f"{self.key} = {name!r} needs {' and '.join(missing)}", "not installed here", install_hint(entry.extra)
            )
        return entry

    def is_own(self, name: str) -> bool:
        """Whether `name` is a user's own `package.module:object`."""
        return self.takes_own and name not in self.entries and ":" in name and not self.is_of_library(name)

    def is_of_library(self, name: str) -> bool:
        """Whether `name` is `module:name` with the module of a library."""
        module, colon, _ = name.partition(":")
        return bool(colon) and module in self.libraries

    def find_own(self, name: str) -> FoundModule:
        """Locate the module of a user's own object, without importing it. Raises UsageError if there is none."""
        module_name = name.partition(":")[0]
        try:
            return find_user_module(module_name)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"{self.key} = {name!r}: there is no module {module_name!r}",
                f"looked in {error}",
                "start shardmill in the folder that contains the module, or set PYTHONPATH (on Spark, also --py-files)",
            ) from None

    def _load_own(self, name: str) -> Value:
        module_name, _, object_name = name.partition(":")
        found = self.find_own(name)
        try:
            module = import_user_module(module_name, found)
        except (Exception, SystemExit) as error:
            # A user's module may raise anything while it is imported; its sys.exit() must not end our command.
            raise UsageError(
                f"{self.key} = {name!r}: cannot import {module_name!r}: {with_line_of_user(error)}",
                f"found it in {found.spec.origin}",
                # Python alone imports what a name of ours hides.
                "" if hidden_by_another(error) else "`python -c 'import MODULE'` in that folder shows the whole error",
            ) from error
        if not hasattr(module, object_name):
            raise UsageError(
                f"{self.key} = {name!r}: {module.__file__} has no {object_name!r}", "expected package.module:object"
            )
        return getattr(module, object_name)

    def problem_with(self, name: str) -> str | None:
        """Why `name` cannot be chosen, with the nearest name; None if it can. Loads nothing."""
        if name in self.entries or self.is_own(name):
            return None
        if self.is_of_library(name):
            return self._problem_in_library(*name.split(":", 1))
        near = self._of_that_name(name) or [each for each in self.entries if name in self.entries[each].packages]
        near = near or difflib.get_close_matches(name, self.entries, n=1, cutoff=0.4)
        own = "".join(f", {library}:NAME" for library in self.libraries)
        own += ", or package.module:object" if self.takes_own else ""
        return f"expected one of {', '.join(self.entries)}{own}" + (f"; did you mean {near[0]!r}?" if near else "")

    def _of_that_name(self, name: str) -> list[str]:
        """What the installed libraries call so."""
        installed = {module: entry for module, entry in self.libraries.items() if not entry.missing_packages()}
        return [f"{module}:{name}" for module, entry in installed.items() if name in load_object(entry.target).names()]

    def _problem_in_library(self, module: str, name: str) -> str | None:
        entry = self.libraries[module]
        if entry.missing_packages():
            # What it holds is known once it is installed; until then `usable` says what is missing.
            return None
        names = load_object(entry.target).names()
        if name in names:
            return None
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        listed = f"expected one of {', '.join(names[:MAX_LISTED])}{', ...' if len(names) > MAX_LISTED else ''}"
        return f"{listed} of {module}" + (f"; did you mean '{module}:{near[0]}'?" if near else "")


@dataclass(frozen=True, slots=True)
class OneOf:
    """Annotates a config field whose choices are a registry's names: `OneOf("shardmill.formats:SHARD_FORMATS")`.

    The registry is named by text, as an entry names its object: a config then does not import the protocols of the
    objects that it chooses, which themselves take the config.
    """

    target: str
    """`package.module:REGISTRY`."""
    also: tuple[str, ...] = ()
    """Further choices that name a rule instead of an entry, such as `auto`."""

    @property
    def registry(self) -> Registry[Any]:
        """The registry, imported on first use."""
        return load_object(self.target)

    @property
    def choices(self) -> dict[str, str]:
        """Every name that may be given, with its line of help."""
        rules = dict.fromkeys(self.also, "chosen by shardmill")
        entries = {name: entry.help for name, entry in self.registry.entries.items()}
        libraries = {f"{module}:NAME": entry.help for module, entry in self.registry.libraries.items()}
        own = {"package.module:object": "your own"} if self.registry.takes_own else {}
        return rules | entries | libraries | own

    def check(self, name: str) -> str:
        """`name` itself. Raises ValueError, as pydantic's validators do, if it is not among the choices."""
        problem = None if name in self.also else self.registry.problem_with(name)
        if problem:
            rules = "".join(f"{rule}, " for rule in self.also)
            raise ValueError(problem.removeprefix("expected ").replace("one of ", f"one of {rules}", 1))
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.check, handler(source))


def load_object(target: str) -> Any:
    """The object that an entry's `package.module:object` names. Raises UsageError if its module cannot be imported."""
    module_name, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        # A package that the entry does not name, or one that is installed and broken.
        raise UsageError(
            f"{target!r} cannot be loaded: {error}", fix="`shardmill doctor` looks for packages"
        ) from error


# What these install runs on no newer Python; there pip installs nothing for them (docs/decisions/0015).
PYTHON_3_11_EXTRAS = frozenset({"horovod", "petastorm"})


def install_hint(extra: str) -> str:
    """The command that installs an extra; in a clone from its folder."""
    if sys.version_info >= (3, 12) and PYTHON_3_11_EXTRAS.intersection(extra.split(",")):
        return f"with Python 3.11: {_install_command(extra)}"
    return _install_command(extra)


def _install_command(extra: str) -> str:
    if not extra or not is_clone():
        return f"pip install 'shardmill[{extra}]'" if extra else ""
    # A package of its own, which pip would look for at its index.
    what = "./native" if extra == "native" else f"'.[{extra}]'"
    return f"`make setup` in the checkout, or pip install {what} there"


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


def is_clone() -> bool:
    """Whether this `shardmill` runs from a clone of its repository, and neither installed nor out of a ZIP."""
    return os.path.isfile(os.path.join(applications_home(), "native", "setup.py"))


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
        written = [(file, int(line)) for file, line in _FRAME.findall(str(each))]
        if own := _last_own(written) or _last_own(frames):
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
