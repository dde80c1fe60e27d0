"""Bad arguments and states of a loader: one line before the first batch, with the numbers and the fix."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import shardmill
from shardmill.errors import UsageError
from tests.lab.datasets import SharedDatasets

BATCH = {"global_batch_size": 24, "seed": 7, "num_streams": 8}


@pytest.fixture(scope="module")
def dataset(shared_dataset: SharedDatasets) -> shardmill.Dataset:
    return shardmill.open_dataset(f"{shared_dataset()}@1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rank": 1}, "expected both"),
        ({"rank": 2, "world_size": 2}, "expected a rank from 0 to world_size - 1"),
        ({"rank": 0, "world_size": 9}, "9 ranks for 8 streams"),
        ({"global_batch_size": 0}, "global_batch_size = 0; expected a whole number from 1 on"),
        ({"global_batch_size": None}, "a loader without global_batch_size.*pass, for example, 64"),
        ({"num_threads": 0}, "num_threads = 0; expected a whole number from 1 on"),
        ({"seed": 1.5}, "seed = 1.5; expected a whole number"),
        ({"augment": {"hue": 0.1}}, "augment = .*expected AugmentOptions or one of"),
        ({"global_batch_size": 20}, "global_batch_size = 20 with num_streams = 8"),
        ({"format": "arrow"}, "no arrow shards"),
        ({"num_streams": 0}, "num_streams = 0; expected a whole number from 1 on"),
        ({"rank": 0, "world_size": 25}, "global_batch_size = 24 on 25 ranks; expected a sample .*; use 25 or more"),
        ({"rank": 0, "world_size": 9}, r"set num_streams \(train.num_streams\) to 9 or more, to a divisor"),
        ({"columns": "caption"}, r"columns = 'caption'; expected a list of names; pass \['caption'\]"),
        ({"cache_dir": ""}, "cache_dir = ''; expected a folder"),
        ({"cache_dir": "/tmp", "cache_limit_bytes": "50GB"}, "cache_limit_bytes = '50GB'; expected a whole number"),
        ({"cache_dir": "/tmp", "cache_limit_bytes": 0}, "cache_limit_bytes = 0; expected a whole number from 1 on"),
        (
            {"batch_size": 4},
            "a loader with batch_size; expected some of global_batch_size, seed.*did you mean global_batch_size",
        ),
        ({"shufle": False}, "a loader with shufle; .*did you mean shuffle"),
    ],
)
def test_what_cannot_be_read_is_refused_before_the_first_batch(given, said, dataset):
    with pytest.raises(UsageError, match=said):
        dataset.batches("train", **{**BATCH, **given})


def test_a_dataset_is_opened_by_its_path(dataset):
    assert shardmill.open_dataset(Path(dataset.pin.uri)).pin == dataset.pin


def test_a_tf_dataset_says_that_it_needs_tensorflow(dataset, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(UsageError, match="a tf_dataset needs TensorFlow.*not installed here"):
        dataset.tf_dataset("train", **BATCH)


def test_a_loader_in_a_data_loader_says_that_it_is_iterated_itself(dataset):
    data = pytest.importorskip("torch.utils.data")
    loader = dataset.torch_loader("train", **BATCH)
    with pytest.raises(UsageError, match=r"a row of a loader.*no DataLoader around it.*samples\('train'\)"):
        next(iter(data.DataLoader(loader, batch_size=None)))


def test_a_state_of_another_plan_is_refused(dataset):
    state = dataset.batches("train", **BATCH).state_dict()
    for other in ({"seed": 8}, {"global_batch_size": 48}, {"num_streams": 4}):
        with pytest.raises(UsageError, match="belongs to another plan"):
            dataset.batches("train", **{**BATCH, **other}).load_state_dict(state)
    for step in (-1, len(dataset.batches("train", **BATCH))):
        with pytest.raises(UsageError, match="expected an epoch from 0 and a step from 0 to"):
            dataset.batches("train", **BATCH).load_state_dict({**state, "step": step})
    for nothing in (None, "epoch 3", {}):
        with pytest.raises(UsageError, match="is no loader state; expected version 1"):
            dataset.batches("train", **BATCH).load_state_dict(nothing)
    with pytest.raises(UsageError, match="a loader state of version 2; expected version 1"):
        dataset.batches("train", **BATCH).load_state_dict({**state, "version": 2})
