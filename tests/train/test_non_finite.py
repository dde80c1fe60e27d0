"""Batches without a finite loss that are left out: on all ranks, counted, and not without end."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import TrainingError, UsageError
from shardmill.ids import format_sample_id
from shardmill.jobs.config import SparkConfig
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from tests.lab.scale import exhaustive
from tests.train.forked_ranks import launch_forked
from tests.train.ranks import WORKERS, Watcher, usually_of
from tests.train.test_parameter_server import planned
from tests.train.training import Recorder, check_terms, task_of, train_here
from train.checkpoints.checkpoint import complete_checkpoints
from train.checkpoints.shards import WEIGHTS_PART, read_index
from train.checkpoints.state import WEIGHTS, load_arrays, rank_file
from train.config import TrainConfig
from train.launching.rank import DEFAULT_WORKER
from train.settings.non_finite import NonFiniteConfig
from train.strategies import STRATEGIES

LIMIT = "SHARDMILL_TEST_BRIGHTEST"
NON_FINITE = "tests.train.torch_non_finite_models"
CONFIG = {"model": f"{NON_FINITE}:dazzled", "standardize": False, "augment": {"random_crop_padding": 0},
          "non_finite": {"action": "skip"}, "record_samples": True}  # fmt: skip


@pytest.fixture(scope="module")
def by_brightness(tiny_uri) -> list[tuple[float, str]]:
    """(sum of pixels, sample id) of the train split, darkest first."""
    samples = read_samples(open_dataset(tiny_uri), "train", 1000)
    return sorted((float(each.image_HWC.astype(int).sum()), format_sample_id(each.sample_id)) for each in samples)


def test_a_batch_without_a_finite_loss_is_left_out_and_counted(tiny_uri, tmp_path, monkeypatch, by_brightness):
    """The model answers one sample with NaN while it trains, in front of a batch norm."""
    (second, _), (_, name) = by_brightness[-2:]
    monkeypatch.setenv(LIMIT, str(second + 0.5))
    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path, recorder, **CONFIG)
    skipped = [report for report in recorder.steps if not math.isfinite(float.fromhex(report.loss_hex))]
    assert [name in report.sample_ids for report in skipped] == [True] * result.num_epochs
    assert result.num_skipped_steps == len(skipped) and result.num_steps == len(recorder.steps)
    events = recorder.named("step_skipped")
    assert [(each["epoch"], each["step"]) for each in events] == [(report.epoch, report.step) for report in skipped]
    assert ["warning" in each for each in events] == [True] + [False] * (len(events) - 1)
    # Nothing of the batch is left: neither in the weights nor in the moving statistics, nor in the epoch's figures.
    assert result.evaluation is not None and np.isfinite(result.evaluation.loss)
    assert all(np.isfinite(epoch.train_loss) and 0 <= epoch.train_accuracy <= 1 for epoch in result.history)
    assert np.isfinite(float.fromhex(result.final_loss_hex))


def test_too_many_in_a_row_stop_the_training(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setenv(LIMIT, "-1")
    recorder, skipping = Recorder(), {"action": "skip", "max_skipped_in_a_row": 2}
    with pytest.raises(TrainingError, match="step 2 .* not applied; .*; as were 2 updates just before it"):
        train_here(tiny_uri, tmp_path, recorder, **{**CONFIG, "non_finite": skipping, "global_batch_size": 16})
    assert len(recorder.named("step_skipped")) == len(recorder.steps) == 2


def test_a_finite_loss_with_a_gradient_without_bounds_stops_before_the_update(tiny_uri, tmp_path):
    """Of every sample: as many are named as of answers."""
    recorder = Recorder()
    first = planned(
        tiny_uri, TrainConfig(strategy="single", num_workers=1, num_streams=8, global_batch_size=32, epochs=1)
    )[0, 0]
    told = (
        r"^loss \d.*, gradient norm inf at epoch 0, step 0 .*; the update was not applied; .* finite for every sample"
        rf"; the gradient of at least 5 samples by itself is not finite: {', '.join(first[:5])};"
    )
    with pytest.raises(TrainingError, match=told):
        train_here(tiny_uri, tmp_path, recorder, model=f"{NON_FINITE}:with_cliff")
    assert not recorder.steps


def test_samples_whose_gradient_is_not_finite_are_named_and_left_out(tiny_uri, tmp_path, monkeypatch, by_brightness):
    """Two of them, of which the model's answers are finite; a batch norm's statistics are as if they had not been."""
    monkeypatch.setenv(LIMIT, str(by_brightness[-3][0] + 0.5))
    recorder = Recorder()
    config = {**CONFIG, "model": f"{NON_FINITE}:steep", "epochs": 1, "global_batch_size": 96}
    result = train_here(tiny_uri, tmp_path, recorder, **config)
    [event] = recorder.named("step_skipped")
    ids = [name for name in recorder.steps[0].sample_ids if name in {name for _, name in by_brightness[-2:]}]
    assert len(ids) == 2 and event["warning"].endswith(
        f"the gradient of 2 samples by itself is not finite: {', '.join(ids)}"
    )
    assert result.num_skipped_steps == len(recorder.steps) == 1
    running_mean, running_var, num_batches, *_ = load_arrays((tmp_path / result.checkpoint / rank_file(0)).read_bytes())
    assert not running_mean.any() and (running_var == 1).all() and num_batches == 0


@pytest.mark.drill
def test_all_ranks_leave_out_a_batch_and_stop_before_the_same_update(tiny_uri, tmp_path, monkeypatch, by_brightness):
    """Of the samples of a step one rank has the one that is too bright, and the other rank learns of it by the sum."""
    config = {**CONFIG, "model": f"{NON_FINITE}:blinded", "strategy": f"{WORKERS}:REMEMBERED_TORCH_DDP",
              "num_workers": 2, "launcher": "local", "global_batch_size": 8, "checkpoint_every_steps": 1,
              "non_finite": {"action": "skip", "max_skipped_in_a_row": 1}}  # fmt: skip
    brightness_of = {name: brightness for brightness, name in by_brightness}
    steps = list(planned(tiny_uri, TrainConfig(**config, epochs=1)).values())
    brightest = [max(brightness_of[name] for name in names) for names in steps]
    # Two steps in a row have a sample that is as bright, and no two before them.
    stopped_at, limit = max(enumerate(map(min, brightest[1:], brightest[2:]), start=2), key=lambda each: each[1])
    limit -= 0.5
    skipped = [step for step in range(stopped_at) if brightest[step] > limit]
    assert skipped[-1] == stopped_at - 1 and min(brightest[:2]) <= limit
    monkeypatch.setenv(LIMIT, str(limit))
    bad = [name for name in steps[stopped_at] if brightness_of[name] > limit]
    said = rf"\(global step {stopped_at}\); the update was not applied; .* {len(bad)} samples: {', '.join(bad)};"
    watcher = Watcher()
    with pytest.raises(TrainingError, match=said):
        worker = f"{WORKERS}:every_rank_tells_what_a_failure_leaves"
        launch_forked(task_of(tiny_uri, tmp_path, **config), watcher, worker)
    # The step that stopped it is not reported.
    assert [step for step, loss in enumerate(watcher.losses.values()) if loss == "nan"] == skipped
    assert len(watcher.losses) == stopped_at and watcher.events.count("step_skipped") == len(skipped)
    # Nothing has changed since the step before it, of which no update was applied either.
    newest = next(complete_checkpoints(open_store(tmp_path), "t"))
    assert newest.marker.global_step >= stopped_at - 1
    expected = load_arrays((tmp_path / newest.path / WEIGHTS).read_bytes())
    for rank in range(2):
        left = load_arrays((tmp_path / "left" / f"rank-{rank}.npz").read_bytes())
        assert [array.tobytes() for array in left] == [array.tobytes() for array in expected]


@pytest.mark.parametrize(
    ("strategy", "num_workers"),
    [pytest.param("single", 1, marks=pytest.mark.starts("ranks")), exhaustive("horovod", 2)],
)
def test_a_keras_model_is_as_if_a_batch_had_not_been(
    tiny_uri, tmp_path, monkeypatch, by_brightness, strategy, num_workers
):
    """Of two ranks one has the sample; the moving statistics of a batch norm are as they were on both."""
    monkeypatch.setenv(LIMIT, str(by_brightness[-2][0] + 0.5))
    config = {**CONFIG, "model": "tests.train.keras_non_finite_models:steep_behind_norm", "epochs": 1,
              "global_batch_size": 96, "strategy": strategy, "num_workers": num_workers,
              "launcher": "local"}  # fmt: skip
    watcher = Watcher()
    result = launch_forked(task_of(tiny_uri, tmp_path, **config), watcher)
    assert result.num_skipped_steps == result.num_steps == 1 and watcher.events.count("step_skipped") == 1
    for rank in range(num_workers):
        moving_mean, moving_variance, *_ = load_arrays((tmp_path / result.checkpoint / rank_file(rank)).read_bytes())
        assert not moving_mean.any() and (moving_variance == 1).all()


# On two ranks, or two devices: the rank or device without the sample learns of it by the sum.
ON_TWO: dict[str, dict] = {
    "horovod": {"num_workers": 2},
    "multi_worker_mirrored": {"num_workers": 2},
    "mirrored": {"mirrored": {"num_devices": 2}},
    "torch_ddp": {"num_workers": 2, "model": f"{NON_FINITE}:steep"},
    "zero1": {"num_workers": 2, "model": f"{NON_FINITE}:steep"},
    "torch_fsdp": {"num_workers": 2, "model": f"{NON_FINITE}:steep"},
    "tensor_parallel": {"num_workers": 2, "model": f"{NON_FINITE}:steep"},
    "hybrid": {"num_workers": 2, "model": f"{NON_FINITE}:steep"},
    "pipeline_parallel": {"num_workers": 2, "model": f"{NON_FINITE}:steep_chain"},
    "local_sgd": {"num_workers": 2, "local_sgd": {"local_steps": 2}},
    "parameter_server": {"num_workers": 2, "parameter_server": {"num_servers": 1}},
}


def weights_of_rank(checkpoint: Path, rank: int) -> list[np.ndarray]:
    """What a rank holds of the weights in a checkpoint of either layout."""
    if (checkpoint / WEIGHTS).exists():
        return load_arrays((checkpoint / WEIGHTS).read_bytes())
    index = read_index(lambda name: (checkpoint / name).read_bytes())
    wanted = [shard for shard in index.of_ranks[rank] if shard.part == WEIGHTS_PART]
    return index.assemble(wanted, {name: (checkpoint / name).read_bytes() for name in index.files_with(wanted)}, "it")


def test_every_strategy_of_several_is_stopped_by_a_gradient():
    assert set(ON_TWO) == set(STRATEGIES) - {"single"}


@pytest.mark.drill
@pytest.mark.parametrize(
    "strategy",
    usually_of({"horovod", "torch_fsdp", "parameter_server"}, ON_TWO),
)
def test_a_gradient_without_bounds_stops_all_ranks_and_its_sample_is_named(
    tiny_uri, tmp_path, monkeypatch, by_brightness, strategy
):
    """Synchronous ranks have the weights that they had before the step; others have at least saved none of later."""
    is_synchronous = STRATEGIES[strategy].synchronous
    config = {"model": "tests.train.keras_non_finite_models:steep", "standardize": False, "launcher": "local",
              "augment": {"random_crop_padding": 0}, "global_batch_size": 8, "checkpoint_every_steps": 1, "epochs": 1,
              **ON_TWO[strategy], "strategy": strategy}  # fmt: skip
    (second, _), (_, name) = by_brightness[-2:]
    [stopped_at] = [step for (_, step), names in planned(tiny_uri, TrainConfig(**config)).items() if name in names]
    assert stopped_at > 0
    monkeypatch.setenv(LIMIT, str(second + 0.5))
    if is_synchronous:
        config["strategy"] = f"{WORKERS}:REMEMBERED_{strategy.upper()}"
    worker = f"{WORKERS}:every_rank_tells_what_a_failure_leaves" if is_synchronous else DEFAULT_WORKER
    said = (
        rf"\(global step {stopped_at}\); the update was not applied; .* finite for every sample; "
        rf"the gradient of 1 sample by itself is not finite: {name};"
    )
    watcher = Watcher()
    with pytest.raises(TrainingError, match=said):
        launch_forked(task_of(tiny_uri, tmp_path, **config), watcher, worker)
    assert list(watcher.losses) == [(0, step) for step in range(stopped_at)]
    newest = next(complete_checkpoints(open_store(tmp_path), "t"))
    saved = [weights_of_rank(tmp_path / newest.path, rank) for rank in range(config.get("num_workers", 1))]
    assert all(np.isfinite(array).all() for of_rank in saved for array in of_rank)
    if not is_synchronous:
        # The last one may have been under way.
        assert newest.marker.global_step in (stopped_at - 1, stopped_at)
        return
    assert newest.marker.global_step == stopped_at
    for rank in range(config.get("num_workers", 1)):
        left = load_arrays((tmp_path / "left" / f"rank-{rank}.npz").read_bytes())
        assert [array.tobytes() for array in left] == [array.tobytes() for array in saved[rank]]


def test_a_strategy_that_cannot_leave_a_batch_out_is_refused():
    with pytest.raises(UsageError, match=r"non_finite.action = 'skip' with .* 'mirrored'.*'single' or 'horovod'"):
        check_terms(TrainConfig(non_finite=NonFiniteConfig(action="skip"), strategy="mirrored"), SparkConfig())
