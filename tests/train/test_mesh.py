"""The axes of a training, and ranks that hold one model together: layouts, plans, awkward modules, refusals."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import copy
import math
import re
from collections import Counter
from itertools import product

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.import_graph import ROOT
from tests.lab.scale import exhaustive, usually
from tests.train.learners import SPEC
from tests.train.ranks import VIT, kill_on_ranks, numbers, train_on_ranks
from tests.train.training import Killed, Recorder, train_here
from train.checkpoints.shards import WEIGHTS_PART, read_index
from train.config import TrainConfig
from train.contracts.mesh import Mesh, MeshShape
from train.models import MODELS
from train.planning.build_model import build
from train.planning.memory_fit import decided
from train.planning.setup import resolve
from train.planning.trial_build import BuildTask
from train.settings import MeshConfig
from train.strategies import STRATEGIES, mesh_of, strategies_that_share

AXES = [axes for axes in product((1, 2, 3), repeat=4) if axes[1] * axes[2] <= 8]


@pytest.mark.parametrize("axes", AXES)
def test_the_streams_are_shared_out_once_and_a_group_reads_the_same(axes: tuple[int, int, int, int]):
    mesh = Mesh(MeshShape(*axes), num_streams=8)
    ranks = [mesh.data_index(rank) for rank in range(mesh.num_ranks)]
    assert mesh.num_ranks == axes[0] * axes[1] * axes[2] * axes[3]
    first = [each for each in ranks if each.is_first]
    assert [each.index for each in first] == list(range(mesh.data_size))
    assert [stream for each in first for stream in each.streams] == list(range(8))
    assert sum(each.fraction for each in first) == pytest.approx(1)
    # As many ranks hold each copy of the model, and read what it reads.
    assert set(Counter(each.index for each in ranks).values()) == {axes[0] * axes[3]}
    assert len({(each.index, each.streams) for each in ranks}) == mesh.data_size
    places = [mesh.shape.place(rank) for rank in range(mesh.num_ranks)]
    assert len({tuple(place.values()) for place in places}) == mesh.num_ranks
    for axis, size in mesh.sizes.items():
        # Neighbours along an axis are so many ranks apart.
        assert all(
            places[rank + mesh.shape.stride(axis)] == {**place, axis: place[axis] + 1}
            for rank, place in enumerate(places)
            if place[axis] + 1 < size
        )
    # Neighbours are of one tensor group.
    assert all(ranks[rank].index == ranks[rank - rank % axes[3]].index for rank in range(mesh.num_ranks))


def test_processes_and_readers_are_two_numbers():
    config = TrainConfig(num_workers=16, num_streams=8)
    mesh = Mesh.of(config, tensor=2)
    assert (mesh.num_ranks, mesh.data_size, mesh.shape.data) == (16, 8, 8)
    assert str(mesh) == "train.num_workers = 16 (tensor 2 x data 8)"
    with pytest.raises(UsageError, match=r"train.num_workers = 16 for train.num_streams = 8; .* 8 or less"):
        Mesh.of(config)
    with pytest.raises(UsageError, match=r"num_workers = 16; expected a multiple of 3, .* set train.num_workers = 18"):
        Mesh.of(config, pipeline=3)
    assert Mesh.one_reader(config).data_index(0).streams == range(8)
    with pytest.raises(UsageError, match="rank 16 of train.num_workers = 16"):
        mesh.data_index(16)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "sizes", "advised"),
    [
        ("torch_ddp", 16, {}, 8),
        ("torch_fsdp", 16, {}, 8),
        ("torch_fsdp", 18, {"fsdp": 3}, 6),
        ("torch_fsdp", 16, {"fsdp": 16}, None),
        ("tensor_parallel", 32, {"tensor": 2}, 16),
        ("pipeline_parallel", 36, {"pipeline": 4}, 32),
        ("hybrid", 32, {}, 16),
    ],
)
def test_the_advised_number_of_ranks_works(strategy: str, num_ranks: int, sizes: dict[str, int], advised: int | None):
    """Eight images are read by at most eight ranks."""
    config = TrainConfig(strategy=strategy, num_workers=num_ranks, mesh=MeshConfig(**sizes), global_batch_size=8)
    fix = f"set train.num_workers = {advised} or less" if advised else "set smaller sizes of train.mesh"
    with pytest.raises(UsageError) as refused:
        mesh_of(config)
    assert refused.value.fix == f"{fix}, or raise train.global_batch_size, which starts a new run"
    if advised:
        assert mesh_of(config.model_copy(update={"num_workers": advised})).num_ranks == advised


def test_sizes_that_ranks_do_not_have_are_refused_with_those_that_they_have():
    config = TrainConfig(strategy="torch_fsdp", num_workers=8, mesh=MeshConfig(data=2, fsdp=2))
    with pytest.raises(UsageError, match=r"mesh.data = 2 .* set train.num_workers = 4, or train.mesh.data = 0 for 4"):
        mesh_of(config)
    for name, strategy in STRATEGIES.installed().items():
        for axis in ("pipeline", "fsdp", "tensor"):
            asked = TrainConfig(strategy=name, num_workers=4, mesh=MeshConfig(**{axis: 2}))
            if axis in strategy.axes:
                assert mesh_of(asked).sizes[axis] == 2
            elif strategy.allows_world_size(4):
                taker = next(other for other, each in STRATEGIES.installed().items() if axis in each.axes)
                with pytest.raises(UsageError, match=rf"mesh.{axis} = 2 .* no such axis; .* '{taker}'"):
                    mesh_of(asked)
    for strategy in ("auto", "pipeline_parallel", "torch_fsdp"):
        both = TrainConfig(strategy=strategy, model="vit", mesh=MeshConfig(pipeline=2, tensor=2))
        wanted = r"^train.mesh.tensor = 2 with train.mesh.pipeline = 2; .* leave train.mesh.tensor or train.mesh.pipel"
        with pytest.raises(UsageError, match=wanted):
            resolve(both, SparkConfig())
    servers = TrainConfig(strategy="parameter_server", num_workers=2, mesh=MeshConfig(data=2))
    with pytest.raises(UsageError, match=r"mesh.data = 2 with .*'parameter_server'.*; leave train.mesh.data at 0"):
        resolve(servers, SparkConfig())


def test_slow_ranks_read_fewer_streams():
    mesh = Mesh.of(TrainConfig(rank_weights=(3, 1), num_streams=8))
    assert [len(each) for each in mesh.streams] == [6, 2] and (mesh.most_streams, mesh.fewest_streams) == (6, 2)


GUIDE = ROOT / "docs" / "training" / "parallelism.md"


@pytest.fixture(scope="module")
def alone(tiny_uri, tmp_path_factory):
    """The losses of one rank."""
    train_here(tiny_uri, tmp_path_factory.mktemp("alone"), recorder := Recorder(), **VIT)
    return numbers(recorder.losses)


@pytest.mark.drill
def test_a_training_goes_on_in_other_layouts(tiny_uri, tmp_path, alone):
    """Sharded over four ranks, then by two with divided layers, by three that shard updates, in a pipeline with two
    stages on each of two ranks, and by one rank alone."""
    losses: dict[tuple[int, int], str] = {}
    layouts = {
        "torch_fsdp": (4, 4, {}), "tensor_parallel": (2, 7, {}), "zero1": (3, 9, {}),
        "pipeline_parallel": (2, 11, {"pipeline_parallel": {"schedule": "interleaved_1f1b"}}),
    }  # fmt: skip
    for strategy, (num_ranks, killed_at, options) in layouts.items():
        config = {**VIT, "strategy": strategy, **options}
        losses |= kill_on_ranks(tiny_uri, tmp_path, num_ranks, config, killed_at).losses
    rest = Recorder()
    result = train_here(tiny_uri, tmp_path, rest, **VIT)
    assert result.resumed_from is not None
    losses |= rest.losses
    assert numbers(losses) == pytest.approx(alone, rel=1e-5)


STAGES = {"pipeline_parallel": {"schedule": "1f1b", "num_microbatches": 6}, "accumulation_steps": 2}


@pytest.mark.drill
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "how", "module"),
    [
        ("tensor_parallel", 2, {}, "divided_network"),
        ("pipeline_parallel", 2, STAGES, "staged_network"),
        exhaustive("hybrid", 4, {}, "divided_network"),
    ],
)
def test_the_documented_modules_divide_themselves(tiny_uri, tmp_path, monkeypatch, strategy, num_ranks, how, module):
    """The programs of the guide on parallelism, in files of the working directory."""
    programs = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    for name, program in zip(("divided_network", "staged_network"), programs, strict=True):
        (tmp_path / f"{name}.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    config, recorder = {**VIT, "model": f"{module}:build", "epochs": 1}, Recorder()
    train_here(tiny_uri, tmp_path / "one", recorder, **config)
    config |= {"strategy": strategy, **how}
    result, watcher = train_on_ranks(tiny_uri, tmp_path / "several", num_ranks, config)
    assert numbers(watcher.losses) == pytest.approx(numbers(recorder.losses), rel=1e-5)
    index = read_index(lambda file: (tmp_path / "several" / result.checkpoint / file).read_bytes())
    held = [{each.name: each for each in index.of_rank(rank, WEIGHTS_PART)} for rank in range(num_ranks)]
    if strategy == "pipeline_parallel":
        assert not held[0].keys() & held[1].keys()
        assert "embedding.1.weight" in held[0] and "head.weight" in held[1]
        return
    assert math.prod(held[1]["wide.weight"].shape) * num_ranks == math.prod(held[1]["wide.weight"].global_shape)
    if strategy == "hybrid":
        return
    with pytest.raises(Exception, match=r"train.freeze holds wide.weight still, .* parallelize\(mesh\) divides it"):
        train_on_ranks(tiny_uri, tmp_path / "frozen", num_ranks, {**config, "freeze": ["wide.*"]})


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    ("strategy", "model"),
    [
        ("torch_fsdp", "Computing"),
        ("zero1", "tied"),
        exhaustive("zero1", "Computing"),
        exhaustive("torch_fsdp", "tied"),
        exhaustive("pipeline_parallel", "computing_chain"),
    ],
)
def test_a_module_that_cannot_be_built_without_numbers_is_built_whole(tiny_uri, tmp_path, model, strategy):
    config, recorder = {**VIT, "model": f"tests.train.sharded_models:{model}", "epochs": 1}, Recorder()
    train_here(tiny_uri, tmp_path / "one", recorder, **config)
    _, watcher = train_on_ranks(tiny_uri, tmp_path / "two", 2, {**config, "strategy": strategy})
    assert numbers(watcher.losses) == pytest.approx(numbers(recorder.losses), rel=1e-5)
    assert ("built_whole" in watcher.names) == (model != "tied")


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_85_million_weights_are_trained_by_every_strategy(tiny_uri, tmp_path):
    config = {**VIT, "model": "tests.train.sharded_models:base_vit", "global_batch_size": 8, "num_streams": 4,
              "checkpoint_every_steps": 0}  # fmt: skip
    recorder = Recorder(killed_at=3)
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "one", recorder, **config)
    assert len(recorder.losses) == 3
    for strategy in usually(["torch_fsdp"], strategies_that_share()):
        several = kill_on_ranks(tiny_uri, tmp_path / strategy, 2, config | {"strategy": strategy}, 3)
        assert numbers(several.losses) == pytest.approx(numbers(recorder.losses), rel=1e-5)


@pytest.mark.starts("ranks")
def test_batch_norms_of_divided_layers_keep_the_statistics_of_one_rank(tiny_uri, tmp_path):
    """All ranks of a group see the same rows, and count once; and draw the same in `nn.Dropout`."""
    config, recorder = {**VIT, "model": "tests.train.torch_models:stateful", "epochs": 2}, Recorder()
    one = train_here(tiny_uri, tmp_path / "one", recorder, **config)
    two, watcher = train_on_ranks(tiny_uri, tmp_path / "two", 2, {**config, "strategy": "tensor_parallel"})
    assert numbers(watcher.losses) == pytest.approx(numbers(recorder.losses), rel=1e-5)
    assert two.evaluation.loss == pytest.approx(one.evaluation.loss, rel=1e-4)


@pytest.mark.exhaustive
def test_ranks_of_one_group_draw_the_same_after_another_layout(tiny_uri, tmp_path):
    """Each rank of FSDP has a generator of its own; the ranks that divide a layer behind `nn.Dropout` need one."""
    config = {**VIT, "model": "tests.train.torch_models:stateful", "export": "last"}
    kill_on_ranks(tiny_uri, tmp_path, 2, {**config, "strategy": "torch_fsdp"}, killed_at=7)
    # It asserts that all ranks have the same losses and end with the same weights.
    result, watcher = train_on_ranks(tiny_uri, tmp_path, 2, {**config, "strategy": "tensor_parallel"})
    assert "resumed" in watcher.names and result.resumed_from is not None


def test_heads_that_do_not_divide_and_axes_that_a_strategy_lacks_are_refused():
    # Before the ETL, in a process that builds the model (test_launching.py).
    config = TrainConfig(model=VIT["model"], strategy="tensor_parallel", num_workers=3, launcher="local")
    config = decided(resolve(config, SparkConfig()).config, 1, to_bfloat16=False)
    with pytest.raises(UsageError, match=r"4 heads.* 3 ranks .*set train.num_workers to a multiple of 2 or 4"):
        build(BuildTask(config, SPEC, ""))
    with pytest.raises(UsageError, match=r"train.mesh.tensor = 2 with train.strategy = 'torch_fsdp'"):
        mesh_of(TrainConfig(num_workers=4, strategy="torch_fsdp", mesh={"tensor": 2}))  # pyright: ignore


OURS = {
    "attention.query": "column", "attention.key": "column", "attention.value": "column", "attention.out": "row",
    "fc1": "column", "fc2": "row",
}  # fmt: skip
OF_TORCHVISION = {
    "self_attention.query": "column", "self_attention.key": "column", "self_attention.value": "column",
    "self_attention.out": "row", "mlp.0": "column", "mlp.3": "row",
}  # fmt: skip


def vit_of_torchvision(shape_HWC=(32, 32, 3)):
    """Narrow and flat; its head, which is zero, made to let something through."""
    import torch
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(shape_HWC[0], 8, 2, 6, 48, 96, num_classes=5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def part_of(layers, plan, rank: int, num_ranks: int):
    """A copy of a module as `rank` holds it; the bias of a row is added once, by rank 0."""
    import torch

    part = copy.deepcopy(layers)
    for name, split in plan.items():
        layer = part.get_submodule(name)
        axis = 1 if split == "row" else 0
        layer.weight = torch.nn.Parameter(layer.weight.chunk(num_ranks, axis)[rank])
        if split != "row":
            layer.bias = torch.nn.Parameter(layer.bias.chunk(num_ranks)[rank])
        elif rank:
            layer.bias = None
    return part


def test_the_plan_of_a_vision_transformer_names_every_linear_layer_of_its_blocks():
    from train.models.tensor_plans import heads_of, split_attention, tensor_plan

    model = MODELS["vit_tiny"]((32, 32, 3), 5)
    assert tensor_plan(model) == {
        f"blocks.{block}.{name}": split for block in range(12) for name, split in OURS.items()
    }
    theirs = tensor_plan(split_attention(vit_of_torchvision()))
    assert theirs == {
        f"encoder.layers.encoder_layer_{block}.{name}": split
        for block in range(2)
        for name, split in OF_TORCHVISION.items()
    }
    assert heads_of(model) == {3} and heads_of(split_attention(vit_of_torchvision())) == {6}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_of_attention_and_mlp_add_up_to_the_whole(num_ranks):
    import torch

    from train.models.tensor_plans import tensor_plan

    torch.manual_seed(0)
    block = MODELS["vit_small"]((32, 32, 3), 5).blocks[0]
    tokens_NPE, plan = torch.randn(2, 9, 384), tensor_plan(block)
    assert plan == OURS
    parts = [part_of(block, plan, rank, num_ranks) for rank in range(num_ranks)]
    for whole, partial in (
        (block.attention(tokens_NPE), [part.attention(tokens_NPE) for part in parts]),
        (
            block.fc2(torch.nn.functional.gelu(block.fc1(tokens_NPE))),
            [part.fc2(torch.nn.functional.gelu(part.fc1(tokens_NPE))) for part in parts],
        ),
    ):
        np.testing.assert_allclose(sum(partial).detach(), whole.detach(), atol=2e-6)


def test_attention_of_torchvision_that_is_taken_apart_computes_the_same():
    import torch

    from train.models.tensor_plans import SplitAttention, split_attention

    whole = vit_of_torchvision()
    drawn_after = torch.get_rng_state()
    split = split_attention(copy.deepcopy(whole))
    assert torch.equal(torch.get_rng_state(), drawn_after)
    assert sum(isinstance(each, SplitAttention) for each in split.modules()) == 2
    assert sum(each.numel() for each in split.parameters()) == sum(each.numel() for each in whole.parameters())
    images_NCHW = torch.randn(3, 3, 32, 32)
    for is_training in (False, True):
        wanted, found = whole.train(is_training)(images_NCHW), split.train(is_training)(images_NCHW)
        np.testing.assert_allclose(found.detach(), wanted.detach(), atol=1e-6, rtol=1e-6)
    wanted.square().sum().backward()
    found.square().sum().backward()
    for one, other in zip(split.encoder.layers, whole.encoder.layers, strict=True):
        joined = torch.cat([getattr(one.self_attention, name).weight.grad for name in ("query", "key", "value")])
        np.testing.assert_allclose(joined, other.self_attention.in_proj_weight.grad, rtol=1e-4, atol=1e-5)


def test_attention_that_drops_weights_out_stays_whole():
    from torchvision.models import VisionTransformer

    from train.models.tensor_plans import heads_of, split_attention, tensor_plan

    model = split_attention(VisionTransformer(32, 8, 1, 2, 16, 32, attention_dropout=0.1))
    plan = tensor_plan(model)
    assert plan == {f"encoder.layers.encoder_layer_0.mlp.{name}": how for name, how in (("0", "column"), ("3", "row"))}
    assert not heads_of(model)


@pytest.mark.parametrize(("name", "layer"), [("resnet18", "fc"), ("mobilenet_v3_small", "classifier.3")])
def test_of_a_convolutional_network_the_classifier_alone_is_divided(name, layer):
    from train.models.tensor_plans import tensor_plan

    model = MODELS[f"torchvision.models:{name}"]((32, 32, 1), 5)
    assert tensor_plan(model) == {f"model.{layer}": "column_gathered"}


def test_a_module_without_a_linear_layer_has_no_plan():
    from torch import nn

    from train.models.tensor_plans import tensor_plan

    with pytest.raises(
        UsageError, match="a Conv2d has no linear layer that ranks could divide; expected a vision tran"
    ):
        tensor_plan(nn.Conv2d(3, 5, 1))


def test_heads_that_ranks_do_not_divide_are_refused_with_the_sizes_that_fit():
    from train.models.tensor_plans import check_heads

    for num_ranks in (1, 2, 3, 4, 6, 12):
        check_heads("vit_base", {12}, num_ranks, 12, is_set=False)
    check_heads("torchvision.models:resnet18", set(), 5, 5, is_set=False)
    wanted = (
        "train.model = 'vit_base' has attention with 12 heads, and 5 ranks divide each layer; "
        "expected a number of ranks that divides 12; set train.num_workers to a multiple of 2 or 3 or 4 or 6 or 12"
    )
    with pytest.raises(UsageError, match=wanted):
        check_heads("vit_base", {12}, 5, 5, is_set=False)
    # With a size that is set, another number of workers alone would only be refused by the mesh.
    wanted = "divides 4; set train.mesh.tensor to 2 or 4, and train.num_workers to a multiple of it"
    with pytest.raises(UsageError, match=wanted):
        check_heads("vit_tiny", {4}, 3, 3, is_set=True)
    with pytest.raises(
        UsageError, match="with 8 and 12 heads, and 8 ranks .* divides 4; set train.mesh.tensor to 2 or 4"
    ):
        check_heads("mine", {12, 8}, 8, 8, is_set=True)
    with pytest.raises(UsageError, match="divides 1; choose another strategy"):
        check_heads("mine", {3, 4}, 2, 2, is_set=False)
