"""`train.init_from` on ranks that hold a model together: each reads its own slices of a file, or of a checkpoint."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.errors import IntegrityError, UsageError
from shardmill.stores import open_store
from tests.lab.scale import exhaustive
from tests.train.ranks import train_on_ranks
from tests.train.test_initial import learner, plain
from tests.train.training import Recorder, train_here
from train.backends.backend import StatePart
from train.checkpoints.checkpoint import open_checkpoint
from train.checkpoints.shards import read_whole_model
from train.checkpoints.stored_arrays import BUFFER_BYTES, MOST_BYTES_BETWEEN, StoredArray, WeightFile
from train.config import TrainConfig
from train.initialization.checkpoint_arrays import arrays_of_checkpoint
from train.initialization.initial import find_initial, pinned
from train.initialization.match_weights import match_weights

CONFIG = {"num_streams": 12, "global_batch_size": 24, "epochs": 1, "label_smoothing": 0.1}


@given(st.data())
def test_a_slice_has_the_elements_of_the_array(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    array = np.arange(math.prod(shape), dtype="<f4").reshape(shape)
    stored = StoredArray(WeightFile.of_bytes(b"head" + array.tobytes(), "", "f"), 4, array.dtype, shape)
    bounds = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in shape]
    places = tuple(slice(first, end) for first, end in bounds)
    assert np.array_equal(stored[places], array[places])
    assert np.array_equal(stored[...], array)


def test_no_more_is_read_than_a_box_needs():
    shape, asked = (8, 4, MOST_BYTES_BETWEEN), []

    def read_range(start: int, num_bytes: int) -> bytes:
        asked.append(num_bytes)
        return bytes(num_bytes)

    stored = StoredArray(WeightFile("", "f", 4 * math.prod(shape), read_range), 0, np.dtype("<f4"), shape)
    of_row = 4 * MOST_BYTES_BETWEEN
    stored[slice(2, 4), slice(0, 4), slice(0, shape[2])]
    assert sum(asked) == 2 * 4 * of_row
    asked.clear()
    # Each row of its own: what lies between is longer than a request is worth.
    stored[slice(0, 8), slice(1, 2), slice(0, shape[2])]
    assert asked == [of_row] * 8


@pytest.mark.starts("ranks")
@pytest.mark.parametrize("suffix", ["safetensors", exhaustive("pt")])
def test_each_rank_reads_its_own_slices(tiny_uri, tmp_path, suffix):
    """Rank 0 also all of it once, for its hash, and never more than some megabytes at a time."""
    import torch

    model = "tests.train.sharded_models:wide_vit"
    arrays = learner("torch", model, seed=3).named_weights().arrays()
    file = tmp_path / f"given.{suffix}"
    if suffix == "pt":
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, file)
    else:
        file.write_bytes(plain(arrays))
    config = {**CONFIG, "model": model}
    config["init_from"] = pinned(TrainConfig(model=model, init_from=str(file))).init_from
    one = Recorder()
    train_here(tiny_uri, tmp_path / "one", one, **config)
    [said] = one.named("initialized")
    assert said["share"] == 1.0

    sharded = {**config, "strategy": "torch_fsdp"}
    _, watcher = train_on_ranks(tiny_uri, tmp_path / "two", 2, sharded, worker="every_rank_tells_how_much_it_reads")
    expected = [float.fromhex(loss) for loss in one.losses.values()]
    assert [float.fromhex(loss) for loss in watcher.losses.values()] == pytest.approx(expected, rel=1e-5)
    of_ranks = [int((tmp_path / "two" / "read" / f"rank-{rank}").read_text()) for rank in range(2)]
    size, weights = file.stat().st_size, sum(array.nbytes for array in arrays.values())
    # An archive is looked at around each of its entries.
    listing = 2 * (size - weights) + 3 * len(arrays) * BUFFER_BYTES
    assert weights / 2 <= of_ranks[1] < weights / 2 + listing < 0.9 * size
    assert of_ranks[0] <= size + of_ranks[1] + BUFFER_BYTES


@pytest.mark.starts("ranks")
@pytest.mark.parametrize("strategy", ["torch_fsdp", exhaustive("tensor_parallel")])
def test_a_training_starts_from_a_checkpoint_of_shards(tiny_uri, tmp_path, strategy):
    """With the moving statistics of its batch norms."""
    model = "tests.train.torch_models:normed"
    first, _ = train_on_ranks(tiny_uri, tmp_path / "first", 2, {**CONFIG, "model": model, "strategy": strategy})
    folder = tmp_path / "first" / first.checkpoint
    found = open_checkpoint(open_store(tmp_path / "first"), first.checkpoint)
    whole = read_whole_model(found.files(open_store(tmp_path / "first")))
    config = pinned(TrainConfig(model=model, init_from=str(folder)))

    one = learner("torch", model, seed=3)
    named, stored = one.named_weights(), arrays_of_checkpoint(find_initial(config).uri)
    match = match_weights(named.shapes, stored, named.head, "f")
    assert (match.replaced, match.missing) == ((), ())
    named.assign(match.arrays)
    for part, arrays in ((StatePart.WEIGHTS, whole.weights), (StatePart.OWN, whole.own)):
        # But for generators.
        assert all(map(np.array_equal, one.arrays(part)[: None if part is StatePart.WEIGHTS else -1], arrays))

    again = {**CONFIG, "model": model, "init_from": config.init_from}
    recorder = Recorder()
    train_here(tiny_uri, tmp_path / "one", recorder, **again)
    _, watcher = train_on_ranks(tiny_uri, tmp_path / "two", 2, {**again, "strategy": "tensor_parallel"})
    assert "initialized" in watcher.names
    expected = [float.fromhex(loss) for loss in recorder.losses.values()]
    assert [float.fromhex(loss) for loss in watcher.losses.values()] == pytest.approx(expected, rel=1e-5)

    # The marker is as it was, so only the file itself can tell. Found by the driver, before any rank starts.
    damaged = max(folder.glob("weights-*.npz"), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(IntegrityError, match=rf"{damaged.name} was altered"):
        pinned(TrainConfig(model=model, init_from=str(folder)))


def test_a_checkpoint_without_names_is_refused(tiny_uri, tmp_path):
    model = "tests.train.torch_models:linear"
    result = train_here(tiny_uri, tmp_path, **CONFIG, model=model)
    with pytest.raises(UsageError, match=r"is a checkpoint whose arrays have no names; .*; export that training"):
        find_initial(TrainConfig(model=model, init_from=str(tmp_path / result.checkpoint)))
