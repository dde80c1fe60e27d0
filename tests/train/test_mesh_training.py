"""Trainings whose ranks hold one vision transformer together: the losses of one rank, and the state each one holds.

The starting weights are those of one process, whatever the layout; dropout is drawn by sample.
"""

from __future__ import annotations

import math
import re
from itertools import product
from typing import Any

import pytest

from shardmill.errors import UsageError
from shardmill.formats.rows import RowSchema
from shardmill.jobs.config import SparkConfig
from shardmill.stores import open_store
from tests.import_graph import ROOT
from tests.train.test_multi_rank import assert_weights_close, kill_on_ranks, train_on_ranks
from tests.train.training import Killed, Recorder, task_of, train_here
from train.checkpoints.checkpoint import SavedFiles, complete_checkpoints
from train.checkpoints.shards import OPTIMIZER_PART, WEIGHTS_PART, read_index, read_whole_model
from train.config import TrainConfig
from train.contracts.values import Blocks, TrainResult
from train.planning.auto import resolve
from train.planning.memory import model_size
from train.planning.scaling_run import scaling_of_run
from train.planning.trial_build import try_build
from train.published.export import export_training
from train.reporting.rank_times import RankRow
from train.strategies import mesh_of, strategies_that_share

GUIDE = ROOT / "docs" / "training" / "parallelism.md"
MODEL = "tests.train.torch_models:tiny_vit"
BASE = {"model": MODEL, "num_streams": 12, "global_batch_size": 24, "epochs": 3, "label_smoothing": 0.1,
        "record_samples": True, "checkpoint_every_steps": 3, "gradient_clip_norm": 1.0}  # fmt: skip


def pipeline(schedule: str, num_microbatches: int = 0, **config: Any) -> dict[str, Any]:
    options = {"schedule": schedule, "num_microbatches": num_microbatches}
    return {"strategy": "pipeline_parallel", "num_workers": 2, **config, "pipeline_parallel": options}


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"strategy": "zero1", "num_workers": 3},
    "torch_fsdp": {"strategy": "torch_fsdp", "num_workers": 2},
    "fsdp in two copies": {"strategy": "torch_fsdp", "num_workers": 4, "mesh": {"data": 2}},
    "tensor_parallel": {"strategy": "tensor_parallel", "num_workers": 2},
    "layers divided in two copies": {"strategy": "tensor_parallel", "num_workers": 4, "mesh": {"data": 2}},
    "hybrid": {"strategy": "hybrid", "num_workers": 4},
    "gpipe": pipeline("gpipe"),
    "1f1b": pipeline("1f1b", num_microbatches=6, accumulation_steps=2),
    "interleaved_1f1b": pipeline("interleaved_1f1b"),
    "zero_bubble": pipeline("zero_bubble"),
    "1f1b in two copies": pipeline("1f1b", num_workers=4, mesh={"data": 2}),
    "zero_bubble in two copies": pipeline("zero_bubble", num_workers=4, mesh={"pipeline": 2}),
    "four stages": pipeline("1f1b", num_workers=4),
}
assert {layout["strategy"] for layout in LAYOUTS.values()} == set(strategies_that_share()), "each has a layout"
DRILLS = {"interleaved_1f1b", "zero_bubble", "1f1b in two copies", "zero_bubble in two copies", "four stages"}
# What a rank holds of the weights, at most: norms and position embeddings stay whole without FSDP.
SHARES = {"zero1": 1.0, "torch_fsdp": 0.52, "fsdp in two copies": 0.52, "tensor_parallel": 0.75, "hybrid": 0.4,
          "layers divided in two copies": 0.75, "four stages": 0.45}  # fmt: skip
# Two blocks and their neighbours do not divide evenly.
SHARE_OF_TWO_STAGES = 0.6


@pytest.fixture(scope="module")
def alone(tiny_uri, tmp_path_factory):
    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path_factory.mktemp("alone"), recorder, **BASE)
    return result, {step: float.fromhex(loss) for step, loss in recorder.losses.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.drill) if name in DRILLS else name for name in LAYOUTS]
)
def test_losses_are_those_of_one_rank_and_each_holds_its_share(tiny_uri, tmp_path, alone, name):
    layout = dict(LAYOUTS[name])
    one_result, one = alone
    result, watcher = train_on_ranks(tiny_uri, tmp_path, layout.pop("num_workers"), {**BASE, **layout})
    assert {step: float.fromhex(loss) for step, loss in watcher.losses.items()} == pytest.approx(one, rel=1e-5)
    assert result.evaluation.loss == pytest.approx(one_result.evaluation.loss, rel=1e-3)
    index = read_index(lambda file: (tmp_path / result.checkpoint / file).read_bytes())
    for part in (WEIGHTS_PART, OPTIMIZER_PART):
        whole = sum(math.prod(shard.shape) for shard in index.whole(part))
        for shards in index.of_ranks:
            # Under zero1 a rank updates a third of what it holds; each weight's number of steps is everywhere.
            share = 0.36 if name == "zero1" and part == OPTIMIZER_PART else SHARES.get(name, SHARE_OF_TWO_STAGES)
            assert sum(math.prod(each.shape) for each in shards if each.part == part) <= share * whole
    weights = sum(4 * math.prod(shard.shape) for shard in index.whole(WEIGHTS_PART))
    said = re.match(r"trained weights take ([\d.]+) KiB, ", model_size(open_store(tmp_path), result.checkpoint))
    assert said is not None and 1 < float(said[1]) * 1024 / weights < 1.5
    assert_the_report_has_its_curve(tmp_path, {**BASE, **LAYOUTS[name]}, result)


