"""Loaders: every sample once an epoch, for any number of ranks and in each framework; resumed at any step."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmill
from shardmill.environments import ENVIRONMENTS
from shardmill.errors import UsageError
from shardmill.loader.row_source import check_windows
from tests.lab.datasets import SharedDatasets
from tests.lab.scale import usually

BATCH = {"global_batch_size": 24, "seed": 7, "num_streams": 8}


@pytest.fixture(scope="module")
def dataset(shared_dataset: SharedDatasets) -> shardmill.Dataset:
    """120 images in 3 classes, so that the last batch of its train split is padded."""
    return shardmill.open_dataset(f"{shared_dataset()}@1")


def ids_of(loader) -> list[list[int]]:
    return [batch.sample_ids[batch.weights > 0].tolist() for batch in loader]


def test_an_epoch_has_each_sample_once_at_every_world_size(dataset):
    num_rows = dataset.manifest.splits["train"].num_rows
    whole = ids_of(dataset.batches("train", **BATCH))
    assert len({each for ids in whole for each in ids}) == sum(map(len, whole)) == num_rows
    for world_size in range(1, 9):
        ranks = [dataset.batches("train", rank=rank, world_size=world_size, **BATCH) for rank in range(world_size)]
        assert {len(loader) for loader in ranks} == {len(whole)}
        of_ranks = [ids_of(loader) for loader in ranks]
        assert [[each for ids in of_ranks for each in ids[step]] for step in range(len(whole))] == whole


@settings(max_examples=usually(12, 500))
@given(data=st.data())
def test_a_resumed_loader_continues_with_the_very_next_batch(dataset, data):
    num_steps = len(dataset.batches("train", **BATCH))
    handed_out = data.draw(st.integers(0, 2 * num_steps), "batches before the state is taken")
    before, after = (data.draw(st.integers(1, 8), when) for when in ("world size before", "world size after"))
    expected = [ids for loader in [dataset.batches("train", **BATCH)] for _ in range(3) for ids in ids_of(loader)]

    states = []
    for rank in range(before):
        loader = dataset.batches("train", rank=rank, world_size=before, **BATCH)
        for _ in range(handed_out // num_steps):
            for _ in loader:
                pass
        iterator = iter(loader)
        for _ in range(handed_out % num_steps):
            next(iterator)
        states.append(json.dumps(loader.state_dict()))
        loader.close()
    assert len(set(states)) == 1, "the same on every rank"

    of_ranks = []
    for rank in range(after):
        loader = dataset.batches("train", rank=rank, world_size=after, **BATCH)
        loader.load_state_dict(json.loads(states[0]))
        of_ranks.append(ids_of(loader))
    found = [[each for ids in of_ranks for each in ids[step]] for step in range(len(of_ranks[0]))]
    assert found == expected[handed_out : handed_out + len(found)] and len(found) == num_steps - handed_out % num_steps


def test_a_loader_keeps_the_window_with_which_its_order_began(dataset, monkeypatch):
    largest = dataset.index("train").max_chunk_bytes
    monkeypatch.setattr("shardmill.loader.dataset.WINDOW_BUDGET_BYTES", 3 * largest)

    def ranks(world_size: int, state: dict | None = None) -> list:
        loaders = [dataset.batches("train", rank=rank, world_size=world_size, **{**BATCH, "num_streams": 12})
                   for rank in range(world_size)]  # fmt: skip
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        return loaders

    def rows(loaders: list) -> list[list[int]]:
        return [[each for ids in step for each in ids] for step in zip(*map(ids_of, loaders), strict=True)]

    begun = ranks(12)
    state, expected = begun[5].state_dict(), rows(begun)
    assert rows(ranks(1)) == rows(ranks(8)) != expected, "what begins anew on one rank has smaller windows"
    for world_size in (1, 2, 8, 12):
        resumed = ranks(world_size, state)
        assert rows(resumed) == expected and resumed[0].spec == begun[0].spec
    with pytest.raises(UsageError, match="window = 'all'; expected a whole number"):
        ranks(1, {**state, "window": "all"})
    with pytest.raises(UsageError, match=r"windows of 3 chunks, .* rank with 6 of 12 streams; .* the 1000 bytes"):
        check_windows(dataset.index("train"), begun[0].spec, 6, 1000)


def test_a_loop_that_counts_steps_gets_another_order_in_each_epoch(dataset):
    """Lightning takes `len(loader)` batches, and never asks for the end of an iteration."""
    loader = dataset.batches("train", **BATCH)
    epochs = []
    for epoch in range(3):
        assert (loader.epoch, loader.step) == (epoch, 0)
        iterator = iter(loader)
        epochs.append([next(iterator).sample_ids.tolist() for _ in range(len(loader))])
    assert epochs == [
        [batch.sample_ids.tolist() for batch in dataset.batches("train", epoch=e, **BATCH)] for e in range(3)
    ]
    assert epochs[0] != epochs[1] != epochs[2]


def test_set_epoch_keeps_a_resumed_step_and_repeats_an_order(dataset):
    loader = dataset.batches("train", **BATCH)
    first = ids_of(loader)
    loader.set_epoch(0)
    assert ids_of(loader) == first
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 2})
    loader.set_epoch(0)
    assert ids_of(loader) == first[2:]
    iterator = iter(loader)
    next(iterator)
    assert (loader.epoch, loader.step) == (1, 1)
    # What was left by `break` is not read to its end.
    assert ids_of(loader) == ids_of(dataset.batches("train", epoch=2, **BATCH))
    with pytest.raises(UsageError, match="one iteration at a time"):
        next(iterator)


def test_a_batch_has_attributes_and_is_a_mapping_of_them(dataset):
    batch = next(iter(dataset.batches("validation", global_batch_size=16)))
    assert list(batch) == ["images", "labels", "weights", "sample_ids"] and len(batch) == 4
    for name, values in batch.items():
        assert values is getattr(batch, name) and len(values) == 16
    assert batch.images.dtype == np.uint8 and batch.images.shape == (16, 16, 16, 3)


def test_no_thread_is_left_of_an_iteration(dataset):
    before = threading.active_count()
    for end in (lambda loader: loader.close(), lambda loader: None):
        loader = dataset.batches("train", **BATCH)
        iterator = iter(loader)
        next(iterator)
        end(loader)
        del iterator, loader
        assert threading.active_count() == before
    with dataset.batches("train", **BATCH) as loader:
        next(iter(loader))
    assert threading.active_count() == before


def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for starter in ENVIRONMENTS.values():
        monkeypatch.delenv(starter.rank, raising=False)
    monkeypatch.delenv("TF_CONFIG", raising=False)


@pytest.mark.parametrize("starter", ENVIRONMENTS.values(), ids=str)
def test_the_rank_is_that_of_the_environment(starter, dataset, monkeypatch: pytest.MonkeyPatch):
    """Each environment that training knows, because there is one list of them."""
    clear_environment(monkeypatch)
    assert dataset.batches("train", **BATCH).streams == range(8)
    monkeypatch.setenv(starter.rank, "1")
    monkeypatch.setenv(starter.world_size, "2")
    assert dataset.batches("train", **BATCH).streams == range(4, 8)
    assert dataset.batches("train", rank=0, world_size=1, **BATCH).streams == range(8)
    monkeypatch.setenv(starter.rank, "first")
    with pytest.raises(UsageError, match=f"the variables of {starter} are not numbers.*'first'"):
        dataset.batches("train", **BATCH)


@pytest.mark.starts("program")
def test_several_ranks_name_a_version_or_compare_their_plans(dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a process group of two; without one, each rank would look up the latest version for itself."""
    clear_environment(monkeypatch)
    latest = shardmill.open_dataset(dataset.pin.uri)
    assert latest.batches("train", **BATCH).streams == range(8)
    assert latest.batches("train", rank=1, world_size=2, **BATCH).streams == range(4, 8)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"without a version, on rank 1 of 2; .*; open .*/dataset@1, or pass rank"):
        latest.batches("train", **BATCH)

    command = [sys.executable, "-m", "tests.programs.loader_of_two_ranks", dataset.pin.uri, tmp_path / "meeting"]
    ranks = [
        subprocess.Popen([*command, str(rank), "3", str(3 + rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    same, other = zip(*(rank.communicate(timeout=100)[0].splitlines() for rank in ranks), strict=True)
    assert same == ("range(0, 4)", "range(4, 8)")
    assert all("the ranks have different plans: rank 0 " in each and "seed 4" in each for each in other)


def test_the_rank_is_that_of_tensorflows_cluster(dataset, monkeypatch: pytest.MonkeyPatch):
    clear_environment(monkeypatch)
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1", "d:1"], "ps": ["e:1"]}
    for rank, (kind, index) in enumerate((("chief", 0), ("worker", 0), ("worker", 1), ("worker", 2))):
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        assert dataset.batches("train", **BATCH).streams == range(2 * rank, 2 * rank + 2)
    server = {"cluster": cluster, "task": {"type": "ps", "index": 0}}
    for text in (json.dumps(server), "{}", "[]", "worker 1"):
        monkeypatch.setenv("TF_CONFIG", text)
        with pytest.raises(UsageError, match="TF_CONFIG = .*expected JSON whose `task` is the chief or a worker"):
            dataset.batches("train", **BATCH)


def test_the_rank_is_jaxs_once_it_is_initialised(dataset, monkeypatch: pytest.MonkeyPatch):
    clear_environment(monkeypatch)
    is_initialized = []
    jax = SimpleNamespace(
        distributed=SimpleNamespace(is_initialized=lambda: bool(is_initialized)),
        process_index=lambda: 3,
        process_count=lambda: 4,
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert dataset.batches("train", **BATCH).streams == range(8)
    is_initialized.append(True)
    gathered = []
    monkeypatch.setattr(
        "shardmill.loader.ranks.gather_by_jax", lambda text: gathered.append(text) or [text, text, other, text]
    )
    other = "of another seed"
    with pytest.raises(UsageError, match="the ranks have different plans: rank 0 .*; rank 2 of another seed; expected"):
        dataset.batches("train", **BATCH)
    other = gathered[0]
    assert dataset.batches("train", **BATCH).streams == range(6, 8)


@pytest.mark.starts("program")
def test_a_fork_of_a_process_that_has_iterated_is_refused(dataset):
    loader = dataset.batches("train", **BATCH)
    next(iter(loader))

    def say(answers) -> None:
        try:
            next(iter(loader))
        except UsageError as error:
            answers.put(str(error))

    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    child = fork.Process(target=say, args=(answers,))
    child.start()
    assert "is a fork of it" in answers.get(timeout=60)
    child.join()
    loader.close()


def test_torch_gets_tensors_over_the_same_memory(dataset):
    torch = pytest.importorskip("torch")
    arrays = list(dataset.batches("train", **BATCH))
    for layout in ("NCHW", "NHWC"):
        loader = dataset.torch_loader("train", layout=layout, **BATCH)
        for expected, batch in zip(arrays, loader, strict=True):
            images = batch["images"].permute(0, 2, 3, 1) if layout == "NCHW" else batch["images"]
            assert np.array_equal(images.numpy(), expected.images) and batch.images.dtype == torch.uint8
            assert torch.equal(batch.labels, torch.from_numpy(expected.labels))
            assert torch.equal(batch.weights, torch.from_numpy(expected.weights))
    assert next(iter(dataset.torch_loader("train", **BATCH))).images.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(UsageError, match="layout = 'CHW'"):
        dataset.torch_loader("train", layout="CHW", **BATCH)


@pytest.mark.starts("program")
def test_a_data_loader_with_workers_around_it_is_refused(dataset):
    torch = pytest.importorskip("torch")

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(dataset.batches("train", **BATCH))

    assert len(list(torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=0))) > 0
    with pytest.raises(Exception, match="worker 0 of a DataLoader with num_workers = 2"):
        list(torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2))


def test_keras_fits_on_a_tf_dataset_whose_epochs_differ(dataset):
    tf = pytest.importorskip("tensorflow")
    import keras

    expected = [batch for epoch in range(2) for batch in dataset.batches("train", epoch=epoch, **BATCH)]
    rows = dataset.tf_dataset("train", **BATCH)
    # Its thread would let the end of an epoch wait for up to a minute (docs/LOG.md).
    assert rows.options().autotune.enabled is False
    assert int(rows.cardinality()) == len(expected) // 2
    assert rows.element_spec[0].shape == (24, 16, 16, 3) and rows.element_spec[1].dtype == tf.int64
    found = [each for _ in range(2) for each in rows]
    for batch, (images, labels, weights) in zip(expected, found, strict=True):
        assert np.array_equal(images, batch.images) and np.array_equal(labels, batch.labels)
        assert np.array_equal(weights, batch.weights)
    layers = [
        keras.layers.Input((16, 16, 3)),
        keras.layers.Flatten(),
        keras.layers.Dense(3, kernel_initializer="zeros"),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    # All logits are 0, so that class 0 is answered, which padding has, too: a metric without weights counts rows alone.
    labels = dataset.metadata("train").column("label").to_numpy()
    evaluated = dataset.tf_dataset("train", shuffle=False, **BATCH)
    assert any(len(weights) < 24 for _, _, weights in evaluated) and len(labels) % 24
    found = model.evaluate(evaluated, verbose=0, return_dict=True)
    assert found["accuracy"] == found["weighted_accuracy"] == pytest.approx((labels == 0).mean())
    history = model.fit(dataset.tf_dataset("train", **BATCH), epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


@pytest.mark.parametrize("is_dict", [False, True])
@pytest.mark.parametrize("reads_steps", [False, True])
def test_lightning_continues_where_its_checkpoint_was_written(reads_steps: bool, is_dict: bool, dataset, tmp_path):
    """Also if the module asks how many steps there will be, for which the trainer iterates its loaders too early."""
    torch, pl = pytest.importorskip("torch"), pytest.importorskip("pytorch_lightning")
    num_steps = len(dataset.torch_loader("train", **BATCH))

    class Module(pl.LightningModule):
        def __init__(self, loaders) -> None:
            super().__init__()
            self.weight, self.loaders, self.seen = torch.nn.Parameter(torch.zeros(1)), loaders, []

        def training_step(self, batch, _):
            self.seen.append([each.sample_ids.tolist() for each in (batch.values() if is_dict else [batch])])
            return self.weight.sum()

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            if not reads_steps:
                return optimizer
            total = int(self.trainer.estimated_stepping_batches)
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)]

        def train_dataloader(self):
            return self.loaders

    def fitted(checkpoint=None, loaders=None):
        if loaders is None:
            loaders = [dataset.torch_loader("train", **{**BATCH, "seed": seed}) for seed in range(1 + is_dict)]
            loaders = dict(zip("ab", loaders, strict=True)) if is_dict else loaders[0]
        saved = pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = pl.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[saved],
        )  # fmt: skip
        trainer.fit(module := Module(loaders), ckpt_path=checkpoint)
        return module.seen

    whole = fitted()
    for step in (2, num_steps, num_steps + 1):
        assert fitted(tmp_path / f"step={step}.ckpt") == whole[step:], step
    # Of a checkpoint without positions, a loader is not at the beginning without a word.
    state = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    del state["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    torch.save(state, tmp_path / "other.ckpt")
    with pytest.raises(UsageError, match="a new loader in a Lightning trainer that has done 2 steps"):
        fitted(tmp_path / "other.ckpt")
