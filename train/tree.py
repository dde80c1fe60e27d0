"""The config tree of training: the sections that `train/job.py` takes from the file."""

from __future__ import annotations

from shardmill.jobs.config import ConfigTree, DatasetConfig, ModelsConfig, SparkConfig
from train.config import TrainConfig
from train.settings import GateConfig


class TrainTree(ConfigTree):
    """The sections that `train/job.py` takes from the config file."""

    other_sections = ("source", "etl")

    dataset: DatasetConfig = DatasetConfig()
    models: ModelsConfig = ModelsConfig()
    train: TrainConfig = TrainConfig()
    gate: GateConfig = GateConfig()
    spark: SparkConfig = SparkConfig()
