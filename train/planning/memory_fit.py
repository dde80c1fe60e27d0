"""Fits a step into the memory of a rank: first smaller microbatches, then bfloat16, then recomputed activations, as far
as the config allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.section import Section
from shardmill.words import size_of
from train.backends import BACKENDS
from train.strategies import STRATEGIES

if TYPE_CHECKING:
    from train.config import TrainConfig

HALF = 0.5
"""Memory of an image's activations in bfloat16 relative to float32; an assumption, not a measurement."""


class MemoryRecord(Section):
    """The measurements before a training's first step. A resume uses these numbers, and does not measure again."""

    device: str
    rank_bytes: int
    host_bytes: int
    """Value as in `train.planning.memory.Limit`."""
    on_gpu: bool
    fixed_bytes: int
    """Memory of a rank for any batch size, without its input."""
    image_bytes: int
    """Per image that is computed at a time, in the precision that the config asked for."""
    to_bfloat16: bool
    """`train.mixed_precision` was `auto`, and became bfloat16."""
    recomputed_fixed_bytes: int = 0
    recomputed_image_bytes: int = 0
    """Both with `train.memory.activation_checkpointing`; 0 if that was not measured."""
    state_bytes: int = 0
    """Of `fixed_bytes`: weights, gradients and optimizer of a rank with the whole model; 0 if that is not known."""
    recompute_problem: str | None = None
    """Why the model, or what it is trained with, does not have it."""
    note: str = ""
    """How a model that ranks share was measured, if it could not be counted from shapes; for people."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """All facts that the rules read; bytes."""

    device: str
    """Owner of the memory, in words."""
    device_bytes: int
    """Memory that a rank may use."""
    fixed_bytes: int
    """Memory for any batch size: the framework, weights, gradients, optimizer, buffers."""
    image_bytes: int
    """Additional memory per image of a step, while it is computed."""
    num_images: int
    """Number of images of a step on a rank, without microbatches."""
    max_microbatches: int = 2**31
    may_change_precision: bool = False
    is_halved: bool = False
    """The precision was changed before, and stays so: an image needs `HALF` of `image_bytes`."""
    recomputed_fixed_bytes: int = 0
    """Both values with recomputed activations."""
    recomputed_image_bytes: int = 0
    """0: that is not allowed, or was not measured."""
    recompute_problem: str | None = None
    """Reason, for people, if recomputation was requested."""
    may_ask_to_recompute: bool = False
    """A person can still switch that on; what it would save was not measured."""
    may_divide: bool = False
    """A person can still let several ranks hold the model together."""

    @property
    def may_be_halved(self) -> bool:
        return self.may_change_precision or self.is_halved

    def images_at_a_time(self, num_microbatches: int) -> int:
        return -(-self.num_images // num_microbatches)

    def needed_bytes(self, num_microbatches: int, *, halved: bool = False, recomputed: bool = False) -> int:
        share = HALF if halved or self.is_halved else 1
        fixed_bytes, image_bytes = (
            (self.recomputed_fixed_bytes, self.recomputed_image_bytes)
            if recomputed
            else (self.fixed_bytes, self.image_bytes)
        )
        return fixed_bytes + int(self.images_at_a_time(num_microbatches) * image_bytes * share)

    def fitting_microbatches(self, *, halved: bool = False, recomputed: bool = False) -> int | None:
        """The smallest divisor of the images that fits; None if none does."""
        if recomputed and not self.recomputed_image_bytes:
            return None
        fitting = (
            each
            for each in self._parts()
            if self.needed_bytes(each, halved=halved, recomputed=recomputed) <= self.device_bytes
        )
        return next(fitting, None)

    def helpful_microbatches(self) -> int:
        """If nothing fits: the maximum number, unless the memory for any batch size is already too large."""
        return self.most_parts if self.fixed_bytes < self.device_bytes else 1

    @property
    def most_parts(self) -> int:
        """The maximum number of microbatches."""
        return max(self._parts())

    def _parts(self) -> Iterator[int]:
        most = min(self.num_images, self.max_microbatches)
        return (number for number in range(1, max(1, most) + 1) if self.num_images % number == 0)


@dataclass(frozen=True, slots=True)
class Fit:
    """The choice of a rule."""

    choice: str
    num_microbatches: int
    """Value of `train.accumulation_steps`."""
    to_bfloat16: bool
    """Whether `train.mixed_precision` becomes, or has become, bfloat16."""
    recomputes: bool
    """Whether `train.memory.activation_checkpointing` becomes `on`."""
    reason: str
    """Reason with numbers, for people."""


@dataclass(frozen=True, slots=True)
class FitRule:
    """One row of the table in docs/auto.md; the first row that applies counts."""

    choice: str
    applies: Callable[[MemoryFacts], bool]
    halved: bool = False
    recomputed: bool = False


FIT_RULES = (
    FitRule("at_once", lambda facts: not facts.is_halved and facts.fitting_microbatches() == 1),
    FitRule("microbatches", lambda facts: not facts.is_halved and facts.fitting_microbatches() is not None),
    FitRule(
        "bfloat16",
        lambda facts: facts.may_be_halved and facts.fitting_microbatches(halved=True) is not None,
        halved=True,
    ),
    FitRule(
        "activation_checkpointing",
        lambda facts: not facts.is_halved and facts.fitting_microbatches(recomputed=True) is not None,
        recomputed=True,
    ),
    FitRule(
        "bfloat16_and_activation_checkpointing",
        lambda facts: facts.may_be_halved and facts.fitting_microbatches(halved=True, recomputed=True) is not None,
        halved=True,
        recomputed=True,
    ),
    FitRule("too_large", lambda facts: True),
)


def fit(facts: MemoryFacts) -> Fit:
    """The first row that applies, and why."""
    rule = next(rule for rule in FIT_RULES if rule.applies(facts))
    num_microbatches = (
        facts.fitting_microbatches(halved=rule.halved, recomputed=rule.recomputed) or facts.helpful_microbatches()
    )
    reason = f"{_needs(facts)}: {_done(facts, rule, num_microbatches)}"
    return Fit(rule.choice, num_microbatches, rule.halved, rule.recomputed, reason)


def _needs(facts: MemoryFacts) -> str:
    return (
        f"{facts.num_images} images at once need "
        f"{size_of(facts.needed_bytes(1))}{' in bfloat16' if facts.is_halved else ''} ({size_of(facts.fixed_bytes)} "
        f"for any batch size, {size_of(facts.image_bytes)} per image{' in float32' if facts.is_halved else ''}), and "
        f"{facts.device} has {size_of(facts.device_bytes)}"
    )


def _done(facts: MemoryFacts, rule: FitRule, num_microbatches: int) -> str:
    in_microbatches = (
        f"train.accumulation_steps = {num_microbatches}, {facts.images_at_a_time(num_microbatches)} images at a time"
    )
    needed = size_of(facts.needed_bytes(num_microbatches, halved=rule.halved, recomputed=rule.recomputed))
    halved = "train.mixed_precision = 'bfloat16', which is assumed to halve the memory of an image"
    if facts.is_halved:
        halved = "train.mixed_precision = 'bfloat16', as chosen before the first step"
    recomputed = (
        "train.memory.activation_checkpointing = 'on': a step takes longer, and an image takes "
        f"{size_of(facts.recomputed_image_bytes)}{' in float32' if rule.halved else ''}"
    )
    match rule.choice:
        case "at_once":
            return "they fit"
        case "microbatches":
            return f"{in_microbatches} need {needed}"
        case "bfloat16":
            why = "" if facts.is_halved else "smaller microbatches alone do not fit; "
            return f"{why}{in_microbatches} with {halved}, need {needed}"
        case "activation_checkpointing":
            also = " and bfloat16" if facts.may_change_precision else ""
            return f"smaller microbatches{also} alone do not fit; {in_microbatches} with {recomputed}, need {needed}"
        case "bfloat16_and_activation_checkpointing":
            why = "smaller microbatches alone do not fit" if facts.is_halved else "neither option alone fits"
            return f"{why}; {in_microbatches} with {halved}, and {recomputed}, need {needed}"
    so_far = f" with {halved}," if facts.is_halved else ""
    return f"{in_microbatches}{so_far} still need {needed}: {_way_out(facts)}"


def _way_out(facts: MemoryFacts) -> str:
    """The fixes if nothing fits."""
    way_out = "smaller images or a smaller model"
    if facts.max_microbatches < facts.num_images:
        way_out = f"a lower train.global_batch_size (starts a new run), or {way_out}"
    if not facts.may_change_precision and not facts.is_halved and facts.fitting_microbatches(halved=True):
        way_out = f"set train.mixed_precision = 'auto' (chooses bfloat16, which starts a new run); or {way_out}"
    if facts.may_ask_to_recompute and facts.fixed_bytes < facts.device_bytes:
        way_out = (
            "set train.memory.activation_checkpointing = 'on' (does not start a new run; steps take longer, and the "
            f"saving was not measured); or {way_out}"
        )
    if facts.may_divide and facts.fixed_bytes >= facts.device_bytes:
        way_out = (
            "set train.strategy = 'torch_fsdp' and more ranks, which then share the model (does not start a new "
            f"run); or {way_out}"
        )
    if facts.recompute_problem:
        way_out += f" (activations are not recomputed: {facts.recompute_problem})"
    elif facts.recomputed_image_bytes:
        way_out += f" (with recomputation, activations still take {size_of(facts.recomputed_image_bytes)} per image)"
    return way_out


def decided(config: TrainConfig, num_microbatches: int, *, to_bfloat16: bool, recomputes: bool = False) -> TrainConfig:
    """`config` with these microbatches, unless others are set, and without `auto` for precision and checkpointing."""
    precision, checkpointing = config.mixed_precision, config.memory.activation_checkpointing
    if checkpointing == "auto":
        checkpointing = "on" if recomputes else "off"
    if precision == "auto":
        precision = "bfloat16" if to_bfloat16 else "off"
    found = {
        "accumulation_steps": config.accumulation_steps or num_microbatches,
        "mixed_precision": precision,
        "memory": config.memory.model_copy(update={"activation_checkpointing": checkpointing}),
    }
    return config.model_copy(update=found)


def recompute_problem(config: TrainConfig) -> str | None:
    """Name the other setting that prevents `train.memory.activation_checkpointing`; None if none does.

    `config`: one without `auto` for strategy and backend.
    """
    if not STRATEGIES[config.strategy].recomputes:
        return f"train.strategy = {config.strategy!r}"
    if config.sync_batch_norm and not BACKENDS[config.backend].recomputes_sync_batch_norm:
        return f"train.sync_batch_norm = true with the backend {config.backend}"
    return None
