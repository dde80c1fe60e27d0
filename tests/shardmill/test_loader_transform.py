"""Loaders of several datasets, transforms of the user, and segments."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmill
from shardmill.checksummed import checksum_file
from shardmill.dataset.row_segments import put_segment, read_segment, table_bytes
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.loader.selection import _scaled, select_apart
from shardmill.stores import STORES, open_store
from tests.etl import test_extra_columns as extra_columns
from tests.etl.incremental import build_from
from tests.far_store import ENTRY, SCHEME
from tests.lab.datasets import make_dataset
from tests.lab.scale import usually

BATCH = {"global_batch_size": 24, "seed": 7, "num_streams": 8}


def test_a_transform_draws_the_same_at_any_number_of_threads_and_after_a_resume(dataset):
    def noise(batch, rng):
        return {"images": batch.images + rng.integers(0, 9, batch.images.shape, np.uint8), "draw": rng.random(24)}

    def epoch(num_threads: int, **at):
        loader = dataset.batches("train", **BATCH, num_threads=num_threads, transform=noise)
        loader.seek(**{"epoch": 0, **at})
        return [(batch.images.tobytes(), batch["draw"].tobytes()) for batch in loader]

    whole = epoch(1)
    assert whole == epoch(4) and whole[2:] == epoch(2, step=2) and whole != epoch(1, epoch=1)
    assert len(set(whole)) == len(whole)
    ranks = [dataset.batches("train", **BATCH, transform=draw_one, rank=rank, world_size=2) for rank in range(2)]
    assert next(iter(ranks[0]))["draw"] != next(iter(ranks[1]))["draw"]


def draw_one(batch, rng):
    return {"draw": [rng.random()] * len(batch.weights)}


def test_a_transform_that_fails_names_the_samples_and_keeps_its_cause(dataset):
    def fails(batch, rng):
        if batch.step == 2:
            raise ZeroDivisionError("no such lens")
        return batch

    loader = dataset.batches("train", **BATCH, transform=fails)
    batches = iter(loader)
    before = [next(batches) for _ in range(2)]
    with pytest.raises(
        UsageError, match=r"ZeroDivisionError at epoch 0, step 2, in samples [0-9a-f]{16} \('class_.*more: no such lens"
    ) as failed:
        next(batches)
    assert isinstance(failed.value.__cause__, ZeroDivisionError) and len(before) == 2
    assert "\n" not in str(failed.value)
    # After a fix of the transform, the batch that failed is the next one.
    assert (loader.epoch, loader.step) == (0, 2)


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (lambda batch, rng: {"images": batch.images[:5]}, "gave images 5 rows at epoch 0, step 0, .*expected 24"),
        (lambda batch, rng: {"boxes": 3}, "gave boxes as int at epoch 0"),
        (lambda batch, rng: None, "returned NoneType at epoch 0"),
        (lambda batch, rng: {"image": batch.images}, "gave image at epoch 0, step 0.*did you mean images"),
    ],
)
def test_a_transform_that_gives_no_such_batch_is_refused(transform, said, dataset):
    with pytest.raises(UsageError, match=said):
        next(iter(dataset.batches("train", **BATCH, transform=transform)))


def test_a_transform_has_the_arrays_of_its_loader(dataset):
    torch = pytest.importorskip("torch")

    def scaled(batch, rng):
        return replace(batch, images=batch.images.float() / 255)

    batch = next(iter(dataset.torch_loader("train", **BATCH, transform=scaled)))
    assert batch.images.dtype == torch.float32 and batch.images.shape == (24, 3, 16, 16)


def test_a_tf_dataset_has_the_shapes_that_a_transform_gives(dataset):
    tf = pytest.importorskip("tensorflow")
    rows = dataset.tf_dataset(
        "train", **BATCH, transform=lambda batch, rng: {"images": batch.images[:, :8].astype(np.float32)}
    )
    assert rows.element_spec[0].shape == (24, 8, 16, 3) and rows.element_spec[0].dtype == tf.float32
    expected = list(dataset.batches("train", **BATCH))
    for batch, (images, _, _) in zip(expected, rows, strict=True):
        assert np.array_equal(images, batch.images[:, :8])


def test_a_batch_moves_to_a_device_as_a_tensor_does(dataset):
    [batch] = (
        dataset.torch_loader("train", **BATCH, transform=lambda batch, rng: {"mask": batch.weights > 0})
        .cached(1)
        .batches
    )
    moved = batch.to("meta", non_blocking=True)
    assert {name: each.device.type for name, each in moved.items()} == dict.fromkeys(batch, "meta")
    assert (moved.epoch, moved.step) == (batch.epoch, batch.step) and batch.images.device.type == "cpu"


def noisy(sample, rng):
    return {"image": sample.image ^ rng.integers(0, 9, sample.image.shape, np.uint8), "draw": rng.random()}


def changed_of(loader) -> list[list[tuple]]:
    return [
        [
            (int(sample_id), bytes(memoryview(np.ascontiguousarray(image))), draw)
            for sample_id, image, draw, weight in zip(
                batch.sample_ids, batch.images, batch["draw"], batch.weights, strict=True
            )
            if weight
        ]
        for batch in loader
    ]


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_transform_of_samples_draws_the_same_at_any_world_size_and_after_a_resume(dataset, world_size):
    chosen = {"transform": noisy, "per_sample": True, "sample": {"class_1": 2}}
    whole = changed_of(dataset.batches("train", **BATCH, **chosen))
    assert whole != changed_of(dataset.batches("train", **{**BATCH, "seed": 8}, **chosen))
    draws = [draw for rows in whole for *_, draw in rows]
    assert len(set(draws)) == len(draws), "each use of a sample has draws of its own"
    of_ranks = []
    for rank in range(world_size):
        loader = dataset.batches("train", rank=rank, world_size=world_size, num_threads=1 + rank, **BATCH, **chosen)
        loader.seek(0, 1)
        of_ranks.append(changed_of(loader))
    assert [[each for rows in of_ranks for each in rows[step]] for step in range(len(whole) - 1)] == whole[1:]


def test_torchvision_draws_for_each_sample_and_leaves_the_generator_of_the_loop(dataset):
    torch = pytest.importorskip("torch")
    v2 = pytest.importorskip("torchvision.transforms.v2")
    pipeline = v2.Compose(
        [
            v2.RandomResizedCrop(12, antialias=True), v2.RandomHorizontalFlip(), v2.ColorJitter(0.5, 0.5, 0.5),
            v2.ToDtype(torch.float32, scale=True), v2.GaussianNoise(), v2.RandomErasing(1.0, value="random"),
        ]
    )  # fmt: skip

    def epoch(**at):
        loader = dataset.torch_loader(
            "train", **BATCH, **at, transform=lambda sample, rng: pipeline(sample.image), per_sample=True
        )
        return [batch.images for batch in loader]

    before = torch.random.get_rng_state()
    whole = epoch(num_threads=1)
    ranks = [epoch(rank=rank, world_size=2, num_threads=3) for rank in range(2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert whole[0].shape == (24, 3, 12, 12)
    for step, images in enumerate(whole):
        assert torch.equal(torch.cat([rank[step] for rank in ranks]), images)


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (lambda sample, rng: 1 // 0, r"ZeroDivisionError at epoch 0, step 0, sample [0-9a-f]{16} \('class_.*png'\): "),
        (lambda sample, rng: sample.image[: 5 + sample.sample_id % 7], "image the shape .*, sample .*resize or crop"),
        (lambda sample, rng: {str(sample.sample_id % 2): 1}, "the transform gave [01] at .*expected [01], as for"),
        (lambda sample, rng: None, "the transform gave no image at .*sample .*return what is new, also if"),
        (
            lambda sample, rng: {"images": sample.image},
            "the transform gave images at .*sample .*did you mean image[?]$",
        ),
        (lambda sample, rng: {"weights": 1}, "the transform gave weights at .*sample .*image, label and extra columns"),
    ],
)
def test_a_sample_that_fails_is_named_with_its_source(transform, said, dataset):
    with pytest.raises(UsageError, match=said):
        next(iter(dataset.batches("train", **BATCH, transform=transform, per_sample=True)))


def test_samples_of_numbers_become_tensors_in_a_torch_loader(dataset):
    torch = pytest.importorskip("torch")

    def change(sample, rng):
        label = int(sample.label) + 1
        return {"image": sample.image.numpy() * 2, "label": torch.tensor(label) if sample.sample_id % 2 else label}

    before = next(iter(dataset.torch_loader("train", **BATCH)))
    after = next(iter(dataset.torch_loader("train", **BATCH, transform=change, per_sample=True)))
    assert torch.equal(after.images, before.images * 2) and torch.equal(after.labels, before.labels + 1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda torch, ones: torch.rand_like(ones) + torch.randn_like(ones) + torch.randint_like(ones, 3, high=9),
        lambda torch, ones: torch.randint_like(ones, 100, dtype=torch.int64),
        lambda torch, ones: torch.poisson(5 * ones) + torch.binomial(5 * ones, ones / 2),
        lambda torch, ones: torch.distributions.Beta(0.2, 0.2).sample((9,)),
        lambda torch, ones: torch.distributions.Gamma(2.0, 1.0).sample((9,)),
    ],
    ids=["like", "integers", "counts", "beta", "gamma"],
)
def test_functions_of_pytorch_that_take_a_generator_draw_from_that_of_the_key(draw):
    torch = pytest.importorskip("torch")
    from shardmill.loader.torch import draws_of

    before, drawn = torch.random.get_rng_state(), []
    for key in (5, 5, 6):
        with draws_of(key):
            drawn.append(draw(torch, torch.ones(9)))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[shardmill.Dataset]:
    """Of the same classes and sizes; their images and sample ids differ."""
    folders = [tmp_path_factory.mktemp(name) for name in ("large", "small", "tiny")]
    sizes = (150, 60, 24)
    return [
        shardmill.open_dataset(make_dataset(folder, num_images=size))
        for folder, size in zip(folders, sizes, strict=True)
    ]


def rows_of(loader) -> list[list[tuple[int, int, int, bytes]]]:
    """Of each batch: dataset, sample, label and pixels."""
    return [
        [
            (int(number), int(sample_id), int(label), image.tobytes())
            for number, sample_id, label, image, weight in zip(
                batch["dataset"], batch.sample_ids, batch.labels, batch.images, batch.weights, strict=True
            )
            if weight
        ]
        for batch in loader
    ]


@settings(max_examples=usually(12, 500))
@given(data=st.data())
def test_every_dataset_gives_its_amount_at_any_world_size_and_after_any_resume(datasets, data):
    amount = st.sampled_from([0.1, 0.35, ("repeat", 1), ("repeat", 2.5), ("choose", 7), ("choose", 100)])
    own, *others = data.draw(st.permutations(datasets), "datasets")
    chosen = {
        "mix": [(other, data.draw(amount, "amount")) for other in others[: data.draw(st.integers(1, 2))]],
        "where": data.draw(st.sampled_from([None, "label != 1"]), "where"),
        "sample": data.draw(st.sampled_from(["once", {"class_0": 2}]), "sample"),
    }
    loader = own.batches("train", **BATCH, **chosen)
    whole = rows_of(loader)
    found = Counter(number for rows in whole for number, *_ in rows)

    plain = {key: chosen[key] for key in ("where", "sample")}
    alone = [each.batches("train", **BATCH, **plain).samples_per_epoch for each in (own, *others)]
    shares = sum(amount for _, amount in chosen["mix"] if not isinstance(amount, tuple))
    total = sum(found.values())
    assert found[0] == alone[0]
    for number, (_, amount) in enumerate(chosen["mix"], 1):
        if not isinstance(amount, tuple):
            # Of an epoch whose other amounts are whole rows, too.
            assert abs(found[number] - amount * total) < 1 / (1 - shares)
        else:
            assert found[number] == {"repeat": round(amount[1] * alone[number]), "choose": amount[1]}[amount[0]]

    stored = [{s.sample_id: (s.label, s.image_HWC.tobytes()) for s in each.samples("train")} for each in (own, *others)]
    assert all(
        stored[number][sample_id] == (label, pixels) for rows in whole for number, sample_id, label, pixels in rows
    )
    uses = Counter((number, sample_id) for rows in whole for number, sample_id, *_ in rows)
    if plain == {"where": None, "sample": "once"}:
        for number in found:
            counts = [uses[number, sample_id] for sample_id in stored[number]]
            assert max(counts) - min(counts) <= 1
    report = loader.report()
    assert [each.rows for each in report.datasets] == [found[number] for number in sorted(found)]
    assert total == report.epoch_rows == loader.samples_per_epoch == report.rows_seen
    assert report.epoch_rows_repeated == total - len(uses) == sum(each.rows_repeated for each in report.datasets)
    assert report.epoch_rows_left_out == sum(map(len, stored[: len(found)])) - len(uses)

    world_size = data.draw(st.sampled_from([1, 2, 3, 4, 8]), "world size")
    step = data.draw(st.integers(0, len(whole) - 1), "step")
    state = json.loads(json.dumps({**loader.state_dict(), "epoch": 0, "step": step}))
    of_ranks = []
    for rank in range(world_size):
        resumed = own.batches("train", rank=rank, world_size=world_size, num_threads=1 + rank % 2, **BATCH, **chosen)
        resumed.load_state_dict(state)
        of_ranks.append(rows_of(resumed))
    assert [[each for rows in of_ranks for each in rows[number]] for number in range(len(whole) - step)] == whole[step:]


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=9).filter(
        lambda chunks: any(map(any, chunks))
    )
)
def test_uses_of_a_row_are_in_different_places_of_the_plan(chunks):
    repeats_N = np.array([repeats for chunk in chunks for repeats in chunk])
    selection = select_apart(repeats_N, np.array([len(chunk) for chunk in chunks]))
    entries = Counter()
    for place, (start, stop) in enumerate(zip(selection.starts, selection.starts[1:], strict=False)):
        rows = selection.entry_rows[start:stop].tolist()
        assert len(set(rows)) == len(rows) > 0
        assert len(set(selection.entry_occurrences[start:stop].tolist())) == 1
        entries.update((int(selection.chunks[place]), row) for row in rows)
    assert entries == +Counter(
        {(number, row): repeats for number, chunk in enumerate(chunks) for row, repeats in enumerate(chunk)}
    )


@given(st.lists(st.integers(0, 5), min_size=1, max_size=50).filter(any), st.integers(1, 500))
def test_scaled_repeats_add_up_to_the_total(repeats, total):
    scaled = _scaled(np.array(repeats), total)
    assert scaled.sum() == total and (scaled[np.array(repeats) == 0] == 0).all()
    assert (_scaled(np.array(repeats), sum(repeats)) == repeats).all()


def test_a_state_belongs_to_all_datasets_and_amounts_of_its_mix(datasets):
    large, small, tiny = datasets
    loader = large.batches("train", **BATCH, mix=[(small, 0.3)])
    state = loader.state_dict()
    again = shardmill.open_dataset(f"{small.pin.uri}@1")
    large.batches("train", **BATCH, mix=[(again, 0.3)]).load_state_dict(state)
    for other in ([(tiny, 0.3)], [(small, 0.2)], [(small, 0.3), (tiny, 0.1)], None):
        with pytest.raises(UsageError, match="belongs to another plan"):
            large.batches("train", **BATCH, mix=other).load_state_dict(state)


def test_each_dataset_comes_in_all_parts_of_an_epoch(datasets):
    large, _, tiny = datasets
    rows = rows_of(large.batches("train", **BATCH, mix=[(tiny, 0.5)]))
    shares = [np.mean([number for number, *_ in part]) for part in rows[:-1]]
    assert min(shares) > 0.1 and max(shares) < 0.9


def test_columns_are_those_of_the_own_dataset_and_null_where_another_has_none(tmp_path_factory):
    folder = tmp_path_factory.mktemp("captioned")
    build_from(extra_columns.as_parquet(folder, extra_columns.ROWS), folder / "dataset")
    captioned = shardmill.open_dataset(str(folder / "dataset"))
    batch = next(iter(captioned.batches("train", **BATCH, columns=["age"], mix=[(captioned, 0.5)])))
    assert set(batch.extra) == {"age", "dataset"} and {0, 1} <= set(batch["dataset"])


def test_a_cache_keeps_the_chunks_of_all_remote_datasets(datasets, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    own, other = (shardmill.open_dataset(f"{SCHEME}://{each.pin.uri}") for each in datasets[:2])
    expected = rows_of(own.batches("train", **BATCH, mix=[(other, 0.4)]))
    reports = []
    for _ in range(2):
        loader = own.batches("train", **BATCH, mix=[(other, 0.4)], cache_dir=tmp_path)
        assert rows_of(loader) == expected
        reports.append(loader.report().cache)
    num_parts = sum(len(each.index("train").chunk_rows) + each.index("train").num_shards for each in (own, other))
    assert (reports[0].misses, reports[1].misses) == (num_parts, 0)


def test_a_cache_below_what_the_windows_of_a_mix_hold_is_refused(datasets, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    own, other = (shardmill.open_dataset(f"{SCHEME}://{each.pin.uri}") for each in datasets[:2])
    # Each of them fits; both do not.
    needed = [int(each.index("train", "parquet").stored_bytes.sum()) for each in (own, other)]
    for dataset in (own, other):
        dataset.batches("train", **BATCH, cache_dir=tmp_path, cache_limit_bytes=max(needed)).close()
    with pytest.raises(UsageError, match=rf"expected at least {sum(needed)} bytes.*of 2 datasets"):
        own.batches("train", **BATCH, mix=[(other, 0.4)], cache_dir=tmp_path, cache_limit_bytes=sum(needed) - 1)
    own.batches("train", **BATCH, mix=[(other, 0.4)], cache_dir=tmp_path, cache_limit_bytes=sum(needed)).close()
    # A dataset that is mixed with itself is kept once.
    own.batches("train", **BATCH, mix=[(own, 0.4)], cache_dir=tmp_path / "one", cache_limit_bytes=needed[0]).close()
    # The same for the default, and for the room on the disk.
    free = 2 * sum(needed) - 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
    for dataset in (own, other):
        dataset.batches("train", **BATCH, cache_dir=tmp_path).close()
    half = rf"cache_limit_bytes \(half of what the disk has free\) = {sum(needed) - 1}"
    with pytest.raises(UsageError, match=rf"{half}; expected at least {sum(needed)} bytes.*of 2 datasets"):
        own.batches("train", **BATCH, mix=[(other, 0.4)], cache_dir=tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5, 5))
    with pytest.raises(StorageError, match=rf"would grow to {sum(needed)} bytes, and its disk has 5 free"):
        own.batches("train", **BATCH, mix=[(other, 0.4)], cache_dir=tmp_path, cache_limit_bytes=10**9)


def test_datasets_that_do_not_fit_are_refused_before_the_first_batch(datasets, tmp_path):
    large, small, _ = datasets
    wide = shardmill.open_dataset(make_dataset(tmp_path / "wide", num_images=60, image_size=8))
    raw = shardmill.open_dataset(make_dataset(tmp_path / "raw", num_images=60, encoding="raw"))
    classes = shardmill.open_dataset(make_dataset(tmp_path / "classes", num_images=60, num_classes=4))
    for mix, said in (
        ([(wide, 0.5)], r"wide.*@1 has images of shape \(8, 8, 3\); expected \(16, 16, 3\), as in .*large"),
        ([(raw, 0.5)], "raw.*@1 has images stored as raw; expected png"),
        ([(classes, 0.5)], "has 4 classes, not those of .*only one of them has class_3"),
        ([(small, 0.5), (large, 0.5)], "shares of mix add up to 1; expected less than 1"),
        ([(small, 1.5)], "shares of mix add up to 1.5"),
        ([(small, 0)], r"mix has 0 of .*expected \[\(dataset, amount\), ...\]"),
        ([(small, ("twice", 2))], "mix has .*twice"),
        ([(small, ("choose", 2.5))], "mix has .*choose"),
        ([(small, ("repeat", 1e-6))], r"of .*small.*@1 is 0 rows; expected 1 to \d+"),
        ([(small, ("choose", 10**9))], "is 1000000000 rows; expected 1 to"),
        ([small], "mix has <.*open each dataset with shardmill.open_dataset"),
        ([], r"mix = \[\]; expected"),
        (small, "mix = <"),
    ):
        with pytest.raises(UsageError, match=said) as refused:
            large.batches("train", **BATCH, mix=mix)
        assert "\n" not in str(refused.value)
    only_large = f"sample_id == {large.metadata('train').column('sample_id')[0]}"
    with pytest.raises(UsageError, match="leave none of the .* of .*small.*@1; expected"):
        large.batches("train", **BATCH, mix=[(small, 0.5)], where=only_large)
    with pytest.raises(UsageError, match="no metadata column colour in .*"):
        large.batches("train", **BATCH, mix=[(small, 0.5)], where="colour == 1")


SCHEMA = pa.schema([("key", pa.string()), ("sums", pa.list_(pa.int64())), ("number", pa.int64())])
ROWS = [{"key": f"a/{n}.jpg", "sums": [n, n], "number": n} for n in range(20)]
_SEED = random.SystemRandom().randrange(2**32)


def test_stored_objects_are_read(tmp_path: Path):
    store, table = open_store(str(tmp_path)), pa.Table.from_pylist(ROWS, SCHEMA)
    file = put_segment(store, "rows", table)
    assert read_segment(store, file, SCHEMA, 20) == table
    fewer = pa.schema([SCHEMA.field("number"), SCHEMA.field("key")])
    assert read_segment(store, file, fewer, 20) == table.select(["number", "key"])


@pytest.mark.parametrize("key", [None, pa.array([["a"]] * 20), pa.array(range(20)), pa.array([{"a": "b"}] * 20)])
def test_one_without_a_text_that_is_expected_is_refused(key: pa.Array | None, tmp_path: Path):
    table = pa.Table.from_pylist(ROWS, SCHEMA).drop_columns(["key"])
    if key is not None:
        table = table.append_column("key", key)
    store = open_store(str(tmp_path))
    with pytest.raises(IntegrityError, match=r"has columns \['sums', 'number'"):
        read_segment(store, put_segment(store, "rows", table), SCHEMA, 20)


def test_any_bytes_that_a_record_vouches_for_are_a_table_or_an_error(tmp_path: Path):
    print(f"seed {_SEED}")
    rng, whole, store = random.Random(_SEED), table_bytes(pa.Table.from_pylist(ROWS, SCHEMA)), open_store(str(tmp_path))
    num_refused = 0
    for _ in range(2_000):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(whole))] = rng.randrange(256)
        store.put("file", bytes(damaged))
        try:
            read_segment(store, checksum_file("file", bytes(damaged)), SCHEMA, 20)
        except IntegrityError:
            num_refused += 1
    assert num_refused > 200
