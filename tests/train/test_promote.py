"""The gate, and the pointer to the current export."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from shardmill.config import DatasetConfig, ModelsConfig
from shardmill.dataset import open_dataset
from shardmill.errors import CommitConflict, GateNotPassed, UsageError
from shardmill.storage import LocalStore, open_store
from tests.support import make_dataset
from train.config import GateConfig, TrainConfig, TrainTree
from train.export import Export
from train.job import export_model, train_model
from train.observer import SilentObserver
from train.promote import (
    CURRENT,
    Pointer,
    _by_name,
    current_export,
    decide,
    evaluate_export,
    promote_export,
    read_history,
    read_pointer,
    roll_back,
)
from train.records import put_record
from train.values import Evaluation


def evaluation(accuracy: float, split: str = "test") -> Evaluation:
    return Evaluation(split, 200, 0.5, accuracy, 1.0, (), ())


@pytest.mark.parametrize(
    ("candidate", "current", "gate", "decision", "said"),
    [
        (0.9, None, {}, "promoted", "accuracy 0.9000 on 200 test samples"),
        (0.9, None, {"min_accuracy": 0.95}, "kept", "is below gate.min_accuracy = 0.95"),
        (0.95, None, {"min_accuracy": 0.95}, "promoted", "there was no current model"),
        (0.9, 0.9, {}, "promoted", "the current model has 0.9000"),
        (0.895, 0.9, {"max_regression": 0.01}, "promoted", "0.9000"),
        (0.88, 0.9, {"max_regression": 0.01}, "kept", "falls behind the current model's 0.9000"),
        (0.88, 0.9, {"max_regression": 0.05}, "promoted", ""),
        (0.99, 0.9, {"min_accuracy": 0.995}, "kept", "below"),
    ],
)
def test_the_gates_rule(candidate, current, gate, decision, said):
    before = evaluation(current) if current is not None else None
    found = decide(evaluation(candidate), before, GateConfig(**gate))
    assert (found.decision, found.candidate_accuracy, found.current_accuracy) == (decision, candidate, current)
    assert said in found.reason


def test_a_model_that_nobody_could_judge_is_kept():
    assert decide(None, None, GateConfig()).decision == "kept"


def test_classes_are_matched_by_name():
    predict = _by_name(
        lambda images: np.array([[0.1, 0.7, 0.2]] * len(images)), ("a", "b", "c"), ("c", "new", "a", "b")
    )
    assert predict(np.zeros((2, 1, 1, 1), np.uint8)).tolist() == [[0.2, 0.0, 0.1, 0.7]] * 2


@pytest.fixture(scope="module")
def dataset_uri(tmp_path_factory) -> str:
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def exports(dataset_uri, tmp_path) -> tuple[str, Export, Export]:
    """A models' root, the export of a model that has hardly learned, and that of one that has."""
    root = str(tmp_path)

    def make(**train: object) -> Export:
        config = TrainConfig(global_batch_size=24, num_streams=6, **train)
        tree = TrainTree(dataset=DatasetConfig(uri=dataset_uri), models=ModelsConfig(uri=root), train=config)
        return export_model(tree, train_model(tree, SilentObserver()), "run").export

    return root, make(epochs=1, learning_rate=1e-7), make(epochs=4, learning_rate=3e-3)


