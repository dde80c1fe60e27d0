"""Damage: whatever byte of a committed version is altered, cut, lost or swapped, `verify` and the reader name it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardmill.dataset.manifest import encode_manifest
from shardmill.dataset.open import open_dataset, open_pinned
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, SecurityRefusal, UsageError
from shardmill.formats import SHARD_FORMATS
from tests.lab.datasets import make_dataset, read_all
from tests.lab.scale import usually

_SEED = random.SystemRandom().randrange(2**32)
_NUM_FLIPS = usually(20, 500)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_dataset(tmp_path_factory.mktemp("whole"), num_images=60))


@pytest.fixture
def dataset_root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "dataset"))


def test_a_whole_dataset_passes_every_rule(whole: Path):
    report = verify_dataset(open_dataset(str(whole)), deep=True)
    assert not report.problems and len(report.checks) == 15
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
    with pytest.raises(UsageError, match="has no version 9; expected 1"):
        open_dataset(f"{whole}@9")
