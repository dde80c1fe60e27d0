"""Identifies a training by the settings that determine its result."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from shardmill.section import SettingKind, section_of
from train.config import SHA256_OF_FILE, TrainConfig
from train.optimizers import values_of_optimizer
from train.settings import DEFAULTED, DURATION, EXECUTION
from train.strategies import STRATEGIES

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def fields_of_settings() -> dict[str, FieldInfo]:
    """Every setting of section `train`, and of the sections in it: `epochs`, `local_sgd.silos`."""
    found: dict[str, FieldInfo] = {}
    for name, field in TrainConfig.model_fields.items():
        inner = _section_of_settings(field)
        found |= {f"{name}.{key}": each for key, each in inner.model_fields.items()} if inner else {name: field}
    return found


def _section_of_settings(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, if its keys are settings; one that declares a kind is a setting itself."""
    is_setting = any(isinstance(each, SettingKind) for each in field.metadata)
    return None if is_setting else section_of(field)


def values_of_settings(config: TrainConfig) -> dict[str, Any]:
    """The value of each, as JSON has it."""
    return _flat(config.model_dump(mode="json"))


def settings_of(kind: SettingKind) -> frozenset[str]:
    """The settings of section `train` that are declared so."""
    return frozenset(name for name, field in fields_of_settings().items() if kind in field.metadata)


def settings_that_matter(config: TrainConfig) -> dict[str, str]:
    """The settings that decide a training's outcome, by name -> JSON.

    Those of a section and those declared so are left out at their defaults, so that a new one renames no training.
    """
    values, defaults = values_of_settings(config), values_of_settings(TrainConfig())
    defaulted = settings_of(DEFAULTED).union(name for name in values if "." in name)
    # Those of the optimizer are the ones that it uses, by their values.
    free = settings_of(EXECUTION) | settings_of(DURATION) | {"momentum", "weight_decay"}
    free |= {name for name in defaulted if values[name] == defaults[name]}
    # Between synchronous strategies a training may move: they apply the same updates.
    is_synchronous = config.strategy == "auto" or STRATEGIES[config.strategy].synchronous
    free -= set() if is_synchronous else {"strategy"}
    # A file is what it holds, wherever it lies; one of our exports also knows its classes.
    place, _, digest = config.init_from.rpartition(SHA256_OF_FILE)
    values["init_from"] = f"export {digest}" if re.search(r"@\d+$", place) else digest
    # What is done to images, not what they are declared to be.
    values["augment"] = config.augmentation.model_dump(mode="json", exclude={"images"}, exclude_defaults=True)
    matter = {name: value for name, value in values.items() if name not in free} | values_of_optimizer(config)
    return {name: json.dumps(value, sort_keys=True) for name, value in matter.items()}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    fields, found = TrainConfig.model_fields, {}
    for name, value in values.items():
        is_section = _section_of_settings(fields[name]) is not None
        found |= {f"{name}.{key}": each for key, each in value.items()} if is_section else {name: value}
    return found
