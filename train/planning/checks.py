"""Checks a setup before it starts, so that no rank is started only to fail: a table, which `check` goes through.

Nothing is imported that trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
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
from train.optimizers import check_optimizer
from train.planning.memory_fit import recompute_problem
from train.readers import reader_of
from train.settings import EXECUTION, GateConfig
from train.strategies import STRATEGIES, find_strategy, fitting_strategies, has_chief
from train.strategies.options import silos_of

if TYPE_CHECKING:
    from shardmill.formats.rows import RowSchema
    from train.api import Launcher, Strategy
    from train.planning.setup import Setup


WINDOW = "train.reading.window_budget_bytes"


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table."""

    name: str
    """The setting, or what is looked at."""
    problem: Callable[[Setup], object]
    """The UsageError of a setup to which it applies, returned or raised; anything else if there is none."""
    applies: Callable[[Setup], bool] = lambda setup: True
    of_ranks: bool = False
    """It depends on how many ranks there are: asked again before fewer go on after a loss."""


def check(setup: Setup, *, of_ranks: bool = False) -> Setup:
    """`setup`, if strategy, launcher, backend, optimizer and their numbers fit each other, and the dataset, if there is
    one. Raises the first of `problems`."""
    for _, problem in problems(setup, of_ranks=of_ranks):
        raise problem
    return setup


def problems(setup: Setup, *, of_ranks: bool = False) -> Iterator[tuple[str, UsageError]]:
    """-> row, error. `of_ranks`: only of what fewer ranks may break."""
    for row in CHECKS:
        if (row.of_ranks or not of_ranks) and row.applies(setup):
            try:
                found = row.problem(setup)
            except UsageError as error:
                found = error
            if isinstance(found, UsageError):
                yield row.name, found


def _launcher_problem(setup: Setup) -> UsageError | None:
    """It starts all processes that the strategy needs, and its job outlives those that the strategy may lose."""
    config, strategy, launcher, roles = setup.config, setup.strategy, setup.launcher, setup.roles
    together = f"train.strategy = {config.strategy!r} with train.launcher = {config.launcher!r}"
    if not launcher.starts_helpers and not all(role.runs_loop for role in roles):
        *first, last = [counted(number, role) for role, number in Counter(roles).items()]
        return UsageError(
            together,
            f"it needs {len(roles)} processes: {', '.join(first)} and {last}",
            f"set train.launcher to {_launchers(lambda each: each.starts_helpers)}",
        )
    if launcher.strategies is not None and config.strategy not in launcher.strategies:
        return UsageError(
            together,
            f"this launcher starts ranks of {' and '.join(launcher.strategies)}",
            f"set train.launcher to {_launchers(lambda each: True)}",
        )
    if (may_lose := strategy.may_lose(config)) and not launcher.outlives_ranks:
        return UsageError(
            f"{together}: the training continues without {counted(len(may_lose), 'rank')}, if they are lost",
            "under this launcher a lost process ends the job",
            f"set train.launcher to {_launchers(lambda each: each.outlives_ranks)}",
        )
    return None


def _launchers(suits: Callable[[Launcher], bool]) -> str:
    """`'local' or 'spark_barrier'`: those here that suit, and start any strategy's processes."""
    many = {name: each for name, each in LAUNCHERS.installed().items() if not each.in_this_process}
    return " or ".join(repr(name) for name, each in many.items() if each.strategies is None and suits(each))


def _strategies(suits: Callable[[Strategy], bool]) -> str:
    """`'horovod' or 'torch_ddp'`: those here that suit."""
    return " or ".join(repr(name) for name, each in STRATEGIES.installed().items() if suits(each))


def _microbatches_problem(setup: Setup) -> UsageError | None:
    config, smallest = setup.config, setup.mesh.smallest_share(setup.config.global_batch_size)
    if config.num_accumulated <= smallest:
        return None
    return UsageError(
        f"train.accumulation_steps = {config.accumulation_steps}",
        f"expected at most {smallest}, the samples of a step on the rank with the fewest streams",
        f"set train.accumulation_steps = {smallest}, or 0 for as few microbatches as memory allows",
    )


def _unused_problem(setup: Setup) -> UsageError | None:
    """Of one that decides numbers, or how a strategy executes. Those of execution of a launcher may stay set: the same
    config runs here and on a cluster."""
    config = setup.config
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
            return UsageError(
                f"{', '.join(set_here)} with {options.chosen_by} = {chosen!r}",
                "which does not use it",
                f"remove it, or set {options.chosen_by} = {options.name!r}",
            )
    return None


def _compression_problem(setup: Setup) -> UsageError:
    compression, has = setup.config.compression, setup.strategy.compressions
    return UsageError(
        f"train.compression = {compression!r} with train.strategy = {setup.config.strategy!r}",
        f"it has {' and '.join(map(repr, has))}",
        f"set train.compression = 'none', "
        f"or train.strategy to {_strategies(lambda each: compression in each.compressions)}",
    )


