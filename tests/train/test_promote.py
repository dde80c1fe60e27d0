"""Records of a models folder: what is promoted, and what garbage collection never touches."""

# pyright: reportArgumentType=false
from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.checksummed import checksum_file, with_checksum
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.maintenance.gc import Retention
from shardmill.errors import CommitConflict, GateNotPassed, IntegrityError, UsageError
from shardmill.failpoints import VARIABLE
from shardmill.jobs.config import SparkConfig
from shardmill.loader.reader import read_split
from shardmill.options import NormalizeOptions
from shardmill.stores import open_store
from shardmill.values import DatasetPin
from tests.services.faulty_store import FaultyStore, send_twice
from tests.train.checkpoints import write_checkpoint
from tests.train.exports import put_export
from tests.train.training import tree_of
from train.checkpoints.checkpoint import CheckpointFolder, TrainingIdentity, claim_attempt
from train.contracts.values import (
    CONFUSION,
    EXCHANGED_FILES,
    PROFILES,
    RESULT,
    BestEpoch,
    ModelIdentity,
    Progress,
    TimeShares,
    TrainResult,
    to_json,
)
from train.garbage import ModelsReport, collect_models, plan_models
from train.metrics.evaluate import SMALLEST_LOG_PROBABILITY
from train.planning.plan import TrainingPlan, keep_plan
from train.planning.setup import resolve
from train.planning.trainings import FRESH, PLAN, TRAININGS, FreshTraining, read_plan
from train.published.evaluation import by_name, evaluate_export
from train.published.exported import (
    CURRENT,
    EXPORTS,
    Export,
    ExportRecord,
    Pointer,
    current_export,
    load_exported,
    read_export,
    read_history,
)
from train.published.gate import promote_export, promotion_record
from train.published.promote import choose_export, roll_back
from train.rank.initialize import INITIALIZED
from train.records import numbers_in_words, put_record, record_numbers
from train.settings import GateConfig


def test_classes_are_matchedby_name():
    scores = by_name(lambda images: np.array([[-3.0, -0.1, -2.0]] * len(images)), "abc", ("c", "new", "a", "b"))
    last = SMALLEST_LOG_PROBABILITY
    assert scores(np.zeros((2, 1, 1, 1), np.uint8)).tolist() == [[-2.0, last, -3.0, -0.1]] * 2


@pytest.fixture
def exports(tiny_uri, tmp_path) -> tuple[str, Export, Export]:
    """A models' root, the export of a model that has learned nothing, and that of one that has."""
    root = str(tmp_path)
    return root, put_export(root, tiny_uri, is_good=False), put_export(root, tiny_uri)


def test_exports_come_and_go_through_the_gate(exports, tiny_uri):
    root, bad, good = exports
    gate, store = GateConfig(), open_store(exports[0])
    with pytest.raises(UsageError, match="has no current model"):
        current_export(root)

    # The first has nobody to fall behind, the better one replaces it, and is current already then.
    first = promote_export(root, bad, gate, "run-1")
    assert (first.gate.decision, first.previous, first.current) == ("promoted", None, bad.number)
    second = promote_export(root, good, gate, "run-2")
    assert (second.gate.decision, second.previous, second.current) == ("promoted", bad.number, good.number)
    assert second.gate.current_value == bad.record.evaluation.accuracy < good.record.evaluation.accuracy
    again = promote_export(root, good, gate, "run-3")
    assert (again.gate.decision, again.previous, again.current) == ("already_current", good.number, good.number)
    # A second try of the run that promoted it finds it current, and that its own run has published it.
    retried = promote_export(root, good, gate, "run-2")
    assert retried.gate.decision == "already_current"
    assert [each.is_published for each in (first, second, again, retried)] == [True, True, False, True]
    assert promotion_record(retried).sections["promotion"]["published"] is True
    assert promotion_record(again).sections["promotion"]["published"] is False
    assert len(read_history(store).pointers) == 2

    # The worse one is kept out; with `require` that is an error.
    kept = promote_export(root, bad, gate, "run-4")
    assert (kept.gate.decision, kept.current) == ("kept", good.number)
    with pytest.raises(GateNotPassed, match=f"export {bad.number} was not promoted: accuracy .* falls behind"):
        promote_export(root, bad, gate, "run-4", require=True)

    # Rolled back: the one before is current, and the next run does not put the other in again.
    back = roll_back(root, "run-5")
    assert (back.gate.decision, back.previous, back.current) == ("rolled_back", good.number, bad.number)
    assert current_export(root).number == bad.number
    assert "was promoted before and rolled back" in promote_export(root, good, gate, "run-6").gate.reason
    with pytest.raises(UsageError, match="nothing to roll back to"):
        roll_back(root, "run-7")
    assert [pointer.run_id for pointer in read_history(store).readable] == ["run-1", "run-2", "run-5"]

    # An export says of the dataset what the training model said of it.
    dataset = open_dataset(tiny_uri)
    with read_split(dataset, "test") as batches:
        test_split = evaluate_export(load_exported(root, good.number), dataset, "test", batches)
    assert test_split.accuracy == good.record.evaluation.accuracy
    assert test_split.loss == pytest.approx(good.record.evaluation.loss, abs=1e-6)


