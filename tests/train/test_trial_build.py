"""A model is built in a process of its own before anything costs time: which ones, and by whom.

That it ends a run before its ETL, and is a row of `doctor`, is shown in tests/pipeline.
"""

from __future__ import annotations

import pytest

from shardmill.errors import UsageError
from shardmill.formats.rows import RowSchema
from shardmill.jobs.config import SparkConfig
from tests.train.forked_ranks import launch_forked
from tests.train.ranks import Watcher
from tests.train.test_job import Recorder, tree_of
from tests.train.training import task_of
from train.config import TrainConfig
from train.models import MODELS
from train.planning.auto import resolve
from train.planning.trial_build import may_not_build, try_build
from train.training import train_model


def test_ours_are_tried_where_they_may_not_fit():
    ours = [name for name in MODELS.entries if not may_not_build(TrainConfig(model=name))]
    assert ours == ["small_cnn", "vit", "vit_tiny", "vit_small", "vit_base", "vit_large", "vit_huge"]
    for asked in ({"freeze": ("conv*",)}, {"memory": {"activation_checkpointing": "on"}}, {"sync_batch_norm": True}):
        assert may_not_build(TrainConfig.model_validate(asked))
    recorder, schema = Recorder(), RowSchema("png", (16, 16, 3), ("cat", "dog"))
    assert try_build(resolve(TrainConfig(), SparkConfig()).config, schema, recorder) is None and not recorder.events


@pytest.mark.drill
def test_a_cluster_is_not_asked_for_ranks_of_a_model_that_does_not_build(tiny_uri, tmp_path):
    how = {"strategy": "torch_ddp", "launcher": "spark_barrier", "num_workers": 2}
    tree = tree_of(tiny_uri, tmp_path / "models", model="tests.train.torch_models:one_class_too_many", **how)
    recorder = Recorder()
    with pytest.raises(UsageError, match=r"shape \(2, 4\) for 2 images; expected 3 outputs") as caught:
        train_model(tree.model_copy(update={"spark": SparkConfig(master="local[2]")}), recorder)
    assert "rank" not in str(caught.value) and recorder.events == ["building"]


@pytest.mark.starts("ranks")
def test_ranks_that_shard_a_model_try_it_themselves_and_none_waits_for_the_other(tiny_uri, tmp_path):
    """The others have it without numbers, and cannot call it."""
    model = "tests.train.torch_models:one_class_too_many"
    task = task_of(tiny_uri, tmp_path, model=model, strategy="torch_fsdp", num_workers=2, launcher="local")
    with pytest.raises(UsageError, match=r"shape \(2, 4\) for 2 images \(rank 0, .*; expected 3 outputs"):
        launch_forked(task, Watcher())


@pytest.mark.starts("ranks")
def test_what_divides_itself_wrongly_is_refused_before_the_first_step(tiny_uri, tmp_path):
    """In float32, so that what bfloat16 rounds hides nothing."""
    config = {"model": "tests.train.divided_models:Averaging", "mixed_precision": "bfloat16", "num_workers": 2}
    task = task_of(tiny_uri, tmp_path, strategy="tensor_parallel", launcher="local", **config)
    watcher = Watcher()
    with pytest.raises(UsageError, match=r"2 of 2 ranks compute outputs that differ by up to 0\.\d+ from those of the"):
        launch_forked(task, watcher)
    assert not watcher.losses


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    ("model", "strategy", "what"), [("Drawing", "tensor_parallel", "losses"), ("Unsummed", "hybrid", "gradients")]
)
def test_ranks_that_share_rows_and_compute_something_else_are_refused(tiny_uri, tmp_path, model, strategy, what):
    """Both compute the right outputs in inference."""
    config = {"model": f"tests.train.divided_models:{model}", "num_workers": 2, "mesh": {"tensor": 2}}
    task = task_of(tiny_uri, tmp_path, strategy=strategy, launcher="local", **config)
    wanted = (
        rf"in step 1, ranks that divide its layers and have the same rows have different {what}: rank \d [\d.]+, rank"
    )
    with pytest.raises(UsageError, match=wanted):
        launch_forked(task, Watcher())


@pytest.mark.starts("ranks")
def test_what_does_not_compute_when_divided_starts_no_ranks_also_if_a_new_training_is_asked_for(tiny_uri, tmp_path):
    model = "tests.train.divided_models:Half"
    tree = tree_of(tiny_uri, tmp_path, model=model, strategy="tensor_parallel", num_workers=2, launcher="local")
    recorder = Recorder()
    with pytest.raises(UsageError, match="Half' does not compute with its layers divided: RuntimeError"):
        train_model(tree, recorder, fresh_for="a run")
    assert recorder.events == ["building"]
