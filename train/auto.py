"""What `auto` stands for: strategy and launcher by one table of rules, from what is known before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from train.choose_backend import choose_backend, framework_of
from train.config import TrainConfig
from train.launching import LAUNCHERS
from train.launching.attach_place import find_place
from train.launching.devices import gpus_here
from train.models.user import imported_packages
from train.strategies import STRATEGIES, roles_of

if TYPE_CHECKING:
    from shardmill.jobs.config import SparkConfig

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the rules look at."""

    num_workers: int
    num_ranks: int
    """More than `num_workers` where a strategy that is set needs other processes, too."""
    local_steps: int
    backend: str
    """That of the config, or of the model's own code; `keras` if either would do."""
    is_keras_model: bool
    num_devices: int
    """`train.local_devices`, or the GPUs that this process may use."""
    spark_master: str
    installed: frozenset[str]
    """The strategies and launchers of which every package is here."""

    @property
    def has_cluster(self) -> bool:
        return not self.spark_master.startswith("local")


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table in docs/training.md; of a table the first row that applies counts."""

    choice: str
    applies: Callable[[Facts], bool]
    because: str


STRATEGY_RULES = (
    Rule("local_sgd", lambda facts: facts.local_steps > 1, "train.local_steps = {local_steps}"),
    Rule(
        "mirrored",
        lambda facts: facts.num_workers == 1 and facts.backend == "keras" and facts.num_devices > 1,
        "one worker of TensorFlow on {num_devices} devices",
    ),
    Rule("single", lambda facts: facts.num_workers == 1, "one worker"),
    Rule("torch_ddp", lambda facts: facts.backend == "torch", "{num_workers} workers of PyTorch"),
    Rule("horovod", lambda facts: True, "{num_workers} workers of TensorFlow, one grouped allreduce a step"),
    Rule("multi_worker_mirrored", lambda facts: True, "{num_workers} workers of TensorFlow, and Horovod is not here"),
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
    Rule("local", lambda facts: True, "in processes of this machine"),
)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A config in which nothing is `auto` of what decides how ranks work together."""

    config: TrainConfig
    strategy_reason: str
    launcher_reason: str

    @property
    def reason(self) -> str:
        """Why this strategy and this launcher, for people."""
        return f"{self.config.strategy}: {self.strategy_reason}; {self.config.launcher}: {self.launcher_reason}"

    def spread(self, config: TrainConfig) -> TrainConfig:
        """The same training as in `config`, spread so."""
        return config.model_copy(update={"strategy": self.config.strategy, "launcher": self.config.launcher})

    def with_strategy(self, strategy: str, reason: str) -> Chosen:
        """Another strategy."""
        return replace(self, config=self.config.model_copy(update={"strategy": strategy}), strategy_reason=reason)

    def with_launcher(self, launcher: str, reason: str) -> Chosen:
        """Another launcher."""
        return replace(self, config=self.config.model_copy(update={"launcher": launcher}), launcher_reason=reason)


def resolve(config: TrainConfig, spark: SparkConfig) -> Chosen:
    """Replace `auto` for strategy, launcher and backend. Resolving what is resolved changes nothing.

    Raises UsageError if a choice, or what was set, cannot run; nothing is imported that trains.
    """
    facts = _facts(config, spark)
    strategy, why_strategy = config.strategy, "set by train.strategy"
    if strategy == AUTO:
        strategy, why_strategy = choose(STRATEGY_RULES, facts, "train.strategy")
    config = config.model_copy(update={"strategy": strategy})
    config = config.model_copy(update={"backend": choose_backend(config)})
    launcher, why_launcher = config.launcher, "set by train.launcher"
    if launcher == AUTO:
        _refuse_started_by_others()
        launcher, why_launcher = choose(LAUNCHER_RULES, facts, "train.launcher")
    config = config.model_copy(update={"launcher": launcher})
    return Chosen(config, why_strategy, why_launcher)


def choose(rules: tuple[Rule, ...], facts: Facts, key: str) -> tuple[str, str]:
    """The first choice whose packages are here and whose row applies, and why. Raises UsageError if there is none."""
    wanted = [rule for rule in rules if rule.applies(facts)]
    for rule in wanted:
        if rule.choice in facts.installed:
            return rule.choice, rule.because.format(**asdict(facts))
    (STRATEGIES if key == "train.strategy" else LAUNCHERS).usable(wanted[0].choice)
    raise UsageError(
        f"{key} = 'auto' finds nothing for this training", f"expected {', '.join(rule.choice for rule in wanted)}"
    )


def _facts(config: TrainConfig, spark: SparkConfig) -> Facts:
    entries = {**STRATEGIES.entries, **LAUNCHERS.entries}
    backend = framework_of(config) or "keras"
    return Facts(
        num_workers=config.num_workers,
        num_ranks=config.num_workers if config.strategy == AUTO else len(roles_of(config)),
        local_steps=config.local_steps,
        backend=backend,
        is_keras_model="keras" in imported_packages(config.model),
        num_devices=config.local_devices or len(gpus_here(config, backend)),
        spark_master=spark.master,
        installed=frozenset(name for name, entry in entries.items() if not entry.missing_packages()),
    )


def _refuse_started_by_others() -> None:
    found = find_place(os.environ)
    if found and found[1].world_size > 1:
        raise UsageError(
            f"{found[0]} started this command {found[1].world_size} times, and train.launcher is not set",
            "each of them would train by itself",
            "set train.launcher = 'attach'",
        )