@pytest.fixture
def promoted(tiny_uri, tmp_path) -> str:
    """A models' root where exports 1, 2 and 3 became current, one after the other."""
    for number in (1, 2, 3):
        put_export(str(tmp_path), tiny_uri)
        previous = number - 1 or None
        put_record(open_store(tmp_path), CURRENT, number, pointer(number, previous, "promoted", f"run-{number}"))
    return str(tmp_path)


def pointer(export: int, previous: int | None, decision: str, run_id: str) -> Pointer:
    return Pointer(export=export, previous=previous, replaced=export - 1 or None, decision=decision, reason="",
                   accuracy=0.9, run_id=run_id, created_at="")  # fmt: skip


def test_a_rollback_whose_reply_was_lost_goes_back_once(promoted, faulty):
    faulty["put_if_absent"] = send_twice
    back = roll_back(f"faulty://{promoted}", "run-4")
    assert (back.previous, back.current) == (3, 2)
    assert [each.export for each in read_history(open_store(promoted)).readable] == [1, 2, 3, 2]


@pytest.mark.parametrize("winner", [pointer(2, 1, "rolled_back", "run-5"), pointer(4, 3, "promoted", "run-5")])
def test_a_rollback_that_comes_second_changes_nothing(promoted, faulty, winner):
    """Another operator has rolled back, or a run has promoted, between this one's look at the history and its write."""
    store = open_store(promoted)

    def come_second(late: FaultyStore, path: str, data: bytes) -> bool:
        assert put_record(store, CURRENT, 4, winner)
        return late.sound.put_if_absent(path, data)

    faulty["put_if_absent"] = come_second
    said = rf"run run-5 made export {winner.export} current \({winner.decision}\) while run run-4 .*changed nothing"
    with pytest.raises(CommitConflict, match=said):
        roll_back(f"faulty://{promoted}", "run-4")
    assert read_history(store).readable[3:] == [winner]


