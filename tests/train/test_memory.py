"""Memory of a rank: as counted, as found before the first step, and with activations that are computed twice."""

# pyright: reportArgumentType=false
from __future__ import annotations

import json
import re
import resource
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.errors import TrainingError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import WARNING
from shardmill.loader.reader import read_epoch
from shardmill.memory import RecycledMemory, free_bytes
from shardmill.stores import open_store
from tests.lab.scale import exhaustive
from tests.processes import in_own_process
from tests.train.forked_ranks import launch_forked
from tests.train.learners import LINEAR, SHAPE, SPEC, THREE, batch_of, learner
from tests.train.ranks import VIT, WORKERS, Watcher, usually_of
from tests.train.training import MODELS, DriverRecorder, task_of, tree_of
from train.api import StatePart
from train.backends import BACKENDS
from train.backends.model_spec import InputScale, ModelSpec, model_spec
from train.config import TrainConfig
from train.contracts.row_source import evaluation_spec, row_source
from train.identity import settings_that_matter
from train.planning.memory import (
    Limit,
    Memory,
    considered,
    facts_of,
    images_at_once,
    input_bytes,
    look_at_memory,
    most_microbatches,
    probed_record,
)
from train.planning.memory_fit import MemoryRecord, decided, fit
from train.planning.plan import TrainingPlan, keep_plan, plan_record
from train.planning.probe import ProbeTask, StepCost, probe
from train.planning.setup import Setup, resolve
from train.planning.state_bytes import RankParts, StateBytes, StateTask, count_state
from train.planning.state_program import count
from train.planning.trainings import TrainingChoice
from train.settings import MemoryConfig, MeshConfig, ReadingConfig
from train.stage_record import train_record
from train.strategies import strategies_that_share
from train.strategies.options import LocalSgdOptions, MirroredOptions
from train.strategies.sharded.pipeline_schedules import PipelineOptions
from train.training import train_model
from train.tree import TrainTree

ROOMY = {"model": "tests.train.torch_models:Roomy", "global_batch_size": 96, "num_streams": 8, "epochs": 1}
GIB = 2**30


def set_up(config: TrainConfig, dataset: Dataset | None = None) -> Setup:
    return resolve(config, SparkConfig(), dataset)


def keep(choice: TrainingChoice, models: Path, tree: TrainTree, record: MemoryRecord) -> None:
    plan = TrainingPlan(resolve(tree.train, tree.spark), Memory(record))
    keep_plan(open_store(str(models)), choice.training_dir, plan)


def look_at(setup: Setup, begun: MemoryRecord | None = None) -> Memory:
    plan = plan_record(TrainingPlan(setup, Memory(begun))) if begun else None
    return look_at_memory(setup, RankParts(), begun=plan, has_begun=False)


