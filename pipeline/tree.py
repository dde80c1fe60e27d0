"""The whole config tree: the sections of both applications, as one file holds them."""

from __future__ import annotations

from etl.config import EtlConfig, EtlTree, SourceConfig
from shardmill.jobs.config import ConfigTree, DatasetConfig, ModelsConfig, SparkConfig
from train.config import GateConfig, TrainConfig
from train.tree import TrainTree


class PipelineTree(ConfigTree):
    """Every section of the config file."""

    source: SourceConfig = SourceConfig()
    dataset: DatasetConfig = DatasetConfig()
    models: ModelsConfig = ModelsConfig()
    etl: EtlConfig = EtlConfig()
    spark: SparkConfig = SparkConfig()
    train: TrainConfig = TrainConfig()
    gate: GateConfig = GateConfig()

    def etl_tree(self) -> EtlTree:
        """What the ETL may see."""
        return EtlTree(**{name: getattr(self, name) for name in EtlTree.model_fields})

    def train_tree(self) -> TrainTree:
        """What training may see."""
        return TrainTree(**{name: getattr(self, name) for name in TrainTree.model_fields})