def test_runs_that_promote_at_the_same_time_are_judged_one_after_the_other(exports):
    root, bad, good = exports
    start = threading.Barrier(4)

    def promote(candidate: Export) -> None:
        start.wait()
        promote_export(root, candidate, GateConfig(), "run")

    threads = [threading.Thread(target=promote, args=(each,)) for each in (bad, good, bad, good)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Whoever came first, the better one is current, and each pointer was set against the one before it.
    history = read_history(open_store(root)).readable
    assert history[-1].export == good.number
    assert [pointer.previous for pointer in history] == [None, *(pointer.export for pointer in history[:-1])]
    assert len({pointer.export for pointer in history}) == len(history) <= 2


def test_any_export_is_current_if_a_person_says_so(exports):
    root, bad, good = exports
    promote_export(root, good, GateConfig(), "run-1")
    chosen = choose_export(root, bad.number, "run-2")
    assert (chosen.gate.decision, chosen.previous, chosen.current) == ("chosen", good.number, bad.number)
    assert choose_export(root, bad.number, "run-3").gate.decision == "already_current"
    assert roll_back(root, "run-4").current == good.number
    assert [each.decision for each in read_history(open_store(root)).readable] == ["promoted", "chosen", "rolled_back"]
    with pytest.raises(UsageError, match="has no export 9"):
        choose_export(root, 9, "run-5")


def test_what_is_damaged_is_neither_chosen_nor_rolled_back_to(exports, tmp_path):
    root, bad, good = exports
    promote_export(root, bad, GateConfig(), "run-1")
    promote_export(root, good, GateConfig(), "run-2")
    (tmp_path / bad.record.files[0].path).unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        roll_back(root, "run-3")
    with pytest.raises(IntegrityError, match="is missing"):
        choose_export(root, bad.number, "run-3")
    assert current_export(root).number == good.number

    # Which one is current may be unknown: everybody is told what to do about it.
    newest = tmp_path / "current" / "00000002.json"
    newest.write_bytes(newest.read_bytes()[:-9])
    for ask in (lambda: current_export(root), lambda: roll_back(root, "run-4")):
        with pytest.raises(IntegrityError, match=f"choose one: `shardmill promote {root}@N`"):
            ask()
    choose_export(root, good.number, "run-4")
    assert current_export(root).number == good.number


def test_rollbacks_go_further_back_after_an_export_was_chosen(promoted):
    choose_export(promoted, 1, "run")
    assert [roll_back(promoted, "run").current for _ in range(3)] == [3, 2, 1]
    with pytest.raises(UsageError, match="nothing to roll back to"):
        roll_back(promoted, "run")


def test_rollbacks_go_back_from_what_was_chosen_after_a_rollback(promoted):
    roll_back(promoted, "run")
    choose_export(promoted, 3, "run")
    choose_export(promoted, 1, "run")
    assert [roll_back(promoted, "run").current for _ in range(3)] == [3, 2, 1]


def test_a_pointer_of_another_version_is_no_damage(promoted):
    store = open_store(promoted)
    store.put(f"{CURRENT}/00000004.json", with_checksum(b'{"attempt": "a", "record": {"export": 2, "colour": "blue"}}'))
    candidate = read_export(promoted, 1)
    asks = (lambda: current_export(promoted), lambda: roll_back(promoted, "run"),
            lambda: promote_export(promoted, candidate, GateConfig(min_accuracy=0.0), "run",
                                    replace_current=True))  # fmt: skip
    for ask in asks:
        with pytest.raises(UsageError, match=rf"00000004.json has a different layout; .*promote {promoted}@N`"):
            ask()
    assert read_history(store, is_layout_free=True).next_number == 5
    choose_export(promoted, 2, "run")
    assert current_export(promoted).number == 2


def test_an_export_of_another_version_is_no_damage(promoted, tiny_uri):
    candidate = put_export(promoted, tiny_uri)
    open_store(promoted).put("exports/00000003.json", with_checksum(b'{"attempt": "a", "record": {"colour": "blue"}}'))
    with pytest.raises(UsageError, match=r"exports/00000003.json has a different layout"):
        promote_export(promoted, candidate, GateConfig(min_accuracy=0.0), "run")
    choose_export(promoted, candidate.number, "run")


ROOT = Path(__file__).parents[2]
_PIN, _MODEL = DatasetPin("dataset", 1, "0" * 64), ModelIdentity("", "")
_HOUR = 3600.0


def training(models: Path, number: int, *, result: bool = True, uses: str = "") -> str:
    """A training as `train` leaves it; `uses`: a checkpoint of another one that it names. Older numbers are older."""
    store, folder = open_store(models), f"{TRAININGS}/{number:016x}/v00000001-00000000/epochs-00010-best"
    best = BestEpoch(0, 1.0, uses) if uses else None
    identity = TrainingIdentity(_PIN, "plan", _MODEL, {})
    keeps = CheckpointFolder(claim_attempt(store, folder, 1), 1)
    checkpoint = keeps.path_of(7)
    write_checkpoint(keeps, 7, identity, Progress(best=best))
    for name in (CONFUSION, f"{EXCHANGED_FILES}/1", f"{PROFILES}/steps-1-2/rank-0/x"):
        store.put(f"{folder}/{name}", b"")
    if result:
        done = TrainResult(
            dataset=_PIN, training_dir=folder, exported="best", weights_epoch=0, checkpoint=uses or checkpoint,
            last_checkpoint=checkpoint, continued_from="", model=_MODEL, strategy="single", world_size=1, num_epochs=1,
            num_steps=1, seconds=1.0, images_per_second=1.0, time_shares=TimeShares(), final_loss_hex="0x0p+0",
            weights_sha256="", stopped_early=False, resumed_from=None, history=(), evaluation=None,
        )  # fmt: skip
        store.put(f"{folder}/{RESULT}", with_checksum(to_json(done)))
    age(models / folder, (100 - number) * _HOUR)
    return folder


def export(models: Path, number: int, training_dir: str = "") -> str:
    """An export with one file; returns the folder of its files."""
    store, artifact = open_store(models), f"artifacts/{number:04d}"
    store.put(f"{artifact}/model.keras", b"model")
    record = ExportRecord(
        created_at="", run_id="run", artifact_dir=artifact, files=(checksum_file(f"{artifact}/model.keras", b"model"),),
        keras_note="", model="m", class_names=("a",), normalize=NormalizeOptions(), normalization_fingerprint="",
        decoder_id="", channel_mean=(), channel_std=(), dataset=_PIN, content_digest="", layout_digest="",
        training_dir=training_dir, checkpoint="", weights_sha256="", training_evaluation=None, evaluation=None,
        parity_max_abs_diff=0.0, parity_num_images=0,
    )  # fmt: skip
    assert put_record(store, EXPORTS, number, record)
    age(models / artifact, (100 - number) * _HOUR)
    return artifact


def point(models: Path, number: int, export_number: int, previous: int | None, decision: Any = "promoted") -> None:
    pointer = Pointer(
        export=export_number, previous=previous, replaced=None, decision=decision, reason="", accuracy=None,
        run_id="run", created_at="",
    )  # fmt: skip
    assert put_record(open_store(models), CURRENT, number, pointer)


def age(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (then, then))


def collect(models: Path, keep: int | None, older_than_seconds: float = 2 * _HOUR) -> ModelsReport:
    return collect_models(open_store(models), Retention(keep, older_than_seconds))


def files(models: Path) -> set[str]:
    return {str(path.relative_to(models)) for path in models.rglob("*") if path.is_file()}


def test_exports_that_no_rollback_needs_go_and_the_newest_stay(tmp_path: Path):
    artifacts = {number: export(tmp_path, number) for number in range(1, 8)}
    point(tmp_path, 1, 2, None)
    point(tmp_path, 2, 4, 2)
    before = files(tmp_path)
    planned = plan_models(open_store(tmp_path), Retention(2, 2 * _HOUR), time.time())
    assert (planned.expired_exports, planned.retained_exports) == ((1, 3, 5), (2, 4, 6, 7))
    assert files(tmp_path) == before
    assert collect(tmp_path, 2).garbage == planned.garbage
    assert record_numbers(open_store(tmp_path), EXPORTS) == [2, 4, 6, 7]
    gone = {f"{artifacts[number]}/model.keras" for number in (1, 3, 5)}
    assert before - files(tmp_path) == gone | {f"{EXPORTS}/{number:08d}.json" for number in (1, 3, 5)}
    # The next export has a new number, and an export that was rolled back is needed no more.
    point(tmp_path, 3, 2, None, "rolled_back")
    assert collect(tmp_path, 1).retained_exports == (2, 7)
    assert not collect(tmp_path, 1).garbage


def test_nothing_expires_without_a_number_or_before_its_age(tmp_path: Path):
    for number in range(1, 4):
        export(tmp_path, number)
        training(tmp_path, number)
    assert collect(tmp_path, None) == collect(tmp_path, 1, 1_000 * _HOUR)
    assert collect(tmp_path, None).expired_trainings == ()


def test_old_trainings_go_but_for_what_others_and_exports_name(tmp_path: Path):
    exported, shorter, old, unfinished_old = (training(tmp_path, n, result=n != 4) for n in (1, 2, 3, 4))
    checkpoint = f"{shorter}/checkpoints/step-00000007-a00000001"
    continued = training(tmp_path, 5, result=False, uses=checkpoint)
    newest = training(tmp_path, 6, uses=f"{continued}/checkpoints/step-00000007-a00000001")
    export(tmp_path, 9, exported)
    report = collect(tmp_path, 1)
    assert report.expired_trainings == (old, unfinished_old)
    assert report.retained_trainings == (exported, shorter, continued, newest)
    assert {path.split("/epochs")[0] for path in files(tmp_path) if path.startswith(TRAININGS)} == {
        folder.split("/epochs")[0] for folder in (exported, shorter, continued, newest)
    }
    assert not list((tmp_path / TRAININGS / f"{3:016x}").rglob("*"))


def leave_everything(models: Path, number: int, *, fresh: int = 0) -> str:
    """What a training may leave beside its checkpoints and result, and a later shardmill perhaps more."""
    first = training(models, number)
    folder, store = f"{first}/{FRESH}-{fresh:08d}" if fresh else first, open_store(models)
    if fresh:
        assert put_record(store, f"{first}/{FRESH}", fresh, FreshTraining(run_id=f"run-{fresh}"))
        keeps = CheckpointFolder(claim_attempt(store, folder, 1), 1)
        write_checkpoint(keeps, 7, TrainingIdentity(_PIN, "plan", _MODEL, {}), Progress())
    for name in (PLAN, "more.json", "most.json", INITIALIZED, "later.json", "later/1/x"):
        store.put(f"{folder}/{name}", b"")
    age(models / first, (100 - number) * _HOUR)
    return folder


def test_nothing_of_a_deleted_training_is_left(tmp_path: Path):
    gone = leave_everything(tmp_path, 1)
    kept = leave_everything(tmp_path, 2)
    before = {path for path in files(tmp_path) if path.startswith(kept)}
    assert collect(tmp_path, 1).expired_trainings == (gone,)
    assert {path for path in files(tmp_path) if path.startswith(TRAININGS)} == before
    assert not list((tmp_path / TRAININGS / f"{1:016x}").rglob("*"))


@pytest.mark.starts("program")
@pytest.mark.parametrize("killed", ["gc_delete:2", "gc_delete:4", "gc_delete:9"])
def test_a_killed_gc_of_a_training_is_finished_by_the_next(tmp_path: Path, killed: str):
    gone, kept = leave_everything(tmp_path, 1), leave_everything(tmp_path, 2)
    code = (
        "import sys; from pathlib import Path; from tests.train.test_promote import collect; "
        "collect(Path(sys.argv[1]), 1)"
    )
    environment = {**os.environ, VARIABLE: killed}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, env=environment, check=False, timeout=300)
    assert done.returncode == -9
    assert any(path.startswith(gone) for path in files(tmp_path)) and f"{gone}/{RESULT}" not in files(tmp_path)
    collect(tmp_path, 1)
    assert all(path.startswith(kept) for path in files(tmp_path) if path.startswith(TRAININGS))


