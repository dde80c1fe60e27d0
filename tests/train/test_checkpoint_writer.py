"""A checkpoint is written behind the training, by the newest attempt: no kill, slow or failing store loses one."""

from __future__ import annotations

import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.errors import CommitConflict, StorageError
from shardmill.failpoints import VARIABLE
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.process import Terminated
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from shardmill.values import DatasetPin
from tests.lab.scale import usually
from tests.train.checkpoints import CONFIG, FullStore, OneRank, Silent
from tests.train.driver_process import start_driver
from tests.train.forked_ranks import launch_forked
from tests.train.multi_rank_workers import HELD_FROM, KILLED_IN, let_go
from tests.train.ranks import WORKERS, Watcher, train_on_ranks
from tests.train.training import MODELS, DriverRecorder, Recorder, task_of, train_here
from train.checkpoints.arrays import MARKER, WEIGHTS, rank_file
from train.checkpoints.checkpoint import (
    Attempt,
    CheckpointFolder,
    TrainingIdentity,
    claim_attempt,
    complete_checkpoints,
    open_checkpoint,
)
from train.checkpoints.checkpoint_writer import OF_ALL_RANKS, STORING, CheckpointWriter, Moment, wait_for_writers
from train.contracts.activities import Activity
from train.contracts.values import RESULT, BestEpoch, ModelIdentity, Progress
from train.launching import LAUNCHERS, rank_failures
from train.launching.rank_failures import RankLost
from train.results import read_result

NUM_KILLS = usually(3, 300)


def test_a_store_that_cannot_say_whether_an_attempt_is_the_newest_costs_a_checkpoint(tiny_uri, tmp_path, whole, faulty):
    asked = []

    def stat(store, path):
        if path.endswith("attempts/00000002.json"):
            asked.append(path)
            if len(asked) == 2:
                raise StorageError("503", "expected an answer", "ask again")
        return store.sound.stat(path)

    faulty["stat"] = stat
    result = train_here(tiny_uri, f"faulty://{tmp_path}", recorder := Recorder(), **CONFIG)
    [failed] = recorder.named("checkpoint_failed")
    assert failed["global_step"] == 2 and result.weights_sha256 == whole.weights_sha256


def test_the_rank_that_a_checkpoint_waits_for_is_reported(tmp_path):
    """Its own store, first for a file and then for the marker; or other ranks, whose files it names."""
    told: queue.SimpleQueue[Activity] = queue.SimpleQueue()
    go_on = threading.Semaphore(0)

    class Telling(Silent):
        now = Activity()

        def doing(self, activity: Activity) -> Activity:
            before, self.now = self.now, activity
            told.put(activity)
            return before

    class SlowStore(LocalStore):
        def put(self, path: str, data: bytes) -> None:
            assert go_on.acquire(timeout=60)
            super().put(path, data)

    class FirstOfTwo(OneRank):
        world_size = 2

    def gather(data: bytes) -> list[bytes]:
        assert go_on.acquire(timeout=60)
        return [data, data]

    claim_attempt(open_store(tmp_path), "t", 2)
    folder = CheckpointFolder(Attempt(SlowStore(str(tmp_path)), "t", 1), 2)
    with CheckpointWriter(folder, FirstOfTwo(), Telling(), gather) as writer:
        writer.begin(Moment(folder.path_of(1), {WEIGHTS: [np.zeros(3)]}, IDENTITY, Progress(), 1, world_size=2))
        taken = threading.Thread(target=writer.take)
        taken.start()
        for expected in (STORING, OF_ALL_RANKS, STORING, OF_ALL_RANKS):
            assert told.get(timeout=60) == expected
            go_on.release()
        assert told.get(timeout=60) == Activity()
        taken.join()
    assert open_checkpoint(open_store(tmp_path), folder.path_of(1)).marker.world_size == 2


