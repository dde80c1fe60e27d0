"""The reader: planned order whatever the threads do, both formats alike, resumable, and no thread left over."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from shardmill.augment.options import AugmentOptions
from shardmill.dataset.chunks import ChunkFetcher
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.open import open_dataset
from shardmill.epoch_plan import streams_of_rank
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.encodings import decode_stored
from shardmill.formats.rows import ChunkRows
from shardmill.loader.reader import read_batches
from shardmill.loader.row_source import ReaderOptions
from shardmill.loader.samples import read_samples
from shardmill.step_planner import StepPlanner
from shardmill.values import Batch
from tests.lab.datasets import make_dataset


@pytest.fixture(scope="module", params=["png", "raw", "jpeg", "webp"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("reader")
    return open_dataset(make_dataset(folder, num_images=150, encoding=request.param, chunk_bytes=4_000))


def read(dataset: Dataset, *, epoch: int = 1, **options) -> list[Batch]:
    spec = dataset.plan_spec("train", seed=3, global_batch_size=16, num_streams=4, window_bytes=15_000)
    with read_batches(dataset, dataset.plan_epoch(spec, epoch), **options) as batches:
        return list(batches)


def assert_same(one: list[Batch], other: list[Batch]) -> None:
    assert len(one) == len(other) > 0
    for left, right in zip(one, other, strict=True):
        assert (left.epoch, left.step) == (right.epoch, right.step)
        for name in ("images_NHWC", "labels_N", "weights_N", "sample_ids_N"):
            assert np.array_equal(getattr(left, name), getattr(right, name)), name


@pytest.mark.parametrize("name", SHARD_FORMATS)
@pytest.mark.parametrize("num_threads", [1, 4])
def test_formats_and_threads_change_nothing(dataset: Dataset, name: str, num_threads: int):
    # One batch ahead, or many; a thread for each batch, or all threads for each.
    for prefetch_bytes, part_bytes in ((1, 1), (1, 4_000_000), (10_000_000, 4_000_000)):
        options = ReaderOptions(name, num_threads, prefetch_bytes=prefetch_bytes, part_bytes=part_bytes)
        assert_same(read(dataset, options=options), read(dataset))


def test_an_epoch_holds_every_row_once_with_its_own_pixels_and_label(dataset: Dataset):
    stored = {sample.sample_id: sample for sample in read_samples(dataset, "train", 10**6)}
    seen = []
    for batch in read(dataset):
        for image_HWC, label, weight, sample_id in zip(
            batch.images_NHWC, batch.labels_N, batch.weights_N, batch.sample_ids_N, strict=True
        ):
            if weight:
                sample = stored[int(sample_id)]
                assert np.array_equal(image_HWC, sample.image_HWC) and label == sample.label
                assert dataset.manifest.class_names[int(label)] == sample.source.split("/")[0]
                seen.append(int(sample_id))
            else:
                # Padding looks like data, and counts for nothing.
                assert any(np.array_equal(image_HWC, sample.image_HWC) for sample in stored.values())
                assert label == 0 and sample_id == 0
    assert sorted(seen) == sorted(stored) and len(seen) == dataset.manifest.splits["train"].num_rows


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_read_the_global_batches(dataset: Dataset, world_size: int):
    augment = AugmentOptions()
    whole = read(dataset, augment=augment)
    ranks = [read(dataset, streams=streams_of_rank(rank, world_size, 4), augment=augment) for rank in range(world_size)]
    for step, batch in enumerate(whole):
        parts = [rank[step] for rank in ranks]
        assert np.array_equal(np.concatenate([part.images_NHWC for part in parts]), batch.images_NHWC)
        assert np.array_equal(np.concatenate([part.sample_ids_N for part in parts]), batch.sample_ids_N)


def test_reading_from_every_step_gives_the_same_rest(dataset: Dataset):
    whole = read(dataset, augment=AugmentOptions())
    for first_step in range(len(whole)):
        assert_same(read(dataset, first_step=first_step, augment=AugmentOptions()), whole[first_step:])


def test_a_fault_comes_in_place_of_its_batch_also_of_one_that_is_made_with_others(dataset, monkeypatch):
    whole = read(dataset)
    spec = dataset.plan_spec("train", seed=3, global_batch_size=16, num_streams=4, window_bytes=15_000)
    plan, sound = dataset.plan_epoch(spec, 1), ChunkFetcher.read_chunk
    planner = StepPlanner(plan, range(4))
    first_needed: dict[int, int] = {}
    for step in range(plan.num_steps):
        for chunk in planner.rows_of_step(step).chunks_N.tolist():
            first_needed.setdefault(chunk, step)
    bad, fault_step = max(first_needed.items(), key=lambda each: each[1])
    assert fault_step > 0

    def read_chunk(fetcher: ChunkFetcher, chunk: int) -> ChunkRows:
        if chunk == bad:
            raise IntegrityError("altered")
        return sound(fetcher, chunk)

    monkeypatch.setattr(ChunkFetcher, "read_chunk", read_chunk)
    seen = []
    with read_batches(dataset, plan) as batches:
        assert batches._source.steps_together == (16 if dataset.manifest.normalize.encoding == "raw" else 1)
        with pytest.raises(IntegrityError, match="altered"):
            seen.extend(batches)
    assert_same(seen, whole[:fault_step])


def test_augmentation_changes_pixels_between_epochs(dataset: Dataset):
    one, two = (
        {int(i): image for batch in read(dataset, epoch=epoch, augment=AugmentOptions())
         for i, image in zip(batch.sample_ids_N, batch.images_NHWC, strict=True)}
        for epoch in (1, 2)
    )  # fmt: skip
    assert one.keys() == two.keys()
    assert any(not np.array_equal(one[sample_id], two[sample_id]) for sample_id in one)


def test_threads_end_with_the_reader_also_when_it_is_left_early(dataset: Dataset):
    before = threading.active_count()
    spec = dataset.plan_spec("train", seed=0, global_batch_size=4, num_streams=4)
    with read_batches(dataset, dataset.plan_epoch(spec, 0)) as batches:
        next(iter(batches))
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_a_split_or_format_that_is_not_there_is_refused_with_what_is(dataset: Dataset, tmp_path: Path):
    with pytest.raises(UsageError, match="no split 'val'.*expected one of test, train, validation"):
        dataset.plan_spec("val", seed=0, global_batch_size=4, num_streams=4)
    only = open_dataset(make_dataset(tmp_path, num_images=30, formats=("parquet",)))
    with pytest.raises(UsageError, match="no tfrecord shards.*it holds parquet"):
        only.files("train", "tfrecord")


def test_a_plan_does_not_depend_on_which_formats_were_written(tmp_path: Path):
    specs = set()
    for number, formats in enumerate((*((name,) for name in SHARD_FORMATS), tuple(SHARD_FORMATS))):
        dataset = open_dataset(make_dataset(tmp_path / str(number), num_images=60, formats=formats))
        specs.add(dataset.plan_spec("train", seed=0, global_batch_size=8, num_streams=4).fingerprint)
    assert len(specs) == 1


def test_other_tools_read_the_named_files(dataset: Dataset):
    import pyarrow.dataset as arrow_dataset

    table = arrow_dataset.dataset(dataset.files("train", "parquet"), format="parquet").to_table()
    stored = {sample.sample_id: sample for sample in read_samples(dataset, "train", 10**6)}
    options = dataset.manifest.normalize
    assert table.num_rows == len(stored)
    for row in table.to_pylist():
        image_HWC = decode_stored(row["image"], options.encoding, options.image_shape_HWC)
        assert np.array_equal(image_HWC, stored[row["sample_id"]].image_HWC)


def test_the_folder_of_a_splits_shards_holds_every_image_once(tmp_path: Path):
    import pandas

    dataset = open_dataset(make_dataset(tmp_path, num_images=60, formats=("parquet",)))
    table = pandas.read_parquet(tmp_path / "dataset" / "shards" / "train")
    assert sorted(table["sample_id"]) == sorted(sample.sample_id for sample in read_samples(dataset, "train", 100))
    assert table["image"].map(len).min() > 0


@pytest.mark.parametrize("rank", [-1, 2])
def test_an_invalid_rank_is_refused(rank: int):
    with pytest.raises(UsageError, match=f"rank {rank} of 2; expected 0 to 1; ranks are counted from 0"):
        streams_of_rank(rank, 2, 4)


def test_streams_and_steps_that_the_plan_does_not_have_are_refused(dataset: Dataset):
    plan = dataset.plan_epoch(dataset.plan_spec("train", seed=0, global_batch_size=8, num_streams=4), 0)
    for streams in (range(4, 5), range(-1, 1), range(0)):
        with pytest.raises(UsageError, match=r"streams = range\(.*; expected some of the plan's 4"):
            read_batches(dataset, plan, streams=streams)
    for first_step in (-1, plan.num_steps + 1):
        with pytest.raises(UsageError, match=f"first_step = {first_step}; expected 0 to {plan.num_steps}"):
            read_batches(dataset, plan, first_step=first_step)


def run_program(name: str, uri: str) -> dict[str, list[str]]:
    """What one of `tests.programs` prints: name -> what it says of it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.programs.{name}", uri],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        what, _, answer = line.partition(": ")
        said.setdefault(what, []).append(answer)
    return said


@pytest.mark.starts("program")
def test_a_reader_that_was_begun_before_a_fork_says_so_at_once(tmp_path: Path):
    said = run_program("fork_a_reader", make_dataset(tmp_path, num_images=150, chunk_bytes=4_000))
    used = ("the iterator", "another of its reader", "one step", "closed", "read_split")
    for answer in [answer for name in used for answer in said.pop(name)]:
        assert answer.startswith("UsageError: this loader was started in process "), answer
        assert "open the dataset and make its loader in each of them" in answer
    assert said == {"here": ["1", "1"], "samples": ["read True"], "not begun": ["read 0"]}


@pytest.mark.starts("program")
def test_a_data_loader_with_forked_workers_says_that_its_reader_was_begun_before(tmp_path: Path):
    said = run_program("fork_a_data_loader", make_dataset(tmp_path, num_images=150))
    [refused] = said["begun here"]
    assert "this loader was started in process" in refused and "make its loader in each of them" in refused
    assert said["in the worker"] == ["[0, 1, 2]"] or said["in the worker"] == ["[0, 1]"]
