"""Stores on Google Cloud Storage and on Azure Blob Storage, by one client for both: obstore, in Rust.

It repeats nothing by itself, but the parts of a large file: its interface has no parts that could be repeated here.
It tells what has become of a request in words alone, so its messages are searched for a status and a cause.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shardmill.errors import UsageError
from shardmill.storage import StoredFile
from shardmill.storage_errors import as_storage_error, with_advice
from shardmill.stores import bucket_requests
from shardmill.stores.bucket_requests import BucketRequests, Failure, Piece, UnknownOutcome, received_whole
from shardmill.stores.buckets import BucketStore
from shardmill.stores.retries import stall_seconds

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig


class CloudStore(BucketStore):
    """A prefix of a bucket that obstore reaches; abstract. A subclass opens the client of its cloud."""

    advice: ClassVar[str]
    """What to do about a request that was refused."""

    @staticmethod
    @abstractmethod
    def open_bucket(bucket: str, client: ClientConfig, retries: RetryConfig) -> ObjectStore:
        """The client of one bucket, with the credentials of the environment."""

    def list(self, prefix: str) -> Iterator[StoredFile]:
        with as_storage_error(f"{self.uri}/{prefix}"), self._needs_bucket():
            for found in self._requests.list(self._bucket, f"{self._root}{prefix}".rstrip("/")):
                file = _stored_file(found["path"][len(self._root) :], found)
                # Consoles make empty objects with a slash at the end, to show as folders; the client cuts the slash.
                if file.size_bytes or self.stat(file.path) is not None:
                    yield file

    def delete(self, path: str) -> None:
        try:
            with as_storage_error(f"{self.uri}/{path}"):
                self._requests.delete(self._bucket, self._root + path)
        except FileNotFoundError:
            return

    @property
    def _requests(self) -> CloudRequests:
        return _connected(type(self), os.getpid())

    def _head(self, path: str) -> StoredFile:
        return _stored_file(path, self._requests.head(self._bucket, self._root + path))


class GcsStore(CloudStore):
    """A prefix of a Google Cloud Storage bucket, by the application default credentials; or of an emulator's, at
    STORAGE_EMULATOR_HOST."""

    scheme = "gs"
    cloud = "Google Cloud Storage"
    deadline_variable = "SHARDMILL_GCS_DEADLINE_SECONDS"
    condition = "x-goog-if-generation-match: 0"
    names = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
    expected_names = "3 or more lowercase letters, digits, dots, hyphens and underscores"
    advice = (
        "check the path, its permissions and the Google credentials (GOOGLE_APPLICATION_CREDENTIALS names a key "
        "file, and `gcloud auth application-default login` makes one); then run it again"
    )

    @staticmethod
    def open_bucket(bucket: str, client: ClientConfig, retries: RetryConfig) -> ObjectStore:
        from obstore.store import GCSStore

        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if not emulator:
            return GCSStore(bucket, client_options=client, retry_config=retries)
        # Google's own clients take both spellings.
        address = emulator if "://" in emulator else f"http://{emulator}"
        client = {**client, "allow_http": address.startswith("http://")}
        return GCSStore(bucket, client_options=client, retry_config=retries, base_url=address, bearer_token="emulator")


class AzureStore(CloudStore):
    """A prefix of an Azure Blob Storage container. Account and credentials come from the usual AZURE_* environment;
    the URI may name the account, too, as Hadoop's do: CONTAINER@ACCOUNT.dfs.core.windows.net."""

    scheme = "az"
    cloud = "Azure Blob Storage"
    deadline_variable = "SHARDMILL_AZURE_DEADLINE_SECONDS"
    bucket_kind = "container"
    condition = "If-None-Match: *"
    names = re.compile(r"(?:\$root|[a-z0-9](?:-?[a-z0-9]){2,62})(?:@[a-z0-9]{3,24}\.(?:dfs|blob)\.core\.windows\.net)?")
    expected_names = "3 to 63 lowercase letters, digits and hyphens"
    advice = (
        "check the path, its permissions, AZURE_STORAGE_ACCOUNT_NAME and its key (AZURE_STORAGE_ACCOUNT_KEY, "
        "AZURE_STORAGE_SAS_TOKEN, or a login of `az`); then run it again"
    )

    @staticmethod
    def open_bucket(bucket: str, client: ClientConfig, retries: RetryConfig) -> ObjectStore:
        from obstore.store import AzureStore

        container, _, host = bucket.partition("@")
        endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT") or os.environ.get("AZURE_ENDPOINT") or ""
        client = {**client, "allow_http": endpoint.startswith("http://")}
        if not host:
            return AzureStore(container, client_options=client, retry_config=retries)
        return AzureStore(container, client_options=client, retry_config=retries, account_name=host.partition(".")[0])


