"""Who trains, resolved once: ranks, streams, strategy, launcher and backend, where the config leaves them open.

`resolve` chooses them by tables of rules (docs/auto.md) from facts known before the start; the `Setup` that it returns
is what every check, plan and estimate reads. Nothing that trains is imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from shardmill.environments import find_rank_environment
from shardmill.errors import UsageError
from shardmill.jobs.config import is_local_master
from shardmill.jobs.observer import WARNING
from shardmill.words import counted
from train.backends import BACKENDS
from train.config import TrainConfig
from train.contracts.mesh import axes_in_words
from train.launching import LAUNCHERS, is_on_spark, launcher_of
from train.launching.devices import gpus_here
from train.launching.spark_slots import num_rank_slots, rank_slots_problem
from train.models.user import framework_of, imported_packages, models_of, no_module
from train.readers import READERS
from train.strategies import STRATEGIES, fitting_strategies, mesh_of, roles_of, strategies_that_share
from train.strategies.options import LocalSgdOptions, MirroredOptions, num_named_ranks

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.jobs.config import SparkConfig
    from shardmill.jobs.observer import Observer
    from train.api import Launcher, Strategy
    from train.contracts.mesh import Mesh
    from train.contracts.world import Role
    from train.settings import GateConfig


AUTO = "auto"
WITHOUT_AXIS = {"fsdp": "no weights are sharded", "tensor": "no layer is divided", "pipeline": "there are no stages"}
_DIVIDES = {"strategy", "num_workers", "num_streams", "rank_weights", "mesh"}
"""The settings that the mesh follows from."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Who trains, and on what: one answer to each question that is asked before ranks start."""

    asked: TrainConfig
    """The config as the user wrote it."""
    config: TrainConfig
    """With all decisions that do not depend on memory."""
    spark: SparkConfig
    packages: frozenset[str]
    """What the model's source imports."""
    mesh: Mesh
    strategy_reason: str
    launcher_reason: str
    ranks_reason: str = ""
    """Empty if `train.num_workers` is set."""
    streams_reason: str = ""
    """Likewise of `train.num_streams`."""
    numbers: tuple[str, ...] = ()
    """Observed facts: devices, slots, data; empty if nothing was left to choose."""
    chosen_anew: str = ""
    """Why a training does not resume as it was begun; most often empty."""
    dataset: Dataset | None = None
    """None as long as nobody knows it."""
    gate: GateConfig | None = None
    """What the trained model has to pass; None if nobody will ask."""

    def changed(self, because: Mapping[str, str] | None = None, **settings: object) -> Setup:
        """With other settings, and what follows from them. `because`: reasons, by field. Raises UsageError for ranks
        that cannot divide the training."""
        config, mesh = self.config.model_copy(update=settings), self.mesh
        if not _DIVIDES.isdisjoint(settings):
            mesh = mesh_of(config)
            config = config.model_copy(update={"num_streams": mesh.num_streams})
        is_same_model = models_of(config) is models_of(self.config)
        return replace(
            self,
            config=config,
            packages=self.packages if is_same_model else frozenset(imported_packages(config)),
            mesh=mesh,
            **(because or {}),
        )

    def with_window(self, window_chunks: int) -> Setup:
        """With the shuffle window of a training that begins, or of one that is resumed."""
        return self.changed(reading=self.config.reading.model_copy(update={"window_chunks": window_chunks}))

    @property
    def of_dataset(self) -> Dataset:
        """For what is only asked when there is one."""
        assert self.dataset is not None
        return self.dataset

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.config.strategy]

    @property
    def launcher(self) -> Launcher:
        return LAUNCHERS[self.config.launcher]

    @property
    def roles(self) -> tuple[Role, ...]:
        """Of each process, in rank order."""
        return self.strategy.roles(self.config)

    @property
    def num_ranks_here(self) -> int:
        """Ranks that share this machine; 0 if all are elsewhere."""
        return self.launcher.ranks_here(len(self.roles), self.spark)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Addresses of the GPUs that one rank could use in this process."""
        return gpus_here(self.config, self.config.backend)

    @property
    def is_keras_model(self) -> bool:
        return "keras" in self.packages

    @property
    def trains_module(self) -> bool:
        """Whether the model is an `nn.Module` and no Keras model on PyTorch: it can be counted without numbers."""
        return self.config.backend == "torch" and not self.is_keras_model

    @property
    def divides_model(self) -> bool:
        """Whether ranks compute one copy of the model together."""
        return self.mesh.num_ranks > self.mesh.data_size

    @property
    def identity_config(self) -> TrainConfig:
        """The settings that name the training: streams and a window that were left open name none, however they are
        chosen for however many ranks."""
        return self.config.model_copy(update={"num_streams": self.asked.num_streams, "reading": self.asked.reading})

    @property
    def reason(self) -> str:
        """Why so many ranks, this strategy and this launcher, and the numbers that were looked at, for people."""
        config = self.config
        of_ranks = f"{counted(config.num_workers, 'rank')}: {self.ranks_reason}; " if self.ranks_reason else ""
        looked_at = f" ({'; '.join(self.numbers)})" if self.numbers else ""
        of_launcher = f"{config.launcher}: {self.launcher_reason}"
        return f"{of_ranks}{config.strategy}: {self.strategy_reason}; {of_launcher}{looked_at}"

    @property
    def in_short(self) -> str:
        """Summarize the choice with its main reason, for people."""
        config = self.config
        who = "1 process" if self.launcher.in_this_process else counted(config.num_workers, "rank")
        # Numbers come behind the colon.
        why = self.ranks_reason or self.strategy_reason.partition(": ")[0]
        return f"{who} (strategy {config.strategy}, launcher {config.launcher}): {why}"

    @property
    def single_rank_warning(self) -> str:
        """Why a strategy whose ranks share a model has one rank, if nobody has asked for one; else empty."""
        if self.asked.num_workers or self.config.num_workers > 1 or not self.strategy.needs_module:
            return ""
        return (
            f"train.strategy = {self.config.strategy!r} has one rank, which holds the whole model "
            f"({self.ranks_reason}): set train.num_workers, or sizes of train.mesh, to share it"
        )

    @property
    def unused_axes_warning(self) -> str:
        """What a strategy with several ranks does not share because they left an axis of its mesh one rank, if nobody
        has asked for one; else empty."""
        config, sizes = self.config, self.mesh.sizes
        missing = [axis for axis in self.strategy.axes if sizes[axis] == 1 and self.asked.mesh.sizes[axis] != 1]
        if not missing or config.num_workers == 1:
            return ""
        [axis, *_] = missing
        return (
            f"train.strategy = {config.strategy!r} on {config.num_workers} ranks has the mesh "
            f"{axes_in_words(sizes)}, so that {WITHOUT_AXIS[axis]}: set train.mesh.{axis} = 2 or more, or another "
            "train.num_workers"
        )

    @property
    def large_batch_warning(self) -> str:
        """That one step takes the whole train split; else empty."""
        batch = self.config.global_batch_size
        num_rows = self.dataset.manifest.splits["train"].num_rows if self.dataset else batch
        if batch <= num_rows:
            return ""
        return (
            f"train.global_batch_size = {batch:,} is larger than the train split ({counted(num_rows, 'image')}): each "
            "epoch is one step, with all of them; set a smaller one for more steps"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What ranks do not share although the strategy promises it, and a batch that the dataset does not fill."""
        told = (self.single_rank_warning, self.unused_axes_warning, self.large_batch_warning)
        return tuple(filter(None, told))

    def warn(self, observer: Observer) -> None:
        """Each as an event of the run."""
        if self.single_rank_warning:
            observer.event("one_rank", {"rank": 0, WARNING: self.single_rank_warning})
        if self.unused_axes_warning:
            observer.event("undivided", {"rank": 0, WARNING: self.unused_axes_warning})
        if self.large_batch_warning:
            observer.event("large_batch", {"rank": 0, WARNING: self.large_batch_warning})


