"""The rows of test_array.py: which trainings on several ranks are compared with the one of a single rank.

`make test` trains the covering array: each synchronous strategy, and with it two or three of the other choices at a
time. Who adds a strategy or a choice adds a row, never an axis. The whole products are rows of `make test-all`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.lab.scale import exhaustive
from tests.train.ranks import LONG, ORDINARY_MODEL, SMOOTH_MODEL, TORCH_MODELS, VIT
from tests.train.training import MODELS
from train.strategies import STRATEGIES

# Smoothed labels keep the loss from 0, where a relative bound means nothing. Of 24 rows three ranks have 8, and the
# rows that an epoch's last batch lacks are padding. With averages what is evaluated are not the weights themselves.
COMMON = {"num_streams": 12, "global_batch_size": 24, "label_smoothing": 0.1, "record_samples": True,
          "checkpoint_every_steps": 3, "checkpoint": {"keep": 9}, "epochs": 4}  # fmt: skip
_LONG = {**LONG, **COMMON, "epochs": LONG["epochs"]}
# Adam would make whole steps of gradients that are rounding alone.
NORMED = {**COMMON, "optimizer": "sgd", "learning_rate": 0.05, "sync_batch_norm": True}
SIXTEEN_BITS = {"learning_rate": 0.001, "label_smoothing": 0.0}
_VIT = {**VIT, **COMMON, "epochs": 3}
_FROZEN = {"freeze": ["blocks.0.*", "embedding.*"], "optimizer": "sgd", "learning_rate": 0.05}
_HEAD_FIRST = {"freeze": ["all_but_head"], "unfreeze_epoch": 1, "optimizer": "sgd", "learning_rate": 0.02}

# What is trained: all that a single rank has to be told to train the same.
TRAININGS: dict[str, dict[str, Any]] = {
    "keras smooth": {**_LONG, "model": SMOOTH_MODEL["keras"]},
    "keras norms": {**NORMED, "model": f"{MODELS}:normed"},
    "keras head first": {**COMMON, **_HEAD_FIRST, "model": "small_cnn"},
    "keras bfloat16": {**COMMON, "model": SMOOTH_MODEL["keras"], "mixed_precision": "bfloat16"},
    "keras ordinary": {**COMMON, "epochs": 2, "model": ORDINARY_MODEL["keras"]},
    "routed": {**_LONG, "model": SMOOTH_MODEL["torch"]},
    "torch smooth": {**_LONG, "model": f"{TORCH_MODELS}:smooth"},
    # Weights that not all ranks use in a step, the first whose gradients are complete among them.
    "routed norms": {**NORMED, "model": f"{TORCH_MODELS}:routed_normed"},
    "torch ordinary": {**COMMON, "epochs": 2, "model": ORDINARY_MODEL["torch"]},
    "vit": _VIT,
    "vit averaged": {**_VIT, "ema_decay": 0.9},
    "vit frozen": {**_VIT, **_FROZEN},
    "vit unfrozen": {**_VIT, **_FROZEN, "unfreeze_epoch": 1},
    "vit bfloat16": {**_VIT, **SIXTEEN_BITS, "mixed_precision": "bfloat16"},
    "vit float16": {**_VIT, **SIXTEEN_BITS, "mixed_precision": "float16"},
    "torchvision's": {**_VIT, "optimizer": "sgd", "model": "tests.train.sharded_models:torchvisions_vit"},
}


@dataclass(frozen=True)
class Row:
    """One training on several ranks, which is killed near its end and resumed."""

    training: str
    strategy: str
    num_ranks: int
    resumed_on: int = 1
    """By as many ranks of the same strategy, or by one alone, without a strategy."""
    how: dict[str, Any] = field(default_factory=dict)
    """What changes nothing: the settings of a strategy, parts of a step, activations that are computed twice."""
    shares: tuple[float, float] = (1.0, 1.0)
    """What a rank holds of the weights and of the optimizer's state, at most."""
    steps_per_epoch = 4

    def __str__(self) -> str:
        how = ", ".join(f"{name}={value}" for name, value in self.how.items())
        return f"{self.training}, {self.strategy} {self.num_ranks} then {self.resumed_on}{how and f', {how}'}"

    @property
    def what(self) -> dict[str, Any]:
        return TRAININGS[self.training]

    @property
    def config(self) -> dict[str, Any]:
        return {**self.what, **self.how, "strategy": self.strategy}

    @property
    def num_replicas(self) -> int:
        """How many have a state of their own: ranks, or the devices of one rank."""
        return self.how.get("mirrored", {"num_devices": self.num_ranks})["num_devices"]

    @property
    def num_steps(self) -> int:
        return self.steps_per_epoch * self.what["epochs"]

    @property
    def killed_at(self) -> int:
        """Behind a checkpoint in the middle of an epoch: each third step, and each fourth, writes one."""
        return self.num_steps - 5

    @property
    def is_exact(self) -> bool:
        """But for the order in which numbers of 32 bits are added."""
        return "mixed_precision" not in self.what

    @property
    def is_smooth(self) -> bool:
        """Without ReLU and max pooling, where a rounding error may cross a kink: after some steps losses go apart."""
        return "ordinary" not in self.training

    @property
    def has_telling_weights(self) -> bool:
        """Whether they are sums of gradients: of a gradient that is rounding alone, as of the biases of attention's
        keys, Adam makes whole steps."""
        is_sum = self.what.get("optimizer") == "sgd" or "vit" not in self.training
        return self.is_exact and self.is_smooth and is_sum

    @property
    def tolerance(self) -> float:
        """Relative, of losses: ranks round before it is added up."""
        return 1e-5 if self.is_exact else 0.02


