"""Checks a training before it starts, so that no rank is started only to fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardmill.dataset.chunk_cache import check_folder, check_limit
from shardmill.epoch_plan import PlanSpec, plan_epoch
from shardmill.errors import UsageError
from shardmill.jobs.observer import WARNING
from shardmill.words import counted
from train.backends import BACKENDS
from train.backends.model_spec import check_class_weights
from train.config import TrainConfig
from train.contracts.world import ipv4_of
from train.labels import LabelSpec, check_gate, check_labels
from train.launching import LAUNCHERS
from train.launching.devices import check_devices_here
from train.models.user import framework_of, imported_packages
from train.optimizers import check_optimizer
from train.planning.recompute import check_recompute
from train.readers import reader_of
from train.settings import EXECUTION, GateConfig
from train.strategies import STRATEGIES, find_strategy, fitting_strategies, has_chief, mesh_of, roles_of
from train.strategies.options import silos_of

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.formats.rows import RowSchema
    from shardmill.jobs.config import SparkConfig
    from train.api import Launcher, Strategy


@dataclass(frozen=True, slots=True)
class RowShares:
    """The rows of one epoch."""

    num_rows: int
    num_steps: int
    global_batch_size: int
    num_streams: int
    rows_of_ranks: tuple[int, ...]
    """Rows by data index (`train.contracts.mesh.Mesh`)."""

    def __str__(self) -> str:
        fewest, most = min(self.rows_of_ranks), max(self.rows_of_ranks)
        each = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        return (
            f"{counted(self.num_rows, 'row')}, {counted(self.num_steps, 'step')} an epoch of train.global_batch_size "
            f"= {self.global_batch_size}; {each} rows for each of {counted(len(self.rows_of_ranks), 'rank')}, which "
            f"own train.num_streams = {self.num_streams}"
        )


def follows_plan(config: TrainConfig) -> bool:
    """Whether the epoch plan shares the rows out; silos and other readers have rules of their own."""
    return reader_of(config).follows_plan


def row_shares(config: TrainConfig, num_rows: int) -> RowShares:
    """Compute the shares of a split with so many rows. Raises UsageError for more ranks than streams, and for a rank
    without a row.
    """
    mesh = mesh_of(config)
    world_size = mesh.data_size
    # Where chunks end decides which rows a stream has, not how many.
    spec = PlanSpec("", "train", config.seed, config.global_batch_size, mesh.num_streams, 1, shuffle=False)
    plan = plan_epoch(spec, np.array([num_rows]), 0)
    rows_of_ranks = tuple(plan.stream_start(each.stop) - plan.stream_start(each.start) for each in mesh.streams)
    if min(rows_of_ranks) == 0:
        fewer = f", or set train.num_workers to {num_rows} or less" if 0 < num_rows < world_size else ""
        fewer = ", or give that rank more streams (train.rank_weights)" if num_rows >= world_size else fewer
        raise UsageError(
            f"a train split of {counted(num_rows, 'row')} for {counted(world_size, 'rank')}: "
            f"rank {rows_of_ranks.index(0)} gets none",
            "expected at least one row on each rank",
            f"add images, raise etl.split_fractions.train{fewer}",
        )
    return RowShares(num_rows, plan.num_steps, config.global_batch_size, mesh.num_streams, rows_of_ranks)


def check_unused(config: TrainConfig) -> None:
    """Raises UsageError for one that decides numbers, or how a strategy executes. Those of execution of a launcher may
    stay set: the same config runs here and on a cluster."""
    for section, options in TrainConfig.options_fields().items():
        chosen = getattr(config, options.chosen_by.rpartition(".")[2])
        given, defaults = getattr(config, section), options.defaults()
        may_stay = options.chosen_by == "train.launcher"
        set_here = [
            f"train.{section}.{name} = {getattr(given, name)!r}"
            for name, field in type(given).model_fields.items()
            if getattr(given, name) != getattr(defaults, name) and not (may_stay and EXECUTION in field.metadata)
        ]
        if set_here and chosen != options.name:
            raise UsageError(
                f"{', '.join(set_here)} with {options.chosen_by} = {chosen!r}",
                "which does not use it",
                f"remove it, or set {options.chosen_by} = {options.name!r}",
            )


@dataclass(frozen=True, slots=True)
class WindowMemory:
    """The maximum size of one rank's shuffle windows."""

    streams_per_rank: int
    """Number of streams of the rank with most streams."""
    window_chunks: int
    chunk_bytes: int
    """Size of the largest chunk."""
    split_bytes: int
    """Size of all chunks of the train split; streams share a chunk that several of their windows hold."""
    budget_bytes: int

    @property
    def bytes_per_rank(self) -> int:
        return min(self.streams_per_rank * self.window_chunks * self.chunk_bytes, self.split_bytes)

    def as_fields(self) -> dict[str, str | int | float]:
        """Return the fields of an event, with a warning of more than the budget."""
        fields = {**asdict(self), "bytes_per_rank": self.bytes_per_rank}
        if self.bytes_per_rank <= self.budget_bytes:
            return fields
        return fields | {
            WARNING: f"shuffle windows of {self.window_chunks} chunks, with which this training began, take up to "
            f"{self.bytes_per_rank} bytes of memory on a rank with {self.streams_per_rank} streams, more than "
            f"train.reading.window_budget_bytes = {self.budget_bytes}; if a host has less, set more train.num_workers"
        }


