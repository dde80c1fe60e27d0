"""A rank's session and its loop: where it resumes, how it stops, and the same bits whatever happens on the way."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import IntegrityError, StorageError, TrainingError, UsageError
from shardmill.ids import format_sample_id
from shardmill.jobs.observer import WARNING
from shardmill.loader.reader import ReaderSeconds, read_batches
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from shardmill.values import Batch, Cursor, DatasetPin
from tests.lab.datasets import build_here, make_dataset, write_images
from tests.lab.scale import exhaustive
from tests.processes import in_own_process
from tests.train.checkpoints import FullStore
from tests.train.training import MODELS, Killed, Recorder, task_of, train_here
from train.checkpoints.attempts import Attempt, claim_attempt
from train.checkpoints.checkpoint import (
    CheckpointFolder,
    SavedFiles,
    TrainingIdentity,
    complete_checkpoints,
    open_checkpoint,
)
from train.checkpoints.checkpoint_writer import CheckpointWriter
from train.checkpoints.state import WEIGHTS, load_arrays, rank_file
from train.config import TrainConfig
from train.contracts.progress import BestEpoch, Progress, TimeSpent
from train.contracts.task import WorkerTask
from train.contracts.values import RESULT, ModelIdentity, to_json
from train.contracts.world import World
from train.planning.preflight import check_trainable
from train.rank.session import (
    Session,
    load_best,
    report_checkpoint,
    resume,
    save,
    save_last,
    step_report,
    stop,
    wait_for_checkpoint,
)
from train.results import read_result

NUM_STEPS = 5
PIN = DatasetPin("/data", 3, "0" * 64)


class Stand:
    """A `Member`; what is asked of it, in `calls`."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.world_size = rank, 1
        self.data = SimpleNamespace(is_first=rank == 0)
        self.learner = SimpleNamespace(follows_schedule=True)
        self.value = 0.0
        self.calls: list[tuple[Any, ...]] = []
        self.broadcast_bytes: Callable[[bytes], bytes] = lambda data: data
        self.gather_bytes: Callable[[bytes], list[bytes]] = lambda data: [data]

    def gather_aside(self, data: bytes) -> list[bytes]:
        return [data]

    def state_files(self) -> dict[str, list[np.ndarray]]:
        return {WEIGHTS: [np.array([self.value])], rank_file(0): [np.zeros(2)]}

    def files_to_resume(self, saved: SavedFiles) -> list[str]:
        return [WEIGHTS]

    weight_files = files_to_resume

    def start(self, files: Mapping[str, bytes], saved_world_size: int, source: str) -> None:
        self.calls.append(("start", values_of(files), saved_world_size, source))

    def take_weights(self, files: Mapping[str, bytes], source: str) -> None:
        self.calls.append(("take_weights", values_of(files), source))

    def barrier(self) -> None:
        self.calls.append(("barrier",))

    def close(self) -> None:
        self.calls.append(("close",))


def values_of(files: Mapping[str, bytes]) -> dict[str, float]:
    return {name: float(load_arrays(data)[0][0]) for name, data in files.items()}


def session_of(folder: Path, member: Stand | None = None, training_dir: str = "t", **given: Any) -> Any:
    member, store, reporter = member or Stand(), FullStore(str(folder)), Recorder()
    task_keys = ("continues", "allowed")
    task = WorkerTask(TrainConfig(**{key: each for key, each in given.items() if key not in (*task_keys, "settings")}),
                      PIN, str(folder), training_dir, "",
                      **{key: each for key, each in given.items() if key in task_keys})  # fmt: skip
    checkpoints = CheckpointFolder(Attempt(store, training_dir, 1), 9)
    identity = TrainingIdentity(PIN, "plan", ModelIdentity("", ""), given.get("settings", {}))
    claim_attempt(store, training_dir, 1)
    return Session(
        task=task, dataset=cast("Any", None), epochs=cast("Any", SimpleNamespace(num_steps=NUM_STEPS)),
        streams=range(1), member=cast("Any", member), checkpoints=checkpoints, identity=identity, world=World(),
        reporter=reporter, writer=CheckpointWriter(checkpoints, cast("Any", member), reporter),
        profiler=cast("Any", None),
    )  # fmt: skip


