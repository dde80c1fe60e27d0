"""Verification: damage is found and named, also in the index of a split and in copied rows."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardmill
from shardmill.checksummed import checksum_file
from shardmill.dataset import chunks
from shardmill.dataset.chunks import ChunkFetcher
from shardmill.dataset.dataset import Dataset, open_dataset, open_pinned
from shardmill.dataset.index import SplitIndex, _read_parts, index_table, read_index, shards_of_table
from shardmill.dataset.manifest import encode_manifest
from shardmill.dataset.row_segments import ROWS_SCHEMA, put_segment, read_segment, rows_file
from shardmill.dataset.shard import publish_shard, read_stored_rows
from shardmill.dataset.verify import verify_dataset
from shardmill.epoch_plan import plan_epoch
from shardmill.errors import IntegrityError, SecurityRefusal, UsageError
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.rows import cut_chunks
from shardmill.ids import add_digests, format_digest
from shardmill.loader.reader import StepPlanner
from shardmill.stores import STORES, open_store
from shardmill.values import ShardFile, ShardInfo
from tests.counting_store import CALLS, ENTRY, SCHEME
from tests.far_store import ENTRY as FAR_ENTRY
from tests.far_store import SCHEME as FAR
from tests.lab.datasets import make_dataset, read_all
from tests.lab.scale import usually

_SEED = random.SystemRandom().randrange(2**32)
_NUM_FLIPS = usually(20, 500)


def test_a_whole_dataset_passes_every_rule(whole: Path):
    report = verify_dataset(open_dataset(str(whole)), deep=True)
    assert report.ok and len(report.checks) == 15
    assert verify_dataset(whole, deep=True) == verify_dataset(f"{whole}@1", deep=True) == report
    assert repr(report) == f"<VerifyReport: ok {whole}@1, broken rules 0 of 15, deep yes>"
    assert {read_all(whole, format_name) for format_name in SHARD_FORMATS} == {60}


@pytest.mark.parametrize("format_name", SHARD_FORMATS)
def test_no_flipped_bit_of_a_shard_goes_unseen(dataset_root: Path, format_name: str):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    dataset = open_dataset(str(dataset_root))
    shards = [shard for shard in dataset.shards if shard.format == format_name]
    for _ in range(_NUM_FLIPS):
        info = rng.choice(shards)
        shard = dataset_root / info.path
        data = bytearray(shard.read_bytes())
        # What lies before the first chunk is magic that no reader needs; the file's SHA-256 covers it.
        place = rng.randrange(info.chunks[0].start, len(data))
        data[place] ^= 1 << rng.randrange(8)
        original = shard.read_bytes()
        shard.write_bytes(data)
        with pytest.raises(IntegrityError, match=shard.name):
            read_all(dataset_root, format_name)
        with pytest.raises(IntegrityError, match=shard.name):
            verify_dataset(dataset, deep=True).raise_if_failed()
        shard.write_bytes(original)
    assert read_all(dataset_root, format_name) == 60


@pytest.mark.parametrize("format_name", SHARD_FORMATS)
def test_a_cut_shard_is_never_just_shorter(dataset_root: Path, format_name: str):
    dataset = open_dataset(str(dataset_root))
    shard = dataset.shards_of("train", format_name)[0]
    file = dataset_root / shard.path
    data = file.read_bytes()
    # Zero bytes, one byte less, and exactly between two chunks.
    for length in (0, len(data) - 1, shard.chunks[-1].start):
        file.write_bytes(data[:length])
        with pytest.raises(IntegrityError, match="expected"):
            read_all(dataset_root, format_name)
        with pytest.raises(IntegrityError, match=f"has {length} bytes; expected {len(data)}"):
            verify_dataset(dataset).raise_if_failed()


def test_a_missing_or_swapped_shard_is_named(dataset_root: Path):
    dataset = open_dataset(str(dataset_root))
    first, second = [dataset_root / shard.path for shard in dataset.shards_of("train")[:2]]
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(IntegrityError, match=first.name):
        read_all(dataset_root, "auto")
    first.unlink()
    with pytest.raises(IntegrityError, match=f"{first.name} is missing"):
        read_all(dataset_root, "auto")
    with pytest.raises(IntegrityError, match=f"{first.name} is missing"):
        verify_dataset(dataset).raise_if_failed()
    first.write_bytes(data)
    verify_dataset(dataset, deep=True).raise_if_failed()


@pytest.mark.parametrize("kind", ["indexes", "rows", "manifests", "committed"])
def test_a_flipped_bit_in_any_other_file_is_seen_too(dataset_root: Path, kind: str):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    files = sorted((dataset_root / kind).rglob("*.*"))
    for _ in range(_NUM_FLIPS):
        file = rng.choice(files)
        original = file.read_bytes()
        data = bytearray(original)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        with pytest.raises(IntegrityError, match=file.name):
            verify_dataset(open_dataset(str(dataset_root))).raise_if_failed()
        file.write_bytes(original)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "not JSON"),
        (lambda data: data.replace(b'"schema_version": 1', b'"schema_version": 99'), "schema version 99"),
        (lambda data: data.replace(b'"version": 1', b'"version": 7'), "was altered"),
        (lambda data: b"[]", "not a manifest"),
    ],
)
def test_a_damaged_manifest_is_refused_and_never_replaced_by_a_listing(
    dataset_root: Path, damage: Callable[[bytes], bytes], message: str
):
    file = dataset_root / "manifests" / "00000001.json"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(IntegrityError, match=message):
        open_dataset(str(dataset_root))


def test_a_manifest_under_another_number_is_refused(dataset_root: Path):
    shutil.copy(dataset_root / "manifests" / "00000001.json", dataset_root / "manifests" / "00000002.json")
    with pytest.raises(IntegrityError, match="claims to be version 1.*expected 2"):
        open_dataset(str(dataset_root))


def test_a_manifest_that_points_outside_is_a_security_refusal(dataset_root: Path):
    file = dataset_root / "manifests" / "00000001.json"
    manifest = open_dataset(str(dataset_root)).manifest
    for path in ("../outside.parquet", "/etc/passwd", "s3://other/x"):
        hostile = replace(manifest.index_segments[0], path=path)
        file.write_bytes(encode_manifest(manifest.model_copy(update={"index_segments": (hostile,)})))
        with pytest.raises(SecurityRefusal, match="leaves its root folder"):
            open_dataset(str(dataset_root))


def test_ranks_refuse_a_manifest_that_changed_after_the_driver_looked(dataset_root: Path):
    pin = open_dataset(str(dataset_root)).pin
    file = dataset_root / "manifests" / "00000001.json"
    body = json.loads(file.read_bytes())
    body["run_id"] = "someone else"
    file.write_text(json.dumps(body))
    with pytest.raises(IntegrityError, match="which this job's driver resolved"):
        open_pinned(pin)


def test_what_was_not_committed_is_not_a_dataset(tmp_path: Path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "000000.parquet").write_bytes(b"")
    with pytest.raises(IntegrityError, match="not a committed dataset"):
        open_dataset(str(tmp_path))


def test_a_mistyped_path_is_a_mistake_of_usage_and_names_what_is_near(dataset_root: Path, tmp_path: Path):
    for uri in (tmp_path / "datset", tmp_path, f"{dataset_root}@\N{SUPERSCRIPT TWO}"):
        with pytest.raises(UsageError, match=f"there is no dataset at .*did you mean {dataset_root}"):
            open_dataset(str(uri))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(b"")
    with pytest.raises(UsageError, match="there is no dataset at .*images"):
        open_dataset(str(tmp_path / "images"))


def test_an_unknown_version_names_the_known_ones(whole: Path):
    with pytest.raises(UsageError, match="has no version 9; expected version 1, the only one"):
        open_dataset(f"{whole}@9")


NUM_FLIPS = usually(10, 1_000)
NUM_CUTS = NUM_FLIPS // 5
BATCH = {"global_batch_size": 8, "seed": 3, "num_streams": 2}


@pytest.fixture(scope="module")
def damageable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_dataset(tmp_path_factory.mktemp("whole"), num_images=90, chunk_bytes=3000))


@pytest.fixture
def root(damageable: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(damageable, tmp_path / "dataset"))


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
        damageable = path.read_bytes()
        kind, place, data = damage(rng, damageable, number)
        chunks = hit(shard, kind, place)
        path.write_bytes(data)
        found, error = read(root, format)
        path.write_bytes(damageable)
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
def test_what_is_damaged_in_a_cache_is_fetched_again(damageable: Path, format: str, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(STORES.entries, FAR, FAR_ENTRY)
    expected, _ = read(damageable, format)
    uri, rng = f"{FAR}://{damageable}", random.Random(f"cache {format} {NUM_FLIPS}")
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


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of several shards in each split and both formats."""
    return make_dataset(tmp_path_factory.mktemp("indexed"), num_images=120, shard_max_bytes=20_000)


