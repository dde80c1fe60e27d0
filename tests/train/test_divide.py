"""Whether ranks hold a model together: the rows of the table in docs/auto.md, and a training that `auto` divides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.train.test_job import Recorder, tree_of
from train.backends.backend import ModelSpec
from train.config import TrainConfig
from train.planning import divide, memory_plan
from train.planning.auto import resolve
from train.planning.divide import ModelFacts, division_rules, nothing_holds, with_room
from train.planning.make import plan_training
from train.planning.memory_fit import decided
from train.planning.memory_plan import plan_memory
from train.planning.memory_table import Room, row_of
from train.planning.plan import TrainingPlan
from train.planning.state_bytes import StateBytes, StateTask
from train.planning.state_program import count
from train.settings.memory import MemoryConfig
from train.settings.mesh import MeshConfig
from train.strategies import STRATEGIES
from train.training import train_model

GIB = 2**30
# 1 GiB of weights, with Adam: 4 GiB; 2 GiB of activations for each of 8 images.
STATE = StateBytes(GIB, GIB, 2 * GIB, image=2 * GIB)
HALF = StateBytes(GIB // 2, GIB // 2, GIB, gathered=3 * GIB, image=2 * GIB)
DIVIDED = replace(HALF, gathered=0, image=GIB)
SMALLER = replace(DIVIDED, parameters=GIB // 4, optimizer=GIB // 2)
CONFIG = TrainConfig(num_workers=2, strategy="torch_ddp", global_batch_size=16, num_streams=8, backend="torch")


def facts(device_gib: float, **states: StateBytes) -> ModelFacts:
    room = Room("one T4", int(device_gib * GIB), GIB, 0, is_host=False)
    rows = {name: row_of(CONFIG.model_copy(update={"strategy": name}), state, room) for name, state in states.items()}
    return ModelFacts("one T4", room.device_bytes, rows)


def all_of(device_gib: float, **other: StateBytes) -> ModelFacts:
    states = {"torch_ddp": STATE, "torch_fsdp": HALF, "tensor_parallel": DIVIDED, "hybrid": SMALLER, **other}
    return facts(device_gib, **states)


CASES = [
    # Facts, row, and what must be among the words.
    (all_of(80), "whole", ""),
    (all_of(7), "whole", ""),
    (
        all_of(6.9, torch_fsdp=replace(HALF, gathered=GIB)),
        "torch_fsdp",
        "one device does not hold the model: parameters 1.0 GiB + gradients 1.0 GiB + optimizer 2.0 GiB + activations "
        "2.0 GiB + framework 1.0 GiB = 7.0 GiB, and one T4 has 6.9 GiB; shared (fsdp 2) it needs parameters 512.0 MiB",
    ),
    (
        all_of(5),
        "tensor_parallel",
        "one device does not hold a layer: with whole layers, shared by all ranks, parameters 512.0 MiB + gradients "
        "512.0 MiB + optimizer 1.0 GiB + activations 2.0 GiB + exchange 3.0 GiB + framework 1.0 GiB = 8.0 GiB, and one",
    ),
    (all_of(3.5), "hybrid", "with divided layers (tensor 2) it needs parameters 256.0 MiB"),
    (all_of(5, tensor_parallel=StateBytes(refused="3 heads")), "hybrid", "one device does not hold a layer"),
    (
        facts(5, torch_ddp=STATE, tensor_parallel=DIVIDED),
        "tensor_parallel",
        "and one T4 has 5.0 GiB; shared (tensor 2) it needs parameters 512.0 MiB",
    ),
    (all_of(3), "refused", ""),
    (facts(3, torch_ddp=STATE), "refused", ""),
]


@pytest.mark.parametrize(("facts", "choice", "words"), CASES)
def test_division(facts: ModelFacts, choice: str, words: str):
    rule = next(rule for rule in division_rules() if rule.applies(facts))
    assert rule.choice == choice and words in rule.because(facts)


def test_a_row_says_how_it_fits():
    row = all_of(7).rows["torch_ddp"]
    assert (row.total, row.activations, row.accumulation_steps) == (7 * GIB, 2 * GIB, 8)
    assert row.verdict == "yes with train.accumulation_steps = 8"
    assert all_of(80).rows["torch_ddp"].verdict == "yes" and all_of(80).rows["torch_ddp"].total == 21 * GIB
    assert all_of(5).rows["torch_ddp"].verdict == "no"
    config = CONFIG.model_copy(update={"mixed_precision": "auto"})
    room = Room("one T4", int(6.2 * GIB), GIB, 0, is_host=False)
    assert row_of(config, STATE, room).verdict.endswith("train.mixed_precision = 'bfloat16'")
    # A host also has the copy of which a checkpoint is written.
    assert row_of(CONFIG, STATE, replace(room, is_host=True)).checkpoint == 3 * GIB
    # And so rank 0's host must hold the whole model before the ranks have their parts.
    large = replace(DIVIDED, start=9 * GIB)
    host = Room("a host", 8 * GIB, GIB, 0, is_host=True)
    assert row_of(CONFIG, large, replace(host, is_host=False)).fits
    assert row_of(CONFIG, large, host).verdict == "no: it begins with all parameters, 10.0 GiB"
    # What is exchanged behind the backward pass takes the place of the activations.
    assert row_of(CONFIG, replace(STATE, update=3 * GIB), room).exchange == GIB


def test_a_model_that_no_ranks_hold_is_refused_with_what_is_needed():
    error = str(nothing_holds(CONFIG, all_of(3)))
    assert (
        "on 2 ranks needs parameters 1.0 GiB" in error
        and "hybrid (tensor 2) needs 3.2 GiB, the least of the strategies that auto" in error
    )
    assert "set train.num_workers higher" in error
    assert "set train.strategy" not in error
    stages = replace(SMALLER, image=GIB // 4)
    chosen = str(nothing_holds(CONFIG, all_of(3, pipeline_parallel=stages)))
    assert "auto chooses; expected" in chosen
    assert "set train.strategy = 'pipeline_parallel' with train.accumulation_steps = 8, which fits; or set" in chosen
    alone = str(nothing_holds(CONFIG, facts(3, torch_ddp=STATE)))
    assert "num_workers" not in alone and "use a smaller model or larger devices" in alone


@pytest.mark.usefixtures("asked_here")
def test_auto_divides_a_model_that_one_device_does_not_hold(tiny_uri, tmp_path, monkeypatch):
    """For a limit between what a rank needs of the whole model and of a half."""
    counted: dict[tuple[str, ...], tuple[StateBytes, ...]] = {}

    def count_once(configs: tuple[TrainConfig, ...], spec: ModelSpec) -> tuple[StateBytes, ...]:
        key = tuple(config.strategy for config in configs)
        if key not in counted:
            counted[key] = count(
                StateTask(tuple(decided(each, 1, to_bfloat16=False) for each in configs), spec)
            ).of_configs
        return counted[key]

    # The budget is nothing that it counts.
    for module in (divide, memory_plan):
        monkeypatch.setattr(module, "count_state", count_once)
    spark, dataset = SparkConfig(), open_dataset(tiny_uri)
    open_to_choose = {
        "model": "tests.train.torch_models:shallow_vit",
        "num_workers": 2,
        "devices": "cpu",
        "accumulation_steps": 12,
    }
    tree = tree_of(tiny_uri, tmp_path, **open_to_choose)
    rows = {row.strategy: row for row in plan_memory(tree, GIB).strategies}

    def planned(budget_bytes: int, **other: object) -> TrainingPlan:
        memory = MemoryConfig(budget_bytes=budget_bytes)
        return with_room(
            plan_training(tree.train.model_copy(update={"memory": memory, **other}), spark, dataset), spark, dataset
        )

    between = (rows["torch_ddp"].total + rows["torch_fsdp"].total) // 2
    assert planned(rows["torch_ddp"].total).config.strategy == "torch_ddp"
    divided = planned(between)
    assert divided.config.strategy == "torch_fsdp" and rows["torch_fsdp"].arithmetic in divided.reason
    assert divided.in_short == "torch_fsdp on 2 ranks by local (one device does not hold the model)"
    assert planned(between, strategy="torch_ddp").config.strategy == "torch_ddp", "what is set stays"
    assert plan_memory(tree, between).choice == "torch_fsdp"
    with pytest.raises(
        UsageError, match=r"shallow_vit' on 2 ranks needs parameters .*, the least of the strategies that auto chooses;"
    ):
        planned(2**20)
    nothing = plan_memory(tree, 2**20)
    assert nothing.choice == "" and "the least of the strategies that auto chooses" in nothing.reason


@pytest.mark.starts("ranks")
def test_a_keras_model_whose_state_no_rank_holds_is_refused(tiny_uri, tmp_path):
    """Its layers cannot be divided; that is known when a step was measured."""
    tree = tree_of(tiny_uri, tmp_path, model="tests.train.models_under_test:linear", num_workers=2, num_streams=8)
    tree = tree.model_copy(update={"train": tree.train.model_copy(update={"memory": MemoryConfig(budget_bytes=1000)})})
    wanted = (
        r"optimizer take .* KiB, and train.memory.budget_bytes has 1.0 KiB; expected a PyTorch module, of which each"
    )
    with pytest.raises(UsageError, match=wanted):
        train_model(tree, Recorder())


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "sizes", "words"),
    [
        ("hybrid", 2, {}, "the mesh tensor 2, so that no weights are sharded: set train.mesh.fsdp = 2"),
        ("hybrid", 3, {}, "on 3 ranks has the mesh fsdp 3, so that no layer is divided: set train.mesh.tensor = 2"),
        ("hybrid", 9, {"fsdp": 3}, ""),
        ("hybrid", 9, {"fsdp": 9}, "the mesh fsdp 9, so that no layer is divided"),
        ("hybrid", 9, {"fsdp": 3, "tensor": 1}, ""),
        ("hybrid", 4, {}, ""),
        ("tensor_parallel", 3, {}, ""),
        ("tensor_parallel", 2, {"data": 2}, "the mesh data 2, so that no layer is divided"),
        ("torch_ddp", 3, {}, ""),
    ],
)
def test_an_axis_that_ranks_leave_empty_is_told(strategy, num_ranks, sizes, words):
    config = TrainConfig(strategy=strategy, num_workers=num_ranks, mesh=MeshConfig(**sizes), model="vit")
    told = resolve(config, SparkConfig()).lacks
    assert words in told and bool(words) == bool(told)


def test_one_rank_that_nobody_has_asked_for_is_told(tiny_uri, tmp_path):
    """Nothing is shared then, whatever the strategy promises."""
    for name, strategy in STRATEGIES.installed().items():
        told = resolve(TrainConfig(strategy=name, model="vit"), SparkConfig()).shares_nothing
        assert bool(told) == strategy.needs_module, name
    for asked in ({"num_workers": 1}, {"num_workers": 2}, {"mesh": MeshConfig(fsdp=2)}):
        config = TrainConfig(strategy="torch_fsdp", model="vit", launcher="local", **asked)
        assert not resolve(config, SparkConfig()).shares_nothing
    recorder = Recorder()
    model = "tests.train.torch_models:linear"
    train_model(tree_of(tiny_uri, tmp_path, model=model, strategy="torch_fsdp", epochs=1), recorder)
    assert recorder.fields["one_rank"]["warning"] == (
        "train.strategy = 'torch_fsdp' has one rank, which holds the whole model (one process uses all devices of this "
        "machine): set train.num_workers, or sizes of train.mesh, to share it"
    )
