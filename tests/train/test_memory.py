"""A training that looks at its memory before its first step, acts on what it finds, and keeps to it."""

# pyright: reportArgumentType=false
from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.open import open_dataset
from shardmill.errors import TrainingError
from shardmill.free_memory import free_bytes
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import WARNING
from shardmill.stores import open_store
from tests.processes import in_own_process
from tests.train.test_job import Recorder, tree_of
from train.backends.backend import model_spec
from train.config import TrainConfig
from train.planning.auto import resolve
from train.planning.images_at_once import images_at_once, most_microbatches
from train.planning.memory import Memory, look_at_memory
from train.planning.memory_fit import decided
from train.planning.memory_record import MemoryRecord
from train.planning.probe import ProbeTask, probe
from train.planning.record import keep_plan
from train.planning.trainings import TrainingChoice
from train.settings.memory import MemoryConfig
from train.stage_record import train_record
from train.strategies.options import LocalSgdOptions, MirroredOptions
from train.training import train_model
from train.tree import TrainTree

ROOMY = {"model": "tests.train.torch_models:roomy", "global_batch_size": 96, "num_streams": 8, "epochs": 1}
LINEAR = "tests.train.torch_models:linear"
GIB = 2**30


def no_input(config: TrainConfig) -> int:
    return 0


def keep(choice: TrainingChoice, models: Path, tree: TrainTree, record: MemoryRecord) -> None:
    plan = resolve(tree.train, tree.spark).with_memory(Memory(record, tree.spark, no_input))
    keep_plan(open_store(str(models)), choice.training_dir, plan, tree.spark)


def look_at(config: TrainConfig, dataset: Dataset, begun: MemoryRecord | None = None) -> Memory:
    return look_at_memory(config, dataset, SparkConfig(), no_input, begun=begun, has_begun=False)