RECOMPUTED = {"memory": {"activation_checkpointing": "on"}}
PROFILED = {"log": {"profile_steps": "3:5"}}


def in_parts(number: int) -> dict[str, Any]:
    return {"accumulation_steps": number}


def stages(schedule: str, num_microbatches: int = 0) -> dict[str, Any]:
    return {"pipeline_parallel": {"schedule": schedule, "num_microbatches": num_microbatches}}


# What a rank holds of weights and of the optimizer's state, at most. Norms and position embeddings stay whole without
# FSDP; each weight's number of steps is everywhere; two blocks and their neighbours do not divide evenly.
HALF, THIRD, DIVIDED, HYBRID = (0.52, 0.52), (1.0, 0.36), (0.75, 0.75), (0.4, 0.4)
OF_TWO_STAGES, OF_FOUR_STAGES = (0.6, 0.6), (0.45, 0.45)

ROWS = [
    Row("keras smooth", "horovod", 2, 1, {**in_parts(4), **PROFILED}),
    Row("keras norms", "horovod", 3, 2),
    Row("keras bfloat16", "horovod", 2, 1, RECOMPUTED),
    Row("keras smooth", "multi_worker_mirrored", 2, 1, RECOMPUTED),
    Row("keras head first", "mirrored", 1, 1, {"mirrored": {"num_devices": 5}}),
    Row("routed", "torch_ddp", 3, 2, {**in_parts(4), "bucket_bytes": 2000, **PROFILED}),
    Row("routed norms", "torch_ddp", 2, 1, {**RECOMPUTED, "bucket_bytes": 2000}),
    Row("vit", "zero1", 3, 1, RECOMPUTED, THIRD),
    Row("vit bfloat16", "torch_fsdp", 2, 1, {**in_parts(2), **RECOMPUTED}, HALF),
    Row("vit averaged", "torch_fsdp", 3, 2, {}, (0.36, 0.36)),
    Row("torchvision's", "tensor_parallel", 2, 1, in_parts(2), DIVIDED),
    Row("vit unfrozen", "hybrid", 4, 1, in_parts(2)),
    Row("vit", "pipeline_parallel", 2, 2, {**in_parts(2), **stages("1f1b", 6)}, OF_TWO_STAGES),
    Row("torch smooth", "pipeline_parallel", 3, 1, {**stages("gpipe"), **RECOMPUTED}),
]

LAYOUTS: list[tuple[str, int, dict[str, Any], tuple[float, float]]] = [
    ("zero1", 3, {}, THIRD),
    ("torch_fsdp", 2, {}, HALF),
    ("torch_fsdp", 4, {"mesh": {"data": 2}}, HALF),
    ("tensor_parallel", 2, {}, DIVIDED),
    ("tensor_parallel", 4, {"mesh": {"data": 2}}, DIVIDED),
    ("hybrid", 4, {}, HYBRID),
    ("pipeline_parallel", 2, stages("gpipe"), OF_TWO_STAGES),
    ("pipeline_parallel", 2, stages("interleaved_1f1b"), OF_TWO_STAGES),
    ("pipeline_parallel", 2, stages("zero_bubble"), OF_TWO_STAGES),
    ("pipeline_parallel", 4, {**stages("1f1b"), "mesh": {"data": 2}}, OF_TWO_STAGES),
    ("pipeline_parallel", 4, {**stages("zero_bubble"), "mesh": {"pipeline": 2}}, OF_TWO_STAGES),
    ("pipeline_parallel", 4, stages("1f1b"), OF_FOUR_STAGES),
]


def products() -> Iterator[Row]:
    """Each strategy with each number of ranks, each layout, each precision, whatever is frozen or normalized."""
    for name, strategy in STRATEGIES.items():
        of_keras = strategy.backends[0] == "keras"
        for ranks in (2, 3):
            if not strategy.synchronous or not strategy.allows_world_size(ranks):
                continue
            how = {
                **(in_parts(4) if ranks == 3 else RECOMPUTED),
                **({"bucket_bytes": 2000} if name == "torch_ddp" else {}),
            }
            # Ranks that gather the weights of a block together must all use the same blocks.
            smooth = "keras smooth" if of_keras else "torch smooth" if strategy.needs_module else "routed"
            yield Row(smooth, name, ranks, 1, {**how, **(PROFILED if name != "multi_worker_mirrored" else {})})
            yield Row("keras ordinary" if of_keras else "torch ordinary", name, ranks, ranks)
        if strategy.needs_module:
            yield from (Row(f"vit {precision}", name, 2, 2) for precision in ("bfloat16", "float16"))
        if strategy.syncs_batch_norm and strategy.synchronous and strategy.allows_world_size(2):
            yield from (Row("keras norms" if of_keras else "routed norms", name, ranks, ranks) for ranks in (2, 3))
    for devices in (2, 4, 5):
        how = {"mirrored": {"num_devices": devices}}
        yield from (Row(training, "mirrored", 1, 1, how) for training in ("keras smooth", "keras norms"))
    for name, ranks, how, shares in LAYOUTS:
        yield Row("vit", name, ranks, ranks, how, shares)
    for name, ranks, _, _ in LAYOUTS[0], LAYOUTS[1], LAYOUTS[3], LAYOUTS[5]:
        yield from (Row(training, name, ranks, ranks) for training in ("vit frozen", "vit unfrozen"))
    yield from (Row("torchvision's", name, 2, 2) for name in ("torch_fsdp", "tensor_parallel", "zero1"))


def rows() -> list[object]:
    """For `parametrize`: those of `make test`, and those that only `make test-all` trains."""
    usual = [pytest.param(row, id=str(row)) for row in ROWS]
    return usual + [exhaustive(row, id=str(row)) for row in products() if row not in ROWS]
