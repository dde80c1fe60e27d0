"""Settings of one registry entry: a config section that is declared in the entry's own module.

A section of keys whose choices are registries' names (`[train]`) derives from `with_options_of`. For each entry that
declares `options` it then has a section of that entry's own settings, such as `[train.local_sgd]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from pydantic import ConfigDict, Field, create_model

from shardmill.registry import Entry, Registry, load_object
from shardmill.section import LaterSection, Section

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

Options = TypeVar("Options", bound=Section)


@dataclass(frozen=True, slots=True)
class OptionsOf(LaterSection):
    """Annotates the field that holds an entry's settings; their class is imported when the first config is validated.

    Not before: the module that declares it may import the config that it is a section of.
    """

    registry: str
    """`package.module:REGISTRY`."""
    name: str
    """Name of the entry."""

    @property
    def chosen_by(self) -> str:
        """The config key that chooses the entry."""
        return load_object(self.registry).key

    @property
    def kind(self) -> type[Section]:
        """The class of the entry's settings."""
        entry: Entry = load_object(self.registry).entries[self.name]
        return load_object(entry.options)

    def defaults(self) -> Section:
        return self.kind()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.kind)


class SectionWithOptions(Section):
    """A section whose keys choose entries, with a section for the settings of each entry that has some."""

    # The schema is built with the first config: only then are the modules imported that declare options.
    model_config = ConfigDict(defer_build=True)

    def options(self, kind: type[Options]) -> Options:
        """The settings of that class: those of one entry, whether it is chosen or not."""
        return next(value for value in vars(self).values() if isinstance(value, kind))

    def with_options(self, options: Section) -> Self:
        """This section with other settings of one entry."""
        name = next(name for name, value in vars(self).items() if type(value) is type(options))
        return self.model_copy(update={name: options})

    @classmethod
    def options_fields(cls) -> dict[str, OptionsOf]:
        """The fields that hold the settings of entries."""
        return {
            name: each
            for name, field in cls.model_fields.items()
            for each in field.metadata
            if isinstance(each, OptionsOf)
        }


def with_options_of(*registries: str) -> type[SectionWithOptions]:
    """A base with a section for each entry that declares options, of registries named as `package.module:REGISTRY`.

    The name of the section is the registry's `options_prefix` and the entry's name.
    """
    fields: dict[str, Any] = {}
    for target in registries:
        registry: Registry[Any] = load_object(target)
        assert registry.options_prefix is not None, f"{target} declares no options_prefix"
        for name, entry in registry.entries.items():
            if entry.options:
                options, section = OptionsOf(target, name), f"{registry.options_prefix}{name}"
                assert section not in fields, f"two entries have options named {section}"
                fields[section] = (Annotated[Section, options], Field(default_factory=options.defaults))
    return create_model("Built", __base__=SectionWithOptions, **fields)