_BLOCK_BYTES = 1 << 20
_SENT_WHOLE_BYTES = 1 << 22
_LISTED_AT_ONCE = 1000
_PARALLEL_PARTS = 4


class CloudRequests(BucketRequests):
    """The connections of one process to the servers of a cloud, one client for each bucket."""

    def __init__(self, cloud: type[CloudStore]) -> None:
        super().__init__(cloud.deadline_variable)
        self._cloud = cloud
        self._clients: dict[tuple[str, bool], ObjectStore] = {}

    def put(self, bucket: str, key: str, data: bytes) -> None:
        self._upload(bucket, key, data, len(data))

    def put_file(self, bucket: str, key: str, file: Path) -> None:
        self._upload(bucket, key, file, file.stat().st_size)

    def head(self, bucket: str, key: str) -> ObjectMeta:
        import obstore

        with self._as_os_error():
            return self._patiently(lambda deadline: obstore.head(self._client(bucket), key))

    def delete(self, bucket: str, key: str) -> None:
        import obstore

        with self._as_os_error():
            self._patiently(lambda deadline: obstore.delete(self._client(bucket), key))

    def list(self, bucket: str, folder: str) -> Iterator[ObjectMeta]:
        import obstore

        stream: ListStream[Any] | None = None
        last: str | None = None

        def few(deadline: float) -> list[ObjectMeta]:
            nonlocal stream
            try:
                if stream is None:
                    client = self._client(bucket)
                    stream = obstore.list(client, folder or None, offset=last, chunk_size=_LISTED_AT_ONCE)
                return list(next(stream, ()))
            except BaseException:
                # A stream ends with its first failure; the next one begins behind what has come.
                stream = None
                raise

        while True:
            with self._as_os_error():
                found = self._patiently(few)
            if not found:
                return
            yield from found
            last = found[-1]["path"]

    def _upload(self, bucket: str, key: str, data: bytes | Path, num_bytes: int) -> None:
        import obstore

        is_large = num_bytes > _SENT_WHOLE_BYTES
        with self._as_os_error():
            self._patiently(
                lambda deadline: obstore.put(
                    self._client(bucket, repeats_parts=is_large), key, data, use_multipart=is_large,
                    chunk_size=bucket_requests.PIECE_BYTES, max_concurrency=_PARALLEL_PARTS,
                )
            )  # fmt: skip

    def _put_new(self, bucket: str, key: str, data: bytes) -> None:
        import obstore

        obstore.put(self._client(bucket), key, data, mode="create")

    def _get_piece(self, bucket: str, key: str, place: tuple[int, int], deadline: float, is_whole: bool) -> Piece:
        import obstore
        from obstore.exceptions import GenericError

        start, num_bytes = place
        try:
            answer = obstore.get(self._client(bucket), key, options={"range": (start, start + num_bytes)})
        except GenericError as error:
            if _is_behind_the_end(error):
                return Piece(b"", 0, "")
            raise
        object_bytes = answer.meta["size"]
        data = received_whole(map(bytes, answer.stream(_BLOCK_BYTES)), place, object_bytes, deadline)
        return Piece(data, object_bytes, answer.meta["e_tag"] or "")

    def _client(self, bucket: str, *, repeats_parts: bool = False) -> ObjectStore:
        if (client := self._clients.get((bucket, repeats_parts))) is not None:
            return client
        seconds = self._deadline_seconds
        options: ClientConfig = {"connect_timeout": "5s", "timeout": timedelta(seconds=seconds)}
        # Each part within the deadline. A part that is repeated replaces itself, so that nothing is to be told.
        retries: RetryConfig = {"retry_timeout": timedelta(seconds=seconds)}
        if not repeats_parts:
            options["read_timeout"] = timedelta(seconds=stall_seconds(seconds))
            retries["max_retries"] = 0
        return self._clients.setdefault((bucket, repeats_parts), self._cloud.open_bucket(bucket, options, retries))

    def _failure_of(self, error: BaseException) -> Failure:
        from obstore.exceptions import BaseError, PreconditionError

        if any(code in str(error) for code in _ENDED_UPLOAD):
            # It begins anew.
            return Failure.LOST
        if isinstance(error, FileNotFoundError):
            return Failure.ABSENT
        if isinstance(error, ConnectionError | TimeoutError):
            return Failure.LOST
        if not isinstance(error, BaseError):
            return Failure.OTHER
        status = _status_of(error)
        if isinstance(error, PreconditionError) or status == HTTPStatus.PRECONDITION_FAILED:
            return Failure.TAKEN
        if status:
            # An object of two writers at once is 409, too; Azure says so of one that exists.
            is_busy = status in _BUSY or (status >= 500 and status not in _FOR_GOOD)
            return Failure.ABSENT if status == HTTPStatus.NOT_FOUND else Failure.BUSY if is_busy else Failure.REFUSED
        said, _, debugged = str(error).partition(_DEBUGGED)
        kind = _KIND.search(debugged)
        if kind is None:
            return Failure.LOST if any(spoiled in said for spoiled in _SPOILED) else Failure.OTHER
        if kind[1] != "Connect":
            return Failure.LOST
        # This is no machine of the cloud's own, and there are no other credentials.
        return Failure.OTHER if _METADATA_SERVER.search(said) else Failure.NOT_SENT

    @contextmanager
    def _as_os_error(self) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except UnknownOutcome:
            raise
        except (BaseError, OSError, ValueError) as error:
            number = getattr(error, "errno", None) or _OS_ERRORS.get(_status_of(error), errno.EIO)
            if self._failure_of(error) is Failure.ABSENT:
                number = errno.ENOENT
            raise with_advice(OSError(number, self._words_of(error)), self._cloud.advice) from error

    def _words_of(self, error: BaseException) -> str:
        """The server's own words, or what happened to the request."""
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        said, _, debugged = str(error).partition(_DEBUGGED)
        if told := _TOLD.search(said):
            words = (told[1] or told[2]).strip().splitlines()[0]
        else:
            cause = _CAUSE.search(debugged)
            words = said.rpartition(" - ")[2] + (f" ({cause[1]})" if cause else "")
        status = _status_of(error)
        is_told = not status or str(status) in words
        return " ".join(words.split())[:_MAX_WORDS] + ("" if is_told else f" (HTTP {status})")


