"""The gate, and the pointer to the current export."""

# pyright: reportArgumentType=false
from __future__ import annotations

import threading

import numpy as np
import pytest

from shardmill.checksummed import with_checksum
from shardmill.dataset.open import open_dataset
from shardmill.errors import CommitConflict, GateNotPassed, IntegrityError, UsageError
from shardmill.loader.reader import read_split
from shardmill.stores import open_store
from tests.services.faulty_store import FaultyStore, send_twice
from tests.train.exports import put_export
from train.evaluation.evaluate import SMALLEST_LOG_PROBABILITY
from train.published.current import CURRENT, Pointer, read_history
from train.published.exported import Export, read_export
from train.published.figures import by_name, evaluate_export
from train.published.gate import promote_export, promotion_record
from train.published.load import current_export, load_exported
from train.published.promote import choose_export, roll_back
from train.records import put_record
from train.settings.gate import GateConfig


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
    assert second.gate.current_figure == bad.record.evaluation.accuracy < good.record.evaluation.accuracy
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
    return Pointer(
        export=export,
        previous=previous,
        replaced=export - 1 or None,
        decision=decision,
        reason="",
        accuracy=0.9,
        run_id=run_id,
        created_at="",
    )


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
    asks = (
        lambda: current_export(promoted),
        lambda: roll_back(promoted, "run"),
        lambda: promote_export(promoted, candidate, GateConfig(min_accuracy=0.0), "run", replace_current=True),
    )
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