@pytest.mark.drill
def test_a_training_short_of_memory_takes_parts_and_continues_with_them(tiny_uri, tmp_path, monkeypatch):
    from tests.train.torch_models import Roomy

    monkeypatch.setattr(Roomy, "most_images", 0)
    first = Recorder(fail_after_steps=1)
    with pytest.raises(TrainingError, match="stopped here"):
        train_model(tree_of(tiny_uri, tmp_path, **ROOMY, memory={"budget_bytes": 3 * GIB // 2}), first)
    found = first.fields["memory"]
    parts = found["accumulation_steps"]
    assert (found["choice"], found["mixed_precision"]) == ("microbatches", "off") and parts > 1 and 96 % parts == 0
    assert Roomy.most_images == 96 // parts
    assert "train.memory.budget_bytes has 1.5 GiB" in found["reason"]

    # Now memory is ample, and the training stays what it is.
    second = Recorder()
    outcome = train_model(tree_of(tiny_uri, tmp_path, **ROOMY, memory={"budget_bytes": 900 * GIB}), second)
    assert second.fields["memory"] == found and Roomy.most_images == 96 // parts
    assert train_record(outcome).sections["train"]["memory"] == found["reason"]


@pytest.mark.starts("ranks")
def test_a_precision_is_chosen_once_and_only_if_that_is_allowed(tiny_uri, tmp_path, choice_of):
    # All that is left to choose is the precision: 96 images at once, or in half of the memory.
    short = {**ROOMY, "memory": {"budget_bytes": 9 * GIB // 2}, "accumulation_steps": 1, "mixed_precision": "auto"}
    config, dataset, _, _ = choice_of(tmp_path, tree_of(tiny_uri, tmp_path, **short))
    memory = look_at(config, dataset)
    fitted = memory.fitted(config)
    assert (fitted.config.mixed_precision, fitted.config.accumulation_steps) == ("bfloat16", 1), fitted.reason
    assert memory.record is not None and "'bfloat16', as chosen before the first step, need" in fitted.reason
    assert fitted.fit is not None and fitted.fit.choice == "bfloat16"
    ample = config.model_copy(update={"memory": MemoryConfig(budget_bytes=900 * GIB)})
    assert look_at(ample, dataset, memory.record) == memory

    # With other parts left to choose, and another number of ranks, from the same measurement.
    free = config.model_copy(update={"accumulation_steps": 0, "num_workers": 2, "strategy": "torch_ddp"})
    assert memory.fitted(free).config.accumulation_steps == 1
    # Of 48 images on a rank 24 fit, which need as much as 12 in float32.
    record = memory.record
    shorter_bytes = record.fixed_bytes + 14 * record.image_bytes
    shorter = replace(memory, record=record.model_copy(update={"rank_bytes": shorter_bytes}))
    assert shorter.fitted(free).config.accumulation_steps == 2

    # Where nothing fits any more, it is told what was not tried, unless that is set or cannot be.
    shortest_bytes = record.fixed_bytes + 1
    shortest = replace(memory, record=record.model_copy(update={"rank_bytes": shortest_bytes}))
    for more, is_told in [
        ({}, True),
        ({"memory": MemoryConfig(activation_checkpointing="off")}, True),
        ({"memory": MemoryConfig(activation_checkpointing="on")}, False),
        ({"strategy": "parameter_server"}, False),
    ]:
        reason = shortest.fitted(config.model_copy(update=more)).reason
        assert ("set train.memory.activation_checkpointing = 'on'" in reason) == is_told, (more, reason)

    # As any training goes on with what lies in its folder; of a smaller model, which is quick.
    tree = tree_of(tiny_uri, tmp_path, model=LINEAR, mixed_precision="auto")
    keep(choice_of(tmp_path, tree)[2], tmp_path, tree, record)
    recorder = Recorder()
    outcome = train_model(tree, recorder)
    assert [recorder.fields["memory"][name] for name in ("choice", "mixed_precision")] == ["bfloat16"] * 2
    marker = json.loads((tmp_path / outcome.result.last_checkpoint / "MARKER.json").read_text())["body"]
    assert marker["identity"]["settings"]["mixed_precision"] == '"bfloat16"'
    assert train_model(tree, Recorder()).skipped

    # What fits nowhere is tried all the same.
    tree = tree_of(tiny_uri, tmp_path, model=LINEAR, epochs=1)
    keep(choice_of(tmp_path, tree)[2], tmp_path, tree, record.model_copy(update={"rank_bytes": 1}))
    recorder = Recorder()
    train_model(tree, recorder)
    assert recorder.fields["memory"]["accumulation_steps"] == 1
    assert "24 images at a time still need" in recorder.fields["memory"][WARNING]


def test_ample_memory_is_not_measured(tiny_uri, tmp_path, choice_of):
    config, dataset, _, _ = choice_of(tmp_path, tree_of(tiny_uri, tmp_path, model=LINEAR))
    memory = look_at(config, dataset)
    fitted = memory.fitted(config)
    assert (memory.record, fitted.fit, fitted.config.accumulation_steps) == (None, None, 1)
    assert "images of a step take" in fitted.reason and fitted.reason.endswith(f"fits into {fitted.available}")


def planned_in_little_memory(uri: str) -> tuple[MemoryRecord, str, int]:
    """In a process of its own -> the record, the reason for the choice, and the most memory of what it has started."""
    strategy = {"strategy": "torch_fsdp", "num_workers": 2, "launcher": "local"}
    asked = TrainConfig(model="vit_huge", memory=MemoryConfig(budget_bytes=12 * GIB), **strategy)
    config = resolve(asked, SparkConfig()).config
    memory = look_at(config, open_dataset(uri))
    assert memory.record is not None
    return memory.record, memory.fitted(config).reason, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


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
    for model in ("vit_tiny", "tests.train.peeking_model:peeking"):
        config = resolve(TrainConfig(model=model, memory=memory, **shared), SparkConfig()).config
        records[model] = look_at(config, dataset).record
    counted, measured = records.values()
    spec = model_spec(dataset.manifest, config)
    task = ProbeTask(
        decided(config.model_copy(update={"model": "vit_tiny"}), 1, to_bfloat16=False), spec, 8, 2, 2, True
    )
    cost = probe(task)
    # But for the states of generators.
    assert cost.state_bytes - 8192 < counted.state_bytes <= cost.state_bytes and not counted.note
    assert "measured with the whole model in one process of this host: RuntimeError" in measured.note


def test_images_and_parts_follow_from_the_config():
    three = TrainConfig(global_batch_size=64, num_streams=8, num_workers=3, strategy="torch_ddp")
    # Streams are shared 3, 3, 2, each with 8 images.
    assert (images_at_once(three), most_microbatches(three)) == (24, 16)
    local = three.model_copy(update={"strategy": "local_sgd"}).with_options(LocalSgdOptions(local_steps=4))
    assert (images_at_once(local), most_microbatches(local)) == (6, 4)
    mirrored = TrainConfig(num_workers=1, num_streams=8, global_batch_size=64, strategy="mirrored")
    mirrored = mirrored.with_options(MirroredOptions(num_devices=4))
    assert (images_at_once(mirrored), most_microbatches(mirrored)) == (64, 16)
    assert (images_at_once(mirrored, 4), most_microbatches(mirrored, 4)) == (16, 16)
    assert most_microbatches(three.model_copy(update={"sync_batch_norm": True})) == 1
    served = TrainConfig(global_batch_size=64, num_streams=8, strategy="parameter_server", num_workers=2)
    assert (images_at_once(served), most_microbatches(served)) == (64, 1)


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
