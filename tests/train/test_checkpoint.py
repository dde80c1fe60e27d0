"""A checkpoint is whole or it is not there, belongs to one training, and is read back by any number of ranks."""

from __future__ import annotations

import io
import json
import math
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.checksummed import with_checksum
from shardmill.dataset.dataset import open_dataset
from shardmill.errors import CommitConflict, IntegrityError, SecurityRefusal, StorageError, UsageError
from shardmill.stores import STORES, open_store
from shardmill.values import DatasetPin
from tests.counting_store import BYTES_READ, ENTRY, SCHEME
from tests.lab.datasets import make_dataset
from tests.train.checkpoints import CONFIG, KILLED_AT, newest, write_checkpoint
from tests.train.training import Killed, Recorder, train_here
from train.backends.keras.runtime import assign_variables
from train.checkpoints.arrays import OPTIMIZER, WEIGHTS, arrays_sha256, dump_arrays, load_arrays
from train.checkpoints.checkpoint import (
    MARKER,
    CheckpointFolder,
    TrainingIdentity,
    check_resumable,
    claim_attempt,
    complete_checkpoints,
    delete_checkpoint,
    open_checkpoint,
)
from train.checkpoints.shards import WEIGHTS_PART, Shard, ShardIndex, dump_index, read_index, shard_file
from train.config import TrainConfig
from train.contracts.values import BestEpoch, ModelIdentity, Progress, to_json
from train.identity import fields_of_settings, settings_of, settings_that_matter
from train.results import read_result
from train.settings import DEFAULTED, DURATION, EXECUTION
from train.strategies.options import LocalSgdOptions


def checkpoints(models: Path) -> list[str]:
    return sorted(marker.parent.name for marker in models.glob(f"t/checkpoints/*/{MARKER}"))


def flip_middle(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "weights flipped": lambda folder: flip_middle(folder / WEIGHTS),
    "optimizer flipped": lambda folder: flip_middle(folder / OPTIMIZER),
    "rank state flipped": lambda folder: flip_middle(folder / "rank-00000.npz"),
    "weights cut": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1]),
    "optimizer missing": lambda folder: (folder / OPTIMIZER).unlink(),
    "marker flipped": lambda folder: flip_middle(folder / MARKER),
    "marker cut": lambda folder: (folder / MARKER).write_bytes((folder / MARKER).read_bytes()[:100]),
    "marker empty": lambda folder: (folder / MARKER).write_bytes(b""),
    "marker not written": lambda folder: (folder / MARKER).unlink(),
    "from another step": lambda folder: shutil.copy(sorted(folder.parent.iterdir())[-2] / WEIGHTS, folder / WEIGHTS),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_the_end_is_the_same(tiny_uri, models, whole, damage):
    damaged = newest(models)
    DAMAGES[damage](damaged)
    recorder = Recorder()
    result = train_here(tiny_uri, models, recorder, **CONFIG)
    [discarded] = recorder.named("checkpoint_discarded")
    assert models / discarded["path"] == damaged
    assert recorder.named("resumed")[0]["global_step"] == KILLED_AT - 1
    assert result.weights_sha256 == whole.weights_sha256


def test_a_resume_reads_every_file_once(tiny_uri, models, monkeypatch):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    files = {f"t/checkpoints/{file.parent.name}/{file.name}": file.stat().st_size for file in newest(models).iterdir()}
    BYTES_READ.clear()
    with pytest.raises(Killed):
        train_here(tiny_uri, f"counted://{models}", Recorder(killed_at=KILLED_AT), **CONFIG)
    assert {path: size for path, size in BYTES_READ.items() if path.startswith("t/checkpoints")} == files


def test_every_flipped_byte_of_a_marker_is_seen(models):
    marker = newest(models) / MARKER
    data = marker.read_bytes()
    good = newest(models)
    for place in range(0, len(data), 7):
        altered = bytearray(data)
        altered[place] ^= 4
        marker.write_bytes(altered)
        assert newest(models) != good, f"byte {place}"
    marker.write_bytes(data)
    assert newest(models) == good


def test_with_every_checkpoint_damaged_it_starts_anew(tiny_uri, models, whole):
    for name in checkpoints(models):
        flip_middle(models / "t" / "checkpoints" / name / WEIGHTS)
    recorder = Recorder()
    result = train_here(tiny_uri, models, recorder, **CONFIG)
    assert len(recorder.named("checkpoint_discarded")) == 3
    assert result.resumed_from is None and result.weights_sha256 == whole.weights_sha256


