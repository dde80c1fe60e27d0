"""A store on S3: paths are keys below a prefix, and conditional PUT makes the commit atomic."""

from __future__ import annotations

import errno
import functools
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.errors import IntegrityError, NoSuchRoot, StorageError, UsageError
from shardmill.storage import TEMPORARY_PREFIX, StoredFile, is_temporary
from shardmill.storage_errors import as_storage_error

if TYPE_CHECKING:
    from shardmill.stores.s3_requests import S3Requests
# Underscores and capitals are in buckets from before 2018; the ARN of an access point is a name, too.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}|arn:[^/]+")


class S3Store:
    """A prefix of an S3 bucket. Endpoint, region and credentials come from the usual AWS_* environment."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.local_root: Path | None = None
        self._bucket, _, root = self.uri[len("s3://") :].partition("/")
        if not _BUCKET.fullmatch(self._bucket):
            raise UsageError(
                f"no S3 bucket can be called {self._bucket!r} (given {uri!r})",
                "expected s3://BUCKET/PATH with letters, digits, dots, hyphens and underscores in the name",
                "correct the URI",
            )
        self._root = f"{root}/" if root else ""
        self._is_conditional = False

    @property
    def deadline_seconds(self) -> float:
        from shardmill.stores.s3_requests import given_deadline_seconds

        # The last repetition may stall for an eighth.
        return given_deadline_seconds() * 9 / 8

    def read(self, path: str) -> bytes:
        return self._get(path, 0, None)

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        return self._get(path, start, num_bytes) if num_bytes else b""

    def put(self, path: str, data: bytes) -> None:
        with as_storage_error(f"{self.uri}/{path}", len(data)), self._needs_bucket():
            _requests().put(self._bucket, self._root + path, data)

    def put_file(self, path: str, local_file: Path) -> None:
        with as_storage_error(f"{self.uri}/{path}", local_file.stat().st_size), self._needs_bucket():
            _requests().put_file(self._bucket, self._root + path, local_file)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with as_storage_error(f"{self.uri}/{path}", len(data)), self._needs_bucket():
            self._check_conditional(path)
            return self._create(path, data)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        for page in self._pages(prefix, "list_objects_v2", ContinuationToken="NextContinuationToken"):
            # Consoles make empty objects with a slash at the end, to show as folders.
            files = (found for found in page.get("Contents", ()) if not found["Key"].endswith("/"))
            yield from (_stored_file(found["Key"][len(self._root) :], found["Size"], found) for found in files)

    def list_unpublished(self, prefix: str) -> Iterator[StoredFile]:
        yield from (file for file in self.list(prefix) if is_temporary(file.path))
        places = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        for page in self._pages(prefix, "list_multipart_uploads", **places):
            for upload in page.get("Uploads", ()):
                path = upload["Key"][len(self._root) :]
                yield StoredFile(path, 0, int(upload["Initiated"].timestamp() * 1e9), upload["UploadId"])

    def delete_unpublished(self, file: StoredFile) -> None:
        if is_temporary(file.path):
            return self.delete(file.path)
        # An upload has no entity tag yet; `list_unpublished` gives its id in that place.
        self._delete(file.path, "abort_multipart_upload", UploadId=file.etag)

    def stat(self, path: str) -> StoredFile | None:
        try:
            with as_storage_error(f"{self.uri}/{path}"):
                found = _requests().call("head_object", Bucket=self._bucket, Key=self._root + path)
        except FileNotFoundError:
            return None
        return _stored_file(path, found["ContentLength"], found)

    def delete(self, path: str) -> None:
        self._delete(path, "delete_object")

    def _get(self, path: str, start: int, num_bytes: int | None) -> bytes:
        from shardmill.stores.s3_requests import Damaged

        try:
            with as_storage_error(f"{self.uri}/{path}"):
                return _requests().get(self._bucket, self._root + path, start, num_bytes)
        except StorageError as error:
            if not isinstance(error.__cause__, Damaged):
                raise
            raise IntegrityError(
                f"{self.uri}/{path} was altered: {error.__cause__}",
                "expected what was uploaded",
                "restore it from a copy",
            ) from error

    def _delete(self, path: str, method: str, **arguments: str) -> None:
        try:
            with as_storage_error(f"{self.uri}/{path}"):
                _requests().call(method, Bucket=self._bucket, Key=self._root + path, **arguments)
        except FileNotFoundError:
            return

    def _pages(self, prefix: str, method: str, **places: str) -> Iterator[dict[str, Any]]:
        """Yield the pages of a folder's listing. `places`: request parameter of the next page -> its position in the
        answer.
        """
        folder = f"{self._root}{prefix}/" if prefix else self._root
        arguments: dict[str, str] = {}
        while True:
            with as_storage_error(f"{self.uri}/{prefix}"), self._needs_bucket():
                page = _requests().call(method, Bucket=self._bucket, Prefix=folder, **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments = {asked: page[told] for asked, told in places.items()}

    def _create(self, path: str, data: bytes) -> bool:
        from shardmill.stores.s3_requests import UnknownOutcome

        try:
            return _requests().create(self._bucket, self._root + path, data)
        except UnknownOutcome as error:
            raise StorageError(
                f"whether {self.uri}/{path} was published is unknown: {error.strerror}",
                "nothing was deleted",
                "run it again when the server answers: it continues from the existing objects",
            ) from error

    def _check_conditional(self, path: str) -> None:
        """Raise StorageError for a server that ignores `If-None-Match`: there, two writers would both get True."""
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
                f"{self.uri} ignores `If-None-Match: *`",
                "expected a store with conditional PUT; without it nothing can be committed safely",
                "upgrade the server, or choose another store; reading from this one works",
            )
        self._is_conditional = True

    @contextmanager
    def _needs_bucket(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            what = f"no bucket {self._bucket!r} for {self.uri}"
            raise NoSuchRoot(what, "expected an existing one", "create it") from None


def _requests() -> S3Requests:
    return _connected(os.getpid())


@functools.cache
def _connected(pid: int) -> S3Requests:
    """Those of this process: two cannot share a connection."""
    from shardmill.stores.s3_requests import S3Requests

    return S3Requests()


def _stored_file(path: str, size_bytes: int, found: dict[str, Any]) -> StoredFile:
    return StoredFile(path, int(size_bytes), int(found["LastModified"].timestamp() * 1e9), found["ETag"].strip('"'))