def events(session: Any) -> list[tuple[str, dict[str, Any]]]:
    """But for how long it took, and that a checkpoint is about to be written."""
    kept = [(name, dict(fields)) for name, fields in session.reporter.events if name != "storing.progress"]
    for _, fields in kept:
        fields.pop("seconds", None)
    return kept


def at(step: int, **given: Any) -> Progress:
    return Progress(cursor=Cursor(*divmod(step, NUM_STEPS)), **given)


def saved(session: Any, *steps: int) -> list[str]:
    """Checkpoints at these steps, whose weights are the step's number."""
    paths = []
    for step in steps:
        session.member.value = float(step)
        paths.append(save(session, at(step))[1])
        wait_for_checkpoint(session)
    session.reporter.events.clear()
    return paths


def damage(folder: Path, path: str, name: str = WEIGHTS) -> None:
    file = folder / path / name
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def never(session: Session) -> None:
    raise AssertionError("there is a checkpoint")


def test_a_training_without_a_checkpoint_begins(tmp_path):
    session = session_of(tmp_path)
    begun: list[Session] = []
    assert resume(session, begun.append) is None
    assert begun == [session] and session.member.calls == [("start", {}, 0, "")] and not events(session)


def test_all_ranks_resume_from_the_newest_checkpoint_whose_files_are_intact(tmp_path):
    older, newer, newest = saved(session_of(tmp_path), 1, 7, 8)
    damage(tmp_path, newest)
    session = session_of(tmp_path)
    found = resume(session, never)
    assert found is not None and found.path == newer
    assert session.member.calls == [("start", {WEIGHTS: 7.0}, 1, f"the checkpoint {newer}")]
    (discarded, why), resumed = events(session)
    assert discarded == "checkpoint_discarded" and why["path"] == newest and "was altered" in why["reason"]
    fields = {"path": newer, "epoch": 1, "step": 2, "world_size": 1, "global_step": 7}
    assert resumed == ("resumed", fields)
    # The damaged one must not count among those that are kept.
    assert not (tmp_path / newest / WEIGHTS).exists() and (tmp_path / older / WEIGHTS).exists()


def test_a_rank_reads_what_rank_0_proposes_and_another_ones_damage_counts_for_all(tmp_path):
    older, newer = saved(session_of(tmp_path), 1, 2)
    proposals = [to_json(open_checkpoint(LocalStore(str(tmp_path)), path)) for path in (newer, older)]
    problems = [[b'"damaged on rank 0"', b'""'], [b'""', b'""']]
    member = Stand(rank=1)
    member.broadcast_bytes = lambda data: proposals.pop(0) if not data else b""
    member.gather_bytes = lambda data: problems.pop(0)
    session = session_of(tmp_path, member)
    found = resume(session, never)
    assert (
        found is not None
        and found.path == older
        and member.calls == [("start", {WEIGHTS: 1.0}, 1, f"the checkpoint {older}")]
    )
    # Rank 0 tells it and deletes it, once for all ranks.
    assert not events(session) and (tmp_path / newer / WEIGHTS).exists()


@pytest.mark.parametrize("damaged", ["", WEIGHTS, "MARKER.json"])
def test_a_training_continues_a_shorter_one_whose_checkpoint_it_never_deletes(tmp_path, damaged):
    [path] = saved(session_of(tmp_path, training_dir="short", settings={"epochs": "2"}), 3)
    if damaged:
        damage(tmp_path, path, damaged)
    session = session_of(tmp_path, continues=path, allowed=("epochs",), settings={"epochs": "4"})
    begun: list[Session] = []
    found = resume(session, begun.append)
    assert (found is None) == bool(damaged) == bool(begun)
    assert session.member.calls == [
        ("start", {}, 0, "") if damaged else ("start", {WEIGHTS: 3.0}, 1, f"the checkpoint {path}")
    ]
    [(name, fields)] = events(session)
    assert name == ("checkpoint_discarded" if damaged else "resumed") and fields["path"] == path
    assert {WEIGHTS, "MARKER.json"} <= {file.name for file in (tmp_path / path).iterdir()}


