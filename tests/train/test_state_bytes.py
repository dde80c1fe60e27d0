"""What `plan` counts of a rank's memory, beside the bytes that ranks have when they train."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.loader.reader import read_epoch
from shardmill.recycled_memory import RecycledMemory
from tests.train.forked_ranks import launch_forked
from tests.train.learners import SPEC, THREE
from tests.train.ranks import VIT, WORKERS, Watcher, usually_of
from tests.train.training import task_of
from train.backends.backend import InputScale, ModelSpec, model_spec
from train.config import TrainConfig
from train.contracts.epochs import evaluation_spec, row_source
from train.planning.input_memory import input_bytes
from train.planning.memory_fit import decided
from train.planning.probe import ProbeTask, probe
from train.planning.state_bytes import StateBytes, StateTask, count_state
from train.planning.state_program import count
from train.settings.mesh import MeshConfig
from train.settings.reading import ReadingConfig
from train.strategies import strategies_that_share
from train.strategies.sharded.pipeline_schedules import PipelineOptions

SHARING = tuple(strategies_that_share())
# Two steps of the 44 rows of the data set `tiny`.
TWO_STEPS = {"model": VIT["model"], "num_streams": 4, "global_batch_size": 24, "epochs": 1, "num_workers": 2}


def counted_here(configs: tuple[TrainConfig, ...], spec: ModelSpec) -> tuple[StateBytes, ...]:
    """As `count_state`, but in this process."""
    return count(StateTask(tuple(decided(config, 1, to_bfloat16=False) for config in configs), spec)).of_configs


@pytest.fixture(scope="module")
def counted(tiny_uri) -> dict[str, StateBytes]:
    configs = {name: TrainConfig(**TWO_STEPS, strategy=name, backend="torch") for name in SHARING}
    for schedule in ("gpipe", "1f1b"):
        options = PipelineOptions(schedule=schedule, num_microbatches=12)
        configs[schedule] = configs["pipeline_parallel"].model_copy(update={"pipeline_parallel": options})
    spec = model_spec(open_dataset(tiny_uri).manifest, configs["zero1"])
    return dict(zip(configs, count_state(tuple(configs.values()), spec), strict=True))


@pytest.mark.starts("ranks")
@pytest.mark.parametrize("strategy", usually_of({"zero1", "hybrid"}, SHARING))
def test_ranks_hold_what_was_counted(tiny_uri, tmp_path, counted, strategy):
    task = task_of(
        tiny_uri, tmp_path, launcher="local", **TWO_STEPS, strategy=f"{WORKERS}:REMEMBERED_{strategy.upper()}"
    )
    launch_forked(task, Watcher(), f"{WORKERS}:every_rank_tells_what_it_holds")
    ranks = [json.loads((tmp_path / "held" / f"rank-{rank}.json").read_text()) for rank in range(2)]
    expected = asdict(counted[strategy])
    for part in ("parameters", "gradients", "optimizer"):
        assert max(rank[part] for rank in ranks) == pytest.approx(expected[part], rel=0.1), part


@pytest.mark.starts("ranks")
def test_shares_are_those_of_the_mesh(counted):
    whole = counted["zero1"].parameters
    assert counted["zero1"].gradients == whole
    assert counted["zero1"].optimizer == pytest.approx(whole, rel=0.02), "half of Adam's two moments"
    assert counted["torch_fsdp"].state == pytest.approx(4 * whole / 2, rel=0.02)
    # Norms, embeddings and the head are whole.
    assert 0.5 < counted["tensor_parallel"].parameters / whole < 0.75
    assert 0 < counted["tensor_parallel"].image < counted["torch_fsdp"].image
    assert counted["torch_fsdp"].gathered > 0 == counted["tensor_parallel"].gathered
    assert all(0 < each.recomputed_image < each.image for each in counted.values())


@pytest.mark.starts("ranks")
def test_a_stage_keeps_the_activations_of_its_schedule(counted):
    """Twelve microbatches: GPipe keeps all of a stage's; 1F1B two of the first stage, and one of the second."""
    whole = counted["torch_fsdp"].image
    assert 0.5 < counted["gpipe"].image / whole < 0.65, "the larger stage"
    assert 1 / 12 < counted["1f1b"].image / whole < 2 * 0.65 / 12


@pytest.mark.drill
def test_a_vision_transformer_is_counted_for_more_ranks_than_there_are():
    """ViT-Base: 86 M weights; tests/train/test_memory.py has ViT-Huge."""
    strategies = {"torch_ddp": {}, "torch_fsdp": {}, "tensor_parallel": {}, "hybrid": {}, "zero1": {}}
    strategies["fsdp in two copies"] = {"strategy": "torch_fsdp", "mesh": MeshConfig(data=2)}
    configs = [
        TrainConfig(**{"strategy": name, **more}, model="vit_base", num_workers=4, backend="torch")
        for name, more in strategies.items()
    ]
    spec = ModelSpec((224, 224, 3), THREE, InputScale((0.0,) * 3, (1.0,) * 3))
    found = dict(zip(strategies, counted_here(tuple(configs), spec), strict=True))
    whole = found["torch_ddp"]
    assert whole.parameters / 4 == pytest.approx(86e6, rel=0.01) and whole.state == pytest.approx(4 * whole.parameters)
    assert found["torch_fsdp"].state == pytest.approx(whole.state / 4, rel=0.01)
    assert found["fsdp in two copies"].state == pytest.approx(whole.state / 2, rel=0.01)
    assert found["tensor_parallel"].state == pytest.approx(whole.state / 4, rel=0.05)
    assert found["hybrid"].state == pytest.approx(whole.state / 4, rel=0.05)
    assert found["zero1"].optimizer == pytest.approx(whole.optimizer / 4, rel=0.01)
    # 12 blocks: 196 tokens of 768 numbers are kept about 20 times in each.
    assert 0.5 < whole.image / (12 * 196 * 768 * 4 * 20) < 2
    # Norms, and what is added to their inputs, are whole.
    assert found["torch_fsdp"].image == whole.image > 2 * found["tensor_parallel"].image


