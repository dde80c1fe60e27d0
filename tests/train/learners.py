"""Learners of both backends and batches for them, without a dataset: for tests of what a backend computes."""

# pyright: reportArgumentType=false
from __future__ import annotations

from typing import Any

import numpy as np

from shardmill.values import Batch
from tests.train.training import MODELS
from train.api import StatePart
from train.backends import BACKENDS
from train.backends.model_spec import InputScale, ModelSpec
from train.config import TrainConfig
from train.contracts.world import World
from train.labels import LabelSpec

TORCH_MODELS = "tests.train.torch_models"
SHAPE = (16, 16, 3)
THREE = LabelSpec("class", ("a", "b", "c"))
SPEC = ModelSpec(SHAPE, THREE, InputScale((120.0,) * 3, (60.0,) * 3))
STATEFUL = {"keras": f"{MODELS}:stateful", "torch": f"{TORCH_MODELS}:stateful"}
LINEAR = {"keras": f"{MODELS}:linear", "torch": f"{TORCH_MODELS}:linear"}
CLIFF = {"keras": f"{MODELS}:with_cliff", "torch": f"{TORCH_MODELS}:Cliff"}


def learner(name: str, model: str, *, sum_in_step: Any = None, **config: Any):
    backend = BACKENDS[name]
    backend.start(World(), int(config.get("seed", 0)))
    return backend.build(TrainConfig(model=model, **config), SPEC, sum_in_step=sum_in_step)


def state(learner) -> dict[StatePart, list[bytes]]:
    return {part: [array.tobytes() for array in learner.arrays(part)] for part in StatePart}


def batch_of(shape_HWC: tuple[int, int, int], num_rows: int = 4, num_classes: int = 3) -> Batch:
    rng = np.random.default_rng(0)
    return Batch(images_NHWC=rng.integers(0, 256, (num_rows, *shape_HWC), dtype=np.uint8),
                 labels_N=np.arange(num_rows, dtype=np.int64) % num_classes,
                 weights_N=np.ones(num_rows, dtype=np.float32), sample_ids_N=np.arange(num_rows, dtype=np.int64),
                 epoch=0, step=0)  # fmt: skip


def step_of(config: TrainConfig, shape_HWC: tuple[int, int, int]):
    """A Keras model of three classes, built, and its step."""
    import keras

    from train.backends.keras.build import build_model
    from train.backends.keras.optimizers import build_optimizer
    from train.backends.keras.step import TrainStep

    keras.utils.set_random_seed(0)
    built = build_model(config, shape_HWC, THREE)
    chosen = build_optimizer(config, built.model, built.compiled_optimizer)
    channels = shape_HWC[2]
    return built, TrainStep(built, chosen, InputScale((120.0,) * channels, (60.0,) * channels))
