"""Stores that can be read alone: a committed dataset over HTTP, what such a store refuses, servers that misbehave."""

from __future__ import annotations

import datetime
import http.server
import ipaddress
import os
import random
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from etl.config import EtlConfig, SourceConfig
from shardmill.dataset.open import open_dataset
from shardmill.errors import CannotList, StorageError, UsageError
from shardmill.storage import Store
from shardmill.stores import http as http_store
from shardmill.stores import open_store
from tests.lab.commands import in_process, last_line
from tests.lab.datasets import build_here, make_dataset, read_all, write_images
from tests.services.fault_proxy import Fault, in_turn, proxying
from tests.services.web import serving

CONFIG = EtlConfig(image_size=16, encoding="png", chunk_bytes=4_000)


@pytest.fixture(params=("http", "fsspec"))
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store over the folder `tmp_path`, in each scheme that can be read only."""
    with serving(tmp_path) as address:
        yield open_store({"http": address, "fsspec": f"local://{tmp_path}"}[request.param])


def test_objects_of_other_clients_are_read(reader: Store, tmp_path: Path):
    writer, name = open_store(tmp_path / "a"), "b c%20#?é.bin"
    for path, data in ((name, b"0123456789"), ("d/x", b"1"), ("d/empty", b""), ("e" * 255, b"2")):
        writer.put(path, data)
        assert reader.read(f"a/{path}") == data
        found = reader.stat(f"a/{path}")
        assert found is not None and (found.path, found.size_bytes) == (f"a/{path}", len(data))
        assert abs(found.mtime_ns - os.stat(tmp_path / "a" / path).st_mtime_ns) < 10**9
    assert reader.read_range(f"a/{name}", 3, 4) == b"3456" and reader.read_range(f"a/{name}", 8, 10) == b"89"
    assert reader.read_range(f"a/{name}", 10, 1) == reader.read_range(f"a/{name}", 99, 1) == b""
    assert reader.read_range(f"a/{name}", 4, 1 << 50) == b"456789" and reader.read_range("a/d/empty", 0, 1) == b""
    for nothing in ("nothing", "a/nothing"):
        assert reader.stat(nothing) is None
        with pytest.raises(FileNotFoundError):
            reader.read(nothing)
        with pytest.raises(FileNotFoundError):
            reader.read_range(nothing, 0, 1)
    try:
        listed = {(file.path, file.size_bytes) for file in reader.list("a")}
    except CannotList:
        assert reader.uri.startswith("http")
    else:
        assert listed == {(f"a/{name}", 10), ("a/d/x", 1), ("a/d/empty", 0), ("a/" + "e" * 255, 1)}
        assert list(reader.list("nothing")) == []


def test_a_committed_dataset_is_read_from_a_web_server(tmp_path: Path):
    dataset = make_dataset(tmp_path, num_images=30)
    with serving(tmp_path) as address:
        remote = f"{address}/dataset"
        assert [read_all(remote, name) for name in ("parquet", "tfrecord")] == [30, 30]
        # The newest of its versions is found without a list of them, at any number.
        for version in range(2, 7):
            write_images(tmp_path / "images", num_images=3 * version, seed=version)
            build_here(str(tmp_path / "images"), dataset, CONFIG)
            assert open_dataset(remote).pin.version == open_dataset(dataset).pin.version == version
        assert open_dataset(f"{remote}@3").manifest == open_dataset(f"{dataset}@3").manifest
        with pytest.raises(UsageError, match=f"{remote} has no version 9; expected one of 1 to 6"):
            open_dataset(f"{remote}@9")
        with pytest.raises(UsageError, match=f"there is no dataset at {address}/nowhere"):
            open_dataset(f"{address}/nowhere")
        checked = in_process("verify", remote, cwd=tmp_path)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("scheme", ["http", "local"])
def test_nothing_is_committed_to_a_store_that_is_read_only(scheme: str, tmp_path: Path):
    """`local` is a scheme of fsspec's own."""
    write_images(tmp_path / "images", num_images=6)
    with serving(tmp_path) as address:
        root = address if scheme == "http" else f"local://{tmp_path}"
        done = in_process(
            "etl", tmp_path / "images", "--set", f"dataset.uri={root}/dataset", "--set", "etl.image_size=16",
            "--workdir", tmp_path / "work", cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 4 and not (tmp_path / "dataset").exists()
        said = last_line(done)
        assert f"cannot write {root}/dataset/" in said and f"{scheme}:// is read only" in said and "s3://" in said
        for write in (
            lambda store: store.put_if_absent("x", b"1"),
            lambda store: store.put("x", b"1"),
            lambda store: store.put_file("x", tmp_path / "images"),
            lambda store: store.delete("x"),
        ):
            with pytest.raises(StorageError, match=f"cannot write {root}/x: {scheme}:// is read only"):
                write(open_store(root))


def test_images_come_from_a_web_server_by_their_names(tmp_path: Path):
    write_images(tmp_path / "images", num_images=12)
    first = next((tmp_path / "images" / "class_0").iterdir())
    first.rename(first.with_name("a b%20c#1?é.png"))
    files = sorted(str(file.relative_to(tmp_path / "images")) for file in (tmp_path / "images").rglob("*.png"))
    rows = "".join(f'"{name}",{name[:7]}\n' for name in files)
    (tmp_path / "images" / "table.csv").write_text(f"uri,label\n{rows}")
    with serving(tmp_path) as address:
        with pytest.raises(CannotList, match="images cannot be listed: .*source.kind = 'table'") as caught:
            build_here(f"{address}/images", str(tmp_path / "none"), CONFIG)
        assert caught.value.exit_code == 4
        digests = set()
        for root in (f"{address}/images", str(tmp_path / "images"), f"local://{tmp_path}/images"):
            source = SourceConfig(uri=f"{root}/table.csv", kind="table")
            built = build_here(source, f"{tmp_path}/{len(digests)}-{root[:5]}", CONFIG)
            manifest = open_dataset(built).manifest
            assert manifest.counts.accepted == 12, manifest.counts
            digests.add(manifest.content_digest)
        assert len(digests) == 1


def test_a_server_that_is_not_there_is_a_storage_error():
    # FTP's file system connects as soon as it is made.
    store = open_store("ftp://127.0.0.1:9/x")
    for use in (lambda: list(store.list("")), lambda: store.read("y"), lambda: store.stat("y")):
        with pytest.raises(StorageError, match=r"cannot access ftp://127\.0\.0\.1:9/x"):
            use()


@pytest.mark.parametrize("address", ["http://user:pass@host/x", "http://host/x?sig=a", "https://host/x#y", "http:///x"])
def test_an_address_holds_nothing_but_its_place(address: str):
    with pytest.raises(UsageError, match="no store at https?://(host)?/x; expected scheme://host/folder, without user"):
        open_store(address)


@pytest.mark.drill
def test_a_spoiled_answer_is_never_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # A second without a byte is a stall.
    monkeypatch.setattr(http_store, "DEADLINE_SECONDS", 8.0)
    monkeypatch.setattr(http_store, "PIECE_BYTES", 3000)
    data = bytes(range(256)) * 40
    (tmp_path / "a").write_bytes(data)
    with serving(tmp_path) as upstream, proxying(upstream) as proxy:
        store, generator = open_store(proxy.endpoint), random.getstate()
        for fault in (Fault.INTERNAL_ERROR, Fault.SLOW_DOWN, Fault.DROPPED, Fault.RESET, Fault.CUT, Fault.SHORT):
            for use in (
                lambda: store.read("a") == data,
                lambda: store.read_range("a", 7, 5000) == data[7:5007],
                lambda: store.stat("a").size_bytes == len(data),  # pyright: ignore[reportOptionalMemberAccess]
            ):
                proxy.choose = in_turn(None, fault)
                assert use()
                proxy.choose = in_turn(fault) if fault is not Fault.SHORT else in_turn()
                assert use()
            assert proxy.told[fault] >= 2
        # As of S3.
        assert random.getstate() == generator
        # A refusal is told once; what never works, when the deadline has come.
        before = proxy.told.total()
        proxy.choose = lambda method, path: Fault.FORBIDDEN
        with pytest.raises(StorageError, match="cannot access .*/a: HTTP 403"):
            store.read("a")
        assert proxy.told.total() == before + 1
        monkeypatch.setattr(http_store, "DEADLINE_SECONDS", 1.0)
        proxy.choose = lambda method, path: Fault.SLOW_DOWN
        with pytest.raises(StorageError, match="cannot access .*/a: HTTP 503"):
            store.read("a")
        proxy.choose = in_turn()
        with pytest.raises(FileNotFoundError):
            store.read("nothing")


class WithoutRanges(http.server.SimpleHTTPRequestHandler):
    """Python's own, which sends the whole file whatever is asked for; and a redirect."""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest/meta-data?token=secret")
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        return


def test_servers_that_redirect_or_know_no_ranges_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(http_store, "PIECE_BYTES", 3000)
    data = bytes(range(256)) * 40
    (tmp_path / "a").write_bytes(data)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WithoutRanges)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        store = open_store(f"http://127.0.0.1:{server.server_port}")
        assert store.read("a") == data and store.read_range("a", 0, 10) == data[:10]
        with pytest.raises(StorageError, match="cannot access .*/a: its server does not support range requests"):
            store.read_range("a", 5, 10)
        with pytest.raises(StorageError, match="/moved: HTTP 302: it leads to 169.254.169.254; name that") as caught:
            store.read("moved")
        assert "secret" not in str(caught.value)
    finally:
        server.shutdown()
        server.server_close()


def test_a_certificate_must_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_store, "DEADLINE_SECONDS", 1.0)
    (tmp_path / "a").write_bytes(b"1")
    certificate = write_certificate(tmp_path / "server.pem")
    with serving(tmp_path, certificate) as address:
        assert address.startswith("https://")
        with pytest.raises(StorageError, match="cannot access https://.*/a: .*certificate verify failed"):
            open_store(address).read("a")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
        http_store.connections.cache_clear()
        assert open_store(address).read("a") == b"1"
    http_store.connections.cache_clear()


def write_certificate(file: Path) -> ssl.SSLContext:
    """A server's own, for loopback, that nobody else has signed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(1))
    signed = builder.add_extension(loopback, critical=True).sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context
