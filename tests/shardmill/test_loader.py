"""The loader: its batches, their augmentation, and its bad input."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmill
from etl.config import EtlConfig
from shardmill.augment.options import AugmentOptions
from shardmill.augment.pixels import augment
from shardmill.environments import ENVIRONMENTS
from shardmill.errors import UsageError
from shardmill.loader.row_source import check_windows
from tests.etl import test_labels as label_kinds
from tests.lab.datasets import build_here, make_dataset
from tests.lab.scale import usually

BATCH = {"global_batch_size": 24, "seed": 7, "num_streams": 8}


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
    same, other = zip(*(rank.communicate(timeout=300)[0].splitlines() for rank in ranks), strict=True)
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
    assert "is a fork of it" in answers.get(timeout=300)
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


OF_ONE_IMAGE = {
    "preset": "imagenet", "size": 12, "random_vertical_flip": True, "brightness": 0.4, "contrast": 0.4,
    "saturation": 0.4, "hue": 0.1, "rand_augment_operations": 2, "random_erasing": 0.5,
}  # fmt: skip
EVERYTHING = AugmentOptions(**OF_ONE_IMAGE, mixup_alpha=0.5, cutmix_alpha=1.0)


@pytest.fixture(scope="module")
def augmentable(tmp_path_factory: pytest.TempPathFactory) -> shardmill.Dataset:
    """120 JPEGs, of which windows alone are decoded, in 3 classes; the last batch of its train split is padded."""
    return shardmill.open_dataset(f"{make_dataset(tmp_path_factory.mktemp('loader'), encoding='jpeg')}@1")


def epoch(augmentable, **reading) -> list[tuple[bytes, bytes]]:
    """Pixels and labels of the real rows of each batch."""
    batches = augmentable.batches("train", **{**BATCH, "augment": EVERYTHING, **reading})
    with batches:
        return [
            (batch.images[batch.weights > 0].tobytes(), batch.labels[batch.weights > 0].tobytes()) for batch in batches
        ]


def test_an_epoch_is_the_same_at_every_world_size_and_with_any_number_of_threads(augmentable):
    whole = epoch(augmentable)
    assert len(set(whole)) == len(whole)
    assert whole != epoch(augmentable, epoch=1)
    assert whole != epoch(augmentable, seed=8)
    for world_size in range(1, 9):
        reading = {"world_size": world_size, "num_threads": 1 + world_size % 4}
        ranks = [epoch(augmentable, rank=rank, **reading) for rank in range(world_size)]
        of_steps = [tuple(b"".join(parts) for parts in zip(*step, strict=True)) for step in zip(*ranks, strict=True)]
        assert of_steps == whole
    assert epoch(augmentable, format="tfrecord") == whole


@settings(max_examples=usually(8, 100))
@given(names=st.sets(st.sampled_from(sorted(OF_ONE_IMAGE))), occurrences=st.integers(1, 3))
def test_each_image_is_what_augmenting_it_alone_gives(augmentable, names, occurrences):
    options = AugmentOptions(**{name: OF_ONE_IMAGE[name] for name in names})
    stored = {sample.sample_id: sample.image_HWC for sample in augmentable.samples("train")}
    sample = dict.fromkeys(augmentable.class_names, occurrences)
    seen: dict[int, set[bytes]] = {}
    for batch in augmentable.batches("train", **BATCH, augment=options, sample=sample):
        for sample_id, image_HWC in zip(batch.sample_ids.tolist(), batch.images, strict=True):
            if sample_id:
                seen.setdefault(sample_id, set()).add(image_HWC.tobytes())
    key = {"seed": 7, "epoch": 0}
    assert seen == {
        sample_id: {
            augment(image_HWC, options, **key, sample_id=sample_id, occurrence=number).tobytes()
            for number in range(occurrences)
        }
        for sample_id, image_HWC in stored.items()
    }


def test_pixels_do_not_depend_on_what_the_thread_did_before_with_opencv():
    """Decoding an image switches the kernels of IPP off, for its thread alone; IPP's colour circle is another one."""
    image_HWC = np.random.default_rng(5).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    uses_ipp = cv2.ipp.useIPP()
    try:
        for name, value in OF_ONE_IMAGE.items():
            options = AugmentOptions(**{name: value})
            changed = set()
            for switch in (True, False):
                cv2.ipp.setUseIPP(switch)
                images = [augment(image_HWC, options, seed=7, epoch=0, sample_id=each) for each in range(1, 17)]
                changed.add(b"".join(each.tobytes() for each in images))
                assert cv2.ipp.useIPP() == switch, "the switch is the thread's own: give it back"
            assert len(changed) == 1, name
    finally:
        cv2.ipp.setUseIPP(uses_ipp)


