"""URLs in a table, against a real server on loopback: bounded, retried, opted out of, and never into a private net."""

from __future__ import annotations

import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import pytest
from pydantic import ValidationError

from etl.config import DownloadConfig
from etl.sources.uris import Downloader, NotDownloaded, opt_out_of
from etl.units.read_source import read_ahead
from shardmill.values import RejectReason, SourceImage
from tests.etl.building import build_source
from tests.etl.source_files import picture, write_table

LOCAL = DownloadConfig(allow_private_addresses=True, timeout_seconds=60.0, num_retries=2)


@dataclass
class Web:
    """A server on two addresses, whose paths say what it does."""

    url: str = ""
    other_url: str = ""
    requests: Counter[str] = field(default_factory=Counter)
    at_once: int = 0
    most_at_once: int = 0


@pytest.fixture
def web() -> Iterator[Web]:
    state = Web()
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                state.requests[self.path] += 1
            try:
                self._answer()
            except (BrokenPipeError, ConnectionResetError):
                pass

        def _answer(self) -> None:
            word, _, rest = self.path[1:].partition("/")
            if word == "status" or (word == "flaky" and state.requests[self.path] < 3):
                self.send_error(int(rest) if word == "status" else 503)
                return
            data = bytes(10_000_000) if word == "huge" else picture(int(rest) if rest.isdigit() else 0)
            self.send_response(302 if word == "to" else 200)
            if word == "to":
                self.send_header("Location", unquote(rest) if "//" in rest else f"/{rest}")
            if word == "robots":
                self.send_header("X-Robots-Tag", rest)
            self.send_header("Content-Length", str(len(data) + (word == "cut")))
            self.end_headers()
            if word == "slow":
                for byte in data:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.2)
            if word == "image":
                # Until the client has all of it and may ask for the next; of others it reads no body.
                self._count(1)
                time.sleep(0.05)
                self._count(-1)
            self.wfile.write(data)

        def _count(self, change: int) -> None:
            with lock:
                state.at_once += change
                state.most_at_once = max(state.most_at_once, state.at_once)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    with serving("127.0.0.1", Handler) as state.url, serving("127.0.0.2", Handler) as state.other_url:
        yield state