def assert_the_report_has_its_curve(models, given: dict[str, Any], result: TrainResult) -> None:
    """Its own number of ranks computes as long as it did, and one rank with the whole model as long as all parts."""
    # Each hands on 64 tokens of 32 numbers.
    assert result.blocks == Blocks(2, 64 * 32 * 4, 64 * 32 * 4)
    config = resolve(TrainConfig(**given, launcher="local"), SparkConfig()).config
    mesh = mesh_of(config)
    rows = [RankRow(rank, "", 100, {"compute": 10.0, "allreduce": 2.5}) for rank in range(mesh.num_ranks)]
    document = scaling_of_run(config, rows, open_store(models), result.last_checkpoint, result.blocks)
    assert document is not None and document["this_run"] == {"num_ranks": mesh.num_ranks, "efficiency": 0.8}
    [here] = [step for step in document["steps"] if step["num_ranks"] == mesh.num_ranks]
    assert here["compute_seconds"] == pytest.approx(0.1) and here["global_batch_size"] == 24
    alone = {each["name"]: each["value"] for each in document["inputs"]}["a step of one rank"]
    images = 24 // mesh.data_size
    assert alone == f"{100 * mesh.shape.tensor * mesh.shape.pipeline:.1f} ms of {images} images"
    idle = here["bubble_seconds"] / (here["bubble_seconds"] + here["compute_seconds"])
    assert (idle > 0) == (mesh.shape.pipeline > 1)
    if config.accumulation_steps == 2:
        # Two passes of six microbatches, each of which fills and drains two stages.
        assert idle == pytest.approx(1 / 7)


@pytest.mark.drill
def test_a_training_goes_on_in_other_layouts(tiny_uri, tmp_path, monkeypatch, alone):
    """Sharded over four ranks, then by two with divided layers, by three that shard updates, in a pipeline with two
    stages on each of two ranks, and by one rank alone."""
    _, one = alone
    losses: dict[tuple[int, int], str] = {}
    layouts = {
        "torch_fsdp": (4, 4, {}), "tensor_parallel": (2, 7, {}), "zero1": (3, 9, {}),
        "pipeline_parallel": (2, 11, {"pipeline_parallel": {"schedule": "interleaved_1f1b"}}),
    }  # fmt: skip
    for strategy, (num_ranks, killed_at, options) in layouts.items():
        config = {**BASE, "strategy": strategy, **options}
        losses |= kill_on_ranks(tiny_uri, tmp_path, num_ranks, config, monkeypatch, killed_at).losses
    rest = Recorder()
    result = train_here(tiny_uri, tmp_path, rest, **BASE)
    assert result.resumed_from is not None
    losses |= rest.losses
    assert {step: float.fromhex(loss) for step, loss in losses.items()} == pytest.approx(one, rel=1e-5)


def test_an_export_puts_the_shards_of_ranks_together(tiny_uri, tmp_path):
    """It compares hash and figures with those that the ranks had."""
    config = {**BASE, "strategy": "hybrid", "epochs": 1, "ema_decay": 0.9}
    result, _ = train_on_ranks(tiny_uri, tmp_path, 4, config)
    settings = task_of(tiny_uri, tmp_path, num_workers=4, launcher="local", **config).config
    record = export_training(str(tmp_path), settings, result, "run").export.record
    assert record.weights_sha256 == result.weights_sha256
    assert record.parity_num_images > 0