FEW_STEPS = 100
"""Steps of a whole training; at 50 ms each they take the 5 seconds that several ranks need to start."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts that the rules read."""

    num_workers: int
    """0: not chosen yet."""
    num_ranks: int
    """More than `num_workers` if a strategy that is set needs other processes, too."""
    local_steps: int
    backend: str
    """Backend of the config, or of the model's own code; `keras` if both would work."""
    is_keras_model: bool
    num_devices: int
    """`train.mirrored.num_devices`, or the GPUs that this process may use."""
    spark_master: str
    installed: frozenset[str]
    """The strategies and launchers of which every package is here."""
    num_started: int = 0
    """Processes that others have started, for the launcher `attach`."""
    num_named: int = 0
    """Ranks that the config names one by one: silos, or weights of ranks."""
    only_one: str = ""
    """The setting that makes several ranks impossible, or that requires the user to ask for them; empty if there is
    none.
    """
    num_gpus: int = 0
    """Number of GPUs of this machine, for ranks that use one each."""
    may_use_cluster: bool = True
    """The launcher is not one that starts ranks on this machine."""
    num_slots: int | None = None
    """Executors of the Spark cluster, or GPUs if it assigns them; None if its settings do not say."""
    rank_slots_problem: str = ""
    """Reason why a cluster's `num_slots` is unknown or 0."""
    axes: frozenset[str] = frozenset()
    """Those of `train.mesh` that are set to several ranks, beside `data`."""
    mesh_ranks: int = 1
    """Product of the sizes that `train.mesh` sets."""
    num_steps: int | None = None
    """Number of steps of the whole training; None without a dataset."""
    num_rows: int | None = None
    """Number of rows of the train split; None without a dataset."""

    @property
    def has_cluster(self) -> bool:
        return self.may_use_cluster and not is_local_master(self.spark_master)

    @property
    def has_room(self) -> bool:
        """Whether there is room for several ranks."""
        return self.room > 1

    @property
    def room(self) -> int:
        """Ranks that there are slots or GPUs for; 0 if none is known."""
        return (self.num_slots or 0) if self.has_cluster else self.num_gpus


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table in docs/auto.md; of a table the first row that applies counts."""

    choice: str
    applies: Callable[[Facts], bool]
    because: str
    num_ranks: Callable[[Facts], int | None] = lambda facts: 1
    """Of a rule for the number of ranks."""


def axis_rules(axes_by_strategy: Mapping[str, tuple[str, ...]]) -> tuple[Rule, ...]:
    """The first rows for the strategy: one for each that has axes beside `data`."""
    return tuple(Rule(name, partial(_sets, axes), _are_set(axes)) for name, axes in axes_by_strategy.items() if axes)


def _sets(axes: tuple[str, ...], facts: Facts) -> bool:
    return facts.axes == set(axes)


def _are_set(axes: tuple[str, ...]) -> str:
    return " and ".join(f"train.mesh.{axis}" for axis in axes) + (" is set" if len(axes) == 1 else " are set")


RANKS_RULES = (
    Rule(
        "started",
        lambda facts: facts.num_started > 0,
        "an external launcher started this many processes",
        lambda facts: facts.num_started,
    ),
    Rule(
        "named",
        lambda facts: facts.num_named > 0,
        "train.local_sgd.silos or train.rank_weights has this many entries",
        lambda facts: facts.num_named,
    ),
    Rule(
        "mesh",
        lambda facts: facts.mesh_ranks > 1,
        "the sizes of train.mesh make {mesh_ranks} ranks, as often as there is room",
        lambda facts: max(1, facts.room // facts.mesh_ranks) * facts.mesh_ranks,
    ),
    Rule(
        "one_unless_set",
        lambda facts: facts.only_one != "",
        "the default with {only_one}; train.num_workers overrides it",
    ),
    Rule(
        "few_steps",
        lambda facts: facts.has_room and facts.num_steps is not None and facts.num_steps < FEW_STEPS,
        "{num_steps} steps in total are too few to justify more ranks",
    ),
    Rule(
        "cluster",
        lambda facts: facts.has_cluster and bool(facts.num_slots),
        "the Spark cluster {spark_master} has slots for {num_slots} ranks",
        lambda facts: facts.num_slots,
    ),
    Rule("unknown_cluster", lambda facts: facts.has_cluster, "{rank_slots_problem}"),
    Rule("gpus", lambda facts: facts.num_gpus > 1, "this machine has {num_gpus} GPUs", lambda facts: facts.num_gpus),
    Rule("one", lambda facts: True, "one process uses all devices of this machine"),
)
STRATEGY_RULES = (
    Rule("local_sgd", lambda facts: facts.local_steps > 1, "train.local_sgd.local_steps = {local_steps}"),
    Rule(
        "mirrored",
        lambda facts: facts.num_workers == 1 and facts.backend == "keras" and facts.num_devices > 1,
        "one TensorFlow worker on {num_devices} devices",
    ),
    Rule("single", lambda facts: facts.num_workers == 1, "one worker"),
    Rule("torch_ddp", lambda facts: facts.backend == "torch", "{num_workers} PyTorch workers"),
    Rule("horovod", lambda facts: True, "{num_workers} TensorFlow workers, one grouped allreduce per step"),
    Rule("multi_worker_mirrored", lambda facts: True, "{num_workers} TensorFlow workers, and Horovod is not installed"),
)
LAUNCHER_RULES = (
    Rule(
        "inline",
        lambda facts: facts.num_ranks == 1 and not (facts.is_keras_model and facts.backend == "torch"),
        "in this process",
    ),
    Rule(
        "spark_barrier",
        lambda facts: facts.num_ranks > 1 and facts.has_cluster,
        "as tasks of the Spark cluster {spark_master}",
    ),
    Rule("local", lambda facts: True, "in processes on one machine"),
)


def resolve(
    asked: TrainConfig, spark: SparkConfig, dataset: Dataset | None = None, gate: GateConfig | None = None
) -> Setup:
    """Choose ranks, streams, strategy, backend and launcher where `asked` leaves them open. What is resolved stays.

    Before there is a `dataset`, nothing follows from its size. Raises UsageError if a choice, or what was set, cannot
    run.
    """
    config, ranks_reason, streams_reason = asked, "", ""
    packages = frozenset(imported_packages(config))
    framework = framework_of(config, packages)
    facts = _facts(config, spark, dataset, packages, framework)
    if not config.num_workers:
        num_workers, ranks_reason = choose_ranks(config, facts)
        config = config.model_copy(update={"num_workers": num_workers})
        facts = replace(facts, num_workers=num_workers, num_ranks=_num_ranks(config))
    strategy, strategy_reason = config.strategy, "set by train.strategy"
    if strategy == AUTO:
        rules = strategy_rules() if facts.axes else STRATEGY_RULES
        strategy, strategy_reason = choose(rules, facts, "train.strategy")
    config = config.model_copy(update={"strategy": strategy})
    if models_of(config) is not models_of(asked):
        packages = frozenset(imported_packages(config))
        framework = framework_of(config, packages)
    if not config.num_streams:
        of_batch = f"divides train.global_batch_size = {config.global_batch_size}"
        streams_reason = f"{of_batch}, and is at least 8 and the ranks"
    mesh = mesh_of(config)
    backend = choose_backend(config, packages, framework)
    facts = replace(facts, backend=backend, is_keras_model="keras" in packages)
    launcher, launcher_reason = config.launcher, "set by train.launcher"
    if launcher == AUTO:
        _refuse_started_by_others()
        launcher, launcher_reason = choose(LAUNCHER_RULES, facts, "train.launcher")
    config = config.model_copy(update={"num_streams": mesh.num_streams, "backend": backend, "launcher": launcher})
    is_left = not asked.num_workers or AUTO in (asked.strategy, asked.launcher)
    return Setup(
        asked=asked,
        config=config,
        spark=spark,
        packages=packages,
        mesh=mesh,
        strategy_reason=strategy_reason,
        launcher_reason=launcher_reason,
        ranks_reason=ranks_reason,
        streams_reason=streams_reason,
        numbers=_numbers(config, facts) if is_left else (),
        dataset=dataset,
        gate=gate,
    )


def choose_backend(config: TrainConfig, packages: frozenset[str], framework: str) -> str:
    """The backend's name. Raises UsageError if the strategy does not run with it, or its packages are missing.

    `framework`: the one that config and model leave no choice about; if there is none, it is the strategy's first.
    """
    strategy = STRATEGIES[config.strategy]
    name = framework or strategy.backends[0]
    if name not in strategy.backends:
        others = fitting_strategies(name, config.num_workers)
        raise UsageError(
            f"train.strategy = {config.strategy!r} with the backend {name!r}"
            + (f", which train.model = {config.model!r} needs" if config.backend == AUTO else ""),
            f"it runs with {' and '.join(strategy.backends)}",
            f"set train.strategy to {' or '.join(map(repr, others))}" if others else "set train.backend = 'auto'",
        )
    # A factory that imports PyTorch too may return either; it is known when it is built, which is also before the ETL.
    if strategy.needs_module and "torch" not in packages and packages & {"keras", "tensorflow"}:
        raise no_module(config)
    # First: the preflight knows this error of a framework that is not installed already.
    models_of(config).usable(config.model)
    BACKENDS.usable(name)
    return name


def choose_ranks(config: TrainConfig, facts: Facts) -> tuple[int, str]:
    """Return the ranks of the first row that applies, and why; fewer, if only fewer have equal shares of a step and
    rows.
    """
    rule = next(rule for rule in RANKS_RULES if rule.applies(facts))
    most, because = rule.num_ranks(facts) or 1, rule.because.format(**asdict(facts))
    if rule.choice in ("started", "named", "mesh"):
        return most, because
    most_streams = config.num_streams_at(min(most, config.global_batch_size))
    most_with_rows = min(most, most_streams, most if facts.num_rows is None else facts.num_rows)
    fitting = (each for each in range(most_with_rows, 1, -1) if _shares_equally(config, each))
    num_ranks = next(fitting, 1)
    equal = f", of which {num_ranks} get equal parts of train.num_streams = {config.num_streams_at(num_ranks)}"
    equal += f" and of {facts.num_rows} rows" if most_with_rows == facts.num_rows else ""
    return num_ranks, because + (equal if num_ranks < most else "")


def choose(rules: tuple[Rule, ...], facts: Facts, key: str) -> tuple[str, str]:
    """The first choice whose packages are here and whose row applies, and why. Raises UsageError if there is none."""
    wanted = [rule for rule in rules if rule.applies(facts)]
    for rule in wanted:
        if rule.choice in facts.installed:
            return rule.choice, rule.because.format(**asdict(facts))
    (STRATEGIES if key == "train.strategy" else LAUNCHERS).usable(wanted[0].choice)
    raise UsageError(
        f"{key} = 'auto' does not apply to this training", f"expected {', '.join(rule.choice for rule in wanted)}"
    )


def strategy_rules() -> tuple[Rule, ...]:
    """The table for the strategy; what has which axes, the strategies say."""
    of_axes = {name: each.axes for name, each in strategies_that_share().items()}
    return (*axis_rules(of_axes), *STRATEGY_RULES)


def _shares_equally(config: TrainConfig, num_ranks: int) -> bool:
    """Whether so many own equally many streams, and each enough for its microbatches."""
    config = config.model_copy(update={"num_streams": config.num_streams_at(num_ranks)})
    num_steps = config.options(LocalSgdOptions).local_steps
    rows_per_stream = config.global_batch_size // config.num_streams
    is_enough = config.num_accumulated * num_steps <= config.num_streams // num_ranks * rows_per_stream
    return config.num_streams % num_ranks == 0 and is_enough


def _facts(
    config: TrainConfig, spark: SparkConfig, dataset: Dataset | None, packages: frozenset[str], framework: str
) -> Facts:
    axes = frozenset(axis for axis, size in config.mesh.sizes.items() if axis != "data" and size > 1)
    backend = framework or _backend_of_strategy(config, axes)
    entries = {**STRATEGIES.entries, **LAUNCHERS.entries}
    gpus = gpus_here(config, backend)
    # Of several GPUs a process of TensorFlow uses all, unless its strategy is set to one that gives each rank one.
    takes_one = backend == "torch" if config.strategy == AUTO else STRATEGIES[config.strategy].devices_per_rank == "one"
    launcher = launcher_of(config)
    split = dataset.manifest.splits.get("train") if dataset else None
    return Facts(
        num_workers=config.num_workers,
        num_ranks=_num_ranks(config),
        local_steps=config.options(LocalSgdOptions).local_steps,
        backend=backend,
        is_keras_model="keras" in packages,
        num_devices=config.options(MirroredOptions).num_devices or len(gpus),
        spark_master=spark.master,
        installed=frozenset(name for name, entry in entries.items() if not entry.missing_packages()),
        num_started=_started_by_others() if launcher and launcher.started_by_others else 0,
        num_named=num_named_ranks(config),
        only_one=_what_keeps_one(config),
        num_gpus=len(gpus) if takes_one else 0,
        may_use_cluster=config.launcher == AUTO or is_on_spark(config.launcher),
        num_slots=num_rank_slots(spark.master, spark.train.conf),
        rank_slots_problem=rank_slots_problem(spark.master, spark.train.conf) or "",
        axes=axes,
        mesh_ranks=math.prod(max(1, size) for size in config.mesh.sizes.values()),
        num_steps=config.epochs * -(-split.num_rows // config.global_batch_size) if split else None,
        num_rows=split.num_rows if split else None,
    )


def _backend_of_strategy(config: TrainConfig, axes: frozenset[str]) -> str:
    """The first backend of the strategy that is set, or of one that shares a model over such axes; else Keras."""
    if config.strategy != AUTO:
        return STRATEGIES[config.strategy].backends[0]
    sharing = (each for each in strategies_that_share().values() if axes and axes <= {*each.axes})
    return next((each.backends[0] for each in sharing), "keras")


def _num_ranks(config: TrainConfig) -> int:
    return config.num_workers if config.strategy == AUTO else len(roles_of(config))


def _numbers(config: TrainConfig, facts: Facts) -> tuple[str, ...]:
    """Describe the facts that the rules have read."""
    devices = f"{facts.num_devices} device(s)" if facts.num_devices else "no GPU"
    found = [f"{devices} and {len(os.sched_getaffinity(0))} processors here"]
    if not facts.has_cluster:
        of_master = f"spark.master = {facts.spark_master} names no cluster"
        why = of_master if facts.may_use_cluster else f"train.launcher = {config.launcher}"
        found.append(f"one host, because {why}")
    else:
        found.append(
            f"spark.master = {facts.spark_master} with slots for {facts.num_slots or 'an unknown number of'} ranks"
        )
    if facts.num_steps is not None:
        steps = f"{facts.num_steps // config.epochs:,} steps of {config.global_batch_size} images an epoch"
        found.append(f"{facts.num_rows:,} rows to train on: {steps}, {facts.num_steps:,} in all")
    return tuple(found)


def _what_keeps_one(config: TrainConfig) -> str:
    """The setting, or an empty text."""
    strategy = None if config.strategy == AUTO else STRATEGIES[config.strategy]
    launcher = launcher_of(config)
    local_steps = config.options(LocalSgdOptions).local_steps
    one = {
        f"train.launcher = {config.launcher!r}": launcher is not None and launcher.in_this_process,
        # With another number of ranks, some strategies give different results, so the user must request it.
        f"train.strategy = {config.strategy!r}": strategy is not None
        and (strategy.max_world_size == 1 or not strategy.synchronous),
        f"train.local_sgd.local_steps = {local_steps}": local_steps > 1,
        # It shares out row groups, of which there may be fewer than ranks.
        f"train.reader = {config.reader!r}": not READERS[config.reader].follows_plan,
    }
    return next((setting for setting, is_set in one.items() if is_set), "")


def _started_by_others() -> int:
    """Processes of this command; 0 if it was started by itself."""
    found = find_rank_environment(os.environ)
    return found[1].world_size if found else 0


def _refuse_started_by_others() -> None:
    found = find_rank_environment(os.environ)
    if found and found[1].world_size > 1:
        starter, place = found
        raise UsageError(
            f"{starter} started this command {place.world_size} times ({starter.rank} = {place.rank}, "
            f"{starter.world_size} = {place.world_size}), and train.launcher is not set",
            "each of them would run its own training",
            f"set train.launcher = 'attach'; {starter.if_left}",
        )