def check_spread(config: TrainConfig, spark: SparkConfig) -> None:
    """Strategy, launcher, backend, optimizer and their numbers fit each other, in a config that leaves none open.

    Raises UsageError for what cannot work. Nothing is imported that trains.
    """
    strategy = find_strategy(config.strategy, config.num_workers, framework_of(config))
    launcher = LAUNCHERS[config.launcher]
    _check_launcher(config, launcher, strategy)
    strategy.check(config)
    _check_microbatches(config)
    check_unused(config)
    check_optimizer(config)
    _check_compression(config)
    _check_batch_norm(config)
    check_recompute(config)
    _check_rank_weights(config)
    if config.non_finite.action == "skip" and not strategy.can_skip_batches:
        raise UsageError(
            f"train.non_finite.action = 'skip' with train.strategy = {config.strategy!r}",
            "expected a strategy that can skip a batch",
            f"set train.strategy to {_strategies(lambda each: each.can_skip_batches)}, "
            "or train.non_finite.action = 'stop'",
        )
    if config.max_restarts and not launcher.starts_again:
        raise UsageError(
            f"train.max_restarts = {config.max_restarts} with train.launcher = {config.launcher!r}",
            "it does not start the ranks itself, so it cannot restart them",
            f"set train.launcher to {_launchers(lambda each: each.starts_again)}, or train.max_restarts = 0",
        )
    launcher.check(len(roles_of(config)), spark)
    num_ranks_here = launcher.ranks_here(len(roles_of(config)), spark)
    if not launcher.assigns_devices(spark):
        check_devices_here(config, num_ranks_here)
    if num_ranks_here:
        # Ranks on other machines look for themselves when they start.
        for nic in config.nics:
            ipv4_of(nic)
    _check_torch(config)


def _check_launcher(config: TrainConfig, launcher: Launcher, strategy: Strategy) -> None:
    """It starts all processes that the strategy needs, and its job outlives those that the strategy may lose."""
    together = f"train.strategy = {config.strategy!r} with train.launcher = {config.launcher!r}"
    roles = strategy.roles(config)
    if not launcher.starts_helpers and not all(role.runs_loop for role in roles):
        *first, last = [counted(number, role) for role, number in Counter(roles).items()]
        raise UsageError(
            together,
            f"it needs {len(roles)} processes: {', '.join(first)} and {last}",
            f"set train.launcher to {_launchers(lambda each: each.starts_helpers)}",
        )
    if launcher.strategies is not None and config.strategy not in launcher.strategies:
        raise UsageError(
            together,
            f"this launcher starts ranks of {' and '.join(launcher.strategies)}",
            f"set train.launcher to {_launchers(lambda each: True)}",
        )
    if (may_lose := strategy.may_lose(config)) and not launcher.outlives_ranks:
        raise UsageError(
            f"{together}: the training continues without {counted(len(may_lose), 'rank')}, if they are lost",
            "under this launcher a lost process ends the job",
            f"set train.launcher to {_launchers(lambda each: each.outlives_ranks)}",
        )