@pytest.mark.parametrize("strategy", ["torch_fsdp", "tensor_parallel", "zero1"])
def test_any_layout_has_the_weights_of_torchvisions_transformer(tiny_uri, tmp_path, strategy):
    """To divide its attention, ranks take it apart; checkpoints, hashes and exports have it as torchvision has it."""
    config = {**BASE, "model": "tests.train.sharded_models:torchvisions_vit", "optimizer": "sgd", "export": "last"}
    recorder = Recorder()
    train_here(tiny_uri, tmp_path / "one", recorder, **config)
    one = read_whole_model(files_of(tmp_path / "one"))
    sharded = {**config, "strategy": strategy}
    result, watcher = train_on_ranks(tiny_uri, tmp_path / "two", 2, sharded)
    expected = [float.fromhex(loss) for loss in recorder.losses.values()]
    assert [float.fromhex(loss) for loss in watcher.losses.values()] == pytest.approx(expected, rel=1e-5)
    # Weights are sums of gradients.
    assert_weights_close(read_whole_model(files_of(tmp_path / "two")).weights, one.weights)
    settings = task_of(tiny_uri, tmp_path / "two", num_workers=2, launcher="local", **sharded).config
    record = export_training(str(tmp_path / "two"), settings, result, "run").export.record
    assert record.weights_sha256 == result.weights_sha256


@pytest.mark.drill
def test_torchvisions_transformer_goes_on_in_other_layouts(tiny_uri, tmp_path, monkeypatch):
    config = {**BASE, "model": "tests.train.sharded_models:torchvisions_vit"}
    recorder, losses = Recorder(), {}
    train_here(tiny_uri, tmp_path / "one", recorder, **config)
    for strategy, num_ranks, killed_at in (("tensor_parallel", 2, 4), ("torch_fsdp", 3, 7), ("hybrid", 4, 10)):
        how = {**config, "strategy": strategy}
        losses |= kill_on_ranks(tiny_uri, tmp_path / "several", num_ranks, how, monkeypatch, killed_at).losses
    rest = Recorder()
    train_here(tiny_uri, tmp_path / "several", rest, **config)
    losses |= rest.losses
    expected = {step: float.fromhex(loss) for step, loss in recorder.losses.items()}
    assert {step: float.fromhex(loss) for step, loss in losses.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["zero1", "torch_fsdp", "tensor_parallel", "hybrid"])
@pytest.mark.parametrize("unfrozen_at", [0, 1])
def test_what_is_frozen_stays_as_it_was_in_every_layout(tiny_uri, tmp_path, name, unfrozen_at):
    layout = dict(LAYOUTS[name])
    config = {**BASE, "epochs": 2, "freeze": ["blocks.0.*", "embedding.*"], "unfreeze_epoch": unfrozen_at}
    recorder = Recorder()
    train_here(tiny_uri, tmp_path / "one", recorder, **config)
    _, watcher = train_on_ranks(tiny_uri, tmp_path / "several", layout.pop("num_workers"), {**config, **layout})
    expected = {step: float.fromhex(loss) for step, loss in recorder.losses.items()}
    found = {step: float.fromhex(loss) for step, loss in watcher.losses.items()}
    assert found == pytest.approx(expected, rel=1e-5)


