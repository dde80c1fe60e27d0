"""The output of `shardmill plan`: its arithmetic, and measurements of a real model that are as short as can be."""

from __future__ import annotations

import json

import pytest

from pipeline.commands.plan import parse_bytes
from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.config import DatasetConfig, SparkConfig
from tests.lab.commands import in_process
from train.contracts.mesh_shape import MeshShape
from train.planning.estimate import estimate_training
from train.planning.memory_table import PARTS
from train.planning.pace import Pace, Shares
from train.tree import TrainTree

HERE = pytest.mark.usefixtures("asked_here")


@pytest.mark.parametrize("how", ["here", pytest.param("by processes", marks=pytest.mark.drill)])
def test_a_model_is_measured_and_nothing_is_trained(tiny_uri, tmp_path, how, request):
    if how == "here":
        request.getfixturevalue("asked_here")
    models = {"models": {"uri": str(tmp_path / "models")}}
    tree = TrainTree.model_validate(
        {**models, "dataset": DatasetConfig(uri=tiny_uri), "spark": SparkConfig(), "train": {"global_batch_size": 24,
         "num_streams": 6, "num_workers": 4, "model": "tests.train.torch_models:linear"}}
    )  # fmt: skip
    planned = estimate_training(tree)
    assert (planned.strategy, planned.launcher, planned.backend) == ("torch_ddp", "local", "torch")
    assert (
        planned.cost.num_weights == (16 * 16 * 3 + 1) * 3 and planned.cost.weights_bytes == 4 * planned.cost.num_weights
    )
    # Weights, gradients and Adam's two moments, and a few bytes for the generators and the number of steps.
    assert 4 <= planned.cost.state_bytes / planned.cost.weights_bytes < 6
    rows = dict(planned.rows())
    assert rows["model"] == "2,307 weights, 9.0 KiB; trainable weights 9.0 KiB"
    assert planned.fit is not None and rows["fit"] == planned.fit.reason and "8 images at once" in planned.fit.reason
    assert planned.local_batch_size == 8, "of six streams with four images each, the largest rank has two"
    assert planned.speed.computed_images_per_second == pytest.approx(24 / planned.cost.step_seconds)
    assert "excluding the start of the ranks, their exchanges" in rows["speed"]
    assert not (tmp_path / "models").exists()


@HERE
def test_the_predicted_speed_counts_input_and_validation(tiny_uri, tmp_path):
    train = {"global_batch_size": 24, "num_streams": 6, "epochs": 3, "model": "tests.train.torch_models:linear"}
    tree = {"models": {"uri": str(tmp_path)}, "dataset": DatasetConfig(uri=tiny_uri), "spark": SparkConfig()}
    planned = estimate_training(TrainTree.model_validate({**tree, "train": train}))
    speed = planned.speed
    assert speed.pace is not None and speed.training_seconds is not None
    pace = speed.pace
    assert 0 < pace.input_wait_seconds < pace.step_seconds and pace.validation_seconds > 0
    assert pace.cached_step_seconds > 0 and f"input costs {pace.input_share:.0%}" in dict(planned.rows())["speed"]
    epoch_seconds = planned.steps_per_epoch * pace.step_seconds + pace.validation_seconds
    first_seconds = pace.compile_seconds + pace.first_validation_seconds
    assert speed.training_seconds == pytest.approx(3 * epoch_seconds + first_seconds)
    num_rows = open_dataset(tiny_uri).manifest.splits["train"].num_rows
    assert speed.images_per_second == pytest.approx(3 * num_rows / speed.training_seconds)
    assert "validation; excluding the start of the ranks" in dict(planned.rows())["speed"]
    # Servers have each worker take a batch of its own: as many updates in a fraction of the time.
    assert Pace(5.0, 2.0, 0.0, 2.0, 1.0, 10.0).training_seconds(3, 100 / 4) == 5.0 + 3 * (25 * 2.0 + 10.0) + 1.0
    # Two ranks that compute the model together share the 1.5 seconds of computation, not the 0.5 of reading.
    halved = Shares.of(MeshShape(tensor=2))
    assert Pace(0.0, 2.0, 0.5, 1.5).training_seconds(1, 10, halved) == 10 * (0.5 + 0.75)
    # And the 6 of 10 seconds that validation computes; in a pipeline two halves of each batch pass two stages.
    validated = Pace(0.0, 2.0, 0.5, 1.5, 0.0, 10.0, 6.0)
    assert validated.training_seconds(1, 0, halved) == 4 + 6 / 2
    staged = Shares.of(MeshShape(pipeline=2))
    assert validated.training_seconds(1, 0, staged) == 4 + 6 * 3 / 4


