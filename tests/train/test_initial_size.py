"""`train.init_from` with an export that was made for images of another size."""

from __future__ import annotations

from shardmill.jobs.observer import WARNING
from tests.lab.datasets import make_dataset
from tests.train.training import Recorder, train_here
from train.config import TrainConfig
from train.initialization.initial import pinned


def test_a_different_size_is_reported(exported, tmp_path):
    """A larger image gets one more convolution from `small_cnn`."""
    large = make_dataset(tmp_path / "large", num_images=60, image_size=64)
    recorder = Recorder()
    init_from = pinned(TrainConfig(init_from=f"{exported}@1")).init_from
    train_here(large, tmp_path / "other", recorder, model="small_cnn", epochs=1, init_from=init_from)
    [said] = recorder.named("initialized")
    assert said[WARNING].endswith(
        "; it was trained on images of 16 x 16 x 3, and this dataset has 64 x 64 x 3: set etl.image_size to match"
    )