# How obstore writes an error: `MESSAGE\n\nDebug source:\nRUST'S STRUCTURE`, and for an answer with an error in MESSAGE
# `... - Server returned non-2xx status code: 404 Not Found: BODY`.
_DEBUGGED = "\n\nDebug source"
_STATUS = re.compile(r"status code: (\d{3})|\(code: (\d{3})\)")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_CAUSE = re.compile(r'message: "([^"]+)"')
_TOLD = re.compile(r'<Message>\s*(.+?)</Message>|"message":\s*"((?:[^"\\]|\\.)+)"', re.DOTALL)
_METADATA_SERVER = re.compile(r"metadata\.google\.internal|169\.254\.169\.254")
_MAX_WORDS = 300
# What it says of an answer that was cut; and the server of an upload in parts whose end was done, its answer lost.
_SPOILED = ("Got invalid", "non-partial response")
_ENDED_UPLOAD = ("NoSuchUpload", "InvalidBlockList")
# Its own words, of an answer with no byte; the second, of Azurite's for an empty object.
_BEHIND_THE_END = ("Wanted range starting at", "bytes 0--1/0")
_BUSY = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS)
_FOR_GOOD = (HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, HTTPStatus.INSUFFICIENT_STORAGE)
_OS_ERRORS: dict[int, int] = {
    HTTPStatus.UNAUTHORIZED: errno.EACCES, HTTPStatus.FORBIDDEN: errno.EACCES,
    HTTPStatus.NOT_IMPLEMENTED: errno.ENOSYS, HTTPStatus.INSUFFICIENT_STORAGE: errno.EDQUOT,
}  # fmt: skip


def _is_behind_the_end(error: BaseException) -> bool:
    said = str(error)
    return _status_of(error) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or any(
        words in said for words in _BEHIND_THE_END
    )


def _status_of(error: BaseException) -> int:
    """The HTTP status of a server's answer; 0 if there was none."""
    found = _STATUS.search(str(error).partition(_DEBUGGED)[0])
    return int(found[1] or found[2]) if found else 0


def _stored_file(path: str, found: ObjectMeta) -> StoredFile:
    changed = int(found["last_modified"].timestamp() * 1e9)
    return StoredFile(path, found["size"], changed, (found["e_tag"] or "").strip('"'))


_user: int | None = None


@functools.cache
def _connected(cloud: type[CloudStore], pid: int) -> CloudRequests:
    """Those of this process. Raises UsageError in a fork of one that has some: the client's threads are not there."""
    global _user
    if _user not in (None, pid):
        raise UsageError(
            f"{cloud.scheme}:// was used in process {_user}; process {pid} is a fork of it: a request would never end",
            "expected a process that was started, because the client's threads do not survive a fork",
            "give DataLoader or multiprocessing the start method 'forkserver' or 'spawn'",
        )
    _user = pid
    return CloudRequests(cloud)
