"""The sections `train` and `gate` of the config, and the tree that `train/job.py` reads."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardmill.jobs.config import ConfigTree, DatasetConfig, ModelsConfig, SparkConfig
from shardmill.registry import OneOf
from shardmill.section import Section
from train.launching import LAUNCHERS
from train.settings import TrainSettings


class TrainConfig(TrainSettings):
    """How a model is trained. The important keys come first."""

    # Declared again to add the choices: every launcher imports TrainSettings, which therefore cannot import LAUNCHERS.
    launcher: Annotated[str, OneOf(LAUNCHERS)] = "inline"
    """How ranks start."""


class GateConfig(Section):
    """What a new model must show before it becomes the current one."""

    min_accuracy: float = Field(default=0.0, ge=0, le=1)
    """Floor for top-1 accuracy on the evaluation split."""
    max_regression: float = Field(default=0.01, ge=0, le=1)
    """How far top-1 accuracy may fall behind the current model's on the same split."""


class TrainTree(ConfigTree):
    """The sections that `train/job.py` takes from the config file."""

    other_sections = ("source", "etl")

    dataset: DatasetConfig = DatasetConfig()
    models: ModelsConfig = ModelsConfig()
    train: TrainConfig = TrainConfig()
    gate: GateConfig = GateConfig()
    spark: SparkConfig = SparkConfig()
