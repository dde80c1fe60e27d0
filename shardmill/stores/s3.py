"""A store on S3: s3fs makes the requests, conditional PUT makes the commit atomic."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardmill.errors import NoSuchRoot, StorageError
from shardmill.storage import TEMPORARY_PREFIX, StoredFile, is_temporary
from shardmill.storage_errors import as_storage_error


class S3Store:
    """A prefix of an S3 bucket. Endpoint, region and credentials come from the usual AWS_* environment."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.local_root: Path | None = None
        self._root = self.uri[len("s3://") :]
        self._is_conditional = False

    def read(self, path: str) -> bytes:
        with as_storage_error(f"{self.uri}/{path}"):
            return _s3_filesystem().cat_file(f"{self._root}/{path}")

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        if num_bytes == 0:
            return b""
        with as_storage_error(f"{self.uri}/{path}"):
            try:
                return _s3_filesystem().cat_file(f"{self._root}/{path}", start=start, end=start + num_bytes)
            except OSError as error:
                if _is_behind_the_end(error):
                    return b""
                raise

    def put(self, path: str, data: bytes) -> None:
        with as_storage_error(f"{self.uri}/{path}", len(data)), self._needs_bucket():
            _s3_filesystem().pipe_file(f"{self._root}/{path}", data)

    def put_file(self, path: str, local_file: Path) -> None:
        with as_storage_error(f"{self.uri}/{path}", local_file.stat().st_size), self._needs_bucket():
            _s3_filesystem().put_file(str(local_file), f"{self._root}/{path}")

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with as_storage_error(f"{self.uri}/{path}", len(data)), self._needs_bucket():
            self._check_conditional(path)
            return self._create(path, data)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        with as_storage_error(f"{self.uri}/{prefix}"), self._needs_bucket():
            folder = f"{self._root}/{prefix}".rstrip("/")
            found = _s3_filesystem().find(folder, detail=True, refresh=True)
        for name, info in found.items():
            # Consoles make empty objects with a slash at the end, to show as folders.
            if not name.endswith("/") and info["type"] == "file":
                yield _stored_file(name[len(self._root) + 1 :], info)

    def list_unpublished(self, prefix: str) -> Iterator[StoredFile]:
        yield from (file for file in self.list(prefix) if is_temporary(file.path))
        bucket, _, root = self._root.partition("/")
        folder = f"{root}/{prefix}/".lstrip("/")
        place: dict[str, str] = {}
        while True:
            with as_storage_error(f"{self.uri}/{prefix}"), self._needs_bucket():
                page = _s3_filesystem().call_s3("list_multipart_uploads", Bucket=bucket, Prefix=folder, **place)
            for upload in page.get("Uploads", ()):
                path = upload["Key"][len(root) :].lstrip("/")
                yield StoredFile(path, 0, int(upload["Initiated"].timestamp() * 1e9), upload["UploadId"])
            if not page.get("IsTruncated"):
                return
            place = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def delete_unpublished(self, file: StoredFile) -> None:
        if is_temporary(file.path):
            return self.delete(file.path)
        bucket, _, key = f"{self._root}/{file.path}".partition("/")
        try:
            with as_storage_error(f"{self.uri}/{file.path}"):
                # An upload has no entity tag yet; `list_unpublished` gives its id in that place.
                _s3_filesystem().call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=file.etag)
        except FileNotFoundError:
            return

    def stat(self, path: str) -> StoredFile | None:
        try:
            with as_storage_error(f"{self.uri}/{path}"):
                info = _s3_filesystem().info(f"{self._root}/{path}", refresh=True)
        except FileNotFoundError:
            return None
        return _stored_file(path, info) if info["type"] == "file" else None

    def delete(self, path: str) -> None:
        try:
            with as_storage_error(f"{self.uri}/{path}"):
                _s3_filesystem().rm_file(f"{self._root}/{path}")
        except FileNotFoundError:
            return

    def _create(self, path: str, data: bytes) -> bool:
        try:
            _s3_filesystem().pipe_file(f"{self._root}/{path}", data, mode="create")
        except FileExistsError:
            return False
        return True

    def _check_conditional(self, path: str) -> None:
        """Raise StorageError for a server that ignores `If-None-Match`: there, two writers would both get True."""
        if self._is_conditional:
            return
        # In the folder that it is asked for: if this process is killed here, `gc` finds the probe.
        probe = f"{path.rpartition('/')[0]}/{TEMPORARY_PREFIX}conditional-put-{uuid.uuid4().hex}".lstrip("/")
        try:
            answers = [self._create(probe, b"1"), self._create(probe, b"2")]
        finally:
            self.delete(probe)
        if answers != [True, False]:
            raise StorageError(
                f"{self.uri} ignores `If-None-Match: *`",
                "expected a store with conditional PUT; without it nothing can be committed safely",
                "upgrade the server, or choose another place; reading from this one works",
            )
        self._is_conditional = True

    @contextmanager
    def _needs_bucket(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            bucket = self._root.split("/")[0]
            raise NoSuchRoot(f"no bucket {bucket!r} for {self.uri}", "expected an existing one", "create it") from None


@functools.cache
def _s3_filesystem() -> Any:
    import s3fs

    # A cached listing would hide what other processes have just committed.
    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)


def _is_behind_the_end(error: OSError) -> bool:
    """Whether the server refused a range because the object ends before it (HTTP 416)."""
    answer = getattr(error.__cause__, "response", None) or {}
    return answer.get("Error", {}).get("Code") in ("InvalidRange", "416")


def _stored_file(path: str, info: dict[str, Any]) -> StoredFile:
    modified = info.get("LastModified")
    mtime_ns = int(modified.timestamp() * 1e9) if modified is not None else 0
    return StoredFile(path, int(info["size"]), mtime_ns, str(info.get("ETag", "")).strip('"'))
