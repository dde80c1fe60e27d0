"""What each strategy would need of a rank's memory for one model: the rows of `shardmill plan --memory`, and what
`auto` reads if a model does not fit one device. Arithmetic on what train/planning/state_bytes.py has counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from shardmill.errors import UsageError
from shardmill.words import size_of
from train.config import TrainConfig
from train.contracts.mesh_shape import axes_in_words
from train.planning.images_at_once import images_at_once, most_microbatches
from train.planning.memory_fit import Fit, MemoryFacts, fit
from train.planning.state_bytes import StateBytes
from train.strategies import STRATEGIES, find_strategy, mesh_of

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
    facts = _facts(config, state, room)
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


def _facts(config: TrainConfig, state: StateBytes, room: Room) -> MemoryFacts:
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