@pytest.mark.drill
def test_a_training_short_of_memory_takes_parts_and_continues_with_them(tiny_uri, tmp_path, monkeypatch):
    from tests.train.torch_models import Roomy

    monkeypatch.setattr(Roomy, "most_images", 0)
    first = DriverRecorder(fail_after_steps=1)
    with pytest.raises(TrainingError, match="stopped here"):
        train_model(tree_of(tiny_uri, tmp_path, **ROOMY, memory={"budget_bytes": 3 * GIB // 2}), first)
    found = first.named("memory")[-1]
    parts = found["accumulation_steps"]
    assert (found["choice"], found["mixed_precision"]) == ("microbatches", "off") and parts > 1 and 96 % parts == 0
    assert Roomy.most_images == 96 // parts
    assert "train.memory.budget_bytes has 1.5 GiB" in found["reason"]

    # Now memory is ample, and the training stays what it is.
    second = DriverRecorder()
    outcome = train_model(tree_of(tiny_uri, tmp_path, **ROOMY, memory={"budget_bytes": 900 * GIB}), second)
    assert second.named("memory")[-1] == found and Roomy.most_images == 96 // parts
    assert train_record(outcome).sections["train"]["memory"] == found["reason"]


@pytest.mark.starts("ranks")
def test_a_precision_is_chosen_once_and_only_if_that_is_allowed(tiny_uri, tmp_path, choice_of):
    # All that is left to choose is the precision: 96 images at once, or in half of the memory.
    short = {**ROOMY, "memory": {"budget_bytes": 9 * GIB // 2}, "accumulation_steps": 1, "mixed_precision": "auto"}
    config, dataset, _, _ = choice_of(tmp_path, tree_of(tiny_uri, tmp_path, **short))
    memory = look_at(set_up(config, dataset))
    fitted = memory.fitted(set_up(config, dataset))
    assert (fitted.config.mixed_precision, fitted.config.accumulation_steps) == ("bfloat16", 1), fitted.reason
    assert memory.record is not None and "'bfloat16', as chosen before the first step, need" in fitted.reason
    assert fitted.fit is not None and fitted.fit.choice == "bfloat16"
    ample = config.model_copy(update={"memory": MemoryConfig(budget_bytes=900 * GIB)})
    assert look_at(set_up(ample, dataset), memory.record) == memory

    # With other parts left to choose, and another number of ranks, from the same measurement.
    two = {"accumulation_steps": 0, "num_workers": 2, "strategy": "torch_ddp", "launcher": "local"}
    free = set_up(config.model_copy(update=two), dataset)
    assert memory.fitted(free).config.accumulation_steps == 1
    # Of 48 images on a rank 24 fit, which need as much as 12 in float32.
    record = memory.record
    shorter_bytes = record.fixed_bytes + input_bytes(free) + 14 * record.image_bytes
    shorter = replace(memory, record=record.model_copy(update={"rank_bytes": shorter_bytes}))
    assert shorter.fitted(free).config.accumulation_steps == 2

    # Where nothing fits any more, it is told what was not tried, unless that is set or cannot be.
    shortest_bytes = record.fixed_bytes + input_bytes(set_up(config, dataset)) + 1
    shortest = replace(memory, record=record.model_copy(update={"rank_bytes": shortest_bytes}))
    for more, is_told in [
        ({}, True),
        ({"memory": MemoryConfig(activation_checkpointing="off")}, True),
        ({"memory": MemoryConfig(activation_checkpointing="on")}, False),
        ({"strategy": "parameter_server", "model": "small_cnn", "backend": "keras"}, False),
    ]:
        reason = shortest.fitted(set_up(config.model_copy(update=more), dataset)).reason
        assert ("set train.memory.activation_checkpointing = 'on'" in reason) == is_told, (more, reason)

    # As any training goes on with what lies in its folder; of a smaller model, which is quick.
    tree = tree_of(tiny_uri, tmp_path, model=LINEAR["torch"], mixed_precision="auto")
    keep(choice_of(tmp_path, tree)[2], tmp_path, tree, record)
    recorder = DriverRecorder()
    outcome = train_model(tree, recorder)
    assert [recorder.named("memory")[-1][name] for name in ("choice", "mixed_precision")] == ["bfloat16"] * 2
    marker = json.loads((tmp_path / outcome.result.last_checkpoint / "MARKER.json").read_text())["body"]
    assert marker["identity"]["settings"]["mixed_precision"] == '"bfloat16"'
    assert train_model(tree, DriverRecorder()).skipped

    # What fits nowhere is tried all the same.
    tree = tree_of(tiny_uri, tmp_path, model=LINEAR["torch"], epochs=1)
    keep(choice_of(tmp_path, tree)[2], tmp_path, tree, record.model_copy(update={"rank_bytes": 1}))
    recorder = DriverRecorder()
    train_model(tree, recorder)
    assert recorder.named("memory")[-1]["accumulation_steps"] == 1
    assert "24 images at a time still need" in recorder.named("memory")[-1][WARNING]


def test_ample_memory_is_not_measured(tiny_uri, tmp_path, choice_of):
    config, dataset, _, _ = choice_of(tmp_path, tree_of(tiny_uri, tmp_path, model=LINEAR["torch"]))
    memory = look_at(set_up(config, dataset))
    fitted = memory.fitted(set_up(config, dataset))
    assert (memory.record, fitted.fit, fitted.config.accumulation_steps) == (None, None, 1)
    assert (
        "images of a step take" in fitted.reason and f": {fitted.available} hold more than 1,000 times" in fitted.reason
    )


def planned_in_little_memory(uri: str) -> tuple[MemoryRecord, str, int]:
    """In a process of its own -> the record, the reason for the choice, and the most memory of what it has started."""
    strategy = {"strategy": "torch_fsdp", "num_workers": 2, "launcher": "local"}
    asked = TrainConfig(model="vit_huge", memory=MemoryConfig(budget_bytes=12 * GIB), **strategy)
    setup = set_up(asked, open_dataset(uri))
    memory = look_at(setup)
    assert memory.record is not None
    return memory.record, memory.fitted(setup).reason, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


@pytest.mark.drill
def test_a_model_that_ranks_share_is_counted_and_never_whole_on_the_host_of_the_driver(tiny_uri):
    record, reason, most_bytes = in_own_process("none", planned_in_little_memory, tiny_uri)
    # 631 M weights, with gradients and Adam's moments.
    assert record.state_bytes == pytest.approx(4 * 4 * 631e6, rel=0.01) and record.image_bytes > 0
    assert most_bytes < 1.5 * GIB, "what PyTorch itself takes"
    assert "train.accumulation_steps = " in reason and not record.note


@pytest.mark.drill
def test_counted_bytes_are_those_of_a_measured_step_and_what_cannot_be_counted_is_measured(tiny_uri):
    shared = {"strategy": "torch_fsdp", "num_workers": 2, "launcher": "local", "accumulation_steps": 0}
    dataset, memory = open_dataset(tiny_uri), MemoryConfig(budget_bytes=4 * GIB)
    records = {}
    for model in ("vit_tiny", "tests.train.torch_models:peeking"):
        setup = set_up(TrainConfig(model=model, memory=memory, **shared), dataset)
        records[model] = look_at(setup).record
    counted, measured = records.values()
    spec = model_spec(dataset.manifest, setup.config)
    task = ProbeTask(
        decided(setup.config.model_copy(update={"model": "vit_tiny"}), 1, to_bfloat16=False), spec, 8, 2, 2, True
    )
    cost = probe(task)
    # But for the states of generators.
    assert cost.state_bytes - 8192 < counted.state_bytes <= cost.state_bytes and not counted.note
    assert "measured with the whole model in one process of this host: RuntimeError" in measured.note


def test_images_and_parts_follow_from_the_config():
    three = TrainConfig(global_batch_size=64, num_streams=8, num_workers=3, strategy="torch_ddp")

    def images_and_parts(config: TrainConfig) -> tuple[int, int]:
        return images_at_once(set_up(config)), most_microbatches(set_up(config))

    # Streams are shared 3, 3, 2, each with 8 images.
    assert images_and_parts(three) == (24, 16)
    local = three.model_copy(update={"strategy": "local_sgd"}).with_options(LocalSgdOptions(local_steps=4))
    assert images_and_parts(local) == (6, 4)
    mirrored = TrainConfig(num_workers=1, num_streams=8, global_batch_size=64, strategy="mirrored")
    mirrored = set_up(mirrored.with_options(MirroredOptions(num_devices=4)))
    assert (images_at_once(mirrored), most_microbatches(mirrored)) == (64, 16)
    assert (images_at_once(mirrored, 4), most_microbatches(mirrored, 4)) == (16, 16)
    assert images_and_parts(three.model_copy(update={"sync_batch_norm": True}))[1] == 1
    served = TrainConfig(global_batch_size=64, num_streams=8, strategy="parameter_server", num_workers=2)
    assert images_and_parts(served) == (64, 1)


def test_a_container_has_what_its_group_still_may_use(tmp_path):
    assert free_bytes(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\n")
    assert free_bytes(tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in {
        "memory.max": "5000\n",
        "memory.current": "3000\n",
        "memory.stat": "file 9\ninactive_file 70\n",
    }.items():
        (group / name).write_text(text)
    assert free_bytes(tmp_path) == 2070
    (group / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path) == 8000 * 1024


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
    launch_forked(task, Watcher(), f"{WORKERS}:every_rank_reports_what_it_holds")
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
    others = ({"optimizer": "sgd"}, {"ema_decay": 0.9}, {"freeze": ("all_but_head",)}, {"strategy": "torch_ddp"})
    configs = tuple(TrainConfig(**{**base, **each}) for each in ({}, *others))
    adam, sgd, averaged, frozen, replicated = counted_here(configs, SPEC)
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
        ("Raising", r"parallelize\(mesh\) of Raising failed: KeyError: .*no such layer.* \(.*sharded_models.py:\d+\)"),
        ("Half",
         r"does not compute with its layers divided: RuntimeError: .*sharded_models.py:\d+\); expected sizes th"),
        ("Odd", r"does not compute with its layers divided: "),
    ],
)  # fmt: skip
def test_a_module_that_divides_itself_wrongly_is_refused_and_other_strategies_are_counted(model, why):
    named = {"model": f"tests.train.sharded_models:{model}", "num_workers": 2, "backend": "torch"}
    configs = tuple(TrainConfig(**named, strategy=name) for name in ("tensor_parallel", "torch_fsdp"))
    tensor, fsdp = count(StateTask(configs, SPEC)).of_configs
    assert fsdp.state > 0 == tensor.state and re.search(why, tensor.refused), tensor.refused


def test_a_module_that_looks_at_numbers_is_counted_without_activations():
    models = ("tests.train.torch_models:peeking", "torchvision.models:vit_b_16")
    peeking, vit = (
        counted_here((TrainConfig(model=each, backend="torch", num_workers=2, strategy="torch_ddp"),), SPEC)
        for each in models
    )
    assert peeking[0].state > 0 == peeking[0].image and "RuntimeError" in str(peeking[0].step_problem)
    assert vit[0].image > 0 and not vit[0].step_problem, "attention of a library, without its weights"


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
    assert 0 < bytes_kept <= input_bytes(set_up(config, dataset)) * 9 / 8


BLOCKS = "tests.train.torch_models"
DEEP = {"keras": f"{MODELS}:deep", "torch": f"{BLOCKS}:deep"}
MIB = 2**20


def times_computed(name: str) -> int:
    """So far, by the blocks of `DEEP`."""
    if name == "torch":
        from tests.train.torch_models import Block

        return Block.num_computed
    from tests.train.models_under_test import Counting

    return Counting.num_called


def three_steps(name: str, precision: str, setting: str) -> tuple[list[list[np.ndarray]], int]:
    """Each in two parts -> all of the gradients and the state after each, and outputs; how often blocks computed."""
    batch, memory = batch_of(SHAPE, num_rows=6), {"activation_checkpointing": setting}
    one = learner(name, DEEP[name], memory=memory, mixed_precision=precision, accumulation_steps=2)
    steps, before = [], times_computed(name)
    for _ in range(3):
        addends = one.gradients(batch, 6, 1.0)
        one.apply(addends, 0.1)
        steps.append([*map(np.array, addends), *(array for part in StatePart for array in one.arrays(part))])
    computed = times_computed(name) - before
    # What is evaluated is the model itself.
    return [*steps, [one.outputs(batch.images_NHWC)]], computed


@pytest.fixture
def without(name, precision):
    return three_steps(name, precision, "off")


@pytest.mark.parametrize(
    ("name", "precision"),
    [("keras", "off"), ("torch", "off"), ("torch", "bfloat16"), exhaustive("keras", "bfloat16")],
)
def test_a_step_is_the_same_bits_with_it(name, precision, without):
    """Gradients, moving statistics, dropout's masks, generators."""
    steps, computed = three_steps(name, precision, "on")
    assert computed == 2 * without[1] > 0
    for with_it, without_it in zip(steps, without[0], strict=True):
        assert [array.tobytes() for array in with_it] == [array.tobytes() for array in without_it]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_model_without_parts_is_refused(name):
    with pytest.raises(UsageError, match="linear' has no part that can be recomputed; expected .* in a row|use"):
        learner(name, LINEAR[name], memory={"activation_checkpointing": "on"})


def test_what_would_not_be_the_same_the_second_time_is_refused():
    batch = batch_of(SHAPE, num_rows=6)
    changing = learner("torch", f"{BLOCKS}:ChangesInputs", memory={"activation_checkpointing": "on"})
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        changing.gradients(batch, 6, 1.0)
    drawing = learner("keras", f"{MODELS}:drawing", memory={"activation_checkpointing": "on"})
    with pytest.raises(UsageError, match="is a RandomUniform; expected layers with all state in Keras variables"):
        drawing.gradients(batch, 6, 1.0)


@pytest.mark.drill
def test_it_is_taken_where_nothing_else_fits(tiny_uri, tmp_path, choice_of):
    """Measured by two probes of a real model: an image takes a block's activations in place of all blocks'."""
    sizes = {"backend": "torch", "global_batch_size": 8, "num_streams": 4, "epochs": 1}
    tree = tree_of(tiny_uri, tmp_path, **sizes, model=f"{BLOCKS}:roomy_blocks")
    config, dataset, _, _ = choice_of(tmp_path, tree)
    setup = set_up(config, dataset)
    task = ProbeTask(decided(config, 1, to_bfloat16=False), SPEC, 4, 1, num_steps=2, for_memory=True)
    cost = probe(task)
    measured = probed_record(Limit("a machine", 100 * GIB), cost)
    short = Limit("a machine", measured.fixed_bytes + measured.image_bytes * 9 // 10)
    record = considered(short, task, cost, setup)
    # Each of twelve blocks keeps 24 MiB of an image, and four times that as it computes.
    assert 12 * 24 <= measured.image_bytes // MIB <= 15 * 24
    assert 4 * 24 <= record.recomputed_image_bytes // MIB <= 6 * 24
    found = fit(facts_of(record, setup))
    assert found.choice == "activation_checkpointing" and "a step takes longer, and an image takes" in found.reason
    forbidden = config.model_copy(update={"memory": MemoryConfig(activation_checkpointing="off")})
    assert considered(short, task, cost, set_up(forbidden, dataset)).recomputed_image_bytes == 0

    # As any training goes on with what lies in its folder; of a smaller model, which is quick.
    tree = tree_of(tiny_uri, tmp_path, **sizes, model=DEEP["torch"])
    keep(choice_of(tmp_path, tree)[2], tmp_path, tree, record)
    before, recorder = times_computed("torch"), DriverRecorder()
    train_model(tree, recorder)
    assert recorder.named("memory")[-1]["activation_checkpointing"] == "on"
    parts = recorder.named("memory")[-1]["accumulation_steps"]
    assert times_computed("torch") - before == 2 * 2 * parts * len(recorder.steps) > 0


@pytest.mark.usefixtures("asked_here")
def test_a_model_that_cannot_have_it_says_why_it_does_not_fit(tiny_uri, tmp_path, choice_of):
    tree = tree_of(tiny_uri, tmp_path, model=LINEAR["torch"], backend="torch")
    config, dataset, _, _ = choice_of(tmp_path, tree)
    setup = set_up(config, dataset)
    task = ProbeTask(decided(config, 1, to_bfloat16=False), SPEC, 4, 1, num_steps=2, for_memory=True)
    # As if an image took that much.
    cost = StepCost(1, 4, 4, 16, GIB, step_seconds=0.1, process_bytes=GIB, image_bytes=GIB, base_bytes=0)
    short = Limit("a machine", 2 * GIB)
    record = considered(short, task, cost, setup)
    found = fit(facts_of(record, setup))
    assert found.choice == "too_large"
    assert "are not recomputed: train.memory.activation_checkpointing" in found.reason


@pytest.mark.usefixtures("asked_here")
def test_a_model_that_takes_no_single_image_is_measured():
    config = TrainConfig(model="tests.train.torch_models:normed_vector", backend="torch", accumulation_steps=2)
    cost = probe(ProbeTask(decided(config, 1, to_bfloat16=False), SPEC, 8, 1, num_steps=2, for_memory=True))
    assert cost.step_seconds > 0 and cost.image_bytes > 0


def test_it_makes_no_other_training():
    for setting in ("on", "off", "auto"):
        config = TrainConfig.model_validate({"memory": {"activation_checkpointing": setting}})
        assert settings_that_matter(config) == settings_that_matter(TrainConfig())


def test_blocks_are_computed_again_for_inputs_and_for_weights():
    """A pipeline's zero bubble has the two parts of a backward pass apart: equal bits, dropout by sample included."""
    import torch
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    from train.backends.torch.recompute import Recomputed
    from train.layers.sample_bits import drawing, number_layers
    from train.layers.torch import SampleDropout
    from train.models.vit_torch import vit

    model, keys_N = vit((16, 16, 3), 2, dropout=0.1, width=32, num_blocks=2, num_heads=4), torch.arange(4)
    number_layers(each for each in model.modules() if isinstance(each, SampleDropout))
    weights, tokens_NPE = list(model.blocks.parameters()), torch.randn(4, 64, 32)
    found = []
    for how in ("off", "on"):
        config = TrainConfig(model="vit_tiny", backend="torch", memory={"activation_checkpointing": how})  # pyright: ignore
        recomputed, inputs = Recomputed(config, model, False), tokens_NPE.clone().requires_grad_()
        for weight in weights:
            weight.grad = None
        with drawing(keys_N), recomputed.forward(None, lambda: drawing(keys_N)):
            loss = model.blocks(inputs.view_as(inputs)).square().sum()
        (gradient,), groups = stage_backward_input([loss], None, [inputs], iter(weights))
        stage_backward_weight(iter(weights), groups)
        found.append([gradient, *(weight.grad for weight in weights)])
    assert all(torch.equal(one, again) for one, again in zip(*found, strict=True))