def test_another_training_may_not_resume(tmp_path):
    saved(session_of(tmp_path, settings={"epochs": "2"}), 3)
    with pytest.raises(UsageError, match=r"belongs to another training: train.epochs: then 2, now 4"):
        resume(session_of(tmp_path, settings={"epochs": "4"}, allowed=("epochs",)), never)


def test_a_checkpoint_is_told_when_it_is_there_or_refused(tmp_path):
    session = session_of(tmp_path)
    progress, path = save(session, at(7))
    wait_for_checkpoint(session)
    fields = {"path": path, "epoch": 1, "step": 2, "global_step": 7}
    assert events(session) == [("checkpoint", fields)] and progress.cursor == Cursor(1, 2)
    session.reporter.events.clear()
    session.checkpoints.store.full_for = frozenset({WEIGHTS})
    _, path = save(session, at(8))
    wait_for_checkpoint(session)
    [(name, fields)] = events(session)
    assert name == "checkpoint_failed" and fields["path"] == path and fields["global_step"] == 8
    assert fields[WARNING].startswith("no checkpoint at global step 8: no room") and "previous" in fields[WARNING]
    session.reporter.events.clear()
    # Nothing is under way, so nothing is told.
    report_checkpoint(session)
    assert not events(session)


def test_the_last_checkpoint_is_written_unless_it_is_there(tmp_path):
    session = session_of(tmp_path)
    [path] = saved(session, 5)
    _, last = save_last(session, at(5), path)
    assert last == path and not events(session)
    _, last = save_last(session, at(6), "")
    assert open_checkpoint(session.checkpoints.store, last).marker.global_step == 6
    session.checkpoints.store.full_for = frozenset({WEIGHTS})
    with pytest.raises(StorageError, match="the last checkpoint of t could not be written: no room"):
        save_last(session, at(7), "")
    # One that was refused is tried again.
    session.checkpoints.store.full_for = frozenset()
    _, last = save_last(session, at(7), session.checkpoints.path_of(7))
    assert open_checkpoint(session.checkpoints.store, last).marker.global_step == 7


def test_a_training_stops_behind_a_checkpoint_with_all_ranks(tmp_path):
    session = session_of(tmp_path, epochs=3)
    stopped = stop(session, at(7), "")
    [found] = complete_checkpoints(session.checkpoints.store, "t")
    assert (
        str(stopped) == f"terminated by SIGTERM before step 3/5 of epoch 2/3 (after 7 steps); checkpoint {found.path}"
    )
    assert session.member.calls == [("barrier",), ("close",)]
    fresh = session_of(tmp_path, training_dir="fresh", epochs=3)
    assert str(stop(fresh, at(0), "")).endswith("before step 1/5 of epoch 1/3 (after 0 steps); nothing was trained yet")
    fresh.checkpoints.store.full_for = frozenset({WEIGHTS})
    assert str(stop(fresh, at(1), "")).partition("; ")[2].startswith("no room")


@pytest.mark.parametrize(
    ("export", "is_last", "expected"), [("best", False, 4.0), ("best", True, None), ("last", False, None)]
)
def test_the_best_epochs_weights_are_loaded_if_they_are_not_the_last(tmp_path, export, is_last, expected):
    session = session_of(tmp_path, export=export)
    first, last = saved(session, 4, 5)
    best = BestEpoch(0, 0.5, last if is_last else first)
    assert load_best(session, best, last) == (None if export == "last" else best)
    taken = [("take_weights", {WEIGHTS: expected}, f"the checkpoint {first}")] if expected else []
    assert session.member.calls == taken
    assert load_best(session, None, last) is None


