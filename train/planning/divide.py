"""Lets ranks hold a model together if it does not fit one device: the last choice of `auto`, by a table of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from shardmill.errors import ShardmillError, UsageError
from shardmill.words import size_of
from train.backends.backend import model_spec
from train.contracts.mesh_shape import AXES_OF_LAYERS
from train.models import MODELS
from train.models.user import imported_packages
from train.planning.auto import AUTO
from train.planning.host_memory import GPU_FRAMEWORK_BYTES, HOST_FRAMEWORK_BYTES, Limit, bytes_of_a_rank, limit_of
from train.planning.input_memory import input_bytes
from train.planning.memory_table import MemoryRow, Room, row_of, why_refused
from train.planning.plan import TrainingPlan
from train.planning.preflight import check_spread
from train.planning.state_bytes import count_state
from train.strategies import axes_of, strategies_that_share
from train.strategies.options import silos_of

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.jobs.config import SparkConfig
    from train.config import TrainConfig

REPLICATED = "torch_ddp"
"""What `auto` chooses for several ranks of PyTorch, if memory suffices."""
LARGEST_NAMED_BYTES = 16 * 2**30
"""Of the models that have names, ours and torchvision's, all leave room for activations in so much (ViT-H/14, the
largest: 650 M weights, 10 GiB with gradients and Adam)."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """All facts that the rules read."""

    device: str
    device_bytes: int
    rows: Mapping[str, MemoryRow]
    """By strategy, for the same ranks."""

    def fits(self, strategy: str) -> bool:
        return strategy in self.rows and self.rows[strategy].fits

    @property
    def replicated(self) -> str:
        return f"one device does not hold the model: {self.rows[REPLICATED].arithmetic}, {self.limit}"

    @property
    def limit(self) -> str:
        return f"and {self.device} has {size_of(self.device_bytes)}"


@dataclass(frozen=True, slots=True)
class DivisionRule:
    """One row of the table in docs/auto.md; the first row that applies counts."""

    choice: str
    applies: Callable[[ModelFacts], bool]
    because: Callable[[ModelFacts], str] = lambda facts: ""


def _shared_by(strategy: str) -> Callable[[ModelFacts], str]:
    def because(facts: ModelFacts) -> str:
        row = facts.rows[strategy]
        return f"{facts.replicated}; shared ({row.mesh}) it needs {row.arithmetic}"

    return because


def _divided_by(strategy: str, with_whole_layers: str) -> Callable[[ModelFacts], str]:
    def because(facts: ModelFacts) -> str:
        whole, row = facts.rows.get(with_whole_layers), facts.rows[strategy]
        if whole is None or whole.refused:
            # Other settings rule it out, such as a size of `train.mesh.tensor`.
            return _shared_by(strategy)(facts)
        return (
            f"one device does not hold a layer: with whole layers, shared by all ranks, {whole.arithmetic}, "
            f"{facts.limit}; with divided layers ({row.mesh}) it needs {row.arithmetic}"
        )

    return because


def for_large_models() -> tuple[str, ...]:
    """The strategies that `auto` may choose for such a model, in the order in which they are tried."""
    every = strategies_that_share()
    return tuple(name for name, each in every.items() if each.shared_model and each.shared_model.is_for_large_models)


def division_rules() -> tuple[DivisionRule, ...]:
    """The table; what is in it, the strategies say."""
    names = for_large_models()
    dividing = {name for name in names if not set(axes_of(name)).isdisjoint(AXES_OF_LAYERS)}
    with_whole_layers = next((name for name in names if name not in dividing), "")
    return (
        DivisionRule("whole", partial(ModelFacts.fits, strategy=REPLICATED)),
        *(
            DivisionRule(
                name,
                partial(ModelFacts.fits, strategy=name),
                _divided_by(name, with_whole_layers) if name in dividing else _shared_by(name),
            )
            for name in names
        ),
        DivisionRule("refused", lambda facts: True),
    )


def with_room(plan: TrainingPlan, spark: SparkConfig, dataset: Dataset) -> TrainingPlan:
    """`plan`, with a strategy whose ranks hold the model together if one device does not hold it.

    Only if `auto` has chosen that each of several ranks has the whole model. Raises UsageError if no strategy's ranks
    could hold it, with what would be needed.
    """
    limit = limit_of(plan.config, spark)
    if limit is None or not _may_outgrow(plan, limit, spark):
        return plan
    facts = _facts(plan.config, limit, spark, dataset, (REPLICATED, *for_large_models()))
    if facts is None:
        return plan
    rule = next(rule for rule in division_rules() if rule.applies(facts))
    if rule.choice == "whole":
        return plan
    if rule.choice == "refused":
        others = _facts(plan.config, limit, spark, dataset, _others())
        raise nothing_holds(plan.config, replace(facts, rows={**(others.rows if others else {}), **facts.rows}))
    divided = plan.with_strategy(rule.choice, rule.because(facts))
    check_spread(divided.config, spark)
    return divided


def check_undivided(plan: TrainingPlan, *, is_new: bool) -> None:
    """Raises UsageError for a Keras model whose state alone exceeds the memory of each of several ranks: no strategy
    that `auto` has for it divides one. A training that has begun (not `is_new`) goes on."""
    config, memory = plan.config, plan.memory
    record, fitted = (memory.record, plan.fitted) if memory else (None, None)
    is_open = is_new and plan.asked.strategy == AUTO and config.num_workers > 1 and "keras" in imported_packages(config)
    if record is None or fitted is None or not is_open or record.state_bytes <= fitted.available_bytes:
        return
    raise UsageError(
        f"train.model = {config.model!r} on {config.num_workers} ranks: weights, gradients and optimizer take "
        f"{size_of(record.state_bytes)}, and {record.device} has {size_of(fitted.available_bytes)}",
        f"expected a PyTorch module, of which each rank would hold about "
        f"{size_of(record.state_bytes / config.num_workers)} with train.strategy = 'torch_fsdp'",
        "give a factory that returns an nn.Module, use devices with more memory, or set train.strategy = "
        f"{config.strategy!r} to try it all the same",
    )


def nothing_holds(config: TrainConfig, facts: ModelFacts) -> UsageError:
    """The error for a model that is too large for its ranks, however they divide it."""
    whole, best = facts.rows[REPLICATED], _smallest(facts)
    together = (
        f"{best.strategy} ({best.mesh}) needs {size_of(best.total)}, the least of the strategies that auto chooses; "
        if best
        else ""
    )
    others = [row for name, row in facts.rows.items() if row.fits and name not in (REPLICATED, *for_large_models())]
    set_it = "".join(
        f"set train.strategy = {row.strategy!r}{row.verdict.removeprefix('yes')}, which fits; or " for row in others[:1]
    )
    ranks = "" if best is None else "set train.num_workers higher, or "
    return UsageError(
        f"train.model = {config.model!r} on {config.num_workers} ranks needs {whole.arithmetic}, {facts.limit}",
        f"{together}expected a model that fits, or that the ranks can divide",
        f"{set_it}{ranks}use a smaller model or larger devices; train.strategy = {REPLICATED!r} tries it all the same",
    )


def _smallest(facts: ModelFacts) -> MemoryRow | None:
    rows = (facts.rows[name] for name in for_large_models() if name in facts.rows)
    return min((row for row in rows if not row.refused), key=lambda row: row.total, default=None)


def _may_outgrow(plan: TrainingPlan, limit: Limit, spark: SparkConfig) -> bool:
    """Whether there is something to choose, and the size of the model has to be looked at for it: in some seconds."""
    config = plan.config
    is_open = plan.asked.strategy == AUTO and config.strategy == REPLICATED
    if not is_open or silos_of(config) or "keras" in imported_packages(config):
        return False
    return MODELS.is_own(config.model) or bytes_of_a_rank(limit, config, spark) < LARGEST_NAMED_BYTES


def _others() -> tuple[str, ...]:
    """Whose ranks share a model, too, and which only the user chooses."""
    return tuple(name for name in strategies_that_share() if name not in for_large_models())


def _facts(
    config: TrainConfig, limit: Limit, spark: SparkConfig, dataset: Dataset, strategies: tuple[str, ...]
) -> ModelFacts | None:
    """None if the model cannot be counted: its ranks will say why."""
    configs = [config.model_copy(update={"strategy": name}) for name in strategies]
    configs = [each for each in configs if not why_refused(each)]
    try:
        states = count_state(tuple(configs), model_spec(dataset.manifest, config))
    except ShardmillError:
        return None
    device_bytes = bytes_of_a_rank(limit, config, spark)
    rows = {}
    for each, state in zip(configs, states, strict=True):
        room = Room(limit.device, device_bytes, GPU_FRAMEWORK_BYTES, 0, is_host=False)
        if not limit.on_gpu:
            room = Room(limit.device, device_bytes, HOST_FRAMEWORK_BYTES, input_bytes(each, dataset), is_host=True)
        rows[each.strategy] = row_of(each, state, room)
    return ModelFacts(limit.device, device_bytes, rows)
