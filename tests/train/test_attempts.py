"""Attempts at one training: each number is one attempt's, and only the newest publishes."""

from __future__ import annotations

import signal
import threading

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import CommitConflict
from shardmill.stores import open_store
from tests.train.driver_process import start_driver
from tests.train.training import MODELS
from train.checkpoints.attempts import claim_attempt
from train.checkpoints.checkpoint import complete_checkpoints
from train.checkpoints.state import MARKER
from train.results import read_result


def test_attempts_that_begin_at_once_get_different_numbers_without_gaps(tmp_path):
    numbers: list[int] = []
    threads = [
        threading.Thread(target=lambda: numbers.append(claim_attempt(open_store(tmp_path), "t", 1).number))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(numbers) == list(range(1, 17))


def test_only_the_newest_attempt_publishes_and_only_once(tmp_path):
    store = open_store(tmp_path)
    first, second, third = (claim_attempt(store, "t", world_size) for world_size in (4, 3, 2))
    for old in (first, second):
        with pytest.raises(CommitConflict, match=f"attempt {old.number} at .* attempt 3 began on host .*, process"):
            old.publish("t/result.json", b"old")
    third.publish("t/result.json", b"new")
    # A reply that was lost: the same bytes again are no conflict.
    third.publish("t/result.json", b"new")
    with pytest.raises(CommitConflict, match="another attempt has published"):
        claim_attempt(store, "t", 1).publish("t/result.json", b"other")
    assert store.read("t/result.json") == b"new"
    # Another training has numbers of its own.
    assert claim_attempt(store, "other", 1).number == 1


@pytest.mark.drill
def test_an_attempt_that_wakes_up_beside_its_retry_ends_with_6_and_leaves_it_the_training(tiny_uri, tmp_path):
    """A scheduler whose worker was killed knows nothing of the training that still lives; here it sleeps meanwhile."""
    how = {"launcher": "inline", "strategy": "single", "num_workers": 1, "model": f"{MODELS}:stateful", "epochs": 3}
    sizes = {"global_batch_size": 6, "num_streams": 6, "checkpoint_every_steps": 1, "checkpoint": {"keep": 100}}
    train: dict[str, object] = {**how, **sizes}
    pin = open_dataset(tiny_uri).pin
    older = start_driver(tmp_path, train, dataset=pin)
    older.wait_for_step()
    older.process.send_signal(signal.SIGSTOP)
    try:
        retry = start_driver(tmp_path, train, dataset=pin).outcome()
    finally:
        older.process.send_signal(signal.SIGCONT)
    fenced = older.outcome()
    assert (fenced.get("error"), "attempt 2 began" in fenced["message"]) == ("CommitConflict", True), fenced

    store = open_store(tmp_path / "models")
    result = read_result(store, "trainings/test")
    assert result is not None and result.weights_sha256 == retry["weights_sha256"]
    newest = next(complete_checkpoints(store, "trainings/test"))
    assert newest.path == result.last_checkpoint
    # What the older one published, it published before the retry began.
    names = [marker.parent.name for marker in (tmp_path / "models").glob(f"trainings/test/checkpoints/*/{MARKER}")]
    older_steps, newer_steps = ([name[:13] for name in names if name.endswith(number)] for number in ("1", "2"))
    # But for the one that was on its way when it fell asleep.
    assert max(sorted(older_steps)[:-1], default="") < min(newer_steps)