def test_exports_come_and_go_through_the_gate(exports, dataset_uri):
    root, bad, good = exports
    gate, store = GateConfig(), open_store(exports[0])
    with pytest.raises(UsageError, match="has no current model"):
        current_export(root)

    # The first has nobody to fall behind, the better one replaces it, and is current already then.
    first = promote_export(root, bad, gate, "run-1")
    assert (first.gate.decision, first.previous, first.current) == ("promoted", None, bad.number)
    second = promote_export(root, good, gate, "run-2")
    assert (second.gate.decision, second.previous, second.current) == ("promoted", bad.number, good.number)
    assert second.gate.current_accuracy == bad.record.evaluation.accuracy < good.record.evaluation.accuracy
    again = promote_export(root, good, gate, "run-3")
    assert (again.gate.decision, again.previous, again.current) == ("already_current", good.number, good.number)
    assert len(read_history(store)) == 2

    # The worse one is kept out; with `require` that is an error.
    kept = promote_export(root, bad, gate, "run-4")
    assert (kept.gate.decision, kept.current) == ("kept", good.number)
    with pytest.raises(GateNotPassed, match=f"export {bad.number} was not promoted: accuracy .* falls behind"):
        promote_export(root, bad, gate, "run-4", require=True)

    # Rolled back: the one before is current, and the next run does not put the other in again.
    back = roll_back(root, "run-5")
    assert (back.gate.decision, back.previous, back.current) == ("rolled_back", good.number, bad.number)
    assert current_export(root).number == bad.number
    assert promote_export(root, good, gate, "run-6").gate.reason == (
        f"export {good.number} was promoted before and rolled back"
    )
    with pytest.raises(UsageError, match="nothing to roll back to"):
        roll_back(root, "run-7")
    assert [pointer.run_id for pointer in read_history(store)] == ["run-1", "run-2", "run-5"]

    # An export says of the dataset what the training model said of it.
    test_split = evaluate_export(root, good.number, open_dataset(dataset_uri), "test")
    assert test_split.accuracy == good.record.evaluation.accuracy
    assert test_split.loss == pytest.approx(good.record.evaluation.loss, abs=1e-6)


@pytest.fixture
def promoted(tmp_path) -> str:
    """A models' root where exports 1, 2 and 3 became current, one after the other."""
    for number in (1, 2, 3):
        previous = number - 1 or None
        put_record(open_store(tmp_path), CURRENT, number, pointer(number, previous, "promoted", f"run-{number}"))
    return str(tmp_path)


def pointer(export: int, previous: int | None, decision: str, run_id: str) -> Pointer:
    return Pointer(
        export=export, previous=previous, decision=decision, reason="", accuracy=0.9, run_id=run_id, created_at=""
    )


def test_a_rollback_whose_reply_was_lost_goes_back_once(promoted, monkeypatch):
    put_if_absent = LocalStore.put_if_absent

    def sent_again(store: LocalStore, path: str, data: bytes) -> bool:
        put_if_absent(store, path, data)
        return put_if_absent(store, path, data)

    monkeypatch.setattr(LocalStore, "put_if_absent", sent_again)
    back = roll_back(promoted, "run-4")
    assert (back.previous, back.current) == (3, 2)
    assert [each.export for each in read_history(open_store(promoted))] == [1, 2, 3, 2]


@pytest.mark.parametrize("winner", [pointer(2, 1, "rolled_back", "run-5"), pointer(4, 3, "promoted", "run-5")])
def test_a_rollback_that_comes_second_changes_nothing(promoted, monkeypatch, winner):
    """Another operator has rolled back, or a run has promoted, between this one's look at the history and its write."""
    store = open_store(promoted)
    put_if_absent = LocalStore.put_if_absent

    def come_second(late: LocalStore, path: str, data: bytes) -> bool:
        monkeypatch.undo()
        assert put_record(store, CURRENT, 4, winner)
        return put_if_absent(late, path, data)

    monkeypatch.setattr(LocalStore, "put_if_absent", come_second)
    said = rf"run run-5 made export {winner.export} current \({winner.decision}\) while run run-4 .*changed nothing"
    with pytest.raises(CommitConflict, match=said):
        roll_back(promoted, "run-4")
    assert read_pointer(store) == winner and len(read_history(store)) == 4


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
    history = read_history(open_store(root))
    assert read_pointer(open_store(root)).export == good.number
    assert [pointer.previous for pointer in history] == [None, *(pointer.export for pointer in history[:-1])]
    assert len({pointer.export for pointer in history}) == len(history) <= 2
