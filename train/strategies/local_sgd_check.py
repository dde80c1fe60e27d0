"""Checks settings of the strategy `local_sgd`, with and without silos, before anything starts."""

from __future__ import annotations

from shardmill.dataset.versions import split_version
from shardmill.errors import UsageError
from shardmill.registry import install_hint
from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.strategies import STRATEGIES
from train.strategies.options import LocalSgdOptions, silos_of


def check_local_sgd(config: TrainConfig) -> None:
    """`train.strategies.strategy.Strategy.check`."""
    if silos_of(config):
        _check_silos(config)
    _check_updates(config)
    entry = STRATEGIES.entries["horovod"]
    if not silos_of(config) and config.backend == "keras" and (missing := entry.missing_packages()):
        raise UsageError(
            f"train.strategy = 'local_sgd' with the backend 'keras' needs {', '.join(missing)}",
            "whose collectives average the weights",
            install_hint(entry.extra),
        )
    if config.mixed_precision == "float16":
        raise UsageError(
            "train.mixed_precision = 'float16' with train.strategy = 'local_sgd'",
            "each rank would skip different steps and scale its loss by a different factor",
            "set train.mixed_precision = 'bfloat16'",
        )


def _check_updates(config: TrainConfig) -> None:
    local_steps = config.options(LocalSgdOptions).local_steps
    share = Mesh.of(config).smallest_share(config.global_batch_size)
    if config.num_accumulated * local_steps > share:
        raise UsageError(
            f"train.accumulation_steps = {config.accumulation_steps} times train.local_sgd.local_steps = {local_steps}",
            f"expected at most {share}, the samples of a step that the rank with the fewest streams has",
            "lower one of them, or raise train.global_batch_size",
        )


def _check_silos(config: TrainConfig) -> None:
    silos = silos_of(config)
    if len(silos) != config.num_workers:
        raise UsageError(
            f"train.local_sgd.silos names {len(silos)} datasets, and train.num_workers = {config.num_workers}",
            "expected one for each rank",
            f"set train.num_workers = {len(silos)}",
        )
    unnamed = [uri for uri in silos if split_version(uri)[1] is None]
    if unnamed:
        raise UsageError(
            f"train.local_sgd.silos names {', '.join(unnamed)} without a version",
            "a training needs fixed versions, and other ranks may not be able to read a silo's dataset",
            f"write, for example, {unnamed[0]}@1",
        )
    if config.max_restarts or config.reader == "petastorm":
        raise UsageError(
            f"train.local_sgd.silos with train.max_restarts = {config.max_restarts}, train.reader = {config.reader!r}",
            "each rank reads its own dataset with the reader 'shardmill', and no other rank can take over its rows",
            (
                "set train.max_restarts = 0 and train.reader = 'shardmill'; the training continues without a lost "
                "silo anyway"
            ),
        )
    if config.ema_decay:
        raise UsageError(
            f"train.ema_decay = {config.ema_decay} with train.local_sgd.silos",
            "a silo sends only its weights, once per round",
            "remove train.ema_decay",
        )
