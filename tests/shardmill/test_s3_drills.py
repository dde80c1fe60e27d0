"""A dataset on a real S3 server: racing writers, damage, names, long listings, both spellings of its place."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from etl.config import EtlConfig
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError
from shardmill.stores import open_store
from tests.lab.datasets import build_here, read_all, upload, write_images
from tests.programs.use_store import use_store
from tests.services.fault_proxy import proxying
from tests.services.versitygw import KEY, SECRET, Gateway, connect_to
from tests.shardmill.races import NUM_ROUNDS, race_of_writers

pytestmark = pytest.mark.drill

_SEED = random.SystemRandom().randrange(2**32)
_CONFIG = EtlConfig(
    image_size=16, formats=("parquet", "tfrecord"), encoding="png", chunk_bytes=8_000, unit_min_images=40
)


@pytest.fixture
def root(gateway_bucket: str, tmp_path: Path) -> str:
    write_images(tmp_path / "images", num_images=60)
    return build_here(upload(tmp_path / "images", f"{gateway_bucket}/images"), f"{gateway_bucket}/dataset", _CONFIG)


def folder_of(gateway: Gateway, uri: str) -> Path:
    return gateway.folder / uri.removeprefix("s3://")


def test_of_eight_racing_writers_one_wins_each_version(root: str):
    race_of_writers(root)


def test_no_flipped_bit_and_no_cut_object_goes_unseen(root: str, gateway: Gateway):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    kinds = ("shards", "rows", "indexes", "manifests")
    files = [file for kind in kinds for file in folder_of(gateway, root).joinpath(kind).rglob("*.*")]
    shards = [file for file in files if "shards" in file.parts]
    for file in rng.choices(files, k=2 * NUM_ROUNDS):
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=file.name):
            verify_dataset(open_dataset(root), deep=True).raise_if_failed()
        file.write_bytes(whole)
    # The reader asks for ranges: of a cut object some lie behind its end, which the server answers with 416.
    for file, share in zip(rng.sample(shards, 3), (0.0, 0.5, 1.0), strict=True):
        whole = file.read_bytes()
        length = min(int(len(whole) * share), len(whole) - 1)
        os.truncate(file, length)
        with pytest.raises(IntegrityError, match=f"{file.name} (does not have|was altered)"):
            [read_all(root, name) for name in _CONFIG.formats]
        with pytest.raises(IntegrityError, match=f"{file.name} .*has {length} bytes; expected {len(whole)}"):
            verify_dataset(open_dataset(root)).raise_if_failed()
        file.write_bytes(whole)
    assert [read_all(root, name) for name in _CONFIG.formats] == [60, 60]
    verify_dataset(open_dataset(root), deep=True).raise_if_failed()


def test_both_spellings_are_one_place(root: str, gateway_bucket: str):
    hadoops = gateway_bucket.replace("s3://", "s3a://")
    before = open_dataset(root)
    build_here(f"{hadoops}/images", f"{hadoops}/dataset", _CONFIG)
    after = open_dataset(f"{hadoops}/dataset")
    assert after.pin == before.pin and after.manifest.version == 1 and "s3a" not in str(after.manifest.source)


NAMES = ["a b", "b%20c", "c#d", "e?versionId=1", "f+g&h=i", "é😀", "x" * 255, "y/z w/%2F", "t\"'<>|:*"]


def test_names_are_taken_as_they_are(gateway_bucket: str, tmp_path: Path):
    store = open_store(f"{gateway_bucket}/a prefix%20#")
    for name in NAMES:
        (tmp_path / "file").write_text(name)
        store.put_file(name, tmp_path / "file")
        assert store.read(name) == name.encode() and store.stat(name) and not store.put_if_absent(name, b"another")
    assert {file.path: store.read_range(file.path, 0, 1000).decode() for file in store.list("")} == {
        name: name for name in NAMES
    }
    for name in NAMES:
        store.delete(name)
    assert not list(store.list("")) and not list(store.list_unpublished(""))


def test_a_listing_is_one_page_at_a_time(gateway_bucket: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    folder = folder_of(gateway, f"{gateway_bucket}/many")
    folder.mkdir()
    for number in range(2_500):
        (folder / f"{number:04d}").touch()
    with proxying(gateway.endpoint) as proxy:
        connect_to(proxy.endpoint, monkeypatch)
        listing = open_store(gateway_bucket).list("many")
        first = next(listing).path
        assert proxy.told.total() == 1
        assert [first, *(file.path for file in listing)] == [f"many/{number:04d}" for number in range(2_500)]
        assert proxy.told.total() == 3


def test_a_profile_says_where_and_who(gateway_bucket: str, gateway: Gateway, tmp_path: Path):
    """The way for executors: a file on each machine, and a name in the environment."""
    config, keys = tmp_path / "config", tmp_path / "credentials"
    config.write_text(f"[profile lab]\nregion = us-east-1\nendpoint_url = {gateway.endpoint}\n")
    keys.write_text(f"[lab]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    own = {"AWS_ENDPOINT_URL": "", "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_DEFAULT_REGION": ""}
    files = {"AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": str(keys)}
    open_store(gateway_bucket).put("a", b"1")
    told = use_store(gateway_bucket, **own, **files, AWS_PROFILE="lab")
    assert told == {"list": "['a']", "stat": "True", "read": "b'1'", "put_if_absent": "True",
                    "list again": "['a', 'manifest']"}  # fmt: skip