def _batch_norm_problem(setup: Setup) -> UsageError | None:
    config = setup.config
    if not setup.strategy.syncs_batch_norm:
        fitting = set(fitting_strategies(config.backend, config.num_workers))
        offered = [name for name, each in STRATEGIES.installed().items() if each.syncs_batch_norm and name in fitting]
        others = f"train.strategy to {' or '.join(map(repr, offered))}, or " if offered else ""
        return UsageError(
            f"train.sync_batch_norm = true with train.strategy = {config.strategy!r}",
            "expected a strategy that sums statistics of batch norms over ranks within a step",
            f"set {others}train.sync_batch_norm = false",
        )
    if config.accumulation_steps > 1:
        return UsageError(
            f"train.sync_batch_norm = true with train.accumulation_steps = {config.accumulation_steps}",
            "a microbatch cannot use the statistics of later microbatches",
            "set train.accumulation_steps = 1, or train.sync_batch_norm = false",
        )
    return None


def _recompute_problem(setup: Setup) -> UsageError | None:
    other = recompute_problem(setup.config)
    if other is None:
        return None
    return UsageError(
        f"train.memory.activation_checkpointing = 'on' with {other}",
        "recomputing a block would read variables, or sum moments over ranks, twice",
        "use only one of the two",
    )


def _rank_weights_problem(setup: Setup) -> UsageError | None:
    config = setup.config
    others = {
        "train.local_sgd.silos": bool(silos_of(config)),
        f"train.reader = {config.reader!r}": not reader_of(config).follows_plan,
        f"train.strategy = {config.strategy!r}": has_chief(config),
    }
    found = next((name for name, is_set in others.items() if is_set), "")
    if not found:
        return None
    return UsageError(
        f"train.rank_weights with {found}",
        "expected the reader 'shardmill' and a strategy whose ranks share its streams",
        "remove train.rank_weights",
    )


def _skip_problem(setup: Setup) -> UsageError:
    return UsageError(
        f"train.non_finite.action = 'skip' with train.strategy = {setup.config.strategy!r}",
        "expected a strategy that can skip a batch",
        f"set train.strategy to {_strategies(lambda each: each.can_skip_batches)}, or train.non_finite.action = 'stop'",
    )


def _restarts_problem(setup: Setup) -> UsageError:
    return UsageError(
        f"train.max_restarts = {setup.config.max_restarts} with train.launcher = {setup.config.launcher!r}",
        "it does not start the ranks itself, so it cannot restart them",
        f"set train.launcher to {_launchers(lambda each: each.starts_again)}, or train.max_restarts = 0",
    )


def _keras_on_torch_problem(setup: Setup) -> UsageError | None:
    if setup.launcher.in_this_process:
        return UsageError(
            f"train.model = {setup.config.model!r} is a Keras model with the backend 'torch', and the launcher "
            "'inline' trains in this process",
            "Keras on TensorFlow exports it afterwards, and a process can load only one Keras backend",
            "set train.launcher = 'local'",
        )
    BACKENDS.usable("keras")
    return None


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


def _labels_problem(setup: Setup) -> UsageError | None:
    dataset = setup.of_dataset
    dataset.require_images()
    labels = LabelSpec.of(dataset.manifest)
    if not labels.are_numbers and not labels.class_names:
        return UsageError(
            f"the dataset {dataset.pin.uri}@{dataset.pin.version} has no labels",
            "training a classifier needs one folder per class",
            "sort the images into class folders and run the ETL again",
        )
    return check_schema(setup.config, setup.gate, dataset.manifest.row_schema)


def _train_split_problem(setup: Setup) -> UsageError | None:
    pin, splits = setup.of_dataset.pin, setup.of_dataset.manifest.splits
    if "train" not in splits:
        return UsageError(
            f"the dataset {pin.uri}@{pin.version} has no train split",
            f"it has {', '.join(splits) or 'none'}",
            "raise etl.split_fractions.train, or add images",
        )
    if reader_of(setup.config).follows_plan:
        row_shares(setup, splits["train"].num_rows)
    return None


def _cache_problem(setup: Setup) -> UsageError | None:
    """Without a look at a disk: each rank looks at that of its host when it begins to read."""
    config, dataset = setup.config, setup.of_dataset
    folder, limit_bytes = config.cache.dir, config.cache.limit_bytes
    if limit_bytes and not folder:
        return UsageError(
            f"train.cache.limit_bytes = {limit_bytes} without train.cache.dir",
            "expected the folder of the cache",
            "set both, or neither",
        )
    check_folder(folder, "train.cache.dir")
    if folder and limit_bytes and dataset.store.local_root is None:
        spec = config.plan_spec(dataset, setup.mesh.streams)
        check_limit([dataset], spec, config.format, limit_bytes, "train.cache.limit_bytes")
    return None


