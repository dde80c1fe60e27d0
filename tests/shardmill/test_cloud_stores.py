"""Google Cloud Storage and Azure Blob Storage: writers race, answers are lost, and refusals are said in one line."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from etl.config import EtlConfig, SourceConfig
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import StorageError, UsageError
from shardmill.stores import bucket_requests, object_stores, open_store, retries
from tests.etl.building import list_images
from tests.lab.datasets import build_here, read_all, upload, write_images
from tests.programs.use_store import use_store
from tests.services.clouds import Cloud, account_sas
from tests.services.fault_proxy import Fault, check_late_answers, end_patience_with, in_turn, uses_of
from tests.shardmill.races import race_of_writers

pytestmark = pytest.mark.drill

_CLOUDS = object_stores.GcsStore, object_stores.AzureStore
_CONFIG = EtlConfig(image_size=16, encoding="png", chunk_bytes=8_000, unit_min_images=40)


@pytest.fixture(params=["gcs", "azure"])
def cloud(request: pytest.FixtureRequest) -> Cloud:
    return request.getfixturevalue(request.param)


def deadline(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for store in _CLOUDS:
        monkeypatch.setenv(store.deadline_variable, seconds)
    object_stores._connected.cache_clear()


def test_of_eight_racing_writers_one_wins_each_version(cloud: Cloud, tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    root = build_here(upload(tmp_path / "images", f"{cloud.root}/images"), f"{cloud.root}/dataset", _CONFIG)
    race_of_writers(root)
    verify_dataset(open_dataset(f"{root}@1"), deep=True).raise_if_failed()
    assert read_all(f"{root}@1", "parquet") == 30


@pytest.mark.parametrize(
    "spoiled",
    [(Fault.INTERNAL_ERROR,), (Fault.CONFLICT,) * 2, (Fault.DROPPED,), (Fault.SLOW_DOWN, Fault.DROPPED)],
    ids="+".join,
)
def test_the_object_tells_who_won_whatever_became_of_the_answer(spoiled: tuple[Fault, ...], cloud: Cloud):
    # The answers to the probe are spoiled, then those to the manifest; each is a PUT that wins.
    for path in ("conditional-put", "/manifest"):
        store = open_store(cloud.root)
        cloud.faults.choose = in_turn(*spoiled, method="PUT", path=path)
        assert store.put_if_absent(f"manifest{path.count('/')}", b"ours")
        assert sum(cloud.faults.told[fault] for fault in set(spoiled)) == len(spoiled)
        cloud.faults.told.clear()
    # Another's object is there already: a 412 says so without a word, and after any other answer the object does.
    for answers in (spoiled, (Fault.BARE_412,)):
        cloud.faults.choose = in_turn(*answers, method="PUT", path="/manifest1")
        assert not store.put_if_absent("manifest1", b"theirs") and cloud.faults.told[answers[0]]
    assert store.read("manifest1") == b"ours"
    assert [file.path for file in store.list("")] == ["manifest0", "manifest1"]


def test_what_cannot_be_told_is_said_and_nothing_is_deleted(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    assert open_store(cloud.root).put_if_absent("first", b"")
    end_patience_with(3, monkeypatch)
    cloud.faults.choose = lambda method, path: Fault.DROPPED if method == "PUT" else Fault.INTERNAL_ERROR
    store = open_store(cloud.root)
    store._is_conditional = True  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(StorageError, match=r"whether .*/manifest was published is unknown: no success within 120 s"):
        store.put_if_absent("manifest", b"ours")
    cloud.faults.choose = lambda method, path: None
    assert open_store(cloud.root).read("manifest") == b"ours"


@pytest.mark.parametrize(
    "fault",
    [Fault.INTERNAL_ERROR, Fault.TOO_MANY, Fault.RESET, Fault.CUT, Fault.SHORT, Fault.DROPPED, Fault.STALLED,
     Fault.SLOW],
)  # fmt: skip
def test_a_spoiled_answer_is_never_data(fault: Fault, cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    if fault is Fault.STALLED:
        # Of two minutes: what comes later than that is asked for again, time after time.
        monkeypatch.setattr(retries, "STALL_OF_DEADLINE", 1 / 240)
    store, data = open_store(cloud.root), bytes(range(256)) * 20
    cloud.faults.choose = in_turn(fault)
    store.put("a/b", data)
    for use in (*uses_of(store, data), lambda: store.delete("a/b") or store.stat("a/b") is None):
        cloud.faults.choose = in_turn(fault)
        assert use()
    assert cloud.faults.told[fault] == 7


def test_a_listing_goes_on_behind_what_has_come(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(object_stores, "_LISTED_AT_ONCE", 2)
    store, names = open_store(cloud.root), [f"many/{number}" for number in range(5)]
    for name in names:
        store.put(name, b"1")
    listing = store.list("many")
    first = [next(listing).path, next(listing).path]
    cloud.faults.choose = in_turn(Fault.SLOW_DOWN, Fault.CUT)
    assert [*first, *(file.path for file in listing)] == names


NAMES = ["a b", "b%20c", "c#d", "e?versionId=1", "f+g&h=i", "é😀", "x" * 200, "y/z w/%2F", "t'<>*"]


def test_names_are_taken_as_they_are_and_folder_markers_are_no_files(cloud: Cloud):
    store = open_store(f"{cloud.root}/a prefix%20#")
    for name in NAMES:
        assert store.put_if_absent(name, name.encode()) and not store.put_if_absent(name, b"another")
        assert store.read(name) == name.encode() and store.stat(name)
    assert {file.path: store.read_range(file.path, 0, 1000).decode() for file in store.list("")} == {
        name: name for name in NAMES
    }
    for name in NAMES:
        store.delete(name)
    assert not list(store.list("")) and not list(store.list_unpublished(""))
    # Consoles make them. An empty file is a file.
    for key in ("cats/", "cats/1.jpg", "none"):
        cloud.put(key, b"x" if key.endswith(".jpg") else b"")
    assert [file.path for file in open_store(cloud.root).list("")] == ["cats/1.jpg", "none"]


def test_a_large_file_goes_up_in_parts_each_tried_again(cloud: Cloud, tmp_path: Path, monkeypatch):
    # The least that Google takes for a part.
    monkeypatch.setattr(bucket_requests, "PIECE_BYTES", 5 << 20)
    store, data = open_store(cloud.root), bytes(range(251)) * 45_000
    (tmp_path / "large").write_bytes(data)
    part, end = ("partNumber", "uploadId=") if cloud.root.startswith("gs") else ("comp=block&", "comp=blocklist")
    busy, lost = in_turn(Fault.SLOW_DOWN, Fault.RESET, path=part), in_turn(Fault.DROPPED, path=end)
    cloud.faults.choose = lambda method, path: busy(method, path) or (None if part in path else lost(method, path))
    store.put_file("large", tmp_path / "large")
    assert [cloud.faults.told[fault] for fault in (Fault.SLOW_DOWN, Fault.RESET, Fault.DROPPED)] == [1, 1, 1]
    cloud.faults.choose = in_turn(None, Fault.CUT, Fault.RESET, method="GET")
    assert store.read("large") == data and store.read_range("large", 1, 9 << 20) == data[1 : (9 << 20) + 1]
    cloud.faults.choose = lambda method, path: Fault.FORBIDDEN if part in path else None
    with pytest.raises(StorageError, match="cannot access .*by the fault proxy"):
        store.put("refused", data)
    assert store.stat("refused") is None


def test_a_server_that_ignores_the_condition_can_be_read_but_not_committed_to(cloud: Cloud, monkeypatch):
    cloud.put("a", b"1")
    # A signature over the headers would say that one is missing.
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", account_sas())
    cloud.faults.withheld = frozenset({"if-none-match", "x-goog-if-generation-match"})
    outcomes = use_store(cloud.root)
    assert f"{cloud.root} ignores `" in outcomes.pop("put_if_absent")
    outcomes.pop("list again")
    assert outcomes == {"list": "['a']", "stat": "True", "read": "b'1'"}


@pytest.mark.parametrize("fault", [Fault.FORBIDDEN, Fault.EXPIRED])
def test_a_refusal_is_reported_once_with_the_servers_words(fault: Fault, cloud: Cloud):
    store = open_store(cloud.root)
    store.put("x", b"1")
    cloud.faults.choose = lambda method, path: fault
    for name, use in {
        "read": lambda: store.read("x"), "put": lambda: store.put("x", b""), "list": lambda: list(store.list("")),
        "create": lambda: store.put_if_absent("x", b""), "delete": lambda: store.delete("x"),
    }.items():  # fmt: skip
        before = cloud.faults.told[fault]
        with pytest.raises(StorageError, match="cannot access .*by the fault proxy.*(GOOGLE_|AZURE_)") as caught:
            use()
        # Of a probe that failed, the removal is tried.
        assert cloud.faults.told[fault] == before + (2 if name == "create" else 1), name
        assert caught.value.exit_code == 4 and "\n" not in str(caught.value)


def test_a_wrong_key_is_one_line_without_it(azure: Cloud, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "Y2FuYXJ5")
    for use in (lambda store: store.read("x"), lambda store: store.put_if_absent("x", b"")):
        with pytest.raises(StorageError, match="cannot access .*AZURE_STORAGE_ACCOUNT_KEY") as caught:
            use(open_store(azure.root))
        assert "Y2FuYXJ5" not in str(caught.value) and "ignature=" not in str(caught.value)


def test_a_missing_bucket_is_a_storage_error_and_as_a_source_a_usage_error(cloud: Cloud):
    missing = f"{cloud.root}-missing"
    store = open_store(missing)
    for use in (lambda: list(store.list("")), lambda: store.put("a", b"1"), lambda: store.put_if_absent("a", b"1")):
        with pytest.raises(StorageError, match=f"no (bucket|container) '{missing.partition('//')[2]}'"):
            use()
    with pytest.raises(UsageError, match=f"source {missing} does not exist"):
        list_images(SourceConfig(uri=missing))


def test_a_server_that_was_never_there_is_told_soon(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retries, "CONNECT_SECONDS", 0.5)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", "http://127.0.0.1:1")
    deadline("3600", monkeypatch)
    # Not: whether it was published is unknown.
    for use in (lambda store: store.put_if_absent("x", b""), lambda store: store.read("x")):
        with pytest.raises(StorageError, match=r"cannot access .*/x.*: HTTP error: .*Connection refused"):
            use(open_store(cloud.root))


def test_an_answer_that_is_whole_counts_however_late(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    check_late_answers(open_store(cloud.root), object_stores, monkeypatch)


def test_patience_has_an_end(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    deadline("1", monkeypatch)
    cloud.faults.choose = lambda method, path: Fault.STALLED if "stalled" in path else Fault.SLOW_DOWN
    for name in ("busy", "stalled"):
        with pytest.raises(StorageError, match=rf"cannot access .*/{name}: no success within 1 s .*the last of \d+"):
            open_store(cloud.root).read(name)


def test_a_fork_of_a_process_that_used_the_store_is_told_to_be_none(cloud: Cloud):
    open_store(cloud.root).put("x", b"1")
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()

    def read() -> None:
        try:
            told.put(open_store(cloud.root).read("x"))
        except UsageError as error:
            told.put(str(error))

    child = context.Process(target=read)
    child.start()
    assert "is a fork of it" in told.get()
    child.join()
    assert open_store(cloud.root).read("x") == b"1"
