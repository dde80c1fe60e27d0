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
from tests.train.training import Recorder, train_here
from train.config import TrainConfig
from train.preflight import check_terms

LIMIT = "SHARDMILL_TEST_BRIGHTEST"
CONFIG = {"model": "tests.train.torch_models:dazzled", "standardize": False, "augment": {"random_crop_padding": 0},
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


def test_a_strategy_that_cannot_leave_a_batch_out_is_refused():
    with pytest.raises(UsageError, match=r"on_non_finite = 'skip' with .* 'mirrored'.*'single' or 'horovod'"):
        check_terms(TrainConfig(on_non_finite="skip", strategy="mirrored"), SparkConfig())
