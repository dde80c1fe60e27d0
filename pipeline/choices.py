"""Lists the config keys that take their choices from a registry, and the entries that a config chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardmill.errors import UsageError
from shardmill.registry import Entry, OneOf, Registry
from shardmill.section import section_of
from shardmill.stores import STORES, scheme_of

if TYPE_CHECKING:
    from pipeline.tree import PipelineTree


@dataclass(frozen=True, slots=True)
class Chosen:
    """One entry that a config chooses."""

    key: str
    """The config key, such as `etl.formats`."""
    name: str
    registry: Registry[Any]

    @property
    def entry(self) -> Entry:
        return self.registry.entry(self.name)

    def load(self) -> Any:
        """The entry's object. Raises UsageError if a package is missing, or a user's own object cannot be imported."""
        return self.registry[self.name]


def choices_of(*annotations: Any) -> OneOf | None:
    """The choices of a config field, given its annotation and metadata; also those of each item of a tuple."""
    for annotation in annotations:
        if isinstance(annotation, OneOf):
            return annotation
        inner = choices_of(*get_args(annotation), *getattr(annotation, "__metadata__", ()))
        if inner is not None:
            return inner
    return None


def config_keys(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every config key below `section`, as `section.key`, with its field."""
    for name, field in section.model_fields.items():
        if (kind := section_of(field)) is not None:
            yield from config_keys(kind, f"{path}{name}.")
        else:
            yield f"{path}{name}", field


def registry_keys(section: type[BaseModel]) -> Iterator[tuple[str, OneOf]]:
    """Every config key below `section` whose choices are a registry's names."""
    for key, field in config_keys(section):
        if one_of := choices_of(field.annotation, *field.metadata):
            yield key, one_of


def registries(tree: type[BaseModel]) -> list[Registry[Any]]:
    """Every registry that a config chooses from, in the order of the config file."""
    of_keys = (one_of.registry for _, one_of in registry_keys(tree))
    return list({id(registry): registry for registry in (*of_keys, STORES)}.values())


def chosen_entries(tree: PipelineTree) -> Iterator[Chosen]:
    """Every registry entry that this config chooses: by name, or by the scheme of a URI."""
    from train.models import MODELS
    from train.models.user import models_of

    try:
        models = models_of(tree.train)
    except UsageError:  # of a strategy that cannot be loaded; it is an entry, too
        models = MODELS
    for key, one_of in registry_keys(type(tree)):
        value = value_at(tree, key)
        registry = models if key == "train.model" else one_of.registry
        for name in value if isinstance(value, tuple) else (value,):
            if name not in one_of.also:
                yield Chosen(key, name, registry)
    sources = next(one_of.registry for key, one_of in registry_keys(type(tree)) if key == "source.kind")
    for name, part in tree.source.parts.items():
        yield Chosen(f"source.parts.{name}.kind", part.kind, sources)
    uris = (*tree.source.uris().values(), tree.dataset.uri, tree.models.uri)
    for scheme in dict.fromkeys(scheme_of(uri) for uri in uris if uri):
        # An unknown scheme is what the preflight refuses, with the key that names it.
        if scheme in STORES:
            yield Chosen("storage", scheme, STORES)


def value_at(tree: BaseModel, key: str) -> Any:
    """The value of a dotted config key."""
    value: Any = tree
    for part in key.split("."):
        value = getattr(value, part)
    return value
