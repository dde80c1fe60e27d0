"""Shards a model that fits no device: the last choice of `auto`, by a table of rules; and shows what a rank would hold
under every strategy (`shardmill plan --memory`).

The ranks and their devices need not exist: a PyTorch module is counted from shapes. Only a Keras model is built, and
one of its steps measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shardmill.errors import ShardmillError, UsageError
from shardmill.words import counted, size_of
from train.contracts.mesh import AXES_OF_LAYERS, axes_in_words
from train.models import MODELS
from train.models.user import framework_of, imported_packages
from train.planning.checks import check
from train.planning.memory import (
    GPU_FRAMEWORK_BYTES,
    HOST_FRAMEWORK_BYTES,
    Limit,
    Memory,
    bytes_of_a_rank,
    images_at_once,
    input_bytes,
    limit_of,
    most_microbatches,
)
from train.planning.memory_fit import Fit, MemoryFacts, decided, fit
from train.planning.probe import NUM_PROBED_IMAGES, NUM_PROBED_STEPS, ProbeTask, probe
from train.planning.setup import AUTO, Setup, choose_backend
from train.planning.state_bytes import StateBytes, count_state, spec_of
from train.planning.trainings import FoundTraining, as_begun, training_to_plan
from train.strategies import STRATEGIES, axes_of, find_strategy, has_chief, strategies_that_share
from train.strategies.options import silos_of

if TYPE_CHECKING:
    from train.tree import TrainTree


PARTS = ("parameters", "gradients", "optimizer", "activations", "exchange", "input", "checkpoint", "framework")
"""Of a rank's memory, in the order of the table."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
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


def row_of(setup: Setup, state: StateBytes, budget: MemoryBudget) -> MemoryRow:
    """The row of a setup's strategy, with the fewest microbatches that fit."""
    config, mesh = setup.config, axes_in_words(setup.mesh.sizes)
    if state.refused:
        return MemoryRow(config.strategy, mesh, refused=state.refused)
    facts = _state_facts(setup, state, budget)
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
        input=budget.input_bytes,
        checkpoint=_checkpoint(state, budget),
        framework=budget.framework_bytes,
        start=budget.framework_bytes + state.start if budget.is_host else 0,
        accumulation_steps=found.num_microbatches * config.num_accumulated,
        mixed_precision="bfloat16" if found.to_bfloat16 and config.mixed_precision == "auto" else "",
        recomputes=found.recomputes,
        not_counted=state.step_problem or "",
    )
    return replace(row, fits=max(row.total, row.start) <= budget.device_bytes)


def under(setup: Setup, strategy: str, **settings: Any) -> Setup:
    """The same ranks with another strategy. Raises UsageError if it cannot run with the other settings, whatever the
    model."""
    other = setup.changed(strategy=strategy, **settings)
    other.strategy.check(other.config)
    find_strategy(strategy, other.config.num_workers)
    return other


