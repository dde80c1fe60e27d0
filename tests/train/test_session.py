"""A rank's session: where it resumes, how it stops and ends, and whether its model only guesses."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.errors import StorageError, UsageError
from shardmill.ids import format_sample_id
from shardmill.jobs.observer import WARNING
from shardmill.loader.reader import ReaderSeconds
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from shardmill.typed_columns import LABEL_TYPES
from shardmill.values import Batch, Cursor, DatasetPin
from tests.lab.datasets import make_dataset
from tests.lab.scale import exhaustive
from tests.train.checkpoints import FullStore
from tests.train.learners import LINEAR
from tests.train.training import Recorder, train_here
from train.backends import BACKENDS
from train.backends.model_spec import InputScale, ModelSpec
from train.backends.rules import largest_momentum
from train.checkpoints.arrays import WEIGHTS, load_arrays, rank_file
from train.checkpoints.checkpoint import (
    Attempt,
    CheckpointFolder,
    SavedFiles,
    TrainingIdentity,
    claim_attempt,
    complete_checkpoints,
    open_checkpoint,
)
from train.checkpoints.checkpoint_writer import CheckpointWriter
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import (
    BestEpoch,
    EarlyStop,
    EpochRecord,
    Evaluation,
    ModelIdentity,
    Progress,
    TimeSpent,
    to_json,
)
from train.contracts.world import World
from train.labels import LabelSpec
from train.published.export import export_training
from train.published.gate import promote_export
from train.rank.session import (
    Chance,
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
from train.settings import GateConfig

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


def test_a_checkpoint_is_reported_when_it_is_there_or_refused(tmp_path):
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
    where = "before step 3/5 of epoch 2/3 (after 7 steps)"
    assert str(stopped) == f"terminated by SIGTERM; stopped {where}; checkpoint {found.path}"
    assert session.member.calls == [("barrier",), ("close",)]
    fresh = session_of(tmp_path, training_dir="fresh", epochs=3)
    assert str(stop(fresh, at(0), "")).endswith("before step 1/5 of epoch 1/3 (after 0 steps); nothing was trained yet")
    fresh.checkpoints.store.full_for = frozenset({WEIGHTS})
    assert str(stop(fresh, at(1), "")).split("; ")[2].startswith("no room")


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
def test_a_step_is_reported_with_its_own_number(tmp_path, record_samples, rank, is_recorded):
    session = session_of(tmp_path, Stand(rank), record_samples=record_samples)
    batch = Batch(np.zeros(3), np.zeros(3), np.array([1.0, 1.0, 0.0]), np.array([5, -6, 0]), 1, 2)
    spent = TimeSpent(input_wait=1.0, compute=2.0, allreduce=4.0, checkpoint=8.0, other=16.0)
    report = step_report(session, batch, 0.75, at(8), spent, ReaderSeconds())
    assert (report.rank, report.epoch, report.step, report.num_steps, report.loss_hex) == (rank, 1, 2, 5, (0.75).hex())
    assert report.sample_ids == (tuple(map(format_sample_id, (5, -6))) if is_recorded else ())
    parts = {"input_wait": 1.0, "compute": 2.0, "allreduce": 4.0, "checkpoint": 8.0, "total": 31.0}
    assert parts.items() <= report.seconds.items()


def test_steps_are_counted_over_epochs_and_events_are_reported_by_rank_0(tmp_path):
    session = session_of(tmp_path, learning_rate=0.5)
    assert session.global_step(at(8)) == 8 and session.learning_rate(at(0)) == pytest.approx(0.5)
    session.member.learner.follows_schedule = False
    assert session.learning_rate(at(0)) is None
    session.event("name", {"key": 1})
    other = session_of(tmp_path, Stand(1), training_dir="other")
    other.event("name", {"key": 1})
    assert (events(session), events(other)) == ([("name", {"key": 1})], [])


LATE = {"keras": "tests.train.models_under_test:late_statistics", "torch": "tests.train.torch_models:late_statistics"}


EACH_BACKEND = pytest.mark.parametrize("backend", LATE)


@pytest.fixture(scope="module")
def uri(tmp_path_factory) -> str:
    fractions = {"train": 0.4, "validation": 0.3, "test": 0.3}
    return make_dataset(tmp_path_factory.mktemp("data"), num_images=240, split_fractions=fractions)


@pytest.fixture
def guessing(uri, backend, tmp_path):
    """A training's settings, what it reported and its result."""
    settings = {"model": LATE[backend], "epochs": 4, "augment": {"random_flip": False}}
    recorder = Recorder()
    return settings, recorder, train_here(uri, tmp_path, recorder, **settings)


@EACH_BACKEND
def test_it_is_reported_and_not_promoted(guessing, backend, tmp_path):
    settings, recorder, result = guessing
    assert result.history[-1].train_accuracy > 0.6, "it has not learned"
    [told] = recorder.named("guessing")
    assert (
        told["warning"].startswith(result.caution) and "the weights of the last epoch are exported" in told["warning"]
    )
    assert "no better than guessing" in result.caution
    assert (result.exported, result.weights_epoch, result.checkpoint) == ("last", 3, result.last_checkpoint)
    assert read_result(open_store(str(tmp_path)), "t").caution == result.caution

    export = export_training(str(tmp_path), TrainConfig(**settings, global_batch_size=32), result, "run").export
    decision = promote_export(str(tmp_path), export, GateConfig(), "run").gate
    assert decision.decision == "kept" and decision.reason.startswith(result.caution)