@pytest.mark.parametrize(
    ("record_samples", "rank", "is_recorded"), [(True, 0, True), (True, 1, False), (False, 0, False)]
)
def test_a_step_is_told_with_its_own_number(tmp_path, record_samples, rank, is_recorded):
    session = session_of(tmp_path, Stand(rank), record_samples=record_samples)
    batch = Batch(np.zeros(3), np.zeros(3), np.array([1.0, 1.0, 0.0]), np.array([5, -6, 0]), 1, 2)
    spent = TimeSpent(input_wait=1.0, compute=2.0, allreduce=4.0, checkpoint=8.0, other=16.0)
    report = step_report(session, batch, 0.75, at(8), spent, ReaderSeconds())
    assert (report.rank, report.epoch, report.step, report.num_steps, report.loss_hex) == (rank, 1, 2, 5, (0.75).hex())
    assert report.sample_ids == (tuple(map(format_sample_id, (5, -6))) if is_recorded else ())
    parts = {"input_wait": 1.0, "compute": 2.0, "allreduce": 4.0, "checkpoint": 8.0, "total": 31.0}
    assert parts.items() <= report.seconds.items()


def test_steps_are_counted_over_epochs_and_events_told_by_rank_0(tmp_path):
    session = session_of(tmp_path, learning_rate=0.5)
    assert session.global_step(at(8)) == 8 and session.learning_rate(at(0)) == pytest.approx(0.5)
    session.member.learner.follows_schedule = False
    assert session.learning_rate(at(0)) is None
    session.event("name", {"key": 1})
    other = session_of(tmp_path, Stand(1), training_dir="other")
    other.event("name", {"key": 1})
    assert (events(session), events(other)) == ([("name", {"key": 1})], [])


STATEFUL = f"{MODELS}:stateful"


@pytest.fixture(scope="module")
def never_killed(tiny_uri, tmp_path_factory):
    """A stateful model, trained without any disturbance: (result, recorder)."""
    recorder = Recorder()
    models = tmp_path_factory.mktemp("never_killed")
    result = train_here(tiny_uri, models, recorder, model=STATEFUL, record_samples=True, checkpoint_every_steps=2)
    return result, recorder


def test_two_fresh_runs_agree_bit_for_bit(tiny_uri, tmp_path, never_killed):
    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path, recorder, model=STATEFUL)
    assert result.weights_sha256 == never_killed[0].weights_sha256
    assert result.evaluation == never_killed[0].evaluation
    assert recorder.losses == never_killed[1].losses


def test_another_seed_gives_other_weights(tiny_uri, tmp_path, never_killed):
    assert train_here(tiny_uri, tmp_path, model=STATEFUL, seed=1).weights_sha256 != never_killed[0].weights_sha256


@pytest.mark.parametrize("killed_at", [0, 2, 3, exhaustive(1), exhaustive(5)])
def test_killed_and_resumed_equals_never_killed(tiny_uri, tmp_path, never_killed, killed_at):
    first, second = Recorder(killed_at), Recorder()
    config = {"model": STATEFUL, "record_samples": True, "checkpoint_every_steps": 1}
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path, first, **config)
    result = train_here(tiny_uri, tmp_path, second, **config)

    undisturbed, undisturbed_recorder = never_killed
    # The killed step was not on record, and a checkpoint is written after each one that was.
    assert len(second.steps) == len(undisturbed_recorder.steps) - killed_at
    assert first.losses | second.losses == undisturbed_recorder.losses
    assert [report.sample_ids for report in first.steps + second.steps] == [
        report.sample_ids for report in undisturbed_recorder.steps
    ]
    assert result.weights_sha256 == undisturbed.weights_sha256
    assert result.final_loss_hex == undisturbed.final_loss_hex
    assert result.evaluation == undisturbed.evaluation
    without_seconds = [
        [dataclasses.replace(record, seconds=0.0) for record in history.history] for history in (result, undisturbed)
    ]
    assert without_seconds[0] == without_seconds[1]
    if killed_at:
        [resumed] = second.named("resumed")
        assert resumed["global_step"] == killed_at
        assert result.resumed_from is not None
    else:
        assert result.resumed_from is None