def test_looking_for_a_checkpoint_changes_nothing(models):
    DAMAGES["weights cut"](newest(models))
    before = sorted(str(path) for path in models.rglob("*"))
    assert next(complete_checkpoints(open_store(models), "t")).marker.global_step == KILLED_AT - 1
    assert sorted(str(path) for path in models.rglob("*")) == before
    assert not list(complete_checkpoints(open_store(models), "no/such/training"))


def test_the_newest_are_kept_and_half_written_ones_go_when_they_are_old(tiny_uri, models):
    """A half-written one of a newer attempt may be under way."""
    names = ("step-00000001-a00000001", "step-00000005-a99999999")
    old, new = (models / "t" / "checkpoints" / name / WEIGHTS for name in names)
    for half in (old, new):
        half.parent.mkdir()
        half.write_bytes(b"half")
    train_here(tiny_uri, models, **CONFIG)
    *best, first, second, third = checkpoints(models)
    assert [name[:13] for name in (first, second, third)] == ["step-00000004", "step-00000005", "step-00000006"]
    # Epoch 0 was the best when steps 4 and 5 were saved; were step 6 damaged, it would be again.
    kept = [open_checkpoint(open_store(models), f"t/checkpoints/{name}") for name in (first, second)]
    bests = [each.marker.progress.best for each in kept]
    assert {best and best.checkpoint for best in bests} == {f"t/checkpoints/{name}" for name in best}
    assert not old.exists() and new.exists()


def test_what_a_newer_attempt_wrote_counts_before_later_steps_of_an_older_one(models):
    store = open_store(models)
    identity = next(complete_checkpoints(store, "t")).marker.identity
    late = CheckpointFolder(claim_attempt(store, "t", 1), keep_checkpoints=1)
    progress = Progress(best=BestEpoch(0, 1.0, late.path_of(0)))
    for step in (0, 1):
        write_checkpoint(late, step, identity, progress)
    for step in (0, 1):
        assert open_checkpoint(store, late.path_of(step)).marker.global_step == step
    assert [each.path for each in complete_checkpoints(store, "t")] == [late.path_of(1), late.path_of(0)]


IDENTITY = TrainingIdentity(DatasetPin("u", 1, ""), "plan", ModelIdentity("", ""), {"epochs": "2"})


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """Of a training with checkpoints after steps 1 and 2."""
    found = CheckpointFolder(claim_attempt(open_store(tmp_path), "t", 1), keep_checkpoints=9)
    for step in (1, 2):
        write_checkpoint(found, step, IDENTITY, Progress())
    return found


@pytest.mark.parametrize("missing", [WEIGHTS, MARKER])
def test_damaged_checkpoints_are_deleted_and_those_that_may_be_under_way_are_not(
    folder: CheckpointFolder, tmp_path: Path, missing: str
):
    shutil.copytree(tmp_path / folder.path_of(1), tmp_path / "t" / "checkpoints" / "step-00000003")
    write_checkpoint(folder, 4, IDENTITY, Progress())
    place, told = tmp_path / folder.path_of(4), list[tuple[str, str]]()
    place.joinpath(missing).unlink()
    found = [each.path for each in complete_checkpoints(folder.store, "t", lambda *each: told.append(each))]
    # One without an attempt in its name is of the oldest.
    assert found == [folder.path_of(2), folder.path_of(1), "t/checkpoints/step-00000003"]
    [(path, reason)] = told
    assert path == folder.path_of(4) and ("is missing" if missing == WEIGHTS else f"has no {MARKER}") in reason
    assert bool([*place.glob("*")]) == (missing == MARKER)
    delete_checkpoint(folder.store, folder.path_of(2))
    assert next(complete_checkpoints(folder.store, "t")).path == folder.path_of(1)


def test_of_a_checkpoint_each_file_is_verified_when_it_is_asked_for(folder: CheckpointFolder, tmp_path: Path):
    found = open_checkpoint(folder.store, folder.path_of(1))
    saved = found.files(folder.store)
    assert (saved.world_size, saved.names, found.marker.global_step) == (1, {WEIGHTS}, 1)
    data = (tmp_path / folder.path_of(1) / WEIGHTS).read_bytes()
    assert saved.read(WEIGHTS) == data
    found.verify(folder.store, {WEIGHTS})
    flip_middle(tmp_path / folder.path_of(1) / WEIGHTS)
    found.verify(folder.store, {OPTIMIZER})
    for read in (lambda: saved.read(WEIGHTS), lambda: found.verify(folder.store, {WEIGHTS})):
        with pytest.raises(IntegrityError, match="was altered"):
            read()
    with pytest.raises(IntegrityError, match=f"has no {OPTIMIZER}"):
        saved.read(OPTIMIZER)
    with pytest.raises(SecurityRefusal, match="leaves its root folder"):
        open_checkpoint(folder.store, "../t")