def test_what_is_still_written_when_a_training_was_asked_to_end_can_be_waited_for(tmp_path):
    is_left = threading.Event()

    class HeldStore(LocalStore):
        def put(self, path: str, data: bytes) -> None:
            assert is_left.wait(60)
            super().put(path, data)

    claim_attempt(open_store(tmp_path), "t", 2)
    folder = CheckpointFolder(Attempt(HeldStore(str(tmp_path)), "t", 1), 2)
    with pytest.raises(Terminated), CheckpointWriter(folder, OneRank(), Silent()) as writer:
        writer.begin(moment(folder, 1))
        raise Terminated
    assert not complete_checkpoints_of(tmp_path)
    is_left.set()
    wait_for_writers()
    assert complete_checkpoints_of(tmp_path)


def complete_checkpoints_of(models: Path) -> list[str]:
    return [each.path for each in complete_checkpoints(open_store(models), "t")]


IDENTITY = TrainingIdentity(DatasetPin("u", 1, ""), "plan", ModelIdentity("", ""), {})


def moment(folder: CheckpointFolder, step: int, best_step: int | None = None, world_size: int = 1) -> Moment:
    """At `step`, with weights of that value; `best_step`: where the best epoch ended."""
    best = None if best_step is None else BestEpoch(0, 1.0, folder.path_of(best_step))
    files = {WEIGHTS: [np.full(3, float(step))]}
    return Moment(folder.path_of(step), files, IDENTITY, Progress(best=best), step, world_size)


@pytest.mark.parametrize(
    ("refused_best", "next_best", "is_written_later"),
    [
        # The best epoch's weights exist nowhere else.
        (1, 1, True),
        (1, 2, False),
        (None, 1, False),
        (None, None, False),
        (0, 1, False),
    ],
)
def test_a_refused_checkpoint_of_the_best_epoch_is_written_before_the_next(
    tmp_path, refused_best, next_best, is_written_later
):
    store = FullStore(str(tmp_path))
    claim_attempt(store, "t", 1)
    folder = CheckpointFolder(Attempt(store, "t", 1), 9)
    with CheckpointWriter(folder, OneRank(), Silent()) as writer:
        store.full_for = frozenset({WEIGHTS})
        for _ in range(2):
            writer.begin(moment(folder, 1, refused_best))
            assert writer.take().problem.startswith("no room") and [*writer.refused] == [folder.path_of(1)]
        if is_written_later:
            writer.begin(moment(folder, 2, next_best))
            assert writer.take().problem and {*writer.refused} == {folder.path_of(1), folder.path_of(2)}
        store.full_for = frozenset()
        writer.begin(moment(folder, 2, next_best))
        assert not writer.take().problem and writer.take() is None
        written = [found.marker.global_step for found in complete_checkpoints(store, "t")]
        assert written == ([2, 1] if is_written_later else [2])
        assert [*writer.refused] == ([] if is_written_later else [folder.path_of(1)])
        writer.begin(moment(folder, 3, next_best))
        assert not writer.take().problem and len([*complete_checkpoints(store, "t")]) == len(written) + 1


@pytest.mark.parametrize(("full_rank", "name"), [(None, ""), (0, WEIGHTS), (1, WEIGHTS), (0, MARKER)])
def test_all_ranks_learn_alike_whether_a_checkpoint_is_there(tmp_path, full_rank, name):
    both, told, outcomes = threading.Barrier(2, timeout=20), [b"", b""], {}
    claim_attempt(open_store(tmp_path), "t", 2)

    class OfTwo(OneRank):
        world_size = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def gather(self, data: bytes) -> list[bytes]:
            told[self.rank] = data
            both.wait()
            everything = list(told)
            both.wait()
            return everything

    def write(rank: int) -> None:
        store = FullStore(str(tmp_path))
        store.full_for = frozenset({name} if rank == full_rank else ())
        folder = CheckpointFolder(Attempt(store, "t", 1), 9)
        mine = moment(folder, 1, world_size=2)
        mine_of_two = OfTwo(rank)
        with CheckpointWriter(folder, mine_of_two, Silent(), mine_of_two.gather) as writer:
            files = mine.files if rank == 0 else {rank_file(1): [np.zeros(2)]}
            full_name = {rank_file(1)} if full_rank == rank == 1 else set()
            store.full_for |= full_name
            writer.begin(replace(mine, files=files))
            outcomes[rank] = (writer.take().problem, dict(writer.refused))

    ranks = [threading.Thread(target=write, args=(rank,), daemon=True) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30)
    assert outcomes[0] == outcomes[1]
    problem, refused = outcomes[0]
    assert problem.startswith("no room") == (full_rank is not None) == bool(refused)
    found = [*complete_checkpoints(open_store(tmp_path), "t")]
    assert bool(found) == (full_rank is None)
    if found:
        assert [file.path for file in found[0].marker.files] == [WEIGHTS, rank_file(1)]


