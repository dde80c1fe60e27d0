"""Every backend and reader keeps its contract; `SampleDropout` draws by sample."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalOperand=false
from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from shardmill import memory as recycled_memory
from shardmill.dataset.dataset import open_dataset
from shardmill.errors import TrainingError, UsageError
from shardmill.ids import format_sample_id
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.loader.samples import read_samples
from shardmill.stores import STORES
from tests.counting_store import BYTES_READ
from tests.far_store import ENTRY, SCHEME
from tests.lab.datasets import make_dataset
from tests.train.forked_ranks import launch_forked
from tests.train.learners import CLIFF, LINEAR, SHAPE, STATEFUL, TORCH_MODELS, batch_of, learner, state
from tests.train.ranks import train_on_ranks
from tests.train.training import Killed, Recorder, check_trainable, task_of, train_here
from train.api import StatePart
from train.backends import BACKENDS
from train.config import TrainConfig
from train.contracts.mesh import Mesh, MeshShape
from train.planning.checks import check
from train.planning.setup import resolve
from train.planning.trainings import training_dir
from train.published.export import export_training
from train.published.exported import load_exported
from train.readers import READERS
from train.readers.petastorm import shares_of_ranks
from train.readers.planned import Epochs
from train.reporting.run_log import RunLog


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_state_of_one_moment_gives_the_same_next_step(name, optimizer):
    batch, config = batch_of(SHAPE, num_rows=6), {"optimizer": optimizer}
    first = learner(name, STATEFUL[name], **config)
    untouched = state(first)
    first.apply(first.gradients(batch, 6, 1.0), 0.1)
    saved = {part: first.arrays(part) for part in StatePart}
    outcome = first.apply(first.gradients(batch, 6, 1.0), 0.1)
    after = state(first)

    second = learner(name, STATEFUL[name], seed=1, **config)
    assert state(second)[StatePart.WEIGHTS] != untouched[StatePart.WEIGHTS]
    for part, arrays in saved.items():
        second.assign(part, arrays, "the first")
    again = second.apply(second.gradients(batch, 6, 1.0), 0.1)
    assert (again, state(second)) == (outcome, after)
    assert second.weights_sha256() == first.weights_sha256()
    assert second.config_sha256 == first.config_sha256


@pytest.mark.parametrize("name", BACKENDS)
def test_the_parts_of_a_batch_add_up_to_its_gradient(name):
    whole = batch_of(SHAPE, num_rows=6)
    one = learner(name, LINEAR[name], label_smoothing=0.1)
    expected = [np.array(each) for each in one.gradients(whole, 6, 1.0)]
    parts = []
    for rows in (slice(0, 4), slice(4, 6)):
        names = ("images_NHWC", "labels_N", "weights_N", "sample_ids_N")
        part = replace(whole, **{each: getattr(whole, each)[rows] for each in names})
        parts.append([np.array(each) for each in one.gradients(part, 6, (rows.stop - rows.start) / 6)])
    for total, left, right in zip(expected, *parts, strict=True):
        np.testing.assert_allclose(left + right, total, rtol=1e-4, atol=1e-6)


def test_backends_agree_on_loss_and_gradient():
    """The same linear model with the same weights, in each framework."""
    kernel = np.random.default_rng(0).normal(0, 0.05, (16 * 16 * 3, 3)).astype(np.float32)
    bias, batch = np.array([0.1, 0.2, 0.3], np.float32), batch_of(SHAPE, num_rows=6)
    # PyTorch has channels first, and a kernel's outputs first.
    in_torch = kernel.reshape(16, 16, 3, 3).transpose(3, 2, 0, 1).reshape(3, -1)
    found = {}
    for name, weights in {"keras": [kernel, bias], "torch": [in_torch, bias]}.items():
        one = learner(name, LINEAR[name], label_smoothing=0.2, optimizer="sgd", gradient_clip_norm=0.5)
        one.assign(StatePart.WEIGHTS, [np.ascontiguousarray(each) for each in weights], "the test")
        outcome = one.apply(one.gradients(batch, 6, 1.0), 0.01)
        after, bias_after = one.arrays(StatePart.WEIGHTS)
        if name == "torch":
            after = after.reshape(3, 3, 16, 16).transpose(2, 3, 1, 0).reshape(-1, 3)
        found[name] = (outcome, after, bias_after)
    (one, after, bias_after), (other, other_after, other_bias) = found["keras"], found["torch"]
    assert one.loss == pytest.approx(other.loss, rel=1e-5) and one.num_correct == other.num_correct
    assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4) and one.gradient_norm > 0.5
    np.testing.assert_allclose(after, other_after, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(bias_after, other_bias, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_loss_that_is_not_a_number_changes_nothing(name):
    one = learner(name, LINEAR[name])
    one.assign(StatePart.WEIGHTS, [np.full_like(each, np.inf) for each in one.arrays(StatePart.WEIGHTS)], "the test")
    before = state(one)
    assert not one.apply(one.gradients(batch_of(SHAPE), 4, 1.0), None).is_applied
    assert state(one) == before


@pytest.mark.parametrize("name", BACKENDS)
def test_a_gradient_without_bounds_changes_nothing_though_the_loss_is_finite(name):
    one = learner(name, CLIFF[name])
    before = state(one)
    outcome = one.apply(one.gradients(batch_of(SHAPE), 4, 1.0), None)
    assert (np.isfinite(outcome.loss), outcome.gradient_norm, outcome.is_applied) == (True, np.inf, False)
    assert state(one) == before


@pytest.mark.parametrize("name", BACKENDS)
def test_ranks_draw_numbers_of_their_own(name):
    one = learner(name, STATEFUL[name])
    states = [[array.tobytes() for array in one.arrays(StatePart.OWN)]]
    for rank in (1, 2):
        one.reseed(rank)
        states.append([array.tobytes() for array in one.arrays(StatePart.OWN)])
    changed = [len(set(of_array)) for of_array in zip(*states, strict=True)]
    assert sorted(changed) == [*[1] * (len(changed) - 1), 3], "the generator alone, and anew for each rank"


@pytest.mark.parametrize("name", BACKENDS)
def test_state_of_another_model_is_refused(name):
    one = learner(name, LINEAR[name])
    for part in (StatePart.WEIGHTS, StatePart.OPTIMIZER):
        arrays = one.arrays(part)
        with pytest.raises(UsageError, match="a file holds"):
            one.assign(part, arrays[1:], "a file")
        with pytest.raises(UsageError, match="a file holds"):
            one.assign(part, [np.zeros((2, 2), np.float32), *arrays[1:]], "a file")


@pytest.mark.parametrize("name", BACKENDS)
def test_an_export_answers_as_the_model_does(name, tmp_path):
    one = learner(name, STATEFUL[name])
    one.apply(one.gradients(batch_of(SHAPE), 4, 1.0), 0.1)
    assert one.export_backend == name
    one.write_served(tmp_path)
    served = BACKENDS[name].load_served(tmp_path)
    for num_rows in (1, 5):
        images_NHWC = batch_of(SHAPE, num_rows).images_NHWC
        predictions_NK = served.predictions(images_NHWC)
        assert predictions_NK.shape == (num_rows, 3) and predictions_NK.dtype == np.float32
        np.testing.assert_allclose(predictions_NK.sum(axis=1), 1, rtol=1e-5)
        np.testing.assert_allclose(predictions_NK, one.predictions(images_NHWC), atol=1e-5)
    one.write_portable(tmp_path, batch_of(SHAPE).images_NHWC, 1e-5)
    assert any(path.is_file() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_model", r"the factory returned builtins.str; expected an nn.Module"),
        ("one_class_too_many", "returns an output of shape \\(2, 4\\) for 2 images; expected 3 outputs"),
        ("WithFeatures", "returns a dict; expected one tensor of shape \\(N, 3\\); return only the outputs"),
        ("frozen", r"has no trainable variables"),
    ],
)
def test_a_module_that_does_not_fit_is_refused(factory, message):
    with pytest.raises(UsageError, match=message):
        learner("torch", f"{TORCH_MODELS}:{factory}")


def test_a_softmax_at_the_end_gives_probabilities():
    assert not learner("torch", f"{TORCH_MODELS}:with_softmax").outputs_are_logits
    assert learner("torch", f"{TORCH_MODELS}:SoftmaxElsewhere").outputs_are_logits


def test_a_module_that_cannot_be_exported_is_refused_before_its_first_step(tiny_uri, tmp_path):
    recorder = Recorder()
    with pytest.raises(UsageError, match=r"torch.export cannot follow train.model = .*Branching'"):
        train_here(tiny_uri, tmp_path, recorder, model=f"{TORCH_MODELS}:Branching")
    assert not recorder.steps


def test_a_trial_of_the_export_changes_nothing():
    one = learner("torch", STATEFUL["torch"])
    before = state(one)
    one.check_exportable()
    assert state(one) == before


def resolved(config: TrainConfig) -> TrainConfig:
    return resolve(config, SparkConfig()).config


def backend_of(config: TrainConfig) -> str:
    return resolved(config).backend


def test_the_backend_follows_from_strategy_and_model():
    assert backend_of(TrainConfig()) == "keras"
    assert backend_of(TrainConfig(model=LINEAR["torch"])) == "torch"
    assert backend_of(TrainConfig(model=LINEAR["keras"])) == "keras"
    assert backend_of(TrainConfig(strategy="torch_ddp")) == "torch"
    assert backend_of(TrainConfig(backend="torch")) == "torch"


def test_a_torch_training_is_exported_and_loaded_by_torch(tiny_uri, tmp_path):
    config = TrainConfig(model=LINEAR["torch"], epochs=8, learning_rate=0.01)
    result = train_here(tiny_uri, tmp_path, **config.model_dump(exclude_unset=True))
    outcome = export_training(str(tmp_path), config, result, "run")
    record = outcome.export.record
    assert (record.backend, record.parity_max_abs_diff <= 1e-5) == ("torch", True)
    assert record.evaluation.accuracy == result.evaluation.accuracy == 1.0
    model = load_exported(str(tmp_path), outcome.export.number)
    assert model.predict(batch_of(SHAPE).images_NHWC).shape == (4, 3)


@pytest.mark.starts("ranks")
def test_a_keras_model_trained_by_torch_is_exported_by_keras(tiny_uri, tmp_path):
    """A rank of `torch_ddp` trains the demo's model; the process that exports has TensorFlow."""
    task = task_of(tiny_uri, tmp_path, strategy="torch_ddp", launcher="local", num_workers=1, epochs=1)
    result = launch_forked(task, RunLog(SilentObserver()))
    assert result.export_backend == "keras"
    export = export_training(str(tmp_path), task.config, result, "run").export
    assert export.record.backend == "keras"
    assert export.record.evaluation.loss == pytest.approx(result.evaluation.loss, rel=1e-5)