def _early_stop_problem(setup: Setup) -> UsageError | None:
    pin, splits = setup.of_dataset.pin, setup.of_dataset.manifest.splits
    if "validation" in splits:
        return None
    return UsageError(
        f"train.early_stop_epochs = {setup.config.early_stop_epochs}, and the dataset {pin.uri}@{pin.version} has no "
        "validation split",
        "expected a validation split, which early stopping needs",
        "set train.early_stop_epochs = 0, or raise etl.split_fractions.validation",
    )


def _window_problem(setup: Setup) -> UsageError | None:
    """The window is part of the plan, which is the same at every world size: it is decided where a training begins. A
    resumed one keeps it; with fewer ranks each then has more of it in memory than the budget."""
    memory, config = window_memory(setup), setup.config
    if memory.bytes_per_rank <= memory.budget_bytes or memory.window_chunks > 1:
        return None
    affordable = max(1, memory.budget_bytes // memory.chunk_bytes)
    more = f"set train.num_workers to {-(-config.num_streams // affordable)} or more; or "
    return UsageError(
        f"a rank with {memory.streams_per_rank} of {config.num_streams} streams needs {memory.streams_per_rank} x "
        f"1 chunk(s) of up to {memory.chunk_bytes} bytes: {memory.bytes_per_rank} bytes",
        f"expected at most train.reading.window_budget_bytes = {memory.budget_bytes}",
        f"{'' if has_chief(config) else more}raise the budget or lower train.num_streams, which starts a new run",
    )


def _has_dataset(setup: Setup) -> bool:
    return setup.dataset is not None


CHECKS = (
    Check(
        "train.num_workers",
        lambda setup: find_strategy(setup.config.strategy, setup.config.num_workers, setup.config.backend),
        of_ranks=True,
    ),
    Check("train.launcher", _launcher_problem),
    Check("train.strategy", lambda setup: setup.strategy.check(setup.config), of_ranks=True),
    Check("train.accumulation_steps", _microbatches_problem),
    Check("unused options", _unused_problem),
    Check("train.optimizer", lambda setup: check_optimizer(setup.config)),
    Check(
        "train.compression",
        _compression_problem,
        lambda setup: setup.config.compression not in setup.strategy.compressions,
    ),
    Check("train.sync_batch_norm", _batch_norm_problem, lambda setup: setup.config.sync_batch_norm),
    Check(
        "train.memory.activation_checkpointing",
        _recompute_problem,
        lambda setup: setup.config.memory.activation_checkpointing == "on",
    ),
    Check("train.rank_weights", _rank_weights_problem, lambda setup: bool(setup.config.rank_weights)),
    Check(
        "train.non_finite.action",
        _skip_problem,
        lambda setup: setup.config.non_finite.action == "skip" and not setup.strategy.can_skip_batches,
    ),
    Check(
        "train.max_restarts",
        _restarts_problem,
        lambda setup: setup.config.max_restarts > 0 and not setup.launcher.starts_again,
    ),
    Check("slots", lambda setup: setup.launcher.check(len(setup.roles), setup.spark)),
    Check(
        "train.devices",
        lambda setup: check_devices_here(setup.config, setup.num_ranks_here),
        lambda setup: not setup.launcher.assigns_devices(setup.spark),
    ),
    # Ranks on other machines look for themselves when they start.
    Check(
        "train.nics",
        lambda setup: [ipv4_of(nic) for nic in setup.config.nics],
        lambda setup: setup.num_ranks_here > 0,
    ),
    Check(
        "train.model", _keras_on_torch_problem, lambda setup: setup.config.backend == "torch" and setup.is_keras_model
    ),
    # What only a dataset decides is open until the ETL has worked.
    Check("labels", _labels_problem, _has_dataset),
    Check("train split", _train_split_problem, _has_dataset),
    Check(
        "train.reader",
        lambda setup: reader_of(setup.config).check(setup.config, setup.of_dataset),
        _has_dataset,
        of_ranks=True,
    ),
    Check("train.cache", _cache_problem, _has_dataset),
    Check(
        "train.early_stop_epochs",
        _early_stop_problem,
        lambda setup: _has_dataset(setup) and setup.config.early_stop_epochs > 0,
    ),
    Check(WINDOW, _window_problem, _has_dataset, of_ranks=True),
)


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


def row_shares(setup: Setup, num_rows: int) -> RowShares:
    """Compute the shares of a split with so many rows, if the epoch plan shares them out: silos and other readers have
    rules of their own. Raises UsageError for a rank without a row.
    """
    config, mesh = setup.config, setup.mesh
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


def window_memory(setup: Setup) -> WindowMemory:
    """The window memory of the rank with most streams; `check` refuses windows of one chunk that are beyond the
    budget."""
    index = setup.of_dataset.index("train")
    return WindowMemory(
        streams_per_rank=setup.mesh.most_streams,
        window_chunks=setup.config.plan_spec(setup.of_dataset, setup.mesh.streams).window_chunks,
        chunk_bytes=index.max_chunk_bytes,
        split_bytes=int(index.image_bytes.sum()),
        budget_bytes=setup.config.reading.window_budget_bytes,
    )