def test_there_is_memory_for_one_copy_from_before_the_first_step_on(tmp_path):
    """It is held between checkpoints, and given up before the next copy is made, so that there are never two."""
    copies: list[weakref.ref[np.ndarray]] = []

    class Copying(OneRank):
        def state_files(self) -> dict[str, list[np.ndarray]]:
            assert not any(copy() is not None for copy in copies)
            weights = np.zeros(3)
            copies.append(weakref.ref(weights))
            return {WEIGHTS: [weights]}

    claim_attempt(open_store(tmp_path), "t", 1)
    folder = CheckpointFolder(Attempt(open_store(tmp_path), "t", 1), 2)
    with CheckpointWriter(folder, Copying(), Silent()) as writer:
        writer.copy_state()
        for step in (1, 2):
            writer.begin(Moment(folder.path_of(step), writer.copy_state(), IDENTITY, Progress(), step, world_size=1))
            writer.take()
            # The thread that has written is about to end, and names the copy until then.
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            assert copies[-1]() is not None
    assert len(copies) == 3


def test_training_continues_while_the_store_is_slow(tiny_uri, tmp_path, whole, faulty):
    """A checkpoint's file is kept back until the step after it is done."""
    done: dict[int, threading.Event] = {}

    class Steps(Recorder):
        def step(self, report) -> None:
            super().step(report)
            done.setdefault(report.epoch * report.num_steps + report.step + 1, threading.Event()).set()

    def put(store, path, data) -> None:
        if path.endswith(WEIGHTS) and (step := int(path.split("step-")[1][:8])) < whole.num_steps:
            assert done.setdefault(step + 1, threading.Event()).wait(60), f"step {step + 1} waits for its checkpoint"
        store.sound.put(path, data)

    faulty["put"] = put
    config = {**CONFIG, "checkpoint": {"keep": 100}}
    result = train_here(tiny_uri, f"faulty://{tmp_path}", recorder := Steps(), **config)
    assert result.weights_sha256 == whole.weights_sha256
    # Each holds the state of its own step, not that of the one which was done before it was written.
    saved = [each["global_step"] for each in recorder.named("checkpoint")]
    assert saved == list(range(1, whole.num_steps + 1))
    for step in (1, 2):
        models = Path(shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-{step}"))
        (models / "t" / RESULT).unlink()
        for folder in (models / "t" / "checkpoints").iterdir():
            if int(folder.name[5:13]) > step:
                shutil.rmtree(folder)
        assert train_here(tiny_uri, models, **CONFIG).weights_sha256 == whole.weights_sha256


@pytest.mark.drill
@pytest.mark.parametrize(
    "place", ["checkpoint_file:1", "checkpoint_file:4", "checkpoint_marker:2", "checkpoint_done:1"]
)
def test_a_rank_of_two_that_is_killed_inside_a_checkpoint_changes_nothing(tiny_uri, tmp_path, monkeypatch, place):
    """Whichever of them comes there first; each writes a file of its own, and rank 0 the marker."""
    config = {"model": "tests.train.torch_models:stateful", "strategy": "torch_ddp", "num_workers": 2, "epochs": 2,
              "launcher": "local", "global_batch_size": 12, "num_streams": 6,
              "checkpoint_every_steps": 1}  # fmt: skip

    def launch(models: str):
        return LAUNCHERS["local"].launch(
            task_of(tiny_uri, tmp_path / models, **config), SparkConfig(), DriverRecorder()
        )

    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, f"{place}@{tmp_path / 'was-there'}")
        with pytest.raises(RankLost, match="was killed by SIGKILL"):
            launch("killed")
    assert (tmp_path / "was-there").exists()
    assert launch("killed").weights_sha256 == launch("undisturbed").weights_sha256