@pytest.mark.parametrize(
    "strategy", ["single", "torch_ddp", pytest.param("torch_fsdp", marks=pytest.mark.starts("ranks"))]
)
def test_a_model_that_is_too_large_to_be_timed_here_is_refused_before_it_is_built(
    tiny_uri, tmp_path, strategy, request
):
    """Counted by another process once."""
    if strategy != "torch_fsdp":
        request.getfixturevalue("asked_here")
    train = {"strategy": strategy, "num_workers": 1 + (strategy != "single"), "model": "tests.train.torch_models:huge"}
    tree = {"models": {"uri": str(tmp_path)}, "dataset": DatasetConfig(uri=tiny_uri), "spark": SparkConfig()}
    with pytest.raises(
        UsageError,
        match=r"takes 18,\d{3}\.\d GiB, and this host has .* free; .* with --memory SIZE, .* nothing; or plan on",
    ):
        estimate_training(TrainTree.model_validate({**tree, "train": {"global_batch_size": 24, **train}}))


@HERE
def test_a_step_of_ranks_that_share_layers_is_theirs(tiny_uri, tmp_path):
    train = {"global_batch_size": 24, "num_workers": 2, "model": "tests.train.torch_models:tiny_vit"}
    tree = {"models": {"uri": str(tmp_path)}, "dataset": DatasetConfig(uri=tiny_uri), "spark": SparkConfig()}
    train |= {"strategy": "pipeline_parallel", "pipeline_parallel": {"num_microbatches": 6}}
    planned = estimate_training(TrainTree.model_validate({**tree, "train": train}))
    assert planned.speed.computed_images_per_second == pytest.approx(2 * 24 / planned.cost.step_seconds)
    step = dict(planned.rows())["step"]
    assert f"a part of 2 of the {1000 * planned.cost.step_seconds:.1f} ms of one rank (measured on" in step


@HERE
def test_the_command_prints_json_and_one_line_for_what_cannot_run(tiny_uri, tmp_path):
    wrong = in_process("plan", tiny_uri, "--set", "train.model=tests.train.torch_models:no_model", cwd=tmp_path)
    begun, error = wrong.stderr.splitlines()
    assert wrong.returncode == 2 and begun.startswith("plan: ") and "no_model" in error
    model = ("--set", "train.model=tests.train.torch_models:stateful")
    config = tmp_path / "flowers.toml"
    config.write_text(
        f'[dataset]\nuri = "{tiny_uri}"\n[models]\nuri = "{tmp_path}/models"\n'
        '[train]\nmodel = "tests.train.torch_models:linear"\nnum_streams = 8\n'
    )
    table = in_process("plan", str(config), "--world-size", "8", cwd=tmp_path)
    assert table.returncode == 0, table.stderr
    assert all(each in table.stdout for each in ("torch_ddp", "8 workers", "2,307 weights")), table.stdout
    done = in_process("plan", tiny_uri, "--json", "--world-size", "2", *model, cwd=tmp_path)
    document = json.loads(done.stdout)
    assert "local: in processes on one machine (" in document["reason"] and "spark.master" in document["reason"]
    # A batch norm's moving statistics, of which no gradient exists.
    assert document["cost"]["model_bytes"] > document["cost"]["weights_bytes"] > 0
    assert document["fit"]["choice"] == "at_once" and document["images_per_second"] > 0
    assert document["mesh"]["data"] == 2


