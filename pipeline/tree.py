"""The whole config tree: the sections of both applications, as one file holds them."""

from __future__ import annotations

from etl.config import EtlConfig, SourceConfig
from shardmill.jobs.config import ConfigTree, DatasetConfig, ModelsConfig, SparkConfig
from train.config import TrainConfig
from train.settings import GateConfig


class PipelineTree(ConfigTree):
    """Every section of the config file."""

    source: SourceConfig = SourceConfig()
    dataset: DatasetConfig = DatasetConfig()
    models: ModelsConfig = ModelsConfig()
    etl: EtlConfig = EtlConfig()
    spark: SparkConfig = SparkConfig()
    train: TrainConfig = TrainConfig()
    gate: GateConfig = GateConfig()