def test_every_sample_counts_once_in_each_epoch(tiny_uri, never_killed):
    result, recorder = never_killed
    dataset = open_dataset(tiny_uri)
    expected = sorted(format_sample_id(sample.sample_id) for sample in read_samples(dataset, "train", 1000))
    for epoch in range(result.num_epochs):
        ids = [sample_id for report in recorder.steps if report.epoch == epoch for sample_id in report.sample_ids]
        assert sorted(ids) == expected
    assert len(expected) == dataset.manifest.splits["train"].num_rows


def test_both_formats_give_the_same_losses(tiny_uri, tmp_path):
    losses = []
    for format_name in ("parquet", "tfrecord"):
        recorder = Recorder()
        result = train_here(tiny_uri, tmp_path / format_name, recorder, format=format_name)
        losses.append((recorder.losses, result.weights_sha256, result.evaluation))
    assert losses[0] == losses[1]


@pytest.mark.starts("program")
def test_horovod_of_one_rank_is_the_single_strategy(tiny_uri, tmp_path):
    single = train_here(tiny_uri, tmp_path / "single")
    horovod = in_own_process("keras", train_here, tiny_uri, tmp_path / "horovod", strategy="horovod")
    assert horovod.weights_sha256 == single.weights_sha256
    assert horovod.strategy == "horovod"


def test_the_result_tells_what_happened(tiny_uri, tmp_path):
    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path, recorder, epochs=8, learning_rate=0.01)
    manifest = open_dataset(tiny_uri).manifest
    assert read_result(open_store(tmp_path), "t") == result
    assert result.num_steps == len(recorder.steps) == 8 * recorder.steps[0].num_steps
    assert result.final_loss_hex == recorder.steps[-1].loss_hex
    assert result.evaluation is not None and result.evaluation.split == "test"
    assert result.evaluation.num_samples == manifest.splits["test"].num_rows
    assert result.evaluation.accuracy == 1.0, "the classes are bars at different places"
    assert [record.epoch for record in result.history] == list(range(8))
    assert all(record.validation.num_samples == manifest.splits["validation"].num_rows for record in result.history)
    assert all(record.validation.confused is None for record in result.history), "a history must not grow with classes"
    # What is exported are the weights of the epoch with the lowest validation loss, and the figures are theirs.
    losses = [record.validation.loss for record in result.history]
    assert (result.exported, result.weights_epoch) == ("best", losses.index(min(losses)))
    best = open_checkpoint(open_store(tmp_path), result.checkpoint)
    assert best.marker.global_step == (result.weights_epoch + 1) * recorder.steps[0].num_steps
    shares = result.time_shares
    total = shares.input_wait + shares.compute + shares.allreduce + shares.checkpoint + shares.other
    assert total == pytest.approx(1.0)
    assert [fields["epoch"] for fields in recorder.named("epoch")] == list(range(8))
    found = next(complete_checkpoints(open_store(tmp_path), "t"))
    assert found is not None and found.path == result.last_checkpoint == recorder.named("checkpoint")[-1]["path"]


def test_reported_losses_are_means_over_the_global_batch(tiny_uri, tmp_path):
    """With a learning rate of next to nothing, losses are those of the fresh model; recompute them with plain NumPy."""
    recorder = Recorder()
    config = {"model": f"{MODELS}:linear", "epochs": 1, "optimizer": "sgd", "learning_rate": 1e-30}
    train_here(tiny_uri, tmp_path, recorder, **config)
    task = task_of(tiny_uri, tmp_path, **config)
    dataset = open_dataset(tiny_uri)
    found = next(complete_checkpoints(open_store(tmp_path), "t"))
    assert found is not None
    weights = np.load(tmp_path / found.path / "weights.npz")
    kernel, bias = weights["00000"].astype(np.float64), weights["00001"].astype(np.float64)
    spec = dataset.plan_spec("train", seed=0, global_batch_size=32, num_streams=8)
    with read_batches(dataset, dataset.plan_epoch(spec, 0), augment=task.config.augment) as batches:
        for batch, report in zip(batches, recorder.steps, strict=True):
            x = (batch.images_NHWC - np.array(dataset.manifest.channel_mean)) / np.array(dataset.manifest.channel_std)
            logits = x.reshape(len(x), -1) @ kernel + bias
            losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(x)), batch.labels_N]
            expected = (losses * batch.weights_N).sum() / batch.weights_N.sum()
            assert float.fromhex(report.loss_hex) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("mixed_precision", ["off", "float16"])