@contextmanager
def serving(host: str, handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """Its URL."""
    with http.server.ThreadingHTTPServer((host, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{host}:{server.server_port}"
        server.shutdown()
        thread.join()


def fetch(web: Web, path: str, config: DownloadConfig = LOCAL) -> bytes | NotDownloaded:
    return Downloader(config, max_bytes=5_000).fetch(f"{web.url}/{path}")


def test_a_table_of_urls_becomes_a_dataset_and_each_failure_a_rejection(web: Web, tmp_path: Path):
    paths = [f"image/{number}" for number in range(60)]
    paths += ["status/404", "status/403", "robots/noai", "to/image/99", "a b/ü/7", "huge/1"]
    source = write_table(tmp_path / "t.csv", {"url": [f"{web.url}/{path}" for path in paths], "label": ["x"] * 66})
    source = source.model_copy(update={"download": LOCAL})
    manifest = build_source(source, tmp_path / "d", max_source_bytes=5_000, max_changed_fraction=0.1)
    assert manifest.counts.by_reason == {"missing": 2, "opted_out": 1, "too_large_bytes": 1}
    assert manifest.counts.accepted == 62
    assert 1 < web.most_at_once <= LOCAL.num_parallel_per_host


def test_what_may_pass_is_tried_again_and_the_rest_is_not(web: Web):
    assert fetch(web, "flaky/5") == picture(5) and web.requests["/flaky/5"] == 3
    gone = fetch(web, "status/404")
    assert isinstance(gone, NotDownloaded) and gone.detail == "HTTP 404" and web.requests["/status/404"] == 1
    broken = fetch(web, "status/500")
    assert isinstance(broken, NotDownloaded) and "HTTP 500" in broken.detail and web.requests["/status/500"] == 3
    cut = fetch(web, "cut/1", LOCAL.model_copy(update={"num_retries": 0}))
    assert isinstance(cut, NotDownloaded) and "ended after" in cut.detail


def test_a_server_that_sends_a_byte_now_and_then_is_left_in_time(web: Web):
    # All of it would come, after minutes.
    answer = fetch(web, "slow/1", LOCAL.model_copy(update={"timeout_seconds": 0.7, "num_retries": 0}))
    assert isinstance(answer, NotDownloaded) and answer.reason is RejectReason.MISSING


def test_nothing_larger_than_the_limit_is_held(web: Web):
    answer = fetch(web, "huge/1")
    assert isinstance(answer, bytes) and len(answer) == 5_001


@pytest.mark.parametrize(
    "target",
    [
        "file:///etc/passwd", "ftp://host/x", "gopher://x/", "http://host:port/", "http://[::1",
        f"http://{'x' * 64}.org/",
    ],
)  # fmt: skip
def test_redirects_lead_to_the_web_only(target: str, web: Web):
    answer = fetch(web, f"to/{target}")
    assert isinstance(answer, NotDownloaded) and "not on the web" in answer.detail


def test_redirects_end(web: Web):
    answer = fetch(web, "to/" * 7 + "image/1")
    assert isinstance(answer, NotDownloaded) and answer.detail == "more than 5 redirects"
    assert fetch(web, "to/" * 5 + "image/1") == picture(1)


def test_private_addresses_are_refused_unless_allowed(web: Web):
    answer = fetch(web, "image/1", DownloadConfig())
    assert isinstance(answer, NotDownloaded) and answer.reason is RejectReason.BAD_ROW
    assert not web.requests
    private = ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "::1", "fe80::1%eth0", "::ffff:127.0.0.1"]
    private += ["0.0.0.0", "224.0.0.1", "fd00::1", "100.64.0.1"]
    may_ask = Downloader(DownloadConfig(), max_bytes=1).may_ask
    assert [address for address in private if may_ask(address)] == []
    assert may_ask("8.8.8.8") and may_ask("2001:4860:4860::8888")


def test_a_redirect_leads_into_no_network_that_is_not_allowed(web: Web, tmp_path: Path):
    """Each hop is looked at: of two servers on private addresses one may be asked, and it points to the other."""
    first_alone = DownloadConfig(allow_networks=("127.0.0.1/32", "fd00::/8"))
    inside = f"{web.other_url}/image/7"
    assert fetch(web, f"to/{inside}") == picture(7)
    web.requests.clear()
    for target in (inside, "http://169.254.169.254/latest/meta-data/", "http://[::1]/", "//10.1.2.3/"):
        answer = fetch(web, f"to/{target}", first_alone)
        assert isinstance(answer, NotDownloaded) and answer.reason is RejectReason.BAD_ROW, target
        assert answer.detail.endswith("is an address of a private network")
        assert len(web.requests) == 1
        web.requests.clear()

    urls = [f"{web.url}/image/{number}" for number in range(40)] + [f"{web.url}/to/{inside}"]
    source = write_table(tmp_path / "t.csv", {"url": urls, "label": ["x"] * 41})
    manifest = build_source(source.model_copy(update={"download": first_alone}), tmp_path / "d")
    assert (manifest.counts.by_reason, manifest.counts.accepted) == ({"bad_row": 1}, 40)


def test_networks_that_are_none_are_refused():
    with pytest.raises(ValidationError, match="10.1.2.3/8 has host bits set"):
        DownloadConfig(allow_networks=("10.1.2.3/8",))


def test_opt_outs_are_honoured_when_they_speak_to_us():
    for value in ("noai", "NoImageAI", "all, noindex", "noimageindex", "shardmill: noai"):
        assert opt_out_of([value])
    for value in ("all", "otherbot: noai", "unavailable_after: 25 Jun 2030 15:00:00 PST", "nofollow", ""):
        assert not opt_out_of([value])
    assert opt_out_of(["all", "noai"]) == "noai"


def test_reads_ahead_come_in_order_and_a_failure_where_it_belongs():
    images = [SourceImage(f"{number}", 1) for number in range(30)]

    def read(image: SourceImage) -> bytes:
        time.sleep(0.02 if int(image.key) % 3 == 0 else 0)
        if image.key == "20":
            raise FileNotFoundError(image.key)
        return image.key.encode()

    for num_threads in (1, 8):
        found = []
        with pytest.raises(FileNotFoundError, match="20"):
            for image, data in read_ahead(read, lambda image: None, images, num_threads):
                found.append((image.key, data))
        assert found == [(f"{number}", b"%d" % number) for number in range(20)]


def test_the_only_thread_announces_each_image_once_and_some_time_before_while_reads_wait():
    images = [SourceImage(f"{number:04d}", 1) for number in range(1_100)]
    waiting = range(1_000, 1_030)
    told: list[SourceImage] = []

    def read(image: SourceImage) -> bytes:
        if int(image.key) in waiting:
            time.sleep(0.001)
        return b""

    for number, (image, _) in enumerate(read_ahead(read, told.append, images, 1)):
        assert image == images[number]
        if number == waiting.start:
            assert len(told) < 500  # a busy machine may let reads wait that need not
        if number in waiting[4:]:
            assert told[-1] == images[number + 16]
    keys = [image.key for image in told]
    assert keys == sorted(set(keys))