def assert_says(index: SplitIndex, shards: tuple[ShardInfo, ...]) -> None:
    infos = [chunk for shard in shards for chunk in shard.chunks]
    assert index.num_chunks == len(infos) and index.num_shards == len(shards) > 1
    for field in fields(ShardFile):
        found = [getattr(index.shard(number), field.name) for number in range(index.num_shards)]
        assert found == [getattr(shard, field.name) for shard in shards]
    places = iter(infos)
    for number, shard in enumerate(shards):
        for place, info in enumerate(shard.chunks):
            found = index.chunk(int(index.first_chunk_of_shard[number]) + place)
            assert next(places) == info and (found.shard, found.number) == (number, place)
            assert (found.place.start, found.place.num_bytes) == (info.start, info.num_bytes)
            assert (found.num_rows, found.crc32c) == (info.num_rows, info.crc32c)
    assert index.chunk_rows.tolist() == [info.num_rows for info in infos]
    assert index.image_bytes.tolist() == [info.image_bytes for info in infos]
    assert index.max_chunk_bytes == max(info.image_bytes for info in infos)
    assert index.paths == [shard.path for shard in shards]


def test_columns_say_what_the_values_say(uri: str):
    dataset = open_dataset(uri)
    for split in dataset.manifest.splits:
        for name in dataset.manifest.formats:
            assert_says(dataset.index(split, name), dataset.shards_of(split, name))
    shards = dataset.shards_of("train", "parquet")
    assert_says(SplitIndex.of(shards), shards)


