"""S3: requests are counted, and writers race."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etl.config import EtlConfig
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.stores import bucket_requests, open_store, retries, s3, s3_requests
from shardmill.stores.s3 import S3Store
from tests.lab.datasets import build_here, read_all, upload, write_images
from tests.programs.use_store import use_store
from tests.services.fault_proxy import (
    Fault,
    FaultProxy,
    check_late_answers,
    end_patience_with,
    in_turn,
    proxying,
    uses_of,
)
from tests.services.marked import free_ports
from tests.services.s3 import s3_client
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


@pytest.fixture
def faults(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """What this process asks of S3 goes through it."""
    with proxying(gateway.endpoint) as proxy:
        connect_to(proxy.endpoint, monkeypatch)
        yield proxy


def limit(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(S3Store.deadline_variable, seconds)
    s3._connected.cache_clear()


NOT_DONE = (Fault.INTERNAL_ERROR, Fault.SLOW_DOWN, Fault.CONFLICT)
BUSY = (Fault.INTERNAL_ERROR, Fault.SLOW_DOWN, Fault.TOO_MANY)


@pytest.mark.parametrize(
    "spoiled",
    [*((fault,) for fault in (*NOT_DONE, Fault.DROPPED)), (Fault.SLOW_DOWN, Fault.DROPPED), (Fault.CONFLICT,) * 2],
    ids="+".join,
)
def test_the_object_shows_which_writer_won_whatever_became_of_the_answer(
    spoiled: tuple[Fault, ...], faults: FaultProxy, gateway_bucket: str
):
    # The answers to the probe are spoiled, then those to the manifest; each is a PUT that wins.
    for path in ("conditional-put", "/manifest"):
        store = open_store(gateway_bucket)
        faults.choose = in_turn(*spoiled, method="PUT", path=path)
        assert store.put_if_absent(f"manifest{path.count('/')}", b"ours")
        assert sum(faults.told[fault] for fault in set(spoiled)) == len(spoiled)
        faults.told.clear()
    # Another's object is there already: a 412 says so without a word, and after any other answer the object does.
    for answers in (spoiled, (Fault.BARE_412,)):
        faults.choose = in_turn(*answers, method="PUT", path="/manifest1")
        assert not store.put_if_absent("manifest1", b"theirs") and faults.told[answers[0]]
    assert store.read("manifest1") == b"ours"
    assert [file.path for file in store.list("")] == ["manifest0", "manifest1"]


def test_an_unknown_outcome_is_reported_and_nothing_is_deleted(faults: FaultProxy, gateway_bucket: str, monkeypatch):
    store = open_store(gateway_bucket)
    assert store.put_if_absent("first", b"")
    end_patience_with(3, monkeypatch)
    faults.choose = lambda method, path: Fault.DROPPED if method == "PUT" else Fault.INTERNAL_ERROR
    with pytest.raises(StorageError, match=r"whether .*/manifest was published is unknown: no success within 120 s"):
        store.put_if_absent("manifest", b"ours")
    faults.choose = lambda method, path: None
    assert store.read("manifest") == b"ours"


@pytest.mark.parametrize("seconds", ["2m", "nan", "-1", "0"])
def test_a_deadline_is_a_number_of_seconds(seconds: str, monkeypatch: pytest.MonkeyPatch):
    limit(seconds, monkeypatch)
    with pytest.raises(UsageError, match=f"SHARDMILL_S3_DEADLINE_SECONDS = '{seconds}'; expected a number of seconds"):
        open_store("s3://b").read("x")


@pytest.mark.parametrize(
    "fault",
    [*BUSY, Fault.RESET, Fault.CUT, Fault.SHORT, Fault.DROPPED, Fault.STALLED, Fault.DELAYED, Fault.SLOW],
)
def test_a_spoiled_answer_is_never_data(
    fault: Fault, faults: FaultProxy, gateway_bucket: str, monkeypatch: pytest.MonkeyPatch
):
    if fault is Fault.STALLED:
        # Of two minutes: what comes later than that is asked for again, time after time.
        monkeypatch.setattr(retries, "STALL_OF_DEADLINE", 1 / 240)
        s3._connected.cache_clear()
    store, data = open_store(gateway_bucket), bytes(range(256)) * 20
    faults.choose = in_turn(fault)
    store.put("a/b", data)
    # All has been imported.
    generator = random.getstate()
    for use in uses_of(store, data):
        faults.choose = in_turn(fault)
        assert use()
    assert faults.told[fault] == 6
    # A request that is sent again takes nothing from where Keras takes the seeds of a model's first weights.
    assert random.getstate() == generator


@pytest.mark.parametrize("fault", [Fault.FORBIDDEN, Fault.EXPIRED])
def test_a_refusal_is_reported_once_and_without_a_key(
    fault: Fault,
    faults: FaultProxy,
    gateway_bucket: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    store, said = open_store(gateway_bucket), []
    uses = {
        "read": lambda: store.read("x"), "read_range": lambda: store.read_range("x", 0, 1),
        "put": lambda: store.put("x", b""), "list": lambda: list(store.list("")), "stat": lambda: store.stat("x"),
    }  # fmt: skip
    store.put("x", b"1")
    faults.choose = lambda method, path: fault
    for name, use in uses.items():
        before = faults.told[fault]
        with caplog.at_level("INFO"), pytest.raises(StorageError, match="cannot access s3://.*AWS_") as caught:
            use()
        # A 400 to a HEAD comes without words; botocore asks for the bucket's region, in case that was meant.
        num_asked = 2 if (name, fault) == ("stat", Fault.EXPIRED) else 1
        assert caught.value.exit_code == 4 and faults.told[fault] == before + num_asked, name
        said.append(str(caught.value))
    # What the server itself says of a wrong key.
    faults.choose = lambda method, path: None
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET[:-1]}x")
    s3._connected.cache_clear()
    for name in ("read", "read_range", "put"):
        before = faults.told[None]
        with caplog.at_level("INFO"), pytest.raises(StorageError, match="cannot access .*signature") as caught:
            uses[name]()
        assert faults.told[None] == before + 1, name
        said.append(str(caught.value))
    with caplog.at_level("INFO"), pytest.raises(StorageError, match="cannot access .*signature") as caught:
        store.put_if_absent("x", b"")
    said += [str(caught.value), caplog.text]
    assert KEY not in "".join(said) and SECRET[:20] not in "".join(said)


def test_an_answer_that_is_whole_counts_however_late(
    faults: FaultProxy, gateway_bucket: str, monkeypatch: pytest.MonkeyPatch
):
    check_late_answers(open_store(gateway_bucket), s3_requests, monkeypatch)


def test_patience_has_an_end(faults: FaultProxy, gateway_bucket: str, monkeypatch: pytest.MonkeyPatch):
    limit("1", monkeypatch)
    faults.choose = lambda method, path: Fault.STALLED if "stalled" in path else Fault.SLOW_DOWN
    for name in ("busy", "stalled"):
        said, began = rf"cannot access .*/{name}: no success within 1 s .*the last of (\d+) err", time.monotonic()
        with pytest.raises(StorageError, match=said) as caught:
            open_store(gateway_bucket).read(name)
        # One request may take all of the time.
        [num_errors] = re.findall(said, str(caught.value))
        assert int(num_errors) > 1 or time.monotonic() - began > 1 - retries.FIRST_PAUSE_SECONDS


def test_a_large_file_goes_up_in_parts_each_tried_again(
    faults: FaultProxy, gateway_bucket: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    # The least that S3 takes for a part.
    monkeypatch.setattr(bucket_requests, "PIECE_BYTES", 5 << 20)
    store, data = open_store(gateway_bucket), bytes(range(251)) * 45_000
    lost_end = in_turn(Fault.ERROR_IN_200, Fault.DROPPED, method="POST", path="uploadId")
    busy = in_turn(Fault.SLOW_DOWN, Fault.INTERNAL_ERROR, path="partNumber")
    faults.choose = lambda method, path: lost_end(method, path) or busy(method, path)
    store.put("large", data)
    spoiled = (Fault.ERROR_IN_200, Fault.DROPPED, Fault.SLOW_DOWN, Fault.INTERNAL_ERROR)
    assert [faults.told[fault] for fault in spoiled] == [1, 1, 1, 1]
    faults.choose = in_turn(None, Fault.CUT, Fault.RESET, method="GET")
    assert store.read("large") == data and store.read_range("large", 1, 9 << 20) == data[1 : (9 << 20) + 1]
    faults.choose = lambda method, path: Fault.FORBIDDEN if "partNumber=2" in path else None
    with pytest.raises(StorageError, match="cannot access"):
        store.put("refused", data)
    assert "Uploads" not in s3_client(gateway.endpoint).list_multipart_uploads(
        Bucket=gateway_bucket.removeprefix("s3://")
    )


def test_a_slow_line_needs_no_other_deadline(faults: FaultProxy, gateway_bucket: str, monkeypatch: pytest.MonkeyPatch):
    store, data = open_store(gateway_bucket), bytes(range(250)) * 132_000
    store.put("large", data)
    # Four pieces at a time, of a quarter of a second each: all of them take longer than any one of them may.
    limit("8", monkeypatch)
    monkeypatch.setattr(bucket_requests, "PIECE_BYTES", 250_000)
    faults.choose = lambda method, path: Fault.SLOW
    began = time.monotonic()
    assert store.read("large") == data and faults.told[Fault.SLOW] >= 132
    assert time.monotonic() - began > 8


def test_a_server_that_is_started_again_is_waited_for(gateway_bucket: str, gateway: Gateway, monkeypatch):
    monkeypatch.setattr(retries, "CONNECT_SECONDS", 0.0)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_SECONDS", 0.1)
    [port] = free_ports(1)
    with ThreadPoolExecutor(1) as reader:
        with proxying(gateway.endpoint, port) as proxy:
            connect_to(proxy.endpoint, monkeypatch)
            open_store(gateway_bucket).put("x", b"1")
            proxy.choose = lambda method, path: Fault.DROPPED
            reading = reader.submit(open_store(gateway_bucket).read, "x")
        num_before = retries.num_retried()
        while not reading.done() and retries.num_retried() < num_before + 3:
            time.sleep(0.01)
        assert not reading.done()
        with proxying(gateway.endpoint, port):
            assert reading.result(120) == b"1"


def test_a_server_that_was_never_there_is_reported_soon(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries, "CONNECT_SECONDS", 0.5)
    connect_to("http://127.0.0.1:1", monkeypatch)
    limit("3600", monkeypatch)
    # Not: whether it was published is unknown.
    with pytest.raises(StorageError, match="cannot access s3://b/x.*: Could not connect to the endpoint"):
        open_store("s3://b").put_if_absent("x", b"")
    with pytest.raises(StorageError, match="cannot access s3://b/x: Could not connect to the endpoint"):
        open_store("s3://b").read("x")


@pytest.mark.parametrize("region", ["", "eu-west-1"])
def test_ranges_are_read_whatever_region_is_set(region: str, gateway: Gateway, gateway_bucket: str, monkeypatch):
    connect_to(gateway.endpoint, monkeypatch)
    open_store(gateway_bucket).put("a b%20c#é", b"0123456789")
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    s3._connected.cache_clear()
    store = open_store(gateway_bucket)
    assert [store.read_range("a b%20c#é", start, 4) for start in (0, 8, 20)] == [b"0123", b"89", b""]
    with pytest.raises(FileNotFoundError):
        store.read_range("absent", 0, 1)
