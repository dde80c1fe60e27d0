"""Extension points: a registry names its entries as `module:object` and loads each on first use.

A new format, source, engine, store, strategy, launcher or model is one file and one `Entry` (docs/extending.md). Config
fields take their choices from the registry (`OneOf`); `init`, `config show`, `doctor` and the shared tests read the
same entries.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from shardmill.errors import UsageError
from shardmill.user_module import (
    FoundModule,
    find_user_module,
    hidden_by_another,
    import_user_module,
    with_line_of_user,
)

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

    def problem_with(self, name: str) -> str:
        """Why `name` cannot be chosen, with the nearest name; empty if it can. Loads nothing."""
        if name in self.entries or self.is_own(name):
            return ""
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

    def _problem_in_library(self, module: str, name: str) -> str:
        entry = self.libraries[module]
        if entry.missing_packages():
            # What it holds is known once it is installed; until then `usable` says what is missing.
            return ""
        names = load_object(entry.target).names()
        if name in names:
            return ""
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
        problem = "" if name in self.also else self.registry.problem_with(name)
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


def install_hint(extra: str) -> str:
    """The command that installs an extra; the package is not published, so it is installed from its folder."""
    return f"`make setup` in the checkout, or pip install '.[{extra}]' there" if extra else ""