def test_a_training_that_was_asked_for_goes_with_its_record_and_numbers_go_on(tmp_path: Path):
    gone = leave_everything(tmp_path, 1, fresh=1)
    first = gone.rpartition("/")[0]
    # Another one of the same settings is young: it stays, and so does the record that leads to it.
    store = open_store(tmp_path)
    assert put_record(store, f"{first}/{FRESH}", 2, FreshTraining(run_id="run-2"))
    store.put(f"{first}/{FRESH}-00000002/{PLAN}", b"")
    report = collect(tmp_path, 0)
    assert report.expired_trainings == (first, gone)
    assert report.retained_trainings == (f"{first}/{FRESH}-00000002",)
    left = {path for path in files(tmp_path) if path.startswith(TRAININGS)}
    assert left == {f"{first}/{FRESH}/00000002.json", f"{first}/{FRESH}-00000002/{PLAN}"}
    # Of the last one nothing is left either: an equal training is the first one again.
    age(tmp_path / first, 3 * _HOUR)
    collect(tmp_path, 0)
    assert not any(path.startswith(TRAININGS) for path in files(tmp_path))


def test_an_equal_training_after_gc_chooses_anew(tiny_uri: str, tmp_path: Path, choice_of):
    tree = tree_of(tiny_uri, tmp_path, num_workers=2)
    _, _, choice, store = choice_of(tmp_path, tree)
    chosen = resolve(tree.train, SparkConfig()).changed(strategy="multi_worker_mirrored")
    keep_plan(store, choice.training_dir, TrainingPlan(chosen))
    _, _, asked, _ = choice_of(tmp_path, tree)
    assert read_plan(store, asked.folders) is not None
    newer = training(tmp_path, 99)
    age(tmp_path / choice.training_dir, 50 * _HOUR)
    assert collect(tmp_path, 1).retained_trainings == (newer,)
    _, _, again, _ = choice_of(tmp_path, tree)
    assert again.training_dir == choice.training_dir and read_plan(store, again.folders) is None
    # Nor is a training that somebody asked for the one that an equal training goes on with.
    assert put_record(store, f"{choice.training_dir}/{FRESH}", 1, FreshTraining(run_id="r"))
    assert choice_of(tmp_path, tree)[2].training_dir == f"{choice.training_dir}/{FRESH}-00000001"
    age(tmp_path / choice.training_dir, 50 * _HOUR)
    collect(tmp_path, 1)
    assert choice_of(tmp_path, tree)[2].training_dir == choice.training_dir


