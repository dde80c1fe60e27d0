"""Batches without a finite loss that are left out: on all ranks, counted, and not without end."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import TrainingError, UsageError
from shardmill.ids import format_sample_id
from shardmill.jobs.config import SparkConfig
from shardmill.reader import read_samples
from shardmill.stores import open_store
from tests.train.test_multi_rank import WORKERS, Watcher
from tests.train.test_parameter_server import planned
from tests.train.training import Recorder, task_of, train_here
from train.checkpoint import complete_checkpoints
from train.config import TrainConfig
from train.launching import LAUNCHERS
from train.preflight import check_terms
from train.state import WEIGHTS, load_arrays

LIMIT = "SHARDMILL_TEST_BRIGHTEST"
NON_FINITE = "tests.train.torch_non_finite_models"
CONFIG = {"model": f"{NON_FINITE}:dazzled", "standardize": False, "augment": {"random_crop_padding": 0},
          "on_non_finite": "skip", "record_samples": True}  # fmt: skip


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
    recorder = Recorder()
    with pytest.raises(TrainingError, match="step 2 .* not applied; .*; as were 2 updates just before it"):
        train_here(tiny_uri, tmp_path, recorder, **CONFIG, max_skipped_in_a_row=2, global_batch_size=16)
    assert len(recorder.named("step_skipped")) == len(recorder.steps) == 2


def test_a_finite_loss_with_a_gradient_without_bounds_stops_before_the_update(tiny_uri, tmp_path):
    recorder = Recorder()
    told = (
        r"^loss \d.*, gradient norm inf at epoch 0, step 0 .*; the update was not applied; .* finite for every sample"
    )
    with pytest.raises(TrainingError, match=told):
        train_here(tiny_uri, tmp_path, recorder, model=f"{NON_FINITE}:with_cliff")
    assert not recorder.steps


@pytest.mark.drill
def test_all_ranks_leave_out_a_batch_and_stop_before_the_same_update(tiny_uri, tmp_path, monkeypatch, by_brightness):
    """Of the samples of a step one rank has the one that is too bright, and the other rank learns of it by the sum."""
    config = {**CONFIG, "model": f"{NON_FINITE}:blinded", "strategy": f"{WORKERS}:REMEMBERED",
              "num_workers": 2, "launcher": "local", "global_batch_size": 8, "max_skipped_in_a_row": 1,
              "checkpoint_every_steps": 1}  # fmt: skip
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
        LAUNCHERS["local"].launch(task_of(tiny_uri, tmp_path, **config), SparkConfig(), watcher, worker=worker)
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


def test_a_strategy_that_cannot_leave_a_batch_out_is_refused():
    with pytest.raises(UsageError, match=r"on_non_finite = 'skip' with .* 'mirrored'.*'single' or 'horovod'"):
        check_terms(TrainConfig(on_non_finite="skip", strategy="mirrored"), SparkConfig())