def test_every_framework_gets_the_same_batches(augmentable):
    torch = pytest.importorskip("torch")
    tf = pytest.importorskip("tensorflow")
    arrays = list(augmentable.batches("train", **BATCH, augment=EVERYTHING))
    tensors = augmentable.torch_loader("train", layout="NHWC", **BATCH, augment=EVERYTHING)
    rows = augmentable.tf_dataset("train", **BATCH, augment=EVERYTHING)
    assert rows.element_spec[0].shape == (24, 12, 12, 3)
    assert (rows.element_spec[1].shape, rows.element_spec[1].dtype) == ((24, 3), tf.float32)
    for batch, in_torch, (images, labels, weights) in zip(arrays, tensors, rows, strict=True):
        assert batch.labels.shape == (24, 3) and batch.labels.dtype == np.float32
        assert torch.equal(in_torch.images, torch.from_numpy(batch.images))
        assert torch.equal(in_torch.labels, torch.from_numpy(batch.labels))
        assert np.array_equal(images, batch.images) and np.array_equal(labels, batch.labels)
        assert np.array_equal(weights, batch.weights)


def test_labels_are_shares_and_padding_has_none(augmentable):
    classes = {sample.sample_id: sample.label for sample in augmentable.samples("train")}
    *_, last = augmentable.batches("train", **BATCH, augment=EVERYTHING)
    is_real_N = last.weights > 0
    assert 0 < is_real_N.sum() < 24
    assert not last.labels[~is_real_N].any() and not last.sample_ids[~is_real_N].any()
    assert last.labels[is_real_N].sum(axis=1) == pytest.approx(np.ones(is_real_N.sum()))
    mixed = 0
    for batch in augmentable.batches("train", **BATCH, augment=AugmentOptions(cutmix_alpha=1.0)):
        for stream in range(0, 24, 3):
            ids = [each for each in batch.sample_ids[stream : stream + 3].tolist() if each]
            shares_K = batch.labels[stream : stream + 3].sum(axis=0)
            assert {int(label) for label in np.flatnonzero(shares_K)} <= {classes[each] for each in ids}
        mixed += int((batch.labels.max(axis=1) < 1).sum())
    assert mixed > 20


def test_a_name_is_a_preset_and_only_photographs_are_mirrored(augmentable):
    for name in ("default", "imagenet", "cifar"):
        given = epoch(augmentable, augment=name)
        assert given == epoch(augmentable, augment=AugmentOptions(preset=name))
    stored = {sample.sample_id: sample.image_HWC for sample in augmentable.samples("train")}
    for nothing in (None, "none", AugmentOptions(preset="none")):
        for batch in augmentable.batches("train", **BATCH, augment=nothing):
            for sample_id, image_HWC in zip(batch.sample_ids.tolist(), batch.images, strict=True):
                assert not sample_id or np.array_equal(image_HWC, stored[sample_id])
    assert epoch(augmentable, augment="default") == epoch(augmentable, augment=AugmentOptions(random_flip=False))


def test_evaluation_takes_the_centre(augmentable):
    stored = {sample.sample_id: sample.image_HWC for sample in augmentable.samples("test")}
    for batch in augmentable.batches("test", **BATCH, shuffle=False, augment=EVERYTHING.unchanged):
        for sample_id, image_HWC in zip(batch.sample_ids.tolist(), batch.images, strict=True):
            assert not sample_id or np.array_equal(image_HWC, stored[sample_id][2:14, 2:14])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"augment": "imagnet"}, "augment = 'imagnet'; expected AugmentOptions or one of default, imagenet, cifar"),
        ({"augment": AugmentOptions(size=17)}, "size = 17, but the stored images have 16 x 16 pixels; .* at most 16"),
        (
            {"augment": AugmentOptions(mixup_alpha=0.2), "num_streams": 24},
            "mixup_alpha = 0.2, but a step has 1 row of each stream; expected at least 2, .* lower num_streams",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_batch(augmentable, given, said):
    with pytest.raises(UsageError, match=said):
        augmentable.batches("train", **{**BATCH, **given})


def test_numbers_are_not_mixed_and_shares_of_several_classes_are(tmp_path):
    datasets = {}
    for kind in ("float", "multi_label"):
        (tmp_path / kind).mkdir()
        source = label_kinds.as_csv(tmp_path / kind, kind, label_kinds.LABELS[kind])
        built = build_here(source, str(tmp_path / f"{kind}-dataset"), EtlConfig(image_size=16))
        datasets[kind] = shardmill.open_dataset(built)
    options = AugmentOptions(cutmix_alpha=1.0)
    with pytest.raises(UsageError, match="cutmix_alpha = 1, but the dataset has labels of kind 'float'"):
        datasets["float"].batches("train", global_batch_size=16, num_streams=1, augment=options)
    [batch] = datasets["multi_label"].batches("train", global_batch_size=16, num_streams=1, augment=options)
    assert batch.labels.shape == (16, 3)
    assert ((batch.labels > 0) & (batch.labels < 1)).any()


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
