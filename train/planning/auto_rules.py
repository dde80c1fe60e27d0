"""The rule tables of `auto`, and the facts that they read: pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from shardmill.jobs.spark_settings import is_local_master

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
    num_places: int | None = None
    """Executors of the Spark cluster, or GPUs if it assigns them; None if its settings do not say."""
    why_no_places: str = ""
    """Reason why a cluster's `num_places` is unknown or 0."""
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
        return (self.num_places or 0) if self.has_cluster else self.num_gpus


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table in docs/auto.md; of a table the first row that applies counts."""

    choice: str
    applies: Callable[[Facts], bool]
    because: str


@dataclass(frozen=True, slots=True)
class RanksRule:
    """A rule for the number of ranks."""

    choice: str
    applies: Callable[[Facts], bool]
    because: str
    num_ranks: Callable[[Facts], int | None] = lambda facts: 1


def axis_rules(axes_by_strategy: Mapping[str, tuple[str, ...]]) -> tuple[Rule, ...]:
    """The first rows for the strategy: one for each that has axes beside `data`."""
    return tuple(Rule(name, partial(_sets, axes), _are_set(axes)) for name, axes in axes_by_strategy.items() if axes)


def _sets(axes: tuple[str, ...], facts: Facts) -> bool:
    return facts.axes == set(axes)


def _are_set(axes: tuple[str, ...]) -> str:
    return " and ".join(f"train.mesh.{axis}" for axis in axes) + (" is set" if len(axes) == 1 else " are set")


RANKS_RULES = (
    RanksRule(
        "started",
        lambda facts: facts.num_started > 0,
        "an external launcher started this many processes",
        lambda facts: facts.num_started,
    ),
    RanksRule(
        "named",
        lambda facts: facts.num_named > 0,
        "train.local_sgd.silos or train.rank_weights has this many entries",
        lambda facts: facts.num_named,
    ),
    RanksRule(
        "mesh",
        lambda facts: facts.mesh_ranks > 1,
        "the sizes of train.mesh make {mesh_ranks} ranks, as often as there is room",
        lambda facts: max(1, facts.room // facts.mesh_ranks) * facts.mesh_ranks,
    ),
    RanksRule(
        "one_unless_set",
        lambda facts: facts.only_one != "",
        "the default with {only_one}; train.num_workers overrides it",
    ),
    RanksRule(
        "few_steps",
        lambda facts: facts.has_room and facts.num_steps is not None and facts.num_steps < FEW_STEPS,
        "{num_steps} steps in total are too few to justify more ranks",
    ),
    RanksRule(
        "cluster",
        lambda facts: facts.has_cluster and bool(facts.num_places),
        "the Spark cluster {spark_master} has slots for {num_places} ranks",
        lambda facts: facts.num_places,
    ),
    RanksRule("unknown_cluster", lambda facts: facts.has_cluster, "{why_no_places}"),
    RanksRule(
        "gpus", lambda facts: facts.num_gpus > 1, "this machine has {num_gpus} GPUs", lambda facts: facts.num_gpus
    ),
    RanksRule("one", lambda facts: True, "one process uses all devices of this machine"),
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