@pytest.mark.parametrize(
    ("change", "allowed", "said"),
    [
        ({}, (), ""),
        ({"dataset": DatasetPin("u", 2, "other")}, (), "dataset: then version 1, now version 2"),
        ({"settings": {"epochs": "3"}}, (), "train.epochs: then 2, now 3"),
        ({"settings": {"epochs": "3"}}, ("epochs",), ""),
        ({"settings": {}}, (), "train.epochs: then 2, now absent"),
        ({"model": ModelIdentity("", "x")}, (), "built model: then configuration , now x"),
        ({"plan_fingerprint": "other"}, (), "epoch plan: then plan, now other"),
        # A setting explains another model and another plan.
        (
            {"settings": {"epochs": "3"}, "plan_fingerprint": "x", "model": ModelIdentity("", "x")},
            (),
            "train.epochs: then 2, now 3",
        ),
    ],
)
def test_only_the_same_training_resumes(folder: CheckpointFolder, change, allowed, said):
    found, now = open_checkpoint(folder.store, folder.path_of(1)), replace(IDENTITY, **change)
    if not said:
        check_resumable(found, now, allowed)
        return
    with pytest.raises(UsageError) as refused:
        check_resumable(found, now, allowed)
    assert refused.value.what == f"the checkpoint {found.path} belongs to another training: {said}"


def test_an_attempt_that_was_overtaken_publishes_nothing_more(tiny_uri, tmp_path, whole):
    """One driver runs the whole training while another, which a scheduler has lost sight of, stands at a step."""
    second = Recorder()
    results = []

    class Overtaken(Recorder):
        def step(self, report) -> None:
            super().step(report)
            if report.epoch == 1 and report.step == 0:
                results.append(train_here(tiny_uri, tmp_path, second, **CONFIG))

    with pytest.raises(CommitConflict, match=r"attempt 1 at .*/t is no longer the newest: attempt 2 began on host"):
        train_here(tiny_uri, tmp_path, Overtaken(), **CONFIG)
    assert second.named("resumed") and not second.named("checkpoint_discarded")
    [result] = results
    assert result.weights_sha256 == whole.weights_sha256
    assert read_result(open_store(tmp_path), "t") == result
    # The first one's checkpoints after it was overtaken have no marker: they were never published.
    newest = next(complete_checkpoints(open_store(tmp_path), "t"))
    assert newest.path == result.last_checkpoint and newest.path.endswith("a00000002")


@pytest.mark.parametrize("path", ["../../outside", "/etc/passwd"])
def test_a_marker_whose_names_leave_its_folder_is_refused(tiny_uri, models, path):
    marker = newest(models) / MARKER
    body = json.loads(marker.read_bytes())["body"]
    body["files"][0]["path"] = path
    marker.write_bytes(with_checksum(json.dumps(body).encode()))
    with pytest.raises(SecurityRefusal, match="leaves its root folder"):
        train_here(tiny_uri, models, **CONFIG)


def test_nothing_in_a_checkpoint_is_code(models):

    folder = newest(models)
    for file in folder.glob("*.npz"):
        with np.load(file, allow_pickle=False) as stored:
            assert all(stored[name].dtype != object for name in stored.files)
    assert json.loads((folder / MARKER).read_bytes())["body"]["global_step"] == KILLED_AT


@contextmanager
def full_disk() -> Iterator[Callable[[], None]]:
    """Inside, no file can be longer than 2000 bytes, until the function is called."""
    # The kernel refuses to make a file longer than this, as it does if the disk has no more room.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_stays_full_ends_the_training_at_its_end_and_leaves_the_last_checkpoint(tiny_uri, models):
    before, recorder = newest(models), Recorder()
    with full_disk(), pytest.raises(StorageError, match=r"no space to write .*npz \(\d+ bytes\): File too large"):
        train_here(tiny_uri, models, recorder, **CONFIG)
    # It was refused at every step, and trained to the end.
    assert len(recorder.named("checkpoint_failed")) > len(recorder.steps) > 1 and not recorder.named("checkpoint")
    assert newest(models) == before


