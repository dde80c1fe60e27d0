"""Plans the memory of a model for `shardmill plan --memory`: what a rank would hold under every strategy.

The ranks and their devices need not exist: a PyTorch module is counted from shapes. Only a Keras model is built, and
one of its steps measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmill.dataset.dataset import first_alike, open_dataset, open_pinned
from shardmill.errors import UsageError
from shardmill.jobs.config import require_uri
from shardmill.words import counted, size_of
from train.backends.model_spec import ModelSpec, model_spec
from train.config import TrainConfig
from train.initialization.initial import check_initial
from train.models.user import trains_module
from train.planning.auto import AUTO, choose_backend, resolve
from train.planning.divide import (
    PARTS,
    REPLICATED,
    MemoryRow,
    ModelFacts,
    Room,
    division_rules,
    nothing_holds,
    row_of,
    why_refused,
)
from train.planning.host_memory import GPU_FRAMEWORK_BYTES, HOST_FRAMEWORK_BYTES, images_at_once, input_bytes
from train.planning.memory_fit import decided
from train.planning.preflight import check_trainable
from train.planning.probe import NUM_PROBED_IMAGES, NUM_PROBED_STEPS, ProbeTask, probe
from train.planning.state_bytes import StateBytes, count_state
from train.strategies import STRATEGIES, has_chief, mesh_of

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from train.tree import TrainTree


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
    dataset = open_pinned(first_alike(open_dataset(require_uri("dataset.uri", tree.dataset.uri)).pin))
    check_initial(tree.train)
    planned = resolve(tree.train, tree.spark, dataset)
    config = planned.config
    check_trainable(config, dataset)

    # Every strategy that runs with the model's backend, with the ranks that were chosen.
    configs, rows = _candidates(tree.train.model_copy(update={"num_workers": config.num_workers}))
    states = _count(configs, model_spec(dataset.manifest, config))
    rows |= {name: row_of(each, states[name], _room(each, dataset, memory_bytes)) for name, each in configs.items()}

    choice, reason = config.strategy, planned.strategy_reason
    if tree.train.strategy == AUTO and choice == REPLICATED:
        choice, reason = _divided(config, ModelFacts("a rank", memory_bytes, rows), reason)
    return MemoryPlan(
        model=config.model,
        num_workers=config.num_workers,
        global_batch_size=config.global_batch_size,
        image_shape_HWC=config.augment.shape_of(dataset.manifest.normalize.image_shape_HWC),
        memory_bytes=memory_bytes,
        strategies=tuple(rows[name] for name in STRATEGIES if name in rows),
        choice=choice,
        reason=reason,
    )


def _candidates(asked: TrainConfig) -> tuple[dict[str, TrainConfig], dict[str, MemoryRow]]:
    """-> by strategy: configs to count; rows of those that other settings rule out."""
    configs, refused = {}, {}
    for name, strategy in STRATEGIES.installed().items():
        config = asked.model_copy(update={"strategy": name})
        if not strategy.allows_world_size(config.num_workers):
            continue
        try:
            config = config.model_copy(update={"backend": choose_backend(config)})
        except UsageError:
            # It has no backend that trains this model.
            continue
        why = "its servers hold the weights" if has_chief(config) else why_refused(config)
        if why:
            refused[name] = MemoryRow(name, refused=why)
        else:
            configs[name] = config.model_copy(update={"num_streams": mesh_of(config).num_streams})
    return configs, refused


def _count(configs: dict[str, TrainConfig], spec: ModelSpec) -> dict[str, StateBytes]:
    """By strategy."""
    modules = {name: config for name, config in configs.items() if trains_module(config)}
    counted_states = count_state(tuple(modules.values()), spec) if modules else ()
    found = dict(zip(modules, counted_states, strict=True))
    others = {name: config for name, config in configs.items() if name not in modules}
    if others:
        # Every rank has the whole model, whichever strategy sums its gradients.
        measured = _measure(next(iter(others.values())), spec)
        found |= dict.fromkeys(others, measured)
    return found


def _measure(config: TrainConfig, spec: ModelSpec) -> StateBytes:
    config = decided(config, 1, to_bfloat16=False)
    num_images = min(NUM_PROBED_IMAGES, images_at_once(config))
    cost = probe(ProbeTask(config, spec, num_images, 1, NUM_PROBED_STEPS, for_memory=True))
    return StateBytes(
        parameters=cost.model_bytes,
        gradients=cost.weights_bytes,
        optimizer=max(0, cost.state_bytes - cost.model_bytes - cost.weights_bytes),
        step=cost.base_bytes,
        image=cost.image_bytes,
    )


def _room(config: TrainConfig, dataset: Dataset, memory_bytes: int) -> Room:
    """On a GPU, unless `train.devices` says otherwise; input counts there, too, although it is in the host's memory."""
    is_host = config.devices == "cpu"
    framework_bytes = HOST_FRAMEWORK_BYTES if is_host else GPU_FRAMEWORK_BYTES
    return Room("a rank", memory_bytes, framework_bytes, input_bytes(config, dataset), is_host=is_host)


def _divided(config: TrainConfig, facts: ModelFacts, reason: str) -> tuple[str, str]:
    """-> what `auto` would choose of these rows, and why."""
    rule = next(rule for rule in division_rules() if rule.applies(facts))
    if rule.choice == "refused":
        return "", str(nothing_holds(config, facts))
    if rule.choice == "whole":
        return REPLICATED, f"{reason}, each with the whole model: {facts.rows[REPLICATED].arithmetic}, {facts.limit}"
    return rule.choice, rule.because(facts)


def _as_given(num_bytes: int) -> str:
    """Devices are sold by decimal units."""
    decimal, rest = divmod(num_bytes, 10**9)
    return size_of(num_bytes) if rest else f"{decimal} GB ({size_of(num_bytes)})"
