"""Ranks that hold one vision transformer together: other layouts in a row, awkward modules, batch norms, refusals.

The starting weights are those of one process, whatever the layout; dropout is drawn by sample. That each layout trains
as one rank does is the subject of test_array.py.
"""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import math
import re

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
from train.planning.auto import resolve
from train.planning.build_model import build
from train.planning.memory_fit import decided
from train.planning.trial_build import BuildTask
from train.strategies import mesh_of, strategies_that_share

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


@pytest.mark.exhaustive
def test_torchvisions_transformer_goes_on_in_other_layouts(tiny_uri, tmp_path):
    config = {**VIT, "model": "tests.train.sharded_models:torchvisions_vit"}
    recorder, losses = Recorder(), {}
    train_here(tiny_uri, tmp_path / "one", recorder, **config)
    for strategy, num_ranks, killed_at in (("tensor_parallel", 2, 4), ("torch_fsdp", 3, 7), ("hybrid", 4, 10)):
        how = {**config, "strategy": strategy}
        losses |= kill_on_ranks(tiny_uri, tmp_path / "several", num_ranks, how, killed_at).losses
    rest = Recorder()
    train_here(tiny_uri, tmp_path / "several", rest, **config)
    losses |= rest.losses
    assert numbers(losses) == pytest.approx(numbers(recorder.losses), rel=1e-5)


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
        ("torch_fsdp", "computing"),
        ("zero1", "tied"),
        exhaustive("zero1", "computing"),
        exhaustive("torch_fsdp", "tied"),
        exhaustive("pipeline_parallel", "computing_chain"),
    ],
)
def test_a_module_that_cannot_be_built_without_numbers_is_built_whole(tiny_uri, tmp_path, model, strategy):
    config, recorder = {**VIT, "model": f"tests.train.sharded_models:{model}", "epochs": 1}, Recorder()
    train_here(tiny_uri, tmp_path / "one", recorder, **config)
    _, watcher = train_on_ranks(tiny_uri, tmp_path / "two", 2, {**config, "strategy": strategy})
    assert numbers(watcher.losses) == pytest.approx(numbers(recorder.losses), rel=1e-5)
    assert ("built_whole" in watcher.events) == (model != "tied")


@pytest.mark.exhaustive
def test_a_residual_network_is_sharded_and_resumes_exactly(tiny_uri, tmp_path):
    """Its batch norms have statistics of each rank's rows."""
    config = {**VIT, "model": "torchvision.models:resnet18", "strategy": "torch_fsdp", "epochs": 2}
    whole_result, whole = train_on_ranks(tiny_uri, tmp_path / "whole", 2, config)
    killed = kill_on_ranks(tiny_uri, tmp_path / "killed", 2, config, killed_at=5)
    result, rest = train_on_ranks(tiny_uri, tmp_path / "killed", 2, config)
    assert result.resumed_from is not None
    assert killed.losses | rest.losses == whole.losses
    assert result.weights_sha256 == whole_result.weights_sha256


@pytest.mark.drill
@pytest.mark.timeout(300)
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
    assert "resumed" in watcher.events and result.resumed_from is not None


def test_heads_that_do_not_divide_and_axes_that_a_strategy_lacks_are_refused():
    # Before the ETL, in a process that builds the model (test_trial_build.py).
    config = TrainConfig(model=VIT["model"], strategy="tensor_parallel", num_workers=3, launcher="local")
    config = decided(resolve(config, SparkConfig()).config, 1, to_bfloat16=False)
    with pytest.raises(UsageError, match=r"4 heads.* 3 ranks .*set train.num_workers to a multiple of 2 or 4"):
        build(BuildTask(config, SPEC, ""))
    with pytest.raises(UsageError, match=r"train.mesh.tensor = 2 with train.strategy = 'torch_fsdp'"):
        mesh_of(TrainConfig(num_workers=4, strategy="torch_fsdp", mesh={"tensor": 2}))  # pyright: ignore