@pytest.mark.parametrize("num_refused", [1, 2, 3, 4])
def test_a_disk_that_is_full_for_a_while_costs_checkpoints_and_nothing_else(tiny_uri, tmp_path, whole, num_refused):
    """With four refusals the first epoch, so far the best, ends while the disk is full: its weights are not lost."""
    best_only = {**CONFIG, "checkpoint": {"keep": 100}}
    with full_disk() as make_room:

        class MakesRoom(Recorder):
            def event(self, name, fields) -> None:
                super().event(name, fields)
                if len(self.named("checkpoint_failed")) == num_refused:
                    make_room()

        recorder = MakesRoom()
        result = train_here(tiny_uri, tmp_path, recorder, **best_only)
    failed = recorder.named("checkpoint_failed")
    assert [each["global_step"] for each in failed] == list(range(1, num_refused + 1))
    assert all("no space to write" in each["warning"] for each in failed)
    assert result.weights_sha256 == whole.weights_sha256
    # Whatever a marker names is there.
    for found in complete_checkpoints(open_store(tmp_path), "t"):
        best = found.marker.progress.best
        assert best is None or open_checkpoint(open_store(tmp_path), best.checkpoint)


def test_checkpoints_and_results_live_on_s3(tiny_uri, s3_bucket, tmp_path, whole):
    models = f"{s3_bucket}/models"
    with pytest.raises(Killed):
        train_here(tiny_uri, models, Recorder(killed_at=3), **CONFIG)
    recorder = Recorder()
    assert train_here(tiny_uri, models, recorder, **CONFIG).weights_sha256 == whole.weights_sha256
    assert recorder.named("resumed")[0]["global_step"] == 3
    assert open_store(models).stat("t/result.json") is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"train.seed: then 0, now 1;"),
        ({"model": "small_cnn"}, r'train.model: then "tests.*:linear", now "small_cnn"'),
        ({"optimizer": "sgd", "momentum": 0.5, "schedule": "step", "schedule_step": {"factor": 0.5}},
         r'train.momentum: then absent, now 0.5; train.optimizer: then "auto", now "sgd"; train.schedule: .*; '
         r"train.schedule_step.factor: then absent, now 0.5; train.weight_decay: then absent, now 0.0001;"),
        ({"global_batch_size": 16}, r"train.global_batch_size: then 32, now 16"),
        ({"augment": {"images": "photographs"}}, r"train.augment: then .*false.* now .*true"),
    ],
)  # fmt: skip
def test_another_training_is_refused_with_each_difference(tiny_uri, models, change, message):
    with pytest.raises(UsageError, match=f"belongs to another training: .*{message}"):
        train_here(tiny_uri, models, **{**CONFIG, **change})


def test_another_dataset_version_is_refused(models, tmp_path):
    other = make_dataset(tmp_path / "other", num_images=90)
    with pytest.raises(UsageError, match="dataset: then version 1, now version 1"):
        train_here(other, models, **CONFIG)


def test_a_factory_that_builds_something_else_is_refused(tiny_uri, tmp_path, monkeypatch):
    for width in (4, 8):
        (tmp_path / f"v{width}").mkdir()
        (tmp_path / f"v{width}" / "changing_factory.py").write_text(
            "import keras\n"
            "def model(image_shape, num_classes):\n"
            f"    layers = [keras.layers.Flatten(), keras.layers.Dense({width}), keras.layers.Dense(num_classes)]\n"
            "    return keras.Sequential([keras.Input(image_shape), *layers])\n"
        )
    import sys

    config = {"model": "changing_factory:model", "checkpoint_every_steps": 1}
    monkeypatch.syspath_prepend(tmp_path / "v4")
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "models", Recorder(killed_at=2), **config)
    del sys.modules["changing_factory"]
    monkeypatch.syspath_prepend(tmp_path / "v8")
    with pytest.raises(UsageError, match=r"source of train.model: then SHA-256 \w+, now \w+; built model: then"):
        train_here(tiny_uri, tmp_path / "models", **config)


