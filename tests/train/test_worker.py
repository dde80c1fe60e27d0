"""The training loop at one rank: the same bits again and again, whatever stops it on the way."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.errors import IntegrityError, TrainingError, UsageError
from shardmill.ids import format_sample_id
from shardmill.loader.reader import read_batches
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from tests.lab.datasets import build_here, make_dataset, write_images
from tests.lab.scale import exhaustive
from tests.processes import in_own_process
from tests.train.training import MODELS, Killed, Recorder, check_trainable, task_of, train_here
from train.checkpoints.checkpoint import (
    complete_checkpoints,
    open_checkpoint,
)
from train.config import TrainConfig
from train.contracts.values import RESULT
from train.results import read_result

STATEFUL = f"{MODELS}:stateful"


@pytest.fixture(scope="module")
def never_killed(tiny_uri, tmp_path_factory):
    """A stateful model, trained without any disturbance: (result, recorder)."""
    recorder = Recorder()
    models = tmp_path_factory.mktemp("never_killed")
    result = train_here(tiny_uri, models, recorder, model=STATEFUL, record_samples=True, checkpoint_every_steps=2)
    return result, recorder


def test_two_fresh_runs_agree_bit_for_bit(tiny_uri, tmp_path, never_killed):
    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path, recorder, model=STATEFUL)
    assert result.weights_sha256 == never_killed[0].weights_sha256
    assert result.evaluation == never_killed[0].evaluation
    assert recorder.losses == never_killed[1].losses


def test_another_seed_gives_other_weights(tiny_uri, tmp_path, never_killed):
    assert train_here(tiny_uri, tmp_path, model=STATEFUL, seed=1).weights_sha256 != never_killed[0].weights_sha256


@pytest.mark.parametrize("killed_at", [0, 2, 3, exhaustive(1), exhaustive(5)])
def test_killed_and_resumed_equals_never_killed(tiny_uri, tmp_path, never_killed, killed_at):
    first, second = Recorder(killed_at), Recorder()
    config = {"model": STATEFUL, "record_samples": True, "checkpoint_every_steps": 1}
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path, first, **config)
    result = train_here(tiny_uri, tmp_path, second, **config)

    undisturbed, undisturbed_recorder = never_killed
    # The killed step was not on record, and a checkpoint is written after each one that was.
    assert len(second.steps) == len(undisturbed_recorder.steps) - killed_at
    assert first.losses | second.losses == undisturbed_recorder.losses
    assert [report.sample_ids for report in first.steps + second.steps] == [
        report.sample_ids for report in undisturbed_recorder.steps
    ]
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert result.final_loss_hex == undisturbed.final_loss_hex
    assert result.evaluation == undisturbed.evaluation
    without_seconds = [
        [dataclasses.replace(record, seconds=0.0) for record in history.history] for history in (result, undisturbed)
    ]
    assert without_seconds[0] == without_seconds[1]
    if killed_at:
        [resumed] = second.named("resumed")
        assert resumed["global_step"] == killed_at
        assert result.resumed_from is not None
    else:
        assert result.resumed_from is None


def test_every_sample_counts_once_in_each_epoch(tiny_uri, never_killed):
    result, recorder = never_killed
    dataset = open_dataset(tiny_uri)
    expected = sorted(format_sample_id(sample.sample_id) for sample in read_samples(dataset, "train", 1000))
    for epoch in range(result.num_epochs):
        ids = [sample_id for report in recorder.steps if report.epoch == epoch for sample_id in report.sample_ids]
        assert sorted(ids) == expected
    assert len(expected) == dataset.manifest.splits["train"].num_rows


def test_both_formats_give_the_same_losses(tiny_uri, tmp_path):
    losses = []
    for format_name in ("parquet", "tfrecord"):
        recorder = Recorder()
        result = train_here(tiny_uri, tmp_path / format_name, recorder, format=format_name)
        losses.append((recorder.losses, result.weights_sha256, result.evaluation))
    assert losses[0] == losses[1]


@pytest.mark.starts("program")
def test_horovod_of_one_rank_is_the_single_strategy(tiny_uri, tmp_path):
    single = train_here(tiny_uri, tmp_path / "single")
    horovod = in_own_process("keras", train_here, tiny_uri, tmp_path / "horovod", strategy="horovod")
    assert horovod.weights_sha256 == single.weights_sha256
    assert horovod.strategy == "horovod"


def test_the_result_reports_what_happened(tiny_uri, tmp_path):
    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path, recorder, epochs=8, learning_rate=0.01)
    manifest = open_dataset(tiny_uri).manifest
    assert read_result(open_store(tmp_path), "t") == result
    assert result.num_steps == len(recorder.steps) == 8 * recorder.steps[0].num_steps
    assert result.final_loss_hex == recorder.steps[-1].loss_hex
    assert result.evaluation is not None and result.evaluation.split == "test"
    assert result.evaluation.num_samples == manifest.splits["test"].num_rows
    assert result.evaluation.accuracy == 1.0, "the classes are bars at different places"
    assert [record.epoch for record in result.history] == list(range(8))
    assert all(record.validation.num_samples == manifest.splits["validation"].num_rows for record in result.history)
    assert all(record.validation.confused is None for record in result.history), "a history must not grow with classes"
    # What is exported are the weights of the epoch with the lowest validation loss, and the metrics are theirs.
    losses = [record.validation.loss for record in result.history]
    assert (result.exported, result.weights_epoch) == ("best", losses.index(min(losses)))
    best = open_checkpoint(open_store(tmp_path), result.checkpoint)
    assert best.marker.global_step == (result.weights_epoch + 1) * recorder.steps[0].num_steps
    shares = result.time_shares
    total = shares.input_wait + shares.compute + shares.allreduce + shares.checkpoint + shares.other
    assert total == pytest.approx(1.0)
    assert [fields["epoch"] for fields in recorder.named("epoch")] == list(range(8))
    found = next(complete_checkpoints(open_store(tmp_path), "t"))
    assert found is not None and found.path == result.last_checkpoint == recorder.named("checkpoint")[-1]["path"]


def test_reported_losses_are_means_over_the_global_batch(tiny_uri, tmp_path):
    """With a learning rate of next to nothing, losses are those of the fresh model; recompute them with plain NumPy."""
    recorder = Recorder()
    config = {"model": f"{MODELS}:linear", "epochs": 1, "optimizer": "sgd", "learning_rate": 1e-30}
    train_here(tiny_uri, tmp_path, recorder, **config)
    task = task_of(tiny_uri, tmp_path, **config)
    dataset = open_dataset(tiny_uri)
    found = next(complete_checkpoints(open_store(tmp_path), "t"))
    assert found is not None
    weights = np.load(tmp_path / found.path / "weights.npz")
    kernel, bias = weights["00000"].astype(np.float64), weights["00001"].astype(np.float64)
    spec = dataset.plan_spec("train", seed=0, global_batch_size=32, num_streams=8)
    with read_batches(dataset, dataset.plan_epoch(spec, 0), augment=task.config.augment) as batches:
        for batch, report in zip(batches, recorder.steps, strict=True):
            x = (batch.images_NHWC - np.array(dataset.manifest.channel_mean)) / np.array(dataset.manifest.channel_std)
            logits = x.reshape(len(x), -1) @ kernel + bias
            losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(x)), batch.labels_N]
            expected = (losses * batch.weights_N).sum() / batch.weights_N.sum()
            assert float.fromhex(report.loss_hex) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mixed_precision", ["off", "float16"])
def test_a_loss_that_is_not_finite_stops_before_the_update(tiny_uri, tmp_path, mixed_precision):
    recorder = Recorder()
    with pytest.raises(TrainingError, match=r"at epoch 0, step \d+ \(global step \d+\); the update was not applied"):
        train_here(tiny_uri, tmp_path, recorder, optimizer="sgd", learning_rate=1e30, schedule="constant",
                   mixed_precision=mixed_precision, checkpoint_every_steps=1)  # fmt: skip
    assert all(np.isfinite(float.fromhex(report.loss_hex)) for report in recorder.steps)
    assert not (tmp_path / "t" / "result.json").exists()


def test_early_stop_is_decided_once_and_survives_a_restart(tiny_uri, tmp_path):
    config = {"epochs": 6, "early_stop_epochs": 2, "optimizer": "sgd", "learning_rate": 1e-30,
              "model": f"{MODELS}:linear"}  # fmt: skip
    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path, recorder, **config)
    # Nothing improves: the first epoch is the best, and two more are given.
    assert result.stopped_early and result.num_epochs == 3
    assert recorder.named("early_stop") == [{"epoch": 2, "epochs_since_best": 2}]

    # As if it had been killed right before it published.
    (tmp_path / "t" / RESULT).unlink()
    again = Recorder()
    assert train_here(tiny_uri, tmp_path, again, **config).weights_sha256 == result.weights_sha256
    assert again.steps == []


def test_data_that_cannot_be_trained_on_is_refused(tiny_uri, tmp_path):
    write_images(tmp_path / "images", num_classes=1, num_images=60)
    flat = build_here(str(tmp_path / "images" / "class_0"), str(tmp_path / "flat"), _etl_config())
    with pytest.raises(UsageError, match="has no labels; .*one folder per class"):
        check_trainable(TrainConfig(), open_dataset(str(flat)))

    one_class = build_here(str(tmp_path / "images"), str(tmp_path / "one"), _etl_config())
    with pytest.raises(UsageError, match=r"1 class\(es\); expected at least 2"):
        train_here(one_class, tmp_path)

    no_train = make_dataset(tmp_path / "no_train", split_fractions={"train": 0, "validation": 0.5, "test": 0.5})
    with pytest.raises(UsageError, match="no train split; it has test, validation"):
        check_trainable(TrainConfig(), open_dataset(str(no_train)))

    no_validation = make_dataset(tmp_path / "no_val", split_fractions={"train": 0.5, "validation": 0, "test": 0.5})
    with pytest.raises(UsageError, match=r"early_stop_epochs = 1, and .* no validation split"):
        check_trainable(TrainConfig(early_stop_epochs=1), open_dataset(str(no_validation)))


@pytest.mark.parametrize("format_name", ["parquet", "tfrecord"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_damaged_shards_stop_the_training_by_name(tiny_uri, tmp_path, format_name, damage):
    uri = shutil.copytree(tiny_uri, tmp_path / "dataset")
    shard = next(path for path in uri.glob(f"shards/train/*.{format_name}") if ".rows." not in path.name)
    if damage == "missing":
        shard.unlink()
    else:
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    with pytest.raises(IntegrityError, match=rf"{shard.name} (was altered|is missing)"):
        train_here(str(uri), tmp_path / "models", format=format_name)


def test_without_a_test_split_validation_is_reported(tmp_path):
    uri = make_dataset(tmp_path / "data", split_fractions={"train": 0.8, "validation": 0.2, "test": 0})
    evaluation = train_here(uri, tmp_path, epochs=1).evaluation
    assert evaluation is not None and evaluation.split == "validation"


def _etl_config():
    from etl.config import EtlConfig

    return EtlConfig(image_size=16, encoding="png", unit_min_images=40)