def _launchers(suits: Callable[[Launcher], bool]) -> str:
    """`'local' or 'spark_barrier'`: those here that suit, and start any strategy's processes."""
    many = {name: each for name, each in LAUNCHERS.installed().items() if not each.in_this_process}
    return " or ".join(repr(name) for name, each in many.items() if each.strategies is None and suits(each))


def _strategies(suits: Callable[[Strategy], bool]) -> str:
    """`'horovod' or 'torch_ddp'`: those here that suit."""
    return " or ".join(repr(name) for name, each in STRATEGIES.installed().items() if suits(each))


def _check_microbatches(config: TrainConfig) -> None:
    smallest = mesh_of(config).smallest_share(config.global_batch_size)
    if config.num_accumulated > smallest:
        raise UsageError(
            f"train.accumulation_steps = {config.accumulation_steps}",
            f"expected at most {smallest}, the samples of a step on the rank with the fewest streams",
            f"set train.accumulation_steps = {smallest}, or 0 for as few microbatches as memory allows",
        )


def _check_torch(config: TrainConfig) -> None:
    if config.backend != "torch":
        return
    is_keras = "keras" in imported_packages(config)
    if is_keras and LAUNCHERS[config.launcher].in_this_process:
        raise UsageError(
            f"train.model = {config.model!r} is a Keras model with the backend 'torch', and the launcher 'inline' "
            "trains in this process",
            "Keras on TensorFlow exports it afterwards, and a process can load only one Keras backend",
            "set train.launcher = 'local'",
        )
    if is_keras:
        BACKENDS.usable("keras")


def _check_rank_weights(config: TrainConfig) -> None:
    if not config.rank_weights:
        return
    others = {
        "train.local_sgd.silos": bool(silos_of(config)),
        f"train.reader = {config.reader!r}": not reader_of(config).follows_plan,
        f"train.strategy = {config.strategy!r}": has_chief(config),
    }
    if found := [name for name, is_set in others.items() if is_set]:
        raise UsageError(
            f"train.rank_weights with {found[0]}",
            "expected the reader 'shardmill' and a strategy whose ranks share its streams",
            "remove train.rank_weights",
        )


def _check_compression(config: TrainConfig) -> None:
    has = STRATEGIES[config.strategy].compressions
    if config.compression not in has:
        raise UsageError(
            f"train.compression = {config.compression!r} with train.strategy = {config.strategy!r}",
            f"it has {' and '.join(map(repr, has))}",
            f"set train.compression = 'none', "
            f"or train.strategy to {_strategies(lambda each: config.compression in each.compressions)}",
        )


def check_schema(config: TrainConfig, gate: GateConfig | None, schema: RowSchema) -> None:
    """Check the labels and the size of a dataset's images, which are known before the ETL works.

    Raises UsageError for what they do not have.
    """
    labels = LabelSpec.of_schema(schema)
    check_labels(config, labels)
    if schema.one_shape_HWC is not None:
        config.augment.shape_of(schema.one_shape_HWC)
    if gate is not None:
        check_gate(gate, labels.kind)
    check_class_weights(config, schema)


def _check_batch_norm(config: TrainConfig) -> None:
    if not config.sync_batch_norm:
        return
    if not STRATEGIES[config.strategy].syncs_batch_norm:
        fitting = set(fitting_strategies(framework_of(config), config.num_workers))
        offered = [name for name, each in STRATEGIES.installed().items() if each.syncs_batch_norm and name in fitting]
        others = f"train.strategy to {' or '.join(map(repr, offered))}, or " if offered else ""
        raise UsageError(
            f"train.sync_batch_norm = true with train.strategy = {config.strategy!r}",
            "expected a strategy that sums statistics of batch norms over ranks within a step",
            f"set {others}train.sync_batch_norm = false",
        )
    if config.accumulation_steps > 1:
        raise UsageError(
            f"train.sync_batch_norm = true with train.accumulation_steps = {config.accumulation_steps}",
            "a microbatch cannot use the statistics of later microbatches",
            "set train.accumulation_steps = 1, or train.sync_batch_norm = false",
        )


