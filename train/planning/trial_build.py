"""Builds a training's model in a separate process as a check, before the ETL costs any time.

A user's module is imported there, and its factory called, with what is known by then: the size of the images and the
labels. Pixels are not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.backends.model_spec import InputScale, ModelSpec
from train.config import TrainConfig
from train.contracts.values import to_json
from train.labels import LabelSpec
from train.launching.side_process import ask_of_model
from train.models import BUILD_FOR_ANY_IMAGE
from train.models.user import source_sha256
from train.planning.memory_fit import decided

if TYPE_CHECKING:
    from shardmill.formats.rows import RowSchema
    from train.planning.setup import Setup
    from train.reporting.observer import TrainObserver

_built: dict[bytes, Built] = {}
"""Builds already checked by this process: a run trains on the version of its own ETL."""


@dataclass(frozen=True, slots=True)
class BuildTask:
    """The model to build."""

    config: TrainConfig
    """Without `auto`."""
    spec: ModelSpec
    model_source_sha256: str
    """An edited factory is another one."""


@dataclass(frozen=True, slots=True)
class Built:
    """A model that fits."""

    num_trained: int
    """Weights that gradients change."""
    seconds: float
    """Time of its process."""


def may_not_build(setup: Setup) -> bool:
    """Whether there is anything to try: our own models build, unless something is asked for that they may not have."""
    config = setup.config
    is_asked = config.freeze or config.sync_batch_norm or config.memory.activation_checkpointing == "on"
    return config.model not in BUILD_FOR_ANY_IMAGE or bool(is_asked) or setup.divides_model


def try_build(setup: Setup, schema: RowSchema, observer: TrainObserver) -> Built | None:
    """Build the model of a training as a rank would, on the CPU, for images and labels of a dataset with this
    schema. None: nothing to try.

    Raises UsageError for a module that does not import, a factory that fails, and a model that does not fit; and for a
    process that crashes, or does not end within `train.watch.start_timeout_seconds`.
    """
    if not may_not_build(setup) or schema.one_shape_HWC is None:
        return None
    config = decided(setup.config, 1, to_bfloat16=False)
    task = to_json(BuildTask(config, _spec(config, schema), source_sha256(config.model)))
    if task not in _built:
        height, width, channels = config.augment.shape_of(schema.one_shape_HWC)
        fields = {"model": config.model, "images": f"{height} x {width} x {channels}"}
        observer.event("building", {"rank": 0, **fields, "labels": str(LabelSpec.of_schema(schema))})
        started = time.monotonic()
        steps = "imported it, called its factory, and called the model once on the CPU"
        program, fails = "train.planning.build_model", "does not build"
        num_trained = ask_of_model(program, task, int, config, fails=fails, steps=steps)
        _built[task] = Built(num_trained, time.monotonic() - started)
        observer.event("built", {"rank": 0, "weights": num_trained, "seconds": _built[task].seconds})
    return _built[task]


def _spec(config: TrainConfig, schema: RowSchema) -> ModelSpec:
    """With pixels as they are: over what they are to be standardized is not known before the ETL."""
    assert schema.one_shape_HWC is not None
    shape_HWC = config.augment.shape_of(schema.one_shape_HWC)
    num_channels = shape_HWC[2]
    scale = InputScale((0.0,) * num_channels, (1.0,) * num_channels)
    return ModelSpec(shape_HWC, LabelSpec.of_schema(schema), scale, mixes_labels=config.augment.mixes)