def test_other_optimizers_averages_and_frozen_weights_count():
    base = {"model": VIT["model"], "backend": "torch", "num_workers": 2, "strategy": "torch_fsdp"}
    adam, sgd, averaged, frozen, replicated = counted_here(
        (
            TrainConfig(**base),
            TrainConfig(**base, optimizer="sgd"),
            TrainConfig(**base, ema_decay=0.9),
            TrainConfig(**base, freeze=("all_but_head",)),
            TrainConfig(**{**base, "strategy": "torch_ddp"}),
        ),
        SPEC,
    )
    assert sgd.optimizer == pytest.approx(adam.optimizer / 2, rel=0.01)
    assert averaged.optimizer == pytest.approx(1.5 * adam.optimizer, rel=0.01)
    # Frozen parameters stay whole, and have neither gradients nor state.
    assert frozen.parameters == pytest.approx(replicated.parameters, rel=0.01)
    assert frozen.gradients + frozen.optimizer < 0.01 * adam.state
    # And are not gathered: what is left is the head.
    assert 0 < frozen.gathered < 0.01 * adam.gathered


def test_what_ranks_cannot_divide_is_refused_and_other_strategies_are_counted():
    names = ("torch_fsdp", "tensor_parallel")
    configs = [TrainConfig(model=VIT["model"], num_workers=3, backend="torch", strategy=name) for name in names]
    fsdp, tensor = counted_here(tuple(configs), SPEC)
    assert fsdp.state > 0 == tensor.state and "4 heads, and 3 ranks" in tensor.refused


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("Misspelt", r"names the layer 'wyde', which the model has not; expected .*: wide, head; correct the name"),
        ("Raising", r"parallelize\(mesh\) of Raising failed: KeyError: .*no such layer.* \(.*divided_models.py:\d+\)"),
        (
            "Half",
            r"does not compute with its layers divided: RuntimeError: .*divided_models.py:\d+\); expected sizes th",
        ),
        ("Odd", r"does not compute with its layers divided: "),
    ],
)
def test_a_module_that_divides_itself_wrongly_is_refused_and_other_strategies_are_counted(model, why):
    named = {"model": f"tests.train.divided_models:{model}", "num_workers": 2, "backend": "torch"}
    configs = tuple(TrainConfig(**named, strategy=name) for name in ("tensor_parallel", "torch_fsdp"))
    tensor, fsdp = count(StateTask(configs, SPEC)).of_configs
    assert fsdp.state > 0 == tensor.state and re.search(why, tensor.refused), tensor.refused


def test_a_module_that_looks_at_numbers_is_counted_without_activations():
    models = ("tests.train.peeking_model:peeking", "torchvision.models:vit_b_16")
    peeking, vit = (
        counted_here((TrainConfig(model=each, backend="torch", num_workers=2, strategy="torch_ddp"),), SPEC)
        for each in models
    )
    assert peeking[0].state > 0 == peeking[0].image and "RuntimeError" in peeking[0].why_not_stepped
    assert vit[0].image > 0 and not vit[0].why_not_stepped, "attention of a library, without its weights"


@pytest.mark.drill
def test_activations_are_those_of_a_measured_step():
    """Measured as the peak of a process, which the allocator rounds."""
    config = TrainConfig(model="vit_tiny", num_workers=1, strategy="single", backend="torch", accumulation_steps=1)
    spec = ModelSpec((64, 64, 3), THREE, InputScale((0.0,) * 3, (1.0,) * 3))
    [counted] = counted_here((config,), spec)
    measured = probe(ProbeTask(decided(config, 1, to_bfloat16=False), spec, 32, 1, 2, for_memory=True))
    assert counted.image == pytest.approx(measured.image_bytes, rel=0.1)


def test_readers_keep_no_more_than_was_planned(tiny_uri, monkeypatch):
    kept: list[RecycledMemory] = []

    class Watched(RecycledMemory):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            kept.append(self)

    monkeypatch.setattr("shardmill.loader.row_source.RecycledMemory", Watched)
    dataset = open_dataset(tiny_uri)
    reading = ReadingConfig(prefetch_bytes=20_000)
    config = TrainConfig(num_workers=1, strategy="single", num_streams=4, global_batch_size=8, reading=reading)
    batches = []
    # An evaluation keeps its own beside what the next epoch begins with.
    for spec in (config.plan_spec(dataset), evaluation_spec(dataset, config, "validation")):
        with read_epoch(row_source(config, dataset, spec, range(4)), dataset.plan_epoch(spec, 0)) as reader:
            batches += reader
    bytes_kept = sum(len(array) for memory in kept for array in memory._arrays)
    # Of each array an eighth may be more than was asked for; it is never written to.
    assert len(batches) > 5 and len(kept) == 4
    assert 0 < bytes_kept <= input_bytes(config, dataset) * 9 / 8
