"""Lets ranks hold a model together if it does not fit one device: the last choice of `auto`, by a table of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardmill.errors import ShardmillError, UsageError
from shardmill.words import size_of
from train.backends.model_spec import model_spec
from train.config import TrainConfig
from train.contracts.mesh import AXES_OF_LAYERS, axes_in_words
from train.models import MODELS
from train.models.user import imported_packages
from train.planning.auto import AUTO
from train.planning.host_memory import (
    GPU_FRAMEWORK_BYTES,
    HOST_FRAMEWORK_BYTES,
    Limit,
    bytes_of_a_rank,
    images_at_once,
    input_bytes,
    limit_of,
    most_microbatches,
)
from train.planning.memory_fit import Fit, MemoryFacts, fit
from train.planning.plan import TrainingPlan
from train.planning.preflight import check_spread
from train.planning.state_bytes import StateBytes, count_state
from train.strategies import STRATEGIES, axes_of, find_strategy, mesh_of, strategies_that_share
from train.strategies.options import silos_of

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.jobs.config import SparkConfig


PARTS = ("parameters", "gradients", "optimizer", "activations", "exchange", "input", "checkpoint", "framework")
"""Of a rank's memory, in the order of the table."""


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a rank, and what is taken of it whatever is trained."""

    device: str
    """Owner of the memory, in words."""
    device_bytes: int
    framework_bytes: int
    input_bytes: int
    is_host: bool
    """It is a host's: the copy of the state from which a checkpoint is written is in it, and so is the whole model that
    rank 0 builds before each rank has its part."""


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One strategy; bytes of the rank that holds most."""

    strategy: str
    mesh: str = ""
    """The axes that it would choose, with their sizes."""
    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Of one microbatch."""
    exchange: int = 0
    """Gathered weights, and copies that are exchanged."""
    input: int = 0
    """Chunks and decoded batches."""
    checkpoint: int = 0
    """The copy of parameters and optimizer from which a checkpoint is written, in a host's memory."""
    framework: int = 0
    """Assumed, not counted."""
    start: int = 0
    """Of rank 0 before ranks have their parts, in a host's memory; not part of the total."""
    fits: bool = False
    accumulation_steps: int = 1
    mixed_precision: str = ""
    """If the memory decides it."""
    recomputes: bool = False
    """Whether activations have to be recomputed (`train.memory.activation_checkpointing`)."""
    not_counted: str = ""
    """Why the activations are not known."""
    refused: str = ""
    """Why it cannot train this model; all numbers are then 0."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in PARTS)

    @property
    def arithmetic(self) -> str:
        """`parameters 1.0 GiB + ... = 4.0 GiB`."""
        parts = [f"{part} {size_of(getattr(self, part))}" for part in PARTS if getattr(self, part)]
        return f"{' + '.join(parts)} = {size_of(self.total)}"

    @property
    def verdict(self) -> str:
        """Whether it fits, and how."""
        if self.refused:
            return f"no: {self.refused}"
        how = [f"train.accumulation_steps = {self.accumulation_steps}"] if self.accumulation_steps > 1 else []
        how += [f"train.mixed_precision = {self.mixed_precision!r}"] if self.mixed_precision else []
        how += ["train.memory.activation_checkpointing = 'on'"] if self.recomputes else []
        if not self.fits and self.start > self.total:
            return f"no: it begins with all parameters, {size_of(self.start)}"
        unknown = f" (without activations: {self.not_counted})" if self.not_counted else ""
        return ("yes" + f" with {', '.join(how)}" * bool(how) if self.fits else "no") + unknown

    def document(self) -> dict[str, Any]:
        """Of `--json`."""
        return {**asdict(self), "total": self.total}


def row_of(config: TrainConfig, state: StateBytes, room: Room) -> MemoryRow:
    """The row of a config, whose strategy is set, with the fewest microbatches that fit."""
    mesh = axes_in_words(mesh_of(config).sizes)
    if state.refused:
        return MemoryRow(config.strategy, mesh, refused=state.refused)
    facts = _state_facts(config, state, room)
    found = fit(facts)
    if found.choice == "too_large":
        # Compared is the least that it needs.
        found = replace(found, num_microbatches=facts.most_parts)
    activations = _activations(facts, found, state)
    exchange = max(state.gathered, state.update - activations)
    row = MemoryRow(
        strategy=config.strategy,
        mesh=mesh,
        parameters=state.parameters,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=activations,
        exchange=exchange,
        input=room.input_bytes,
        checkpoint=_checkpoint(state, room),
        framework=room.framework_bytes,
        start=room.framework_bytes + state.start if room.is_host else 0,
        accumulation_steps=found.num_microbatches * config.num_accumulated,
        mixed_precision="bfloat16" if found.to_bfloat16 and config.mixed_precision == "auto" else "",
        recomputes=found.recomputes,
        not_counted=state.why_not_stepped,
    )
    return replace(row, fits=max(row.total, row.start) <= room.device_bytes)


def why_refused(config: TrainConfig) -> str:
    """Why the strategy of a config cannot run with its other settings, whatever the model; empty if it can."""
    try:
        STRATEGIES[config.strategy].check(config)
        find_strategy(config.strategy, config.num_workers)
        mesh_of(config)
    except UsageError as error:
        return str(error)
    return ""


def _state_facts(config: TrainConfig, state: StateBytes, room: Room) -> MemoryFacts:
    always = room.framework_bytes + room.input_bytes + _checkpoint(state, room) + state.state + state.gathered
    may_recompute = config.memory.activation_checkpointing == "auto"
    return MemoryFacts(
        device=room.device,
        device_bytes=room.device_bytes,
        fixed_bytes=always + state.step,
        image_bytes=state.image,
        num_images=-(-images_at_once(config) // config.num_accumulated),
        max_microbatches=1 if config.accumulation_steps else most_microbatches(config),
        may_change_precision=config.mixed_precision == "auto",
        is_halved=config.mixed_precision in ("bfloat16", "float16"),
        recomputed_fixed_bytes=always + state.recomputed_step,
        recomputed_image_bytes=state.recomputed_image if may_recompute else 0,
    )


def _activations(facts: MemoryFacts, found: Fit, state: StateBytes) -> int:
    needed = facts.needed_bytes(found.num_microbatches, halved=found.to_bfloat16, recomputed=found.recomputes)
    fixed, step = facts.fixed_bytes, state.step
    if found.recomputes:
        fixed, step = facts.recomputed_fixed_bytes, state.recomputed_step
    return needed - fixed + step


def _checkpoint(state: StateBytes, room: Room) -> int:
    return state.parameters + state.optimizer if room.is_host else 0


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
