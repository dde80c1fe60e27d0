"""Google Cloud Storage and Azure Blob Storage on loopback for tests: fake-gcs-server and Azurite, each behind the fault
proxy, which also says to fake-gcs-server in its words what a client says in Google's XML API."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from shardmill.stores import object_stores
from tests.services.fault_proxy import Answer, FaultProxy, PassOn, proxying
from tests.services.marked import free_ports
from tests.services.servers import CACHE, fetching, go_program, start_server, wait_until_up

_FAKE_GCS = "github.com/fsouza/fake-gcs-server@v1.55.1"
_AZURITE = "azurite@3.35.0"
_INSTALL_SECONDS = 300.0
_START_SECONDS = 240.0
# Known to everybody: Azurite has no other.
_ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True, slots=True)
class Cloud:
    """A new bucket of a running server; the environment of the test points at it, through the proxy."""

    root: str
    faults: FaultProxy
    put: Callable[[str, bytes], object]
    """As other clients do: of any name."""


@pytest.fixture(scope="session")
def fake_gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    [port] = free_ports(1)
    place = ("-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", "127.0.0.1")
    program = go_program("fake-gcs-server", _FAKE_GCS)
    endpoint = f"http://127.0.0.1:{port}"
    with _running(tmp_path_factory.mktemp("gcs"), program, *place, "-backend", "memory", "-log-level", "error") as up:
        up(f"{endpoint}/_internal/healthcheck")
        yield endpoint


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    [port] = free_ports(1)
    folder = tmp_path_factory.mktemp("azurite")
    place = ("--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence")
    options = ("--silent", "--skipApiVersionCheck", "--disableTelemetry")
    endpoint = f"http://127.0.0.1:{port}"
    with _running(folder, "node", _azurite_program(), *place, *options) as up:
        up(endpoint)
        yield endpoint


@pytest.fixture
def gcs(fake_gcs: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    name = f"test-{uuid.uuid4().hex[:12]}"
    _ask("POST", f"{fake_gcs}/storage/v1/b?project=test", json.dumps({"name": name}).encode())
    with proxying(fake_gcs, handler=_XmlApi) as faults:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", faults.endpoint)
        object_stores._connected.cache_clear()
        yield Cloud(f"gs://{name}", faults, lambda key, data: _ask("PUT", f"{faults.endpoint}/{name}/{key}", data))
    object_stores._connected.cache_clear()


@pytest.fixture
def azure(azurite: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    name, signature = f"test-{uuid.uuid4().hex[:12]}", account_sas()
    container = f"{azurite}/{_ACCOUNT}/{name}"
    _ask("PUT", f"{container}?restype=container&{signature}", b"")
    with proxying(azurite) as faults:
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", faults.endpoint)
        object_stores._connected.cache_clear()
        yield Cloud(f"az://{name}", faults, lambda key, data: _ask("PUT", f"{container}/{key}?{signature}", data))
    object_stores._connected.cache_clear()


@pytest.fixture
def gcs_bucket(gcs: Cloud) -> str:
    return gcs.root


@pytest.fixture
def azure_container(azure: Cloud) -> str:
    return azure.root


def account_sas() -> str:
    """What gives its bearer a day of everything, and signs no header of a request."""
    expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    fields = {"sv": "2019-12-12", "ss": "b", "srt": "sco", "sp": "rwdlac", "se": f"{expires:%Y-%m-%dT%H:%M:%SZ}"}
    signed = "\n".join((_ACCOUNT, *(fields.get(name, "") for name in ("sp", "ss", "srt", "st", "se", "sip", "spr")),
                        fields["sv"], ""))  # fmt: skip
    signature = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
    return urllib.parse.urlencode({**fields, "sig": base64.b64encode(signature).decode()})


class _XmlApi(PassOn):
    """Google's XML API, which obstore speaks, by the JSON API; fake-gcs-server has of the former only reading."""

    def _ask(self, body: bytes) -> Answer:
        where = urllib.parse.urlsplit(self.path)
        bucket, _, name = where.path.removeprefix("/").partition("/")
        query = dict(urllib.parse.parse_qsl(where.query, keep_blank_values=True))
        match self.command:
            case "GET" if not name:
                return self._list(bucket, query)
            case "PUT" if "partNumber" in query:
                return self._part(query, body)
            case "PUT":
                condition = self._passed().get("x-goog-if-generation-match", "")
                return self._insert(bucket, name, body, f"&ifGenerationMatch={condition}" if condition else "")
            case "POST" if "uploads" in query:
                _uploads[upload := uuid.uuid4().hex] = {}
                told = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
                return 200, [], told.encode()
            case "POST" if query.get("uploadId") in _uploads:
                parts = _uploads.pop(query["uploadId"])
                status, headers, data = self._insert(bucket, name, b"".join(parts[n] for n in sorted(parts)), "")
                told = "<CompleteMultipartUploadResult><ETag>made</ETag></CompleteMultipartUploadResult>"
                return status, headers, told.encode() if status == 200 else data
            case "DELETE" if "uploadId" in query:
                _uploads.pop(query["uploadId"], None)
                return 204, [], b""
            case "POST":
                return _NO_UPLOAD
        return super()._ask(body)

    def _insert(self, bucket: str, name: str, body: bytes, condition: str) -> Answer:
        # Its simple upload knows no condition.
        about, bound = json.dumps({"name": urllib.parse.unquote(name)}).encode(), uuid.uuid4().hex.encode()
        parts = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (bound, _PART_TYPE, part) for part in (about, body))
        place = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart{condition}"
        kind = f"multipart/related; boundary={bound.decode()}"
        status, _, data = _ask("POST", self.proxy.upstream + place, parts + b"--%b--" % bound, kind)
        if status != 200:
            return status, [], data
        made = json.loads(data)
        return 200, [("ETag", f'"{made["etag"]}"'), ("x-goog-generation", made["generation"])], b""

    def _part(self, query: dict[str, str], body: bytes) -> Answer:
        if query["uploadId"] not in _uploads:
            return _NO_UPLOAD
        _uploads[query["uploadId"]][int(query["partNumber"])] = body
        return 200, [("ETag", f'"{hashlib.md5(body).hexdigest()}"')], b""

    def _list(self, bucket: str, query: dict[str, str]) -> Answer:
        behind = query.get("start-after", "")
        asked = {
            "prefix": query.get("prefix", ""), "startOffset": behind, "maxResults": "1000",
            "pageToken": query.get("continuation-token", ""),
        }  # fmt: skip
        status, _, data = _ask("GET", f"{self.proxy.upstream}/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(asked)}")
        if status != 200:
            return status, [], data
        page = json.loads(data)
        files = "".join(
            f"<Contents><Key>{escape(file['name'])}</Key><Size>{file['size']}</Size>"
            f"<LastModified>{file['updated']}</LastModified><ETag>{file['etag']}</ETag></Contents>"
            for file in page.get("items") or ()
            if file["name"] != behind
        )
        token = page.get("nextPageToken") or ""
        more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
        return 200, [("Content-Type", "application/xml")], f"<List>{files}{more}</List>".encode()


