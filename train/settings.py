"""What a training is known by: the settings that decide which numbers come out."""

from __future__ import annotations

import json
import re

from train.config import HOW, LATER, LENGTH, SHA256_OF_FILE, Resume, TrainConfig
from train.optimizers import recorded_of_optimizer
from train.strategies import STRATEGIES


def settings_of(meaning: Resume) -> frozenset[str]:
    """The settings of section `train` that are declared so."""
    return frozenset(name for name, field in TrainConfig.model_fields.items() if meaning in field.metadata)


def settings_that_matter(config: TrainConfig) -> dict[str, str]:
    """The settings that decide a training's outcome, name -> JSON."""
    free = settings_of(HOW) | settings_of(LENGTH)
    # Trainings that began when there was one backend do not name it.
    free |= {"backend"} if config.backend in ("auto", "keras") else set()
    fields = TrainConfig.model_fields
    defaults = {name: fields[name].get_default(call_default_factory=True) for name in settings_of(LATER)}
    free |= {name for name, default in defaults.items() if getattr(config, name) == default} | {"recipe_version"}
    # Between synchronous strategies a training may move: they apply the same updates.
    is_synchronous = config.strategy == "auto" or STRATEGIES[config.strategy].synchronous
    free -= set() if is_synchronous else {"strategy"}
    values = config.model_dump(mode="json")
    # A file is what it holds, wherever it lies; one of our exports also knows its classes.
    place, _, digest = config.init_from.rpartition(SHA256_OF_FILE)
    values["init_from"] = f"export {digest}" if re.search(r"@\d+$", place) else digest
    # What is done to images, not what they are declared to be.
    values["augment"] = config.augmentation.model_dump(exclude={"images"})
    matter = {name: value for name, value in values.items() if name not in free} | recorded_of_optimizer(config)
    return {name: json.dumps(value, sort_keys=True) for name, value in matter.items()}
