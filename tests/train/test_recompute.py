"""`train.memory.activation_checkpointing`: blocks compute twice, and nothing else is other than without it."""

# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.lab.scale import exhaustive
from tests.train.learners import LINEAR, SHAPE, SPEC, batch_of, learner
from tests.train.test_job import Recorder, tree_of
from tests.train.test_memory import keep
from tests.train.training import MODELS, check_terms
from train.backends import BACKENDS
from train.backends.backend import StatePart
from train.config import TrainConfig
from train.identity import settings_that_matter
from train.planning.host_memory import Limit
from train.planning.memory import considered, facts_of, record_of
from train.planning.memory_fit import MemoryFacts, decided, fit
from train.planning.memory_record import MemoryRecord
from train.planning.probe import ProbeTask, StepCost, probe
from train.settings.memory import MemoryConfig
from train.training import train_model

BLOCKS = "tests.train.torch_recompute_models"
DEEP = {"keras": f"{MODELS}:deep", "torch": f"{BLOCKS}:deep"}
MIB, GIB = 2**20, 2**30


def times_computed(name: str) -> int:
    """So far, by the blocks of `DEEP`."""
    if name == "torch":
        from tests.train.torch_recompute_models import Block

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
    changing = learner("torch", f"{BLOCKS}:changes_inputs", memory={"activation_checkpointing": "on"})
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        changing.gradients(batch, 6, 1.0)
    drawing = learner("keras", f"{MODELS}:drawing", memory={"activation_checkpointing": "on"})
    with pytest.raises(UsageError, match="is a RandomUniform; expected layers with all state in Keras variables"):
        drawing.gradients(batch, 6, 1.0)


@pytest.mark.parametrize(
    "how",
    [
        {"strategy": "parameter_server", "launcher": "local"},
        {"strategy": "horovod", "sync_batch_norm": True, "num_workers": 2},
    ],
)
def test_unsupported_settings_are_refused_before_anything_starts(how):
    said = r"train.memory.activation_checkpointing = 'on' with train\..*; use only one of the two"
    with pytest.raises(UsageError, match=said):
        check_terms(TrainConfig(**how, memory=MemoryConfig(activation_checkpointing="on")), SparkConfig())
    check_terms(TrainConfig(**how), SparkConfig())


def facts_for(config: TrainConfig) -> Callable[[MemoryRecord], MemoryFacts]:
    return lambda record: facts_of(record, config, 0, SparkConfig())


@pytest.mark.drill
def test_it_is_taken_where_nothing_else_fits(tiny_uri, tmp_path, choice_of):
    """Measured by two probes of a real model: an image takes a block's activations in place of all blocks'."""
    sizes = {"backend": "torch", "global_batch_size": 8, "num_streams": 4, "epochs": 1}
    tree = tree_of(tiny_uri, tmp_path, **sizes, model=f"{BLOCKS}:roomy_blocks")
    config, _, _, _ = choice_of(tmp_path, tree)
    task = ProbeTask(decided(config, 1, to_bfloat16=False), SPEC, 4, 1, num_steps=2, for_memory=True)
    cost = probe(task)
    measured = record_of(Limit("a machine", 100 * GIB), cost)
    short = Limit("a machine", measured.fixed_bytes + measured.image_bytes * 9 // 10)
    record = considered(short, task, cost, config, facts_for(config))
    # Each of twelve blocks keeps 24 MiB of an image, and four times that as it computes.
    assert 12 * 24 <= measured.image_bytes // MIB <= 15 * 24
    assert 4 * 24 <= record.recomputed_image_bytes // MIB <= 6 * 24
    found = fit(facts_of(record, config, 0, SparkConfig()))
    assert found.choice == "activation_checkpointing" and "a step takes longer, and an image takes" in found.reason
    forbidden = config.model_copy(update={"memory": MemoryConfig(activation_checkpointing="off")})
    assert considered(short, task, cost, forbidden, facts_for(forbidden)).recomputed_image_bytes == 0

    # As any training goes on with what lies in its folder; of a smaller model, which is quick.
    tree = tree_of(tiny_uri, tmp_path, **sizes, model=DEEP["torch"])
    keep(choice_of(tmp_path, tree)[2], tmp_path, tree, record)
    before, recorder = times_computed("torch"), Recorder()
    train_model(tree, recorder)
    assert recorder.fields["memory"]["activation_checkpointing"] == "on"
    parts = recorder.fields["memory"]["accumulation_steps"]
    assert times_computed("torch") - before == 2 * 2 * parts * len(recorder.steps) > 0


@pytest.mark.usefixtures("asked_here")
def test_a_model_that_cannot_have_it_says_why_it_does_not_fit(tiny_uri, tmp_path, choice_of):
    tree = tree_of(tiny_uri, tmp_path, model=LINEAR["torch"], backend="torch")
    config, _, _, _ = choice_of(tmp_path, tree)
    task = ProbeTask(decided(config, 1, to_bfloat16=False), SPEC, 4, 1, num_steps=2, for_memory=True)
    # As if an image took that much.
    cost = StepCost(1, 4, 4, 16, GIB, step_seconds=0.1, process_bytes=GIB, image_bytes=GIB, base_bytes=0)
    short = Limit("a machine", 2 * GIB)
    record = considered(short, task, cost, config, facts_for(config))
    found = fit(facts_of(record, config, 0, SparkConfig()))
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