_uploads: dict[str, dict[int, bytes]] = {}
_PART_TYPE = b"Content-Type: application/octet-stream"
_NO_UPLOAD: Answer = (404, [], b"<Error><Code>NoSuchUpload</Code><Message>no such upload</Message></Error>")


def _ask(method: str, url: str, data: bytes | None = None, kind: str = "application/octet-stream") -> Answer:
    headers = {"Content-Type": kind, "x-ms-blob-type": "BlockBlob"}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers.items(), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.items(), error.read()


@contextmanager
def _running(folder: Path, *command: str | Path) -> Iterator[Callable[[str], None]]:
    """A server, and how to wait until it answers at an address."""
    server = start_server(command, folder / "server.log", os.environ)
    try:
        yield lambda url: wait_until_up(
            str(command[0]), lambda: _ask("GET", url)[0] > 0, [server], folder, _START_SECONDS
        )
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _azurite_program() -> Path:
    """The server's script, installed once into the user's cache."""
    folder = CACHE / _AZURITE
    script = folder / "node_modules/azurite/dist/src/blob/main.js"
    with fetching("azurite"):
        # npm writes this file after all of the packages.
        if not (folder / "node_modules/.package-lock.json").exists():
            assert shutil.which("npm"), f"no {script}, and no npm to install {_AZURITE}"
            install = ["npm", "install", "--prefix", folder, "--no-audit", "--no-fund", _AZURITE]
            subprocess.run(install, check=True, timeout=_INSTALL_SECONDS, stdout=subprocess.DEVNULL)
    return script