def test_what_killed_processes_left_goes_by_age_alone(tmp_path: Path):
    kept = training(tmp_path, 1)
    half = tmp_path / kept / "checkpoints" / "step-00000009-killed"
    empty = tmp_path / kept / "checkpoints" / "step-00000011-killed"
    for folder in (half, empty, tmp_path / "artifacts" / "unnamed", tmp_path / "reach"):
        folder.mkdir(parents=True)
    for file in (
        half / "weights.npz",
        half / ".tmp-1",
        tmp_path / "artifacts" / "unnamed" / "x",
        tmp_path / "reach" / "1",
    ):
        file.write_bytes(b"1")
    before = files(tmp_path)
    assert not collect(tmp_path, None).garbage
    for folder in (half, empty, tmp_path / "artifacts" / "unnamed", tmp_path / "reach"):
        age(folder, 3 * _HOUR)
    kinds = {each.kind for each in collect(tmp_path, None).garbage}
    assert kinds == {"checkpoints", "artifacts", "reach", "unpublished"}
    gone = {str((half / name).relative_to(tmp_path)) for name in ("weights.npz", ".tmp-1")}
    assert before - files(tmp_path) == gone | {"artifacts/unnamed/x", "reach/1"}
    assert not half.exists() and not empty.exists()


def test_if_a_record_cannot_be_read_nothing_that_it_may_name_goes(tmp_path: Path):
    with pytest.raises(UsageError, match="holds no models"):
        collect(tmp_path, 1)
    for number in range(1, 4):
        export(tmp_path, number)
    point(tmp_path, 1, 1, None)
    point(tmp_path, 2, 2, 1)
    (tmp_path / CURRENT / "00000001.json").write_bytes(b"{}")
    before = files(tmp_path)
    with pytest.raises(IntegrityError, match="the exports that rollbacks need"):
        collect(tmp_path, 1)
    assert files(tmp_path) == before
    assert not collect(tmp_path, None).garbage


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2, 3, 5, 8, 9], "1 to 3, 5, 8 to 9"),
        (list(range(1, 41, 2)), "..., 25, 27, 29, 31, 33, 35, 37, 39"),
    ],
)
def test_numbers_are_reported_as_ranges(numbers: list[int], words: str):
    assert numbers_in_words(numbers) == words


def test_an_export_that_is_gone_is_not_among_those_that_are_reported(tmp_path: Path):
    for number in (1, 2, 5):
        export(tmp_path, number)
    with pytest.raises(UsageError, match="has no export 3; it has 1 to 2, 5; "):
        read_export(str(tmp_path), 3)