@EACH_BACKEND
def test_a_model_that_does_better_is_not_said_to(uri, backend, tmp_path):
    recorder = Recorder()
    result = train_here(uri, tmp_path, recorder, model=LINEAR[backend], epochs=3)
    assert (result.caution, result.exported, recorder.named("guessing")) == ("", "best", [])


def record(epoch: int, loss: float, figure: float, *, train_accuracy: float | None = 0.5, **how: object) -> EpochRecord:
    validation = replace(Evaluation("validation", 60, loss, figure, None, ()), **how)
    return EpochRecord(epoch, 10, 1.0, train_accuracy, 1e-3, 1.0, validation)


def test_a_first_epoch_of_low_loss_that_guesses_is_not_the_best(uri):
    chance = Chance.of(open_dataset(uri).manifest)
    progress = Progress()
    for each in (record(0, 1.1, 0.33), record(1, 1.3, 0.7), record(2, 1.2, 0.34), record(3, 1.25, 0.8)):
        is_guessing = chance.is_all((*progress.history, each))
        assert is_guessing == (each.epoch in (0, 2))
        progress = progress.after_epoch(each, EarlyStop(), f"epoch {each.epoch}", is_guessing=is_guessing)
    assert (progress.best.epoch, progress.best.is_guessing) == (3, False)


def test_what_a_guess_reaches_depends_on_the_labels(uri):
    manifest = open_dataset(uri).manifest

    def of(kind: str, counts: tuple[int, ...], num_rows: int = 100) -> Chance | None:
        split = manifest.splits["train"].model_copy(update={"class_counts": counts, "num_rows": num_rows})
        changed = {"splits": {"train": split, "validation": split}, "columns": {"label": LABEL_TYPES[kind]}}
        return Chance.of(manifest.model_copy(update=changed))

    assert of("class", (80, 10, 10)).train_accuracy == of("class", (80, 10, 10)).validation_metric == 0.8
    # The mean precision of any order of images is the share of a class; "no" is right for the rare one.
    assert of("multi_label", (80, 10, 0)).validation_metric == pytest.approx(0.45)
    assert of("multi_label", (80, 10, 0)).train_accuracy == pytest.approx((0.8 + 0.9 + 1.0) / 3)
    assert of("class", (80, 10, 10)).validation_limit == pytest.approx(0.88)
    assert (
        of("class", (10, 10, 9), 29) is None
        and of("class", (10, 10, 10), 30) is not None
        and of("class", (100, 0, 0)) is None
    )


def test_a_training_that_has_not_learned_is_not_at_fault_for_its_validation(uri):
    chance = Chance.of(open_dataset(uri).manifest)
    assert not chance.has_learned([record(0, 1.1, 0.3, train_accuracy=0.38)])
    assert chance.has_learned([record(0, 1.1, 0.3, train_accuracy=0.45)])


def test_numbers_are_compared_with_the_first_epoch():
    chance = Chance(0.0, 0.0, 0.0)
    numbers = {"label_kind": "float", "mean_absolute_error": 1.0}
    first = replace(record(0, 5.0, 0.0, train_accuracy=None, **numbers), train_loss=4.0)
    worse = replace(record(1, 4.5, 0.0, train_accuracy=None, **numbers), train_loss=1.0)
    better = replace(worse, validation=replace(worse.validation, loss=1.5))
    assert chance.is_all([first, worse]) and chance.has_learned([first, worse])
    assert not chance.is_all([first, better]) and not chance.has_learned([first])
    assert "loss 4.5 after epoch 2 is no better than the loss 4 of the first epoch" in chance.caution([first, worse])


@pytest.mark.parametrize("steps", [1, 3, 10, 300, 100_000])
def test_moving_statistics_are_those_of_the_model_by_the_end_of_an_epoch(steps):
    momentum = largest_momentum(steps)
    assert 0.5 <= momentum < 1 and (momentum**steps <= 0.0501 or momentum == 0.5)
    assert largest_momentum(300) == pytest.approx(0.99, abs=1e-4)


@pytest.mark.parametrize(
    ("backend", "model", "own"),
    [
        exhaustive("keras", "resnet50", 0.99),
        exhaustive("keras", "keras.applications:MobileNetV2", 0.999),
        ("torch", "torchvision.models:resnet18", 0.9),
        ("keras", LATE["keras"], None),
        ("torch", LATE["torch"], None),
    ],
)
def test_models_by_name_follow_the_length_of_an_epoch(backend, model, own):
    def built(steps_per_epoch: int) -> tuple[set[float], str]:
        BACKENDS[backend].start(World(), 0)
        spec = ModelSpec((32, 32, 3), LabelSpec("class", ("a", "b")), InputScale((0.0,) * 3, (1.0,) * 3))
        one = BACKENDS[backend].build(TrainConfig(model=model), replace(spec, steps_per_epoch=steps_per_epoch))
        if backend == "keras":
            layers = one._model._flatten_layers()
            found = {layer.momentum for layer in layers if "BatchNorm" in type(layer).__name__}
        else:
            found = {1 - each.momentum for each in one.classifier.modules() if "BatchNorm" in type(each).__name__}
        return {round(each, 6) for each in found}, one.config_sha256

    (short, identity), (unknown, same) = built(10), built(0)
    assert identity == same, "an older checkpoint would no longer fit"
    if own is None:
        assert short == unknown == {0.99999}
    else:
        assert short == {round(largest_momentum(10), 6)} and unknown == {own}
