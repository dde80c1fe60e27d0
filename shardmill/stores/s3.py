"""A store on S3: paths are keys below a prefix of a bucket, by Amazon's own client."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardmill.errors import IntegrityError, StorageError
from shardmill.storage import StoredFile, is_temporary
from shardmill.storage_errors import as_storage_error
from shardmill.stores.buckets import BucketStore

if TYPE_CHECKING:
    from shardmill.stores.s3_requests import S3Requests


class S3Store(BucketStore):
    """A prefix of an S3 bucket. Endpoint, region and credentials come from the usual AWS_* environment."""

    scheme = "s3"
    deadline_variable = "SHARDMILL_S3_DEADLINE_SECONDS"
    cloud = "S3"
    condition = "If-None-Match: *"
    # Underscores and capitals are in buckets from before 2018; the ARN of an access point is a name, too.
    names = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}|arn:[^/]+")
    expected_names = "letters, digits, dots, hyphens and underscores"

    def list(self, prefix: str) -> Iterator[StoredFile]:
        for page in self._pages(prefix, "list_objects_v2", ContinuationToken="NextContinuationToken"):
            # Consoles make empty objects with a slash at the end, to show as folders.
            files = (found for found in page.get("Contents", ()) if not found["Key"].endswith("/"))
            yield from (_stored_file(found["Key"][len(self._root) :], found["Size"], found) for found in files)

    def list_unpublished(self, prefix: str) -> Iterator[StoredFile]:
        yield from super().list_unpublished(prefix)
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

    def delete(self, path: str) -> None:
        self._delete(path, "delete_object")

    @property
    def _requests(self) -> S3Requests:
        return _connected(os.getpid())

    def _head(self, path: str) -> StoredFile:
        found = self._requests.call("head_object", Bucket=self._bucket, Key=self._root + path)
        return _stored_file(path, found["ContentLength"], found)

    def _get(self, path: str, start: int, num_bytes: int | None) -> bytes:
        from shardmill.stores.s3_requests import Damaged

        try:
            return super()._get(path, start, num_bytes)
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
                self._requests.call(method, Bucket=self._bucket, Key=self._root + path, **arguments)
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
                page = self._requests.call(method, Bucket=self._bucket, Prefix=folder, **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments = {asked: page[told] for asked, told in places.items()}


@functools.cache
def _connected(pid: int) -> S3Requests:
    """Those of this process: two cannot share a connection."""
    from shardmill.stores.s3_requests import S3Requests

    return S3Requests(S3Store.deadline_variable)


def _stored_file(path: str, size_bytes: int, found: dict[str, Any]) -> StoredFile:
    return StoredFile(path, int(size_bytes), int(found["LastModified"].timestamp() * 1e9), found["ETag"].strip('"'))