@pytest.mark.starts("program")
def test_a_torch_rank_imports_no_tensorflow(tiny_uri, tmp_path):
    command = [sys.executable, "-m", "tests.programs.imports_of_a_torch_training", f"{TORCH_MODELS}:linear"]
    done = subprocess.run([*command, tiny_uri, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr[-1000:]


@pytest.mark.needs("horovod")
def test_another_framework_is_another_training(tiny_uri):
    pin = open_dataset(tiny_uri).pin
    folders = {
        (strategy, backend): training_dir(resolved(TrainConfig(strategy=strategy, backend=backend)), pin, "")
        for strategy, backend in (("single", "auto"), ("single", "keras"), ("horovod", "auto"), ("torch_ddp", "auto"))
    }
    assert len(set(folders.values())) == 2
    assert folders["torch_ddp", "auto"] == training_dir(resolved(TrainConfig(backend="torch")), pin, "")


def test_a_sample_for_which_the_model_gives_no_number_is_named(tiny_uri, tmp_path, monkeypatch):
    samples = read_samples(open_dataset(tiny_uri), "train", 1000)
    *_, second, brightest = sorted(samples, key=lambda sample: int(sample.image_HWC.astype(int).sum()))
    from tests.train import torch_models

    monkeypatch.setattr(torch_models.Fragile, "limit", float(second.image_HWC.astype(int).sum()) + 0.5)
    name, still = format_sample_id(brightest.sample_id), {"random_crop_padding": 0}
    with pytest.raises(TrainingError, match=rf"not applied; the model's outputs are not finite for 1 samples: {name};"):
        train_here(tiny_uri, tmp_path, model="tests.train.torch_models:Fragile", standardize=False, augment=still)


CONFIG = {"global_batch_size": 24, "num_streams": 6, "augment": {"random_crop_padding": 0, "random_flip": False}}


def config_of(reader: str, **more) -> TrainConfig:
    return TrainConfig(**{**CONFIG, "reader": reader, "strategy": "torch_ddp", "launcher": "local", **more})


@pytest.fixture(scope="module")
def many_uri(tmp_path_factory) -> str:
    """300 images in several row groups, so that ranks have some to share."""
    return make_dataset(tmp_path_factory.mktemp("many"), num_images=300)


def batches_of(reader: str, uri: str, epoch: int, num_ranks: int, **more):
    """By rank: all batches of an epoch."""
    dataset, config = open_dataset(uri), config_of(reader, num_workers=num_ranks, **more)
    found = []
    for rank in range(num_ranks):
        opened = Epochs(READERS[reader], dataset, config, Mesh.of(config).data_index(rank))[epoch]
        with opened.read(0) as batches:
            found.append(list(batches))
        assert len(found[-1]) == opened.num_steps
        for step in range(opened.num_steps):
            assert opened.num_rows_of_step(step) > 0
        assert sum(map(opened.num_rows_of_step, range(opened.num_steps))) == opened.num_rows
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("reader", READERS.installed())
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_read_in_equal_steps_and_no_sample_twice(many_uri, reader, num_ranks):
    of_ranks = batches_of(reader, many_uri, 0, num_ranks)
    assert len({len(batches) for batches in of_ranks}) == 1
    stored = {sample.sample_id: sample for sample in read_samples(open_dataset(many_uri), "train", 10**6)}
    seen: Counter[int] = Counter()
    for batch in (batch for batches in of_ranks for batch in batches):
        for place in np.flatnonzero(batch.weights_N > 0):
            sample = stored[int(batch.sample_ids_N[place])]
            assert np.array_equal(batch.images_NHWC[place], sample.image_HWC)
            assert batch.labels_N[place] == sample.label
            seen[sample.sample_id] += 1
    assert set(seen.values()) == {1} and set(seen) <= set(stored)
    config = config_of(reader, num_workers=num_ranks)
    opened = Epochs(READERS[reader], open_dataset(many_uri), config, Mesh.of(config).data_index(0))
    assert len(seen) == opened.num_rows
    if READERS[reader].is_exact:
        assert set(seen) == set(stored)
    else:
        # Nothing but what fills no whole batch on the poorest rank is left out.
        assert len(stored) - opened.num_rows < 24 * num_ranks + 16 * num_ranks


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("reader", READERS.installed())
def test_an_epoch_has_an_order_of_its_own_and_the_same_one_again(many_uri, reader):
    def order(epoch: int, seed: int = 0) -> list[int]:
        [batches] = batches_of(reader, many_uri, epoch, 1, seed=seed)
        return [sample_id for batch in batches for sample_id in batch.sample_ids_N.tolist()]

    assert order(0) == order(0)
    assert order(0) != order(1) and order(0) != order(0, seed=1)


@pytest.mark.needs("petastorm")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_training_by_petastorm_continues_at_the_start_of_its_epoch(tiny_uri, tmp_path):
    config = {"reader": "petastorm", "epochs": 3, "global_batch_size": 24, "num_streams": 6, "record_samples": True,
              "checkpoint_every_steps": 1, "model": "small_cnn"}  # fmt: skip
    whole, resumed = Recorder(), Recorder()
    fresh = train_here(tiny_uri, tmp_path / "fresh", whole, **config)
    steps_of_an_epoch = whole.steps[0].num_steps
    assert steps_of_an_epoch >= 2
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "killed", Recorder(steps_of_an_epoch + 1), **config)
    result = train_here(tiny_uri, tmp_path / "killed", resumed, **config)
    assert result.resumed_from is not None and (result.resumed_from.epoch, result.resumed_from.step) == (1, 0)
    # All that an inexact reader does by epochs it does exactly.
    assert result.weights_sha256 == fresh.weights_sha256
    assert resumed.losses == {key: loss for key, loss in whole.losses.items() if key[0] > 0}
    assert result.evaluation == fresh.evaluation


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.starts("ranks")
def test_two_ranks_train_by_petastorm(tiny_uri, tmp_path):
    config = {"reader": "petastorm", "strategy": "torch_ddp", "model": "tests.train.torch_models:smooth", "epochs": 2,
              "global_batch_size": 24, "num_streams": 6, "record_samples": True}  # fmt: skip
    result, watcher = train_on_ranks(tiny_uri, tmp_path, 2, config)
    opened = Epochs(READERS["petastorm"], open_dataset(tiny_uri), config_of("petastorm", num_workers=2),
                    Mesh(MeshShape(data=2), num_streams=8).data_index(0))  # fmt: skip
    assert result.num_steps == 2 * opened.num_steps > 0
    for epoch in range(2):
        seen = [sample_id for (number, _), ids in watcher.sample_ids.items() if number == epoch for sample_id in ids]
        assert len(seen) == len(set(seen)) == opened.num_rows


@pytest.mark.needs("petastorm")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_its_metadata_is_never_unpickled(tmp_path):
    """Beside the shards lies a `_common_metadata` file as Petastorm writes it, whose pickle writes a file."""
    from petastorm.etl.dataset_metadata import UNISCHEMA_KEY, get_schema_from_dataset_url

    uri = make_dataset(tmp_path)
    [folder] = {Path(file).parent for file in open_dataset(uri).files("train", "parquet")}
    proof = tmp_path / "unpickled"
    schema = pq.read_schema(next(folder.glob("*.parquet"))).with_metadata({UNISCHEMA_KEY: pickle.dumps(Trap(proof))})
    pq.write_metadata(schema, folder / "_common_metadata")
    pq.write_metadata(schema, folder / "_metadata")
    train_here(uri, tmp_path / "models", reader="petastorm", epochs=1, global_batch_size=24, num_streams=6)
    assert not proof.exists()
    # Petastorm itself, on the folder, falls into it.
    get_schema_from_dataset_url(folder.as_uri())
    assert proof.exists()


class Trap:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        # Petastorm unpickles what its own list of modules holds; `builtins` is among them.
        return (exec, (f"open({str(self.proof)!r}, 'w').close()",))


@pytest.mark.needs("petastorm")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_what_it_cannot_read_is_refused_before_anything_starts(tmp_path, many_uri):
    tfrecord = open_dataset(make_dataset(tmp_path, formats=("tfrecord",)))
    with pytest.raises(
        UsageError, match=r"on a dataset of tfrecord; it reads Parquet only.*train.reader = 'shardmill'"
    ):
        check_trainable(config_of("petastorm"), tfrecord)
    many = open_dataset(many_uri)
    with pytest.raises(UsageError, match=r"train.format = 'tfrecord'.*Parquet only"):
        check_trainable(config_of("petastorm", format="tfrecord"), many)
    shares = shares_of_ranks(many, config_of("petastorm"), 6)
    too_large = 6 * (min(share.num_rows for share in shares) + 1)
    with pytest.raises(UsageError, match=rf"row groups rank \d gets \d+ rows.*expected at least its {too_large // 6}"):
        check_trainable(config_of("petastorm", num_workers=6, global_batch_size=too_large), many)
    check_trainable(config_of("petastorm"), many)
    # Fewer ranks are no easier case: of four row groups each of four ranks has one, and of three ranks one has two of
    # the streams to fill with one row group.
    few = open_dataset(make_dataset(tmp_path / "few", chunk_bytes=10**6, formats=("parquet",)))
    rows = few.index("train", "parquet").chunk_rows.tolist()
    assert len(rows) == 4, rows
    config = config_of("petastorm", num_workers=4, num_streams=4, global_batch_size=4 * (min(rows) - 1))
    check(resolve(config, SparkConfig(), few), of_ranks=True)
    with pytest.raises(UsageError, match=r"row groups rank 2 gets \d+ rows"):
        check(resolve(config.model_copy(update={"num_workers": 3}), SparkConfig(), few), of_ranks=True)
    assert "samples an epoch" in READERS["petastorm"].limits(config_of("petastorm", num_workers=1), many)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_default_leaves_old_trainings_what_they_were():
    from train.identity import settings_that_matter

    assert "reader" not in settings_that_matter(config_of("shardmill"))
    assert settings_that_matter(config_of("petastorm"))["reader"] == '"petastorm"'


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote with a cache"])
def test_twenty_epochs_of_a_training_take_the_memory_of_one(
    is_remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of 10 MB of pixels an epoch, in windows of a fifth of it."""
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    uri = make_dataset(tmp_path, num_images=300, image_size=128, encoding="raw", chunk_bytes=500_000)
    reading = {"prefetch_bytes": 1, "window_budget_bytes": 2_000_000, "threads": 2}
    cache = {"dir": str(tmp_path / "cache")} if is_remote else {}
    config = config_of("shardmill", num_workers=1, num_streams=2, reading=reading, cache=cache)
    opened = Epochs(
        READERS["shardmill"], open_dataset(f"{SCHEME}://{uri}" if is_remote else uri), config,
        Mesh.of(config).data_index(0),
    )  # fmt: skip
    assert opened[0].num_steps == opened.num_steps and not (tmp_path / "cache").exists(), "made when an epoch is read"
    addresses, resident, taken = set(), [], []
    monkeypatch.setattr(
        recycled_memory.RecycledMemory, "_new", lambda *given, new=recycled_memory.RecycledMemory._new: (
            taken.append(given[1]), new(*given)
        )[1]
    )  # fmt: skip
    for number in range(20):
        with opened[number].read(0) as batches:
            for batch in batches:
                addresses.add(batch.images_NHWC.ctypes.data)
        resident.append((resident_mb(), taken.count(24 * 128 * 128 * 3)))
    assert len(addresses) <= 2 + 4, "the batches in the queue and the threads, those of the loop"
    assert resident[-1][1] - resident[4][1] == 0, f"new memory of batches in late epochs: {resident}"
    assert resident[-1][0] - resident[4][0] < 8, resident


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_split_within_the_windows_is_read_once_for_all_epochs_of_a_training(many_uri: str, monkeypatch):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    config = config_of("shardmill", num_workers=1)
    opened = Epochs(READERS["shardmill"], open_dataset(f"{SCHEME}://{many_uri}"), config, Mesh.of(config).data_index(0))
    orders = []
    for number in range(3):
        BYTES_READ.clear()
        with opened[number].read(0) as batches:
            orders.append([batch.sample_ids_N.tolist() for batch in batches])
        assert any(path.startswith("shards/") for path in BYTES_READ) == (number == 0)
    assert orders[0] != orders[1] != orders[2]
    with opened[1].read(2) as batches:
        assert [batch.sample_ids_N.tolist() for batch in batches] == orders[1][2:]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_ranks_keep_chunks_of_a_remote_dataset(many_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    cache, uri = {"dir": str(tmp_path)}, f"{SCHEME}://{many_uri}"
    expected = batches_of("shardmill", many_uri, 0, 2)
    BYTES_READ.clear()
    for epoch in (0, 1, 0):
        found = batches_of("shardmill", uri, epoch, 2, cache=cache)
    for batch, other in zip(chain(*found), chain(*expected), strict=True):
        assert np.array_equal(batch.images_NHWC, other.images_NHWC)
    stored = sum(shard.size_bytes for shard in open_dataset(uri).shards_of("train"))
    # A chunk that was read twice would be more; of each file its first four bytes are never read.
    assert 0.9 * stored < sum(size for path, size in BYTES_READ.items() if path.startswith("shards/")) <= stored
    config = config_of("shardmill", cache={**cache, "limit_bytes": 999})
    with pytest.raises(
        UsageError, match=r"train.cache.limit_bytes = 999; expected at least \d+ bytes, one shuffle window"
    ):
        check_trainable(config, open_dataset(uri))
    check_trainable(config, open_dataset(many_uri))
    alone = config_of("shardmill", cache={"limit_bytes": 999})
    with pytest.raises(UsageError, match=r"train.cache.limit_bytes = 999 without train.cache.dir.*set both"):
        check_trainable(alone, open_dataset(many_uri))
    with pytest.raises(UsageError, match=r"train.cache.dir = 's3://a/b'; expected a folder on a local disk"):
        check_trainable(config_of("shardmill", cache={"dir": "s3://a/b"}), open_dataset(many_uri))