DOCUMENTED = {"tensor_parallel": "divided_network", "hybrid": "divided_network", "1f1b": "staged_network"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_documented_modules_divide_themselves(tiny_uri, tmp_path, monkeypatch, name):
    """The programs of the guide on parallelism, in files of the working directory."""
    programs = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    for module, program in zip(("divided_network", "staged_network"), programs, strict=True):
        (tmp_path / f"{module}.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    layout = dict(LAYOUTS[name])
    config, recorder = {**BASE, "model": f"{DOCUMENTED[name]}:build", "epochs": 1}, Recorder()
    num_ranks = layout.pop("num_workers")
    train_here(tiny_uri, tmp_path / "one", recorder, **config)
    result, watcher = train_on_ranks(tiny_uri, tmp_path / "several", num_ranks, {**config, **layout})
    expected = {step: float.fromhex(loss) for step, loss in recorder.losses.items()}
    assert {step: float.fromhex(loss) for step, loss in watcher.losses.items()} == pytest.approx(expected, rel=1e-5)
    index = read_index(lambda file: (tmp_path / "several" / result.checkpoint / file).read_bytes())
    held = [{each.name: each for each in index.of_rank(rank, WEIGHTS_PART)} for rank in range(num_ranks)]
    if name == "1f1b":
        assert not held[0].keys() & held[1].keys()
        assert "embedding.1.weight" in held[0] and "head.weight" in held[1]
        return
    assert math.prod(held[1]["wide.weight"].shape) * num_ranks == math.prod(held[1]["wide.weight"].global_shape)
    if name == "hybrid":
        return
    frozen = {**config, **layout, "freeze": ["wide.*"]}
    with pytest.raises(Exception, match=r"train.freeze holds wide.weight still, .* parallelize\(mesh\) divides it"):
        train_on_ranks(tiny_uri, tmp_path / "frozen", num_ranks, frozen)


@pytest.mark.parametrize(
    ("strategy", "model"),
    [*product(["torch_fsdp", "zero1"], ["computing", "tied"]), ("pipeline_parallel", "computing_chain")],
)
def test_a_module_that_cannot_be_built_without_numbers_is_built_whole(tiny_uri, tmp_path, model, strategy):
    config, recorder = {**BASE, "model": f"tests.train.sharded_models:{model}", "epochs": 1}, Recorder()
    train_here(tiny_uri, tmp_path / "one", recorder, **config)
    _, watcher = train_on_ranks(tiny_uri, tmp_path / "two", 2, {**config, "strategy": strategy})
    expected = [float.fromhex(loss) for loss in recorder.losses.values()]
    assert [float.fromhex(loss) for loss in watcher.losses.values()] == pytest.approx(expected, rel=1e-5)
    assert ("built_whole" in watcher.events) == (model != "tied")


@pytest.mark.drill
def test_a_residual_network_is_sharded_and_resumes_exactly(tiny_uri, tmp_path, monkeypatch):
    """Its batch norms have statistics of each rank's rows."""
    config = {**BASE, "model": "torchvision.models:resnet18", "strategy": "torch_fsdp", "epochs": 2}
    whole_result, whole = train_on_ranks(tiny_uri, tmp_path / "whole", 2, config)
    killed = kill_on_ranks(tiny_uri, tmp_path / "killed", 2, config, monkeypatch, killed_at=5)
    result, rest = train_on_ranks(tiny_uri, tmp_path / "killed", 2, config)
    assert result.resumed_from is not None
    assert killed.losses | rest.losses == whole.losses
    assert result.weights_sha256 == whole_result.weights_sha256


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_85_million_weights_are_trained_by_every_strategy(tiny_uri, tmp_path, monkeypatch):
    config = {**BASE, "model": "tests.train.sharded_models:base_vit", "global_batch_size": 8, "num_streams": 4,
              "checkpoint_every_steps": 0}  # fmt: skip
    recorder = Recorder(killed_at=3)
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "one", recorder, **config)
    expected = [float.fromhex(loss) for loss in recorder.losses.values()]
    assert len(expected) == 3
    for strategy in strategies_that_share():
        several = kill_on_ranks(tiny_uri, tmp_path / strategy, 2, config | {"strategy": strategy}, monkeypatch, 3)
        assert [float.fromhex(loss) for loss in several.losses.values()] == pytest.approx(expected, rel=1e-5)


def files_of(models) -> SavedFiles:
    """Those of the newest checkpoint below `models`."""
    store = open_store(models)
    found = next(complete_checkpoints(store, "t"))
    return found.files(store)


def test_batch_norms_of_divided_layers_keep_the_statistics_of_one_rank(tiny_uri, tmp_path):
    """All ranks of a group see the same rows, and count once; and draw the same in `nn.Dropout`."""
    config, recorder = {**BASE, "model": "tests.train.torch_models:stateful", "epochs": 2}, Recorder()
    one = train_here(tiny_uri, tmp_path / "one", recorder, **config)
    two, watcher = train_on_ranks(tiny_uri, tmp_path / "two", 2, {**config, "strategy": "tensor_parallel"})
    expected = [float.fromhex(loss) for loss in recorder.losses.values()]
    assert [float.fromhex(loss) for loss in watcher.losses.values()] == pytest.approx(expected, rel=1e-5)
    assert two.evaluation.loss == pytest.approx(one.evaluation.loss, rel=1e-4)


@pytest.mark.drill
def test_ranks_of_one_group_draw_the_same_after_another_layout(tiny_uri, tmp_path, monkeypatch):
    """Each rank of FSDP has a generator of its own; the ranks that divide a layer behind `nn.Dropout` need one."""
    config = {**BASE, "model": "tests.train.torch_models:stateful", "export": "last"}
    kill_on_ranks(tiny_uri, tmp_path, 2, {**config, "strategy": "torch_fsdp"}, monkeypatch, killed_at=7)
    # It asserts that all ranks have the same losses and end with the same weights.
    result, watcher = train_on_ranks(tiny_uri, tmp_path, 2, {**config, "strategy": "tensor_parallel"})
    assert "resumed" in watcher.events and result.resumed_from is not None


def test_heads_that_do_not_divide_and_axes_that_a_strategy_lacks_are_refused():
    # Before the ETL, in a process that builds the model.
    config = TrainConfig(model=MODEL, strategy="tensor_parallel", num_workers=3, launcher="local")
    schema = RowSchema("png", (16, 16, 3), ("cat", "dog"))
    with pytest.raises(UsageError, match=r"4 heads.* 3 ranks .*set train.num_workers to a multiple of 2 or 4"):
        try_build(resolve(config, SparkConfig()).config, schema, Recorder())
    with pytest.raises(UsageError, match=r"train.mesh.tensor = 2 with train.strategy = 'torch_fsdp'"):
        mesh_of(TrainConfig(num_workers=4, strategy="torch_fsdp", mesh={"tensor": 2}))  # pyright: ignore
