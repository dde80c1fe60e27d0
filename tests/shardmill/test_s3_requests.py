"""Requests to S3 that go wrong: which are repeated, who has won a conditional PUT, and when it is enough."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardmill.errors import StorageError, UsageError
from shardmill.stores import open_store, s3, s3_requests
from tests.services.fault_proxy import Fault, FaultProxy, in_turn, proxying
from tests.services.marked import free_ports
from tests.services.s3 import s3_client
from tests.services.versitygw import KEY, SECRET, Gateway, connect_to

pytestmark = pytest.mark.drill


@pytest.fixture
def faults(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """What this process asks of S3 goes through it; a second without a byte is a stall."""
    with proxying(gateway.endpoint) as proxy:
        monkeypatch.setenv(s3_requests.DEADLINE, "8")
        connect_to(proxy.endpoint, monkeypatch)
        yield proxy


def limit(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(s3_requests.DEADLINE, seconds)
    s3._connected.cache_clear()


NOT_DONE = (Fault.INTERNAL_ERROR, Fault.SLOW_DOWN, Fault.CONFLICT)
BUSY = (Fault.INTERNAL_ERROR, Fault.SLOW_DOWN, Fault.TOO_MANY)


@pytest.mark.parametrize(
    "spoiled",
    [*((fault,) for fault in (*NOT_DONE, Fault.DROPPED)), (Fault.SLOW_DOWN, Fault.DROPPED), (Fault.CONFLICT,) * 2],
    ids="+".join,
)
def test_the_object_tells_who_won_whatever_became_of_the_answer(
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


def test_what_cannot_be_told_is_said_and_nothing_is_deleted(
    faults: FaultProxy, gateway_bucket: str, monkeypatch: pytest.MonkeyPatch
):
    store = open_store(gateway_bucket)
    assert store.put_if_absent("first", b"")
    limit("1", monkeypatch)
    faults.choose = lambda method, path: Fault.DROPPED if method == "PUT" else Fault.INTERNAL_ERROR
    with pytest.raises(StorageError, match=r"whether .*/manifest was published is unknown: no success within 1 s"):
        store.put_if_absent("manifest", b"ours")
    faults.choose = lambda method, path: None
    limit("8", monkeypatch)
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
def test_a_spoiled_answer_is_never_data(fault: Fault, faults: FaultProxy, gateway_bucket: str):
    store, data = open_store(gateway_bucket), bytes(range(256)) * 20
    faults.choose = in_turn(fault)
    store.put("a/b", data)
    # All has been imported.
    generator = random.getstate()
    for use in (
        lambda: store.put("a/b", data) or True,
        lambda: store.read("a/b") == data,
        lambda: store.read_range("a/b", 7, 5000) == data[7:5007],
        lambda: [file.size_bytes for file in store.list("a")] == [len(data)],
        lambda: store.stat("a/b").size_bytes == len(data),  # pyright: ignore[reportOptionalMemberAccess]
    ):
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
        "read": lambda: store.read("x"),
        "read_range": lambda: store.read_range("x", 0, 1),
        "put": lambda: store.put("x", b""),
        "list": lambda: list(store.list("")),
        "stat": lambda: store.stat("x"),
    }
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


def test_patience_has_an_end(faults: FaultProxy, gateway_bucket: str, monkeypatch: pytest.MonkeyPatch):
    limit("1", monkeypatch)
    faults.choose = lambda method, path: Fault.STALLED if "stalled" in path else Fault.SLOW_DOWN
    for name in ("busy", "stalled"):
        with pytest.raises(
            StorageError, match=rf"cannot access .*/{name}: no success within 1 s .*the last of \d+ err"
        ):
            open_store(gateway_bucket).read(name)
    assert faults.told[Fault.SLOW_DOWN] > 2


def test_a_large_file_goes_up_in_parts_each_tried_again(
    faults: FaultProxy, gateway_bucket: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    # The least that S3 takes for a part.
    monkeypatch.setattr(s3_requests, "PIECE_BYTES", 5 << 20)
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
    store, data = open_store(gateway_bucket), bytes(range(250)) * 160_000
    store.put("large", data)
    # Four pieces of a second each at a time: all of them take longer than any one of them may.
    monkeypatch.setattr(s3_requests, "PIECE_BYTES", 1_000_000)
    faults.choose = lambda method, path: Fault.SLOW
    assert store.read("large") == data and faults.told[Fault.SLOW] >= 40


def test_a_server_that_is_started_again_is_waited_for(
    gateway_bucket: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(s3_requests, "CONNECT_SECONDS", 0.1)
    [port] = free_ports(1)
    with ThreadPoolExecutor(1) as reader:
        with proxying(gateway.endpoint, port) as proxy:
            connect_to(proxy.endpoint, monkeypatch)
            open_store(gateway_bucket).put("x", b"1")
            proxy.choose = lambda method, path: Fault.DROPPED
            reading = reader.submit(open_store(gateway_bucket).read, "x")
        time.sleep(1.0)
        assert not reading.done()
        with proxying(gateway.endpoint, port):
            assert reading.result(30) == b"1"


def test_a_server_that_was_never_there_is_told_soon(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(s3_requests, "CONNECT_SECONDS", 0.5)
    connect_to("http://127.0.0.1:1", monkeypatch)
    limit("3600", monkeypatch)
    # Not: whether it was published is unknown.
    with pytest.raises(StorageError, match="cannot access s3://b/x.*: Could not connect to the endpoint"):
        open_store("s3://b").put_if_absent("x", b"")
    with pytest.raises(StorageError, match="cannot access s3://b/x: Could not connect to the endpoint"):
        open_store("s3://b").read("x")


@pytest.mark.parametrize("region", ["", "eu-west-1"])
def test_ranges_are_read_whatever_region_is_set(
    region: str, gateway: Gateway, gateway_bucket: str, monkeypatch: pytest.MonkeyPatch
):
    connect_to(gateway.endpoint, monkeypatch)
    open_store(gateway_bucket).put("a b%20c#é", b"0123456789")
    monkeypatch.setenv("AWS_DEFAULT_REGION", region)
    s3._connected.cache_clear()
    store = open_store(gateway_bucket)
    assert [store.read_range("a b%20c#é", start, 4) for start in (0, 8, 20)] == [b"0123", b"89", b""]
    with pytest.raises(FileNotFoundError):
        store.read_range("absent", 0, 1)