def test_a_loss_that_is_not_finite_stops_before_the_update(tiny_uri, tmp_path, mixed_precision):
    recorder = Recorder()
    with pytest.raises(TrainingError, match=r"at epoch 0, step \d+ \(global step \d+\); the update was not applied"):
        train_here(tiny_uri, tmp_path, recorder, optimizer="sgd", learning_rate=1e30, schedule="constant",
                   mixed_precision=mixed_precision, checkpoint_every_steps=1)  # fmt: skip
    assert all(np.isfinite(float.fromhex(report.loss_hex)) for report in recorder.steps)
    assert not (tmp_path / "t" / "result.json").exists()


def test_early_stop_is_decided_once_and_survives_a_restart(tiny_uri, tmp_path):
    config = {"epochs": 6, "early_stop_epochs": 2, "optimizer": "sgd", "learning_rate": 1e-30,
              "model": f"{MODELS}:linear"}  # fmt: skip
    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path, recorder, **config)
    # Nothing improves: the first epoch is the best, and two more are given.
    assert result.stopped_early and result.num_epochs == 3
    assert recorder.named("early_stop") == [{"epoch": 2, "epochs_since_best": 2}]

    # As if it had been killed right before it published.
    (tmp_path / "t" / RESULT).unlink()
    again = Recorder()
    assert train_here(tiny_uri, tmp_path, again, **config).weights_sha256 == result.weights_sha256
    assert again.steps == []


def test_data_that_cannot_be_trained_on_is_refused(tiny_uri, tmp_path):
    write_images(tmp_path / "images", num_classes=1, num_images=60)
    flat = build_here(str(tmp_path / "images" / "class_0"), str(tmp_path / "flat"), _etl_config())
    with pytest.raises(UsageError, match="has no labels; .*one folder per class"):
        check_trainable(TrainConfig(), open_dataset(str(flat)))

    one_class = build_here(str(tmp_path / "images"), str(tmp_path / "one"), _etl_config())
    with pytest.raises(UsageError, match=r"1 class\(es\); expected at least 2"):
        train_here(one_class, tmp_path)

    no_train = make_dataset(tmp_path / "no_train", split_fractions={"train": 0, "validation": 0.5, "test": 0.5})
    with pytest.raises(UsageError, match="no train split; it has test, validation"):
        check_trainable(TrainConfig(), open_dataset(str(no_train)))

    no_validation = make_dataset(tmp_path / "no_val", split_fractions={"train": 0.5, "validation": 0, "test": 0.5})
    with pytest.raises(UsageError, match=r"early_stop_epochs = 1, and .* no validation split"):
        check_trainable(TrainConfig(early_stop_epochs=1), open_dataset(str(no_validation)))


@pytest.mark.parametrize("format_name", ["parquet", "tfrecord"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_damaged_shards_stop_the_training_by_name(tiny_uri, tmp_path, format_name, damage):
    uri = shutil.copytree(tiny_uri, tmp_path / "dataset")
    shard = next(path for path in uri.glob(f"shards/train/*.{format_name}") if ".rows." not in path.name)
    if damage == "missing":
        shard.unlink()
    else:
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    with pytest.raises(IntegrityError, match=rf"{shard.name} (was altered|is missing)"):
        train_here(str(uri), tmp_path / "models", format=format_name)


def test_without_a_test_split_validation_is_reported(tmp_path):
    uri = make_dataset(tmp_path / "data", split_fractions={"train": 0.8, "validation": 0.2, "test": 0})
    evaluation = train_here(uri, tmp_path, epochs=1).evaluation
    assert evaluation is not None and evaluation.split == "validation"


def _etl_config():
    from etl.config import EtlConfig

    return EtlConfig(image_size=16, encoding="png", unit_min_images=40)
