"""A store in a bucket of any object store: paths are keys below a prefix, and a conditional PUT makes the commit
atomic."""

from __future__ import annotations

import errno
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from shardmill.errors import NoSuchRoot, StorageError, UsageError
from shardmill.storage import TEMPORARY_PREFIX, StoredFile, is_temporary
from shardmill.storage_errors import as_storage_error
from shardmill.stores.bucket_requests import BucketRequests, UnknownOutcome, given_deadline_seconds
from shardmill.stores.retries import stall_seconds


class BucketStore(ABC):
    """A prefix of a bucket; abstract. A subclass names its scheme and has the requests to its servers."""

    scheme: ClassVar[str]
    cloud: ClassVar[str]
    """Whose buckets these are, for messages."""
    bucket_kind: ClassVar[str] = "bucket"
    """What its documentation calls a bucket."""
    deadline_variable: ClassVar[str]
    """Environment variable: seconds that a request may take including all retries; 120 if it is not set."""
    condition: ClassVar[str]
    """The header by which a PUT creates an object and replaces none."""
    names: ClassVar[re.Pattern[str]]
    expected_names: ClassVar[str]

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.local_root: Path | None = None
        self._bucket, _, root = self.uri[len(f"{self.scheme}://") :].partition("/")
        if not self.names.fullmatch(self._bucket):
            raise UsageError(
                f"no {self.cloud} {self.bucket_kind} can be called {self._bucket!r} (given {uri!r})",
                f"expected {self.scheme}://{self.bucket_kind.upper()}/PATH with {self.expected_names} in the name",
                "correct the URI",
            )
        self._root = f"{root}/" if root else ""
        self._is_conditional = False

    @property
    def deadline_seconds(self) -> float:
        seconds = given_deadline_seconds(self.deadline_variable)
        return seconds + stall_seconds(seconds)

    def read(self, path: str) -> bytes:
        return self._get(path, 0, None)

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        return self._get(path, start, num_bytes) if num_bytes else b""

    def put(self, path: str, data: bytes) -> None:
        with as_storage_error(f"{self.uri}/{path}", len(data)), self._needs_bucket():
            self._requests.put(self._bucket, self._root + path, data)

    def put_file(self, path: str, local_file: Path) -> None:
        with as_storage_error(f"{self.uri}/{path}", local_file.stat().st_size), self._needs_bucket():
            self._requests.put_file(self._bucket, self._root + path, local_file)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with as_storage_error(f"{self.uri}/{path}", len(data)), self._needs_bucket():
            self._check_conditional(path)
            return self._create(path, data)

    @abstractmethod
    def list(self, prefix: str) -> Iterator[StoredFile]: ...

    def list_unpublished(self, prefix: str) -> Iterator[StoredFile]:
        yield from (file for file in self.list(prefix) if is_temporary(file.path))

    def delete_unpublished(self, file: StoredFile) -> None:
        self.delete(file.path)

    def stat(self, path: str) -> StoredFile | None:
        try:
            with as_storage_error(f"{self.uri}/{path}"):
                return self._head(path)
        except FileNotFoundError:
            return None

    @abstractmethod
    def delete(self, path: str) -> None: ...

    @property
    @abstractmethod
    def _requests(self) -> BucketRequests: ...

    @abstractmethod
    def _head(self, path: str) -> StoredFile:
        """Raises FileNotFoundError."""

    def _get(self, path: str, start: int, num_bytes: int | None) -> bytes:
        with as_storage_error(f"{self.uri}/{path}"):
            return self._requests.get(self._bucket, self._root + path, start, num_bytes)

    def _create(self, path: str, data: bytes) -> bool:
        try:
            return self._requests.create(self._bucket, self._root + path, data)
        except UnknownOutcome as error:
            raise StorageError(
                f"whether {self.uri}/{path} was published is unknown: {error.strerror}",
                "nothing was deleted",
                "run it again when the server answers: it continues from the existing objects",
            ) from error

    def _check_conditional(self, path: str) -> None:
        """Raise StorageError for a server that ignores the condition: there, two writers would both get True."""
        if self._is_conditional:
            return
        # In the folder that it is asked for: if this process is killed here, `gc` finds the probe.
        probe = f"{path.rpartition('/')[0]}/{TEMPORARY_PREFIX}conditional-put-{uuid.uuid4().hex}".lstrip("/")
        try:
            answers = [self._create(probe, b"1"), self._create(probe, b"2")]
        except OSError as error:
            # Some servers say that they do not know the header.
            if error.errno != errno.ENOSYS:
                raise
            answers = []
        finally:
            with suppress(StorageError):
                self.delete(probe)
        if answers != [True, False]:
            raise StorageError(
                f"{self.uri} ignores `{self.condition}`",
                "expected a store with conditional PUT; without it nothing can be committed safely",
                "upgrade the server, or choose another store; reading from this one works",
            )
        self._is_conditional = True

    @contextmanager
    def _needs_bucket(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            what = f"no {self.bucket_kind} {self._bucket!r} for {self.uri}"
            raise NoSuchRoot(what, "expected an existing one", "create it") from None
