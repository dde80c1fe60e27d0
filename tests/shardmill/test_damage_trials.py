"""Damage under a loader: whatever bit of a shard is flipped and wherever it is cut, no wrong batch comes, and no epoch
is short.

10 flips and 2 cuts a format, the same in every run; in `make test-all` 1,000 and 200. The error names the
shard, and comes at the very step that first needs what is damaged: every batch before it is right. What is damaged in a
cache is fetched again.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import shardmill
from shardmill.epoch_plan import plan_epoch
from shardmill.errors import IntegrityError
from shardmill.formats import SHARD_FORMATS
from shardmill.step_planner import StepPlanner
from shardmill.stores import STORES
from shardmill.values import ShardInfo
from tests.far_store import ENTRY, SCHEME
from tests.lab.datasets import make_dataset
from tests.lab.scale import usually

NUM_FLIPS = usually(10, 1_000)
NUM_CUTS = NUM_FLIPS // 5
BATCH = {"global_batch_size": 8, "seed": 3, "num_streams": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_dataset(tmp_path_factory.mktemp("whole"), num_images=90, chunk_bytes=3000))


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "dataset"))


def read(uri: Path | str, format: str, **reading: object) -> tuple[list[str], str]:
    """A digest of each batch of an epoch; and the error with which it ended, if it did."""
    found = []
    with shardmill.open_dataset(str(uri)).batches("train", format=format, **BATCH, **reading) as loader:
        try:
            for batch in loader:
                arrays = (batch.images, batch.labels, batch.weights, batch.sample_ids)
                found.append(hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest())
        except IntegrityError as error:
            return found, str(error)
    return found, ""


def first_steps(root: Path, format: str) -> list[int]:
    """By chunk of the split: the first step that needs it."""
    dataset = shardmill.open_dataset(str(root))
    spec, chunk_rows = dataset.batches("train", **BATCH).spec, dataset.index("train", format).chunk_rows
    plan = plan_epoch(spec, chunk_rows, 0)
    planner, steps = StepPlanner(plan, range(spec.num_streams)), np.full(len(chunk_rows), plan.num_steps)
    for step in reversed(range(plan.num_steps)):
        steps[planner.rows_of_step(step).chunks_N] = step
    return steps.tolist()


def damage(rng: random.Random, data: bytes, number: int) -> tuple[str, int, bytes]:
    """Kind and place of a trial's damage, and what the file then holds."""
    place = rng.randrange(len(data))
    if number >= NUM_FLIPS:
        return "cut", place, data[:place]
    flipped = bytearray(data)
    flipped[place] ^= 1 << rng.randrange(8)
    return "flip", place, bytes(flipped)


def hit(shard: ShardInfo, kind: str, place: int) -> list[int] | None:
    """The chunks of a shard whose bytes, or those of its footer, are damaged; None if nobody reads these bytes."""
    ends = [chunk.start + chunk.num_bytes for chunk in shard.chunks]
    if place >= shard.footer_start or (kind == "cut" and shard.footer_bytes):
        return list(range(len(ends)))
    found = [number for number, end in enumerate(ends) if place < end]
    if kind == "flip":
        return found[:1] if place >= shard.chunks[0].start else None
    return found


@pytest.mark.parametrize("format", SHARD_FORMATS)
def test_no_damaged_byte_of_a_shard_is_silent(root: Path, format: str):
    expected, steps = read(root, format)[0], first_steps(root, format)
    shards = shardmill.open_dataset(str(root)).shards_of("train", format)
    firsts = np.cumsum([0, *(len(shard.chunks) for shard in shards)]).tolist()
    rng, counts = random.Random(f"{format} {NUM_FLIPS}"), Counter()
    for number in range(NUM_FLIPS + NUM_CUTS):
        which = rng.randrange(len(shards))
        shard = shards[which]
        path = root / shard.path
        whole = path.read_bytes()
        kind, place, data = damage(rng, whole, number)
        chunks = hit(shard, kind, place)
        path.write_bytes(data)
        found, error = read(root, format)
        path.write_bytes(whole)
        trial = f"trial {number}: {kind} at {place} of {shard.path}: {error or 'no error'}"
        if chunks is None:
            assert not error and found == expected, trial
        else:
            at = min(steps[firsts[which] + chunk] for chunk in chunks)
            assert path.name in error and found == expected[:at], f"{trial}; expected at step {at}"
        counts[kind, "unread" if chunks is None else "found"] += 1
    print(f"{format}: {dict(counts)}, none silent")
    assert read(root, format) == (expected, "") and counts["flip", "found"] and counts["cut", "found"]


@pytest.mark.parametrize("format", SHARD_FORMATS)
def test_what_is_damaged_in_a_cache_is_fetched_again(
    whole: Path, format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    expected, _ = read(whole, format)
    uri, rng = f"{SCHEME}://{whole}", random.Random(f"cache {format} {NUM_FLIPS}")
    assert read(uri, format, cache_dir=tmp_path) == (expected, "")
    entries = sorted(path for path in tmp_path.rglob("*-*") if path.is_file() and path.stat().st_size)
    for number in range(NUM_FLIPS + NUM_CUTS):
        path = rng.choice(entries)
        data = path.read_bytes()
        kind, place, damaged = damage(rng, data, number)
        path.write_bytes(damaged)
        trial = f"trial {number}: {kind} at {place} of {path.name}"
        assert read(uri, format, cache_dir=tmp_path) == (expected, ""), trial
        assert path.read_bytes() == data, f"{trial}: it is whole again"