@pytest.mark.exhaustive
def test_strategies_are_compared_by_the_memory_of_ranks_that_do_not_exist(tiny_uri, tmp_path):
    """ViT-Base on four devices."""
    config = tmp_path / "flowers.toml"
    config.write_text(f'[dataset]\nuri = "{tiny_uri}"\n[train]\nmodel = "vit_base"\n')
    four = ("plan", str(config), "--world-size", "4")
    done = in_process(*four, "--memory", "80GB", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = {row["strategy"]: row for row in document["strategies"]}
    assert {"torch_ddp", "zero1", "torch_fsdp", "tensor_parallel", "hybrid"} <= set(rows)
    assert not {"single", "horovod", "mirrored"} & set(rows), "those cannot train it on 4 ranks"
    assert document["memory_bytes"] == 80 * 10**9 and document["choice"] == "torch_ddp"
    assert "4 PyTorch workers, each with the whole model: parameters 324.7 MiB + " in document["reason"]
    assert {name: rows[name]["mesh"] for name in ("torch_ddp", "torch_fsdp", "tensor_parallel", "hybrid")} == {
        "torch_ddp": "data 4", "torch_fsdp": "fsdp 4", "tensor_parallel": "tensor 4", "hybrid": "fsdp 2 x tensor 2"
    }  # fmt: skip
    assert rows["torch_ddp"]["parameters"] == pytest.approx(4 * 85.1e6, rel=0.01)
    assert rows["torch_fsdp"]["optimizer"] == pytest.approx(2 * 4 * 85.1e6 / 4, rel=0.01)
    for row in rows.values():
        assert row["fits"] and row["activations"] > 0 and row["input"] > 0
        assert row["total"] == sum(row[part] for part in PARTS)

    eight = ("plan", str(config), "--world-size", "8")
    short = in_process(*eight, "--memory", "2 GB", cwd=tmp_path)
    assert short.returncode == 0, short.stderr
    title, header, *lines = short.stdout.splitlines()
    assert "vit_base, 8 ranks, 64 images of 16 x 16 x 3 a step" in title
    assert header.split("\t")[:3] == ["strategy", "mesh", "parameters"]
    assert header.endswith("fits in 2 GB (1.9 GiB)")
    verdicts = {line.split("\t")[0]: line.rpartition("\t")[2] for line in lines[:-1]}
    assert verdicts["torch_ddp"] == verdicts["zero1"] == "no" and verdicts["torch_fsdp"].startswith("yes")
    assert lines[-1].startswith("torch_fsdp: one device does not hold the model: parameters 324.7 MiB + ")
    assert "12 heads, and 8 ranks divide each layer" in short.stdout

    refused = in_process(*four, "--memory", "80 giga", cwd=tmp_path)
    assert refused.returncode == 2 and "expected a size in B, KB" in refused.stderr.splitlines()[-1]


def test_a_size_has_a_unit():
    for text, num_bytes in {"80GB": 80 * 10**9, "1.5 gib": 3 * 2**29, "1000 B": 1000, " 2kb ": 2000}.items():
        assert parse_bytes(text) == num_bytes
    for wrong in ("80", "0 GB", "80 giga", "GB", ""):
        with pytest.raises(UsageError, match=f"--memory {wrong}; expected a size in B, KB.* give for example 80GB"):
            parse_bytes(wrong)


@pytest.mark.starts("ranks")
def test_a_keras_model_is_measured_for_the_comparison(tiny_uri, tmp_path):
    done = in_process("plan", tiny_uri, "--world-size", "2", "--memory", "1GiB", "--json", cwd=tmp_path)
    rows = {row["strategy"]: row for row in json.loads(done.stdout)["strategies"]}
    assert {"horovod", "multi_worker_mirrored", "torch_ddp"} <= set(rows) and "torch_fsdp" not in rows
    horovod = rows["horovod"]
    assert horovod["parameters"] == horovod["gradients"] > 0 and horovod["activations"] > 0
    assert horovod["optimizer"] == pytest.approx(2 * horovod["parameters"], rel=0.1)