def test_a_factory_that_builds_something_else_from_the_same_source_is_refused(tiny_uri, tmp_path, monkeypatch):
    """It reads a setting from the environment: nothing in its source shows it, and no shape of a weight."""
    (tmp_path / "swaying_factory.py").write_text(
        "import os\n"
        "import keras\n"
        "def model(image_shape, num_classes):\n"
        "    layers = [keras.layers.Activation(os.environ['ACTIVATION']), keras.layers.Flatten()]\n"
        "    return keras.Sequential([keras.Input(image_shape), *layers, keras.layers.Dense(num_classes)])\n"
    )
    config = {"model": "swaying_factory:model", "checkpoint_every_steps": 1}
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ACTIVATION", "relu")
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "models", Recorder(killed_at=2), **config)
    monkeypatch.setenv("ACTIVATION", "tanh")
    with pytest.raises(UsageError, match="belongs to another training: built model: then configuration"):
        train_here(tiny_uri, tmp_path / "models", **config)
    with pytest.raises(UsageError, match="the source here has SHA-256 .* which the driver found"):
        train_here(tiny_uri, tmp_path / "models", expect_source="0" * 64, **config)


@pytest.mark.needs("horovod")
def test_what_does_not_change_the_outcome_may_change(tiny_uri, models, whole):
    recorder = Recorder()
    free = {"format": "tfrecord", "reading": {"prefetch_bytes": 1, "threads": 1}, "checkpoint_every_steps": 0,
            "strategy": "horovod"}  # fmt: skip
    assert {"reading.prefetch_bytes", "reading.threads", *free} - {"reading"} <= settings_of(EXECUTION)
    result = train_here(tiny_uri, models, recorder, **{**CONFIG, **free})
    assert recorder.named("resumed")
    assert result.weights_sha256 == whole.weights_sha256


def test_every_free_setting_exists():
    free = settings_of(EXECUTION) | settings_of(DURATION) | settings_of(DEFAULTED) | {"backend"}
    assert fields_of_settings().keys() >= free
    # Written out, because a new setting that is named here would rename every training there is: declare it DEFAULTED.
    assert sorted(settings_that_matter(TrainConfig())) == [
        "augment", "backend", "early_stop_epochs", "global_batch_size", "gradient_clip_norm", "label_smoothing",
        "learning_rate", "learning_rate_batch_size", "loss", "mixed_precision", "model", "model_outputs",
        "num_streams", "optimizer", "schedule", "seed", "standardize", "warmup_steps",
    ]  # fmt: skip