def _state_facts(setup: Setup, state: StateBytes, budget: MemoryBudget) -> MemoryFacts:
    config = setup.config
    always = budget.framework_bytes + budget.input_bytes + _checkpoint(state, budget) + state.state + state.gathered
    may_recompute = config.memory.activation_checkpointing == "auto"
    return MemoryFacts(
        device=budget.device,
        device_bytes=budget.device_bytes,
        fixed_bytes=always + state.step,
        image_bytes=state.image,
        num_images=-(-images_at_once(setup) // config.num_accumulated),
        max_microbatches=1 if config.accumulation_steps else most_microbatches(setup),
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


def _checkpoint(state: StateBytes, budget: MemoryBudget) -> int:
    return state.parameters + state.optimizer if budget.is_host else 0


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

    @property
    def decided(self) -> tuple[str, str]:
        """What the first row of the table that applies chooses, and why."""
        rule = next(rule for rule in division_rules() if rule.applies(self))
        return rule.choice, rule.because(self)


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


def begun_setup(found: FoundTraining) -> Setup:
    """How its ranks train: as it was begun, or as is decided now. Raises UsageError for what cannot run."""
    setup = as_begun(found.setup, found.begun)
    return shard_if_too_large(setup) if found.is_new else setup


def shard_if_too_large(setup: Setup) -> Setup:
    """`setup`, with a strategy whose ranks hold the model together if one device does not hold it.

    Only if `auto` has chosen that each of several ranks has the whole model. Raises UsageError if no strategy's ranks
    could hold it, with what would be needed.
    """
    config, is_open = setup.config, setup.asked.strategy == AUTO and setup.config.strategy == REPLICATED
    limit = limit_of(setup) if is_open and not silos_of(config) and not setup.is_keras_model else None
    if limit is None:
        return setup
    # Whether the size of the model has to be looked at, in some seconds.
    if not MODELS.is_own(config.model) and bytes_of_a_rank(limit, setup) >= LARGEST_NAMED_BYTES:
        return setup
    facts = _facts(setup, limit, (REPLICATED, *for_large_models()))
    if facts is None:
        return setup
    choice, reason = facts.decided
    if choice == "whole":
        return setup
    if choice == "refused":
        # What only the user chooses.
        others = _facts(setup, limit, tuple(name for name in strategies_that_share() if name not in for_large_models()))
        raise nothing_holds(setup, replace(facts, rows={**(others.rows if others else {}), **facts.rows}))
    return check(setup.changed({"strategy_reason": reason}, strategy=choice))


def check_unsharded(setup: Setup, memory: Memory) -> None:
    """Raises UsageError for a Keras model whose state alone exceeds the memory of each of several ranks: no strategy
    that `auto` has for it divides one."""
    config, record = setup.config, memory.record
    is_open = setup.asked.strategy == AUTO and config.num_workers > 1 and setup.is_keras_model
    if record is None or not is_open or record.state_bytes <= (has := bytes_of_a_rank(record, setup)):
        return
    raise UsageError(
        f"train.model = {config.model!r} on {config.num_workers} ranks: weights, gradients and optimizer take "
        f"{size_of(record.state_bytes)}, and {record.device} has {size_of(has)}",
        f"expected a PyTorch module, of which each rank would hold about "
        f"{size_of(record.state_bytes / config.num_workers)} with train.strategy = 'torch_fsdp'",
        "give a factory that returns an nn.Module, use devices with more memory, or set train.strategy = "
        f"{config.strategy!r} to try it all the same",
    )


def nothing_holds(setup: Setup, facts: ModelFacts) -> UsageError:
    """The error for a model that is too large for its ranks, however they divide it."""
    config, rows = setup.config, [facts.rows[name] for name in for_large_models() if name in facts.rows]
    whole, best = (
        facts.rows[REPLICATED],
        min((each for each in rows if not each.refused), key=lambda row: row.total, default=None),
    )
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


def _facts(setup: Setup, limit: Limit, strategies: tuple[str, ...]) -> ModelFacts | None:
    """None if the model cannot be counted: its ranks will say why."""
    setups, device_bytes = [], bytes_of_a_rank(limit, setup)
    for name in strategies:
        with suppress(UsageError):
            setups.append(under(setup, name))
    try:
        states = count_state(tuple(each.config for each in setups), spec_of(setup))
    except ShardmillError:
        return None
    rows = {}
    for each, state in zip(setups, states, strict=True):
        budget = MemoryBudget(limit.device, device_bytes, GPU_FRAMEWORK_BYTES, 0, is_host=False)
        if not limit.on_gpu:
            budget = MemoryBudget(limit.device, device_bytes, HOST_FRAMEWORK_BYTES, input_bytes(each), is_host=True)
        rows[each.config.strategy] = row_of(each, state, budget)
    return ModelFacts(limit.device, device_bytes, rows)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A row for every strategy that may train the model."""

    model: str
    num_workers: int
    global_batch_size: int
    image_shape_HWC: tuple[int, int, int]
    memory_bytes: int
    """Of a rank."""
    strategies: tuple[MemoryRow, ...]
    choice: str
    """The strategy that is set, or that `auto` would choose; empty if no strategy's ranks can hold the model."""
    reason: str

    def document(self) -> dict[str, Any]:
        """The document of `--json`."""
        fields = ("model", "num_workers", "global_batch_size", "image_shape_HWC", "memory_bytes", "choice", "reason")
        found = {name: getattr(self, name) for name in fields}
        return {**found, "strategies": [row.document() for row in self.strategies]}

    def rows(self) -> list[tuple[str, ...]]:
        """The table for people; its first row names the columns."""
        parts = [part for part in PARTS if any(getattr(row, part) for row in self.strategies)]
        limit = f"fits in {_as_given(self.memory_bytes)}"
        table: list[tuple[str, ...]] = [("strategy", "mesh", *parts, "total", limit)]
        for row in self.strategies:
            sizes = [getattr(row, part) for part in (*parts, "total")]
            numbers = [size_of(size) if size else "" for size in sizes]
            table.append((row.strategy, row.mesh, *numbers, row.verdict))
        return table

    @property
    def decision(self) -> str:
        """The choice with its reason, for people."""
        return f"{self.choice or 'no strategy that auto chooses'}: {self.reason}"

    @property
    def title(self) -> str:
        height, width, channels = self.image_shape_HWC
        return (
            f"memory of a rank: {self.model}, {counted(self.num_workers, 'rank')}, {self.global_batch_size} images of "
            f"{height} x {width} x {channels} a step"
        )


def plan_memory(tree: TrainTree, memory_bytes: int) -> MemoryPlan:
    """Raises UsageError for what no strategy can train, and for a model that does not build."""
    found = training_to_plan(tree)
    setup = as_begun(found.setup, found.begun)
    config = setup.config

    # Every strategy that runs with the model's backend, with the ranks that were chosen.
    setups, rows = _candidates(setup)
    states = _count(setups)
    rows |= {name: row_of(each, states[name], _budget(each, memory_bytes)) for name, each in setups.items()}

    choice, reason = config.strategy, setup.strategy_reason
    if found.is_new and tree.train.strategy == AUTO and choice == REPLICATED:
        facts = ModelFacts("a rank", memory_bytes, rows)
        choice, reason = facts.decided
        if choice == "refused":
            choice, reason = "", str(nothing_holds(setup, facts))
        if choice == "whole":
            whole = f"each with the whole model: {rows[REPLICATED].arithmetic}, {facts.limit}"
            choice, reason = REPLICATED, f"{setup.strategy_reason}, {whole}"
    return MemoryPlan(
        model=config.model,
        num_workers=config.num_workers,
        global_batch_size=config.global_batch_size,
        image_shape_HWC=config.augment.shape_of(setup.of_dataset.manifest.normalize.image_shape_HWC),
        memory_bytes=memory_bytes,
        strategies=tuple(rows[name] for name in STRATEGIES if name in rows),
        choice=choice,
        reason=reason,
    )


def _candidates(setup: Setup) -> tuple[dict[str, Setup], dict[str, MemoryRow]]:
    """-> by strategy: setups to count; rows of those that other settings rule out."""
    setups, refused = {}, {}
    for name, strategy in STRATEGIES.installed().items():
        asked = setup.asked.model_copy(update={"num_workers": setup.config.num_workers, "strategy": name})
        if not strategy.allows_world_size(asked.num_workers):
            continue
        try:
            packages = frozenset(imported_packages(asked))
            backend = choose_backend(asked, packages, framework_of(asked, packages))
        except UsageError:
            # It has no backend that trains this model.
            continue
        if has_chief(asked):
            refused[name] = MemoryRow(name, refused="its servers hold the weights")
            continue
        try:
            setups[name] = under(setup, name, backend=backend, num_streams=asked.num_streams)
        except UsageError as error:
            refused[name] = MemoryRow(name, refused=str(error))
    return setups, refused


def _count(setups: dict[str, Setup]) -> dict[str, StateBytes]:
    """By strategy."""
    modules = [name for name, each in setups.items() if each.trains_module]
    of_modules = tuple(setups[name].config for name in modules)
    found = dict(zip(modules, count_state(of_modules, spec_of(setups[modules[0]])), strict=True)) if modules else {}
    others = [name for name in setups if name not in modules]
    if others:
        # Every rank has the whole model, whichever strategy sums its gradients.
        found |= dict.fromkeys(others, _measure(setups[others[0]]))
    return found


def _measure(setup: Setup) -> StateBytes:
    config, num_images = decided(setup.config, 1, to_bfloat16=False), min(NUM_PROBED_IMAGES, images_at_once(setup))
    cost = probe(ProbeTask(config, spec_of(setup), num_images, 1, NUM_PROBED_STEPS, for_memory=True))
    return StateBytes(
        parameters=cost.model_bytes,
        gradients=cost.weights_bytes,
        optimizer=max(0, cost.state_bytes - cost.model_bytes - cost.weights_bytes),
        step=cost.base_bytes,
        image=cost.image_bytes,
    )


def _budget(setup: Setup, memory_bytes: int) -> MemoryBudget:
    """On a GPU, unless `train.devices` says otherwise; input counts there, too, although it is in the host's memory."""
    is_host = setup.config.devices == "cpu"
    framework_bytes = HOST_FRAMEWORK_BYTES if is_host else GPU_FRAMEWORK_BYTES
    return MemoryBudget("a rank", memory_bytes, framework_bytes, input_bytes(setup), is_host=is_host)


def _as_given(num_bytes: int) -> str:
    """Devices are sold by decimal units."""
    decimal, rest = divmod(num_bytes, 10**9)
    return size_of(num_bytes) if rest else f"{decimal} GB ({size_of(num_bytes)})"
