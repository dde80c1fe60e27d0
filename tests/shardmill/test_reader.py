"""The reader: from the plan of an epoch to decoded batches."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import simplejpeg

import shardmill
from shardmill.augment.options import AugmentOptions
from shardmill.augment.windows import Windows, cut_window, whole_windows
from shardmill.dataset.chunk_cache import ChunkCache, open_quota
from shardmill.dataset.chunks import ChunkFetcher
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.epoch_plan import streams_of_rank
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats import SHARD_FORMATS, encodings
from shardmill.formats.encodings import decode_stored
from shardmill.formats.rows import ChunkRows, Scattered
from shardmill.kernel import CAN_DECODE_WINDOWS
from shardmill.loader import step_decoder
from shardmill.loader.reader import BatchReader, StepPlanner, read_batches
from shardmill.loader.row_source import ReaderOptions, RowOptions, RowSource
from shardmill.loader.samples import read_samples
from shardmill.loader.step_decoder import decode_batch
from shardmill.memory import RecycledMemory
from shardmill.options import NormalizeOptions
from shardmill.stores import STORES
from shardmill.stores.local import LocalStore
from shardmill.values import Batch
from tests.far_store import ENTRY, SCHEME
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


BATCH = {"global_batch_size": 8, "seed": 5}


@pytest.fixture(scope="module", params=["png", "raw"])
def uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("shared"), encoding=request.param, chunk_bytes=3000)


@pytest.fixture
def chunk_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    sound, reads = LocalStore.read_blocks, Counter()

    def counted(store: LocalStore, path: str, *arguments) -> Iterator[np.ndarray]:
        reads["chunks"] += 1
        return sound(store, path, *arguments)

    monkeypatch.setattr(LocalStore, "read_blocks", counted)
    yield reads


@pytest.mark.parametrize("format", ["parquet", "tfrecord"])
def test_a_split_within_the_windows_is_read_once_for_all_epochs(uri: str, chunk_reads: Counter[str], format: str):
    dataset = shardmill.open_dataset(uri)
    num_chunks = dataset.index("train", format).num_chunks
    expected = [
        batch.images.copy()
        for epoch in range(3)
        for batch in dataset.batches("train", epoch=epoch, format=format, **BATCH)
    ]
    chunk_reads.clear()
    loader = dataset.batches("train", format=format, **BATCH)
    # Batches that are kept have memory of their own, whatever comes later.
    found = [batch.images for _ in range(3) for batch in loader]
    assert all(map(np.array_equal, found, expected)) and len(found) == len(expected)
    assert chunk_reads["chunks"] == num_chunks
    loader.close()
    assert sum(1 for _ in loader) and chunk_reads["chunks"] == 2 * num_chunks, "closed, it keeps nothing"


@pytest.mark.parametrize("num_threads", [1, 4])
def test_epochs_with_one_source_are_those_of_a_reader_each(uri: str, chunk_reads: Counter[str], num_threads: int):
    dataset = shardmill.open_dataset(uri)
    spec = dataset.plan_spec("train", seed=3, global_batch_size=8, num_streams=2, window_bytes=5_000)
    num_chunks, most = dataset.index("train").num_chunks, 2 * spec.window_chunks
    assert most < num_chunks
    source = RowSource(
        dataset, spec, range(2), options=ReaderOptions(num_threads=num_threads, prefetch_bytes=1), rows=RowOptions()
    )
    addresses: set[int] = set()
    for epoch in range(4):
        plan = dataset.plan_epoch(spec, epoch)
        reader = BatchReader(source, plan, first_step=0, finish=lambda batch, origins: batch)
        with reader as found, read_batches(dataset, plan) as expected:
            chunk_reads.clear()
            for mine, other in zip(found, expected, strict=True):
                assert np.array_equal(mine.images_NHWC, other.images_NHWC)
                assert np.array_equal(mine.sample_ids_N, other.sample_ids_N)
                addresses.add(mine.images_NHWC.ctypes.data)
        assert len(source._kept) <= most + 2 and len(source._chunk_memory._arrays) <= 2 * most
    assert len(addresses) <= num_threads + 3, "the memory of batches is used again in later epochs"
    source.clear()
    assert not source._kept and not source._chunk_memory._arrays and not source._batch_memory._arrays


def test_a_chunk_that_could_not_be_read_is_read_again_in_the_next_epoch(uri: str, monkeypatch: pytest.MonkeyPatch):
    dataset = shardmill.open_dataset(uri)
    expected = [batch.images.copy() for batch in dataset.batches("train", **BATCH)]
    sound, faults = LocalStore.read_blocks, [True]

    def cut(store: LocalStore, path: str, *arguments) -> Iterator[np.ndarray]:
        blocks = list(sound(store, path, *arguments))
        if faults and faults.pop():
            blocks[-1] = blocks[-1][:-1]
        return iter(blocks)

    monkeypatch.setattr(LocalStore, "read_blocks", cut)
    loader = dataset.batches("train", **BATCH)
    with pytest.raises(IntegrityError, match=r"its chunk \d+ has \d+; expected"):
        list(loader)
    loader.seek(0)
    assert all(map(np.array_equal, [batch.images for batch in loader], expected))


@pytest.mark.parametrize("format", ["parquet", "tfrecord"])
def test_chunks_in_the_cache_are_read_to_memory_that_is_used_again(uri: str, tmp_path: Path, format: str, monkeypatch):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    dataset = shardmill.open_dataset(f"{SCHEME}://{uri}")
    index, schema = dataset.index("train", format), dataset.manifest.row_schema
    taken, memory = [], RecycledMemory(2)
    take, memory.take = memory.take, lambda num_bytes: taken.append(num_bytes) or take(num_bytes)
    cache = ChunkCache(open_quota(str(tmp_path), None, 0), dataset.store.uri)
    fetcher = ChunkFetcher(dataset.store, index, schema, cache, memory)
    plain = ChunkFetcher(dataset.store, index, schema)
    for _ in range(3):
        for chunk in range(index.num_chunks):
            found, expected = fetcher.read_chunk(chunk), plain.read_chunk(chunk)
            assert [bytes(image) for image in found.images] == [bytes(image) for image in expected.images]
            del found
    assert cache.counts.misses == index.num_chunks + index.num_shards and len(memory._arrays) <= 2
    takes_views = SHARD_FORMATS[format].takes_views
    assert taken == (2 * index.stored_bytes.tolist() if takes_views else []), "the first time a client made its own"


def test_blocks_are_the_bytes_of_a_range_and_take_no_more_memory_than_the_file_has(tmp_path, monkeypatch):
    monkeypatch.setattr("shardmill.memory._BLOCK_BYTES", 4)
    (tmp_path / "data").write_bytes(b"0123456789")
    store, taken = LocalStore(str(tmp_path)), []

    def take(num_bytes: int) -> np.ndarray:
        taken.append(num_bytes)
        return np.empty(num_bytes, np.uint8)

    assert [bytes(block) for block in store.read_blocks("data", 1, 6, take)] == [b"1234", b"123456"]
    assert [bytes(block) for block in store.read_blocks("data", 3, 1 << 50, take)] == [b"3456", b"3456789"]
    assert not list(store.read_blocks("data", 10, 5, take)) and not list(store.read_blocks("data", 99, 5, take))
    assert taken == [6, 7, 0, 0]
    with pytest.raises(FileNotFoundError):
        list(store.read_blocks("nothing", 0, 1, take))


_SEED = random.SystemRandom().randrange(1 << 32)
KERNELS = [
    pytest.param(True, marks=pytest.mark.skipif(not CAN_DECODE_WINDOWS, reason="the native kernel is not built")),
    False,
]

NEEDS_COPY_SLICES = pytest.mark.skipif(encodings._copy_slices is None, reason="the native kernel is not built")


def smooth_noise(rng: np.random.Generator, side: int) -> np.ndarray:
    small_HWC = rng.integers(0, 256, (9, 9, 3)).astype(np.uint8)
    large_HWC = cv2.resize(small_HWC, (side, side), interpolation=cv2.INTER_CUBIC).astype(np.int64)
    return np.clip(large_HWC + rng.integers(-9, 10, large_HWC.shape), 0, 255).astype(np.uint8)


def jpegs(rng: np.random.Generator, side: int, subsampling: str, count: int = 16) -> list[memoryview]:
    colors = "GRAY" if subsampling == "Gray" else "RGB"
    images = (smooth_noise(rng, side)[:, :, : 1 if colors == "GRAY" else 3] for _ in range(count))
    return [
        memoryview(
            simplejpeg.encode_jpeg(np.ascontiguousarray(image), 90, colorspace=colors, colorsubsampling=subsampling)
        )
        for image in images
    ]


def options(side: int, subsampling: str) -> NormalizeOptions:
    return NormalizeOptions(image_size=side, color="gray" if subsampling == "Gray" else "rgb")


def random_windows(rng: np.random.Generator, side: int, size: int, count: int) -> Windows:
    """Of any size, a third of them as large as the batch's images; they reach beyond every edge, some lie outside."""
    heights, widths = rng.integers(1, side + 1, count), rng.integers(1, side + 1, count)
    heights[::3] = widths[::3] = size
    top, left = (rng.integers(-side // 8, side - lengths + side // 8 + 1) for lengths in (heights, widths))
    is_inside = np.arange(count) % 2 == 0
    top, left = (
        np.where(is_inside, np.clip(start, 0, side - length), start)
        for start, length in ((top, heights), (left, widths))
    )
    return Windows(top, left, heights, widths, rng.random(count) < 0.3, (size, size))


@pytest.mark.parametrize("with_native", KERNELS)
@pytest.mark.parametrize("subsampling", ["444", "422", "420", "Gray"])
def test_windows_are_cut_out_of_the_pixels_that_the_wheels_decode(subsampling, with_native, monkeypatch):
    print(f"seed {_SEED}")
    monkeypatch.setattr(step_decoder, "CAN_DECODE_WINDOWS", with_native)
    rng = np.random.default_rng(_SEED)
    for side in (16, 97, 256):
        encoded, normalize = jpegs(rng, side, subsampling), options(side, subsampling)
        whole = [simplejpeg.decode_jpeg(data, "GRAY" if subsampling == "Gray" else "RGB") for data in encoded]
        for size in (side, side * 7 // 8):
            windows = random_windows(rng, side, size, len(encoded))
            images_NHWC = np.empty((len(encoded), size, size, normalize.num_channels), np.uint8)
            decode_batch(encoded, normalize, windows, images_NHWC)
            for place, image_HWC in enumerate(whole):
                assert np.array_equal(images_NHWC[place], cut_window(image_HWC, windows, place)), (side, size, place)
        images_NHWC = np.empty((len(encoded), side, side, normalize.num_channels), np.uint8)
        decode_batch(encoded, normalize, whole_windows(len(encoded), (side, side)), images_NHWC)
        assert np.array_equal(images_NHWC, np.stack(whole))


@pytest.mark.parametrize("with_native", KERNELS)
@pytest.mark.parametrize("damage", ["another size", "cut", "no image"])
def test_an_image_that_is_not_as_stored_is_an_integrity_error(damage, with_native, monkeypatch):
    monkeypatch.setattr(step_decoder, "CAN_DECODE_WINDOWS", with_native)
    rng = np.random.default_rng(0)
    encoded = jpegs(rng, 64, "444", 4)
    encoded[2] = {
        "another size": jpegs(rng, 72, "444", 1)[0],
        "cut": encoded[2][: len(encoded[2]) // 2],
        "no image": memoryview(b"hello"),
    }[damage]
    images_NHWC = np.empty((4, 64, 64, 3), np.uint8)
    with pytest.raises(IntegrityError, match="stored jpeg image"):
        decode_batch(encoded, options(64, "444"), whole_windows(4, (64, 64)), images_NHWC)


@pytest.mark.skipif(not CAN_DECODE_WINDOWS, reason="the native kernel is not built")
@pytest.mark.parametrize(
    "place", [(-1, 0, 8, 8, 0), (0, 0, 65, 8, 0), (60, 0, 8, 8, 0), (0, 0, 8, 0, 0), (0, 0, 8, 8, -1), (0, 0, 8, 8, 1)]
)
def test_a_window_outside_of_image_or_target_is_refused(place):
    import shardmill_native

    encoded = jpegs(np.random.default_rng(0), 64, "444", 1)
    target, is_done = np.empty(8 * 8 * 3, np.uint8), np.zeros(1, np.uint8)
    with pytest.raises(ValueError, match="inside"):
        shardmill_native.decode_jpegs(encoded, (64, 64, 3), np.array([place], np.int64), target, is_done)


@pytest.mark.parametrize("with_native", [pytest.param(True, marks=NEEDS_COPY_SLICES), False])
def test_pixels_that_are_stored_as_they_are_are_gathered_from_several_chunks(with_native, monkeypatch):
    if not with_native:
        monkeypatch.setattr(encodings, "_copy_slices", None)
    rng = np.random.default_rng(_SEED)
    data = [memoryview(rng.integers(0, 256, 5000, np.uint8)).toreadonly() for _ in range(3)]
    slots, starts = rng.integers(0, 3, 40), rng.integers(0, 5000 - 192 + 1, 40)
    scattered = Scattered(data, slots, starts, starts + 192)
    expected = [bytes(data[slot][start : start + 192]) for slot, start in zip(slots, starts, strict=True)]
    assert [bytes(each) for each in scattered] == [bytes(scattered[place]) for place in range(40)] == expected
    assert [bytes(each) for each in scattered[7:9]] == expected[7:9]
    raw = NormalizeOptions(image_size=8, encoding="raw")
    images_NHWC = np.empty((40, 8, 8, 3), np.uint8)
    decode_batch(scattered, raw, whole_windows(40, (8, 8)), images_NHWC)
    assert images_NHWC.tobytes() == b"".join(expected)
    windows = random_windows(rng, 8, 8, 40)
    decode_batch(scattered, raw, windows, images_NHWC)
    for place, pixels in enumerate(expected):
        image_HWC = np.frombuffer(pixels, np.uint8).reshape(8, 8, 3)
        assert np.array_equal(images_NHWC[place], cut_window(image_HWC, windows, place))
    with pytest.raises(IntegrityError, match="does not have the shape"):
        decode_batch(Scattered(data, slots, starts, starts + 191), raw, whole_windows(40, (8, 8)), images_NHWC)


@NEEDS_COPY_SLICES
@pytest.mark.parametrize(
    ("slots", "starts", "stops"),
    [
        ([2, 0], [0, 0], [4, 4]), ([-1, 0], [0, 0], [4, 4]), ([0, 0], [-1, 0], [3, 4]), ([0, 1], [0, 7], [4, 11]),
        ([0, 0], [0, 0], [4, 5]), ([0, 0], [0, 4], [4, 0]), ([0], [0], [4]), ([0, 0, 0], [0, 0, 0], [4, 4, 4]),
        ([], [], []), ([0, 0], [0], [4, 4]), ([0, 0], [-(1 << 63), 0], [4 - (1 << 63), 4]),
        ([0, 0], [(1 << 63) - 4, 0], [(1 << 63) - 1, 4]),
    ],
)  # fmt: skip
def test_slices_outside_of_their_source_are_refused(slots, starts, stops):
    import shardmill_native

    numbers = [np.array(each, np.int64) for each in (slots, starts, stops)]
    with pytest.raises(ValueError, match="inside"):
        shardmill_native.copy_slices([b"0123456789", b"0123456789"], *numbers, np.empty(8, np.uint8))


def test_rows_that_padding_repeats_are_decoded_once(monkeypatch):
    rng = np.random.default_rng(_SEED)
    encoded, normalize = jpegs(rng, 64, "444", 5), options(64, "444")
    which = np.array([3, 1, 1, 4, 3, 3, 0, 1])
    windows = random_windows(rng, 64, 48, 5).take(which)
    expected, found = np.empty((2, 8, 48, 48, 3), np.uint8)
    repeated = [encoded[place] for place in which.tolist()]
    decode_batch(repeated, normalize, windows, expected)
    decoded: list[int] = []
    sound = step_decoder.decode_batch
    monkeypatch.setattr(
        step_decoder, "decode_batch", lambda images, *rest: (decoded.append(len(images)), sound(images, *rest))
    )
    step_decoder.decode_distinct(repeated, normalize, windows, found, np.stack([which, which % 2], axis=1))
    assert np.array_equal(found, expected) and decoded == [4]