@pytest.mark.starts("program")
@pytest.mark.timeout(600 + 10 * NUM_KILLS)
def test_no_kill_costs_a_complete_checkpoint(tiny_uri, tmp_path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    program = [sys.executable, "-m", "tests.programs.train_until_killed", tiny_uri, str(tmp_path), str(seed)]
    done = subprocess.run([*program, str(NUM_KILLS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("newest checkpoint") == NUM_KILLS
    *_, killed, undisturbed = done.stdout.split()
    assert killed == undisturbed


# A kill comes within two checkpoints. Rank 0 writes an index, too, and the marker.
PLACES = {
    0: [*(f"checkpoint_file:{number}" for number in range(1, 9)),
        *(f"checkpoint_{place}:{number}" for place in ("marker", "done") for number in (1, 2))],
    1: [f"checkpoint_file:{number}" for number in range(1, 7)],
}  # fmt: skip


@pytest.mark.drill
@pytest.mark.timeout(600 + 10 * NUM_KILLS)
def test_no_kill_of_a_rank_costs_a_complete_checkpoint(tiny_uri, tmp_path, monkeypatch):
    config = {"model": "tests.train.torch_models:linear", "strategy": "torch_fsdp", "global_batch_size": 12,
              "num_streams": 6, "epochs": NUM_KILLS // 3 + 2, "checkpoint_every_steps": 1}  # fmt: skip
    whole_result, whole = train_on_ranks(tiny_uri, tmp_path / "whole", 2, config)
    print("seed", seed := random.randrange(2**32))
    # That one was killed says all: no other fault of the same cause is waited for.
    monkeypatch.setattr(rank_failures, "GRACE_SECONDS", 0.1)
    pick, store, losses, newest = random.Random(seed), open_store(tmp_path / "killed"), {}, None
    for _ in range(NUM_KILLS):
        rank = pick.randrange(2)
        monkeypatch.setenv(KILLED_IN, f"{rank} {pick.choice(PLACES[rank])}")
        task = task_of(tiny_uri, tmp_path / "killed", num_workers=2, launcher="local", **config)
        # In so short a grace, and under load, the driver may not have heard of the signal yet.
        with pytest.raises(RankLost, match=f"rank {rank} .*(SIGKILL|killed by an unknown signal)"):
            launch_forked(task, watcher := Watcher(), f"{WORKERS}:one_rank_dies_in_a_checkpoint")
        assert watcher.losses.items() <= whole.losses.items(), "it went on with other numbers"
        begun_at = newest.marker.progress.cursor if newest else None
        assert min(watcher.losses) == ((begun_at.epoch, begun_at.step) if begun_at else (0, 0))
        losses |= watcher.losses

        found = next(complete_checkpoints(store, "t"), None)
        if newest:
            assert found and found.marker.global_step >= newest.marker.global_step, "a complete checkpoint was lost"
        for file in found.marker.files if found else ():
            assert found and found.read(store, file.path)
        newest = found
    result, rest = train_on_ranks(tiny_uri, tmp_path / "killed", 2, config)
    assert result.resumed_from == (newest.marker.progress.cursor if newest else None)
    assert losses | rest.losses == whole.losses
    assert result.weights_sha256 == whole_result.weights_sha256


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
def test_an_attempt_that_wakes_up_beside_its_retry_ends_with_6_and_leaves_it_the_training(
    tiny_uri, tmp_path, monkeypatch
):
    """A scheduler whose worker was killed knows nothing of the training that still lives; here it sleeps meanwhile."""
    how = {"launcher": "inline", "strategy": "single", "num_workers": 1, "model": f"{MODELS}:stateful", "epochs": 3}
    sizes = {"global_batch_size": 6, "num_streams": 6, "checkpoint_every_steps": 1, "checkpoint": {"keep": 100}}
    train: dict[str, object] = {**how, **sizes}
    pin = open_dataset(tiny_uri).pin
    # It must not end before it sleeps.
    monkeypatch.setenv(HELD_FROM, "20")
    older = start_driver(tmp_path, train, worker=f"{WORKERS}:every_rank_is_held", dataset=pin)
    older.wait_for_step()
    older.process.send_signal(signal.SIGSTOP)
    let_go(tmp_path / "models")
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