def test_a_setting_that_changes_nothing_makes_no_other_training():
    """What images are declared to be, if that decides nothing; the value of `auto`."""
    for one, other in (
        ({}, {"augment": {"random_flip": False}}),
        ({"augment": {"random_flip": True}}, {"augment": {"images": "photographs"}}),
        ({"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-4}),
    ):
        assert settings_that_matter(TrainConfig(**one)) == settings_that_matter(TrainConfig(**other))


@pytest.mark.needs("horovod")
def test_what_makes_another_training_than_those_before_it_is_named():
    averaged = TrainConfig(strategy="local_sgd").with_options(LocalSgdOptions(local_steps=4))
    assert settings_that_matter(averaged).keys() - settings_that_matter(TrainConfig()).keys() == {
        "strategy",
        "local_sgd.local_steps",
    }
    assert settings_that_matter(TrainConfig(strategy="horovod")) == settings_that_matter(TrainConfig())


def test_a_marker_of_another_program_version_is_not_taken_for_damage(tiny_uri, models):
    marker = newest(models) / MARKER
    body = to_json(open_dataset(tiny_uri).pin)
    marker.write_bytes(with_checksum(body))
    with pytest.raises(UsageError, match="has a different layout"):
        train_here(tiny_uri, models, **CONFIG)
    assert marker.exists()


def chunks(size: int, count: int) -> list[tuple[int, int]]:
    """(offset, size) as `torch.chunk` cuts; the last ones may be empty."""
    step = -(-size // count)
    return [(min(rank * step, size), max(0, min(step, size - rank * step))) for rank in range(count)]


def shards_of(name: str, shape: tuple[int, ...], cuts: tuple[int, ...], replicas: int) -> list[Shard]:
    """One box for each rank: axis by axis cut into `cuts` pieces, all of that `replicas` times."""
    boxes = [
        Shard(WEIGHTS_PART, name, shape, tuple(offset for offset, _ in box), tuple(size for _, size in box))
        for box in product(*(chunks(size, count) for size, count in zip(shape, cuts, strict=True)))
    ]
    return boxes * replicas


@st.composite
def layouts(draw, shapes):
    """An index in which each array is cut otherwise; the same number of ranks for all."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    of_ranks = [[] for _ in range(num_ranks)]
    for name, shape in shapes.items():
        divisors = [each for each in range(1, num_ranks + 1) if num_ranks % each == 0]
        cuts = [1] * len(shape)
        left = num_ranks
        for axis in range(len(shape)):
            cuts[axis] = draw(st.sampled_from([each for each in divisors if left % each == 0]))
            left //= cuts[axis]
        for rank, box in enumerate(shards_of(name, shape, tuple(cuts), left)):
            of_ranks[rank].append(box)
    return ShardIndex(tuple(map(tuple, of_ranks)))


SHAPES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple), min_size=1
)


@given(st.data())
def test_any_layout_is_read_by_any_other(data):
    shapes = data.draw(SHAPES)
    whole = {name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}
    saved, wanted = data.draw(layouts(shapes)), data.draw(layouts(shapes))

    def box_of(shard: Shard) -> np.ndarray:
        return whole[shard.name][
            tuple(map(slice, shard.offsets, map(sum, zip(shard.offsets, shard.shape, strict=True))))
        ]

    files = {
        shard_file(WEIGHTS_PART, rank): dump_arrays([box_of(shard) for shard in saved.written_by(rank, WEIGHTS_PART)])
        for rank in range(len(saved.of_ranks))
    }
    # Each element is written once.
    written = sum(
        math.prod(s.shape) for rank in range(len(saved.of_ranks)) for s in saved.written_by(rank, WEIGHTS_PART)
    )
    assert written == sum(array.size for array in whole.values())
    for shards in wanted.of_ranks:
        needed = saved.files_with(shards)
        read = saved.assemble(shards, {name: files[name] for name in needed}, "the checkpoint")
        for shard, array in zip(shards, read, strict=True):
            assert np.array_equal(array, box_of(shard))
        # No file too many: without any one of them something is missing.
        for left_out in needed:
            with pytest.raises(IntegrityError):
                saved.assemble(shards, {name: files[name] for name in needed if name != left_out}, "the checkpoint")
    for shard, array in zip(
        saved.whole(WEIGHTS_PART), saved.assemble(saved.whole(WEIGHTS_PART), files, "it"), strict=True
    ):
        assert np.array_equal(array, whole[shard.name])


def test_the_index_is_read_back():
    index = ShardIndex((tuple(shards_of("a", (4, 3), (2, 1), 1)[:1]), tuple(shards_of("a", (4, 3), (2, 1), 1)[1:])))
    assert read_index(lambda name: dump_arrays(dump_index(index))) == index


def small_model(seed: int = 0):
    import keras

    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])


def test_values_come_back_bit_for_bit():
    import keras

    variables = [
        keras.Variable(np.array([0.1, -0.0, np.nan, np.inf], np.float32)),
        keras.Variable(np.array(5), dtype="int64"),
        keras.random.SeedGenerator(9).state,
    ]
    data = dump_arrays([np.asarray(variable) for variable in variables])
    assert data == dump_arrays([np.asarray(variable) for variable in variables]), "equal values give equal bytes"
    before = [np.array(variable).tobytes() for variable in variables]
    for variable in variables:
        variable.assign(np.zeros(variable.shape, str(variable.dtype)))
    assign_variables(variables, load_arrays(data), "this file")
    assert [np.array(variable).tobytes() for variable in variables] == before


def weights_sha256(model):
    return arrays_sha256(np.asarray(variable) for variable in model.weights)


def test_the_hash_sees_every_weight():
    model = small_model()
    hashes = {weights_sha256(model)}
    assert weights_sha256(small_model()) in hashes
    for weight in model.weights:
        changed = np.array(weight)
        changed.flat[0] = np.nextafter(changed.flat[0], np.float32(9))
        weight.assign(changed)
        hashes.add(weights_sha256(model))
    assert len(hashes) == 1 + len(model.weights)


def test_other_shapes_are_refused_before_anything_is_assigned():
    import keras

    first, second = keras.Variable(np.zeros(2, np.float32)), keras.Variable(np.zeros(3, np.float32))
    arrays = [np.ones(2, np.float32), np.ones(4, np.float32)]
    with pytest.raises(UsageError, match=r"a file holds float32 \(4,\) for .*; this model has float32 \(3,\) there"):
        assign_variables([first, second], arrays, "a file")
    assert not np.array(first).any()
    with pytest.raises(UsageError, match="holds 2 variables; this model has 1"):
        assign_variables([first], arrays, "a file")


def test_pickled_arrays_are_not_read():
    buffer = io.BytesIO()
    np.savez(buffer, **{"00000": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_arrays(buffer.getvalue())