def check_trainable(config: TrainConfig, dataset: Dataset, gate: GateConfig | None = None) -> None:
    """Raises UsageError for a dataset that this training, or the gate behind it, cannot use."""
    dataset.require_images()
    where = f"{dataset.pin.uri}@{dataset.pin.version}"
    splits = dataset.manifest.splits
    labels = LabelSpec.of(dataset.manifest)
    if not labels.are_numbers and not labels.class_names:
        raise UsageError(
            f"the dataset {where} has no labels",
            "training a classifier needs one folder per class",
            "sort the images into class folders and run the ETL again",
        )
    check_schema(config, gate, dataset.manifest.row_schema)
    if "train" not in splits:
        raise UsageError(
            f"the dataset {where} has no train split",
            f"it has {', '.join(splits) or 'none'}",
            "raise etl.split_fractions.train, or add images",
        )
    if follows_plan(config):
        row_shares(config, splits["train"].num_rows)
    reader_of(config).check(config, dataset)
    _check_cache(config, dataset)
    if config.early_stop_epochs and "validation" not in splits:
        raise UsageError(
            f"train.early_stop_epochs = {config.early_stop_epochs}, and the dataset {where} has no validation split",
            "expected a validation split, which early stopping needs",
            "set train.early_stop_epochs = 0, or raise etl.split_fractions.validation",
        )


def _check_cache(config: TrainConfig, dataset: Dataset) -> None:
    """Without a look at a disk: each rank looks at that of its host when it begins to read."""
    folder, limit_bytes = config.cache.dir, config.cache.limit_bytes
    if limit_bytes and not folder:
        raise UsageError(
            f"train.cache.limit_bytes = {limit_bytes} without train.cache.dir",
            "expected the folder of the cache",
            "set both, or neither",
        )
    check_folder(folder, "train.cache.dir")
    if folder and limit_bytes and dataset.store.local_root is None:
        check_limit([dataset], config.plan_spec(dataset), config.format, limit_bytes, "train.cache.limit_bytes")


def check_ranks(config: TrainConfig, dataset: Dataset) -> WindowMemory:
    """Check again before fewer ranks continue. Raises UsageError."""
    reader_of(config).check(config, dataset)
    return window_memory(config, dataset)


def window_memory(config: TrainConfig, dataset: Dataset) -> WindowMemory:
    """Return the window memory of the largest of `train.num_workers` ranks. Raises UsageError if windows of one chunk
    are beyond the budget.

    The window is part of the plan, which is the same at every world size: it is decided where a training begins. A
    resumed one keeps it; with fewer ranks each then has more of it in memory than the budget.
    """
    index = dataset.index("train")
    memory = WindowMemory(
        streams_per_rank=mesh_of(config).most_streams,
        window_chunks=config.plan_spec(dataset).window_chunks,
        chunk_bytes=index.max_chunk_bytes,
        split_bytes=int(index.image_bytes.sum()),
        budget_bytes=config.reading.window_budget_bytes,
    )
    if memory.bytes_per_rank > memory.budget_bytes and memory.window_chunks == 1:
        affordable = max(1, memory.budget_bytes // memory.chunk_bytes)
        more = f"set train.num_workers to {-(-config.num_streams // affordable)} or more; or "
        raise UsageError(
            f"a rank with {memory.streams_per_rank} of {config.num_streams} streams needs {memory.streams_per_rank} x "
            f"1 chunk(s) of up to {memory.chunk_bytes} bytes: {memory.bytes_per_rank} bytes",
            f"expected at most train.reading.window_budget_bytes = {memory.budget_bytes}",
            f"{'' if has_chief(config) else more}raise the budget or lower train.num_streams, which starts a new run",
        )
    return memory