def test_segments_of_any_shape_are_joined_in_their_order(uri: str, tmp_path: Path):
    """Each shard a segment of its own; formats and splits mixed; without dictionaries, in several row groups."""
    dataset = open_dataset(uri)
    store = open_store(str(tmp_path))
    segments = tuple(put_segment(store, "indexes", index_table([shard])) for shard in dataset.shards)
    manifest = dataset.manifest.model_copy(update={"index_segments": segments})
    for (split, name), index in read_index(store, manifest).items():
        assert_says(index, dataset.shards_of(split, name))
    table = index_table(sorted(dataset.shards, key=lambda shard: shard.sha256))
    out = pa.BufferOutputStream()
    pq.write_table(table, out, use_dictionary=False, row_group_size=3)
    store.put("indexes/mixed.parquet", out.getvalue().to_pybytes())
    file = checksum_file("indexes/mixed.parquet", out.getvalue().to_pybytes())
    found = read_index(store, manifest.model_copy(update={"index_segments": (file,)}))
    for (split, name), index in found.items():
        mine = [each for each in shards_of_table(table) if (each.split, each.format) == (split, name)]
        assert_says(index, tuple(mine))


def _first(shard: ShardInfo, **changed: int) -> ShardInfo:
    return replace(shard, chunks=(replace(shard.chunks[0], **changed), *shard.chunks[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda shard: _first(shard, start=-4), lambda shard: _first(shard, num_bytes=1 << 62),
        lambda shard: _first(shard, num_rows=(1 << 63) // 64 + 1), lambda shard: _first(shard, num_rows=0),
        lambda shard: _first(shard, image_bytes=-1), lambda shard: _first(shard, crc32c=1 << 40),
        lambda shard: replace(shard, chunks=(shard.chunks[0], *shard.chunks[2:])),
        lambda shard: replace(shard, chunks=shard.chunks[::-1]),
        lambda shard: replace(shard, num_rows=shard.num_rows + 1),
        lambda shard: replace(shard, footer_bytes=shard.footer_bytes + 1),
        lambda shard: replace(shard, footer_start=(1 << 63) - 1, size_bytes=(1 << 63) - 1, footer_bytes=0),
        lambda shard: replace(shard, path="../outside"), lambda shard: replace(shard, rows_path="rows/../../x"),
        lambda shard: replace(shard, path="shards/%2e%2e/%2e%2e/x"),
        lambda shard: replace(shard, path="shards/..hidden/../x"),
    ],
)  # fmt: skip
def test_what_no_file_has_is_refused_as_the_values_refuse_it(uri: str, tmp_path: Path, change):
    shards = open_dataset(uri).shards_of("train", "parquet")
    target = next(number for number, shard in enumerate(shards) if len(shard.chunks) > 2)
    table = index_table([change(shard) if number == target else shard for number, shard in enumerate(shards)])
    store = open_store(str(tmp_path))
    with pytest.raises((IntegrityError, SecurityRefusal)):
        _read_parts(store, put_segment(store, "indexes", table), 10_000)
    path = table.column("shard")[0].as_py()
    empty = table.set_column(2, "shard", pa.array([None if each == path else each for each in table[2].to_pylist()]))
    with pytest.raises(IntegrityError, match="empty fields"):
        _read_parts(store, put_segment(store, "indexes", empty), 10_000)


def test_the_footers_that_a_reader_keeps_are_bounded(uri: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    dataset = open_dataset(f"{SCHEME}://{uri}")
    index = dataset.index("train", "parquet")
    footer_bytes = max(shard.footer_bytes for shard in dataset.shards_of("train", "parquet"))
    monkeypatch.setattr(chunks, "_MAX_FOOTER_BYTES", 2 * (footer_bytes + chunks._SHARD_BYTES))
    fetcher = ChunkFetcher(dataset.store, index, dataset.manifest.row_schema)
    everything = [fetcher.read_chunk(number) for number in range(index.num_chunks)]
    assert 1 <= len(fetcher._opened) <= 2 and not fetcher._opening
    CALLS.clear()
    again = fetcher.read_chunk(0)
    assert CALLS["read_range"] == 2 and np.array_equal(again.sample_ids_N, everything[0].sample_ids_N)
    fetcher.read_chunk(0)
    assert CALLS["read_range"] == 3


@pytest.mark.starts("program")
def test_the_first_batch_imports_no_pandas(uri: str):
    """pyarrow would, where it is installed: a second on a busy machine."""
    program = (
        "import sys, shardmill\n"
        f"for name in ('parquet', 'tfrecord'):\n"
        f"    next(iter(shardmill.open_dataset({uri!r}).batches('train', global_batch_size=8, format=name)))\n"
        "print('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


@pytest.fixture(scope="module")
def version(whole: Path) -> Dataset:
    return open_dataset(str(whole))


def shard_of(dataset: Dataset, format_name: str) -> ShardInfo:
    return dataset.shards_of("train", format_name)[0]


@pytest.mark.parametrize("source_format", SHARD_FORMATS)
@pytest.mark.parametrize("target_format", SHARD_FORMATS)
def test_a_copied_shard_equals_the_one_that_the_etl_published(
    version: Dataset, tmp_path: Path, source_format: str, target_format: str
):
    schema = version.manifest.row_schema
    rows = read_stored_rows(version.store, shard_of(version, source_format), schema)
    chunks = list(cut_chunks(rows, version.manifest.config["chunk_bytes"]))
    copied = publish_shard(open_store(tmp_path / "copy"), "train", "copied", target_format, chunks, schema=schema)
    expected = shard_of(version, target_format)
    # The whole file and the whole row segment, byte for byte; only the names are other ones.
    assert replace(copied, path=expected.path, rows_path=expected.rows_path) == expected


def test_the_sums_of_the_manifest_follow_from_the_copied_rows(version: Dataset):
    for split, info in version.manifest.splits.items():
        rows = [
            row
            for shard in version.shards_of(split)
            for row in read_stored_rows(version.store, shard, version.manifest.row_schema)
        ]
        assert len(rows) == info.num_rows
        total = format_digest(add_digests(*(int.from_bytes(row.digest, "big") for row in rows)))
        assert total == info.row_digest_sum


@pytest.mark.parametrize("format_name", SHARD_FORMATS)
def test_a_row_segment_of_another_shard_is_refused(version: Dataset, format_name: str):
    first, second = version.shards_of("train", format_name)[:2]
    rows = read_segment(version.store, rows_file(second), ROWS_SCHEMA, second.num_rows)
    assert len(rows) == second.num_rows
    of_rows = {name: getattr(second, name) for name in ("rows_path", "rows_bytes", "rows_sha256", "num_rows")}
    mixed = replace(first, **of_rows)
    with pytest.raises(IntegrityError, match="a different row than its row segment"):
        list(read_stored_rows(version.store, mixed, version.manifest.row_schema))
