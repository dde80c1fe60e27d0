"""A store on HDFS, through hdfs-native without a JVM; a rename that replaces nothing makes the commit atomic."""

from __future__ import annotations

import errno
import functools
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardmill.errors import AccessDenied, StorageError, UsageError
from shardmill.storage import TEMPORARY_PREFIX, StoredFile, is_temporary
from shardmill.storage_errors import as_storage_error

CONNECT_TIMEOUT_SECONDS = 10.0
"""Time in which a NameNode must accept the first connection; the client alone would try for minutes."""
REPEATED_SECONDS = 180.0
"""Time for which the client repeats a request to an address that does not answer; measured."""
_BLOCK_BYTES = 1 << 22
# What a NameNode answers beyond absence: `RPCError("<Java class>", "<message>\n\tat <stack>")`.
_REFUSAL = re.compile(r'^RPCError\("(?:[\w.]+[.$])?(\w+)", "(.*?)(?:\\n|"\)$)', re.DOTALL)
_ERRNO = {
    "AccessControlException": errno.EACCES,
    "NSQuotaExceededException": errno.EDQUOT,
    "DSQuotaExceededException": errno.EDQUOT,
    "QuotaByStorageTypeExceededException": errno.EDQUOT,
    "PathIsNotEmptyDirectoryException": errno.ENOTEMPTY,
}


class HdfsStore:
    """A folder of an HDFS: `hdfs://host:port/path`, a name service of `HADOOP_CONF_DIR`, or its default (`hdfs:///path`).

    The user is `HADOOP_USER_NAME` or this process's; delegation tokens come from `HADOOP_TOKEN_FILE_LOCATION`.
    """

    deadline_seconds = REPEATED_SECONDS

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/") if uri != "hdfs:///" else uri
        self.local_root: Path | None = None
        self._authority, _, path = uri[len("hdfs://") :].partition("/")
        self._root = f"/{path}".rstrip("/")

    def read(self, path: str) -> bytes:
        with self._errors(path, denied=AccessDenied):
            reader = self._client.read(self._name(path))
            return reader.read_range(0, len(reader))

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        with self._errors(path):
            reader = self._client.read(self._name(path))
            # It panics for a range that reaches behind the end.
            left = max(0, len(reader) - start)
            return reader.read_range(start, min(num_bytes, left)) if left else b""

    def put(self, path: str, data: bytes) -> None:
        with self._errors(path, len(data)):
            self._publish(path, lambda file: file.write(data), overwrite=True)

    def put_file(self, path: str, local_file: Path) -> None:
        def copy(file: Any) -> None:
            with open(local_file, "rb") as source:
                while block := source.read(_BLOCK_BYTES):
                    file.write(block)

        with self._errors(path, local_file.stat().st_size):
            self._publish(path, copy, overwrite=True)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._errors(path, len(data)):
            try:
                self._publish(path, lambda file: file.write(data), overwrite=False)
            except FileExistsError:
                return False
            return True

    def list(self, prefix: str) -> Iterator[StoredFile]:
        for _, files in self._walk(prefix):
            yield from (self._stored_file(file) for file in files if not is_temporary(file.path))

    def list_unpublished(self, prefix: str) -> Iterator[StoredFile]:
        for empty_folder, files in self._walk(prefix):
            if empty_folder is not None:
                yield self._stored_file(empty_folder)
            yield from (self._stored_file(file) for file in files if is_temporary(file.path))

    def delete_unpublished(self, file: StoredFile) -> None:
        # An empty folder, or a file: a folder that is not empty any more stays.
        self._remove(self._name(file.path))
        self._remove_empty(file.path)

    def stat(self, path: str) -> StoredFile | None:
        try:
            with self._errors(path):
                file = self._client.get_file_info(self._name(path))
        except FileNotFoundError:
            return None
        return None if file.isdir else self._stored_file(file)

    def delete(self, path: str) -> None:
        with self._errors(path):
            self._client.delete(self._name(path), False)
        # As on a local disk, folders go with their last file.
        self._remove_empty(path)

    @property
    def _client(self) -> Any:
        return connected(self._authority, os.getpid())

    def _name(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/") or "/"

    def _stored_file(self, file: Any) -> StoredFile:
        return StoredFile(file.path[len(self._root) + 1 :], int(file.length), int(file.modification_time) * 1_000_000)

    def _publish(self, path: str, write: Callable[[Any], object], *, overwrite: bool) -> None:
        """Write a temporary file beside `path` and rename it: atomic among all clients of the NameNode."""
        client, name = self._client, self._name(path)
        temporary = f"{name.rpartition('/')[0]}/{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            with client.create(temporary) as file:
                write(file)
            written = client.get_file_info(temporary)
            try:
                client.rename(temporary, name, overwrite=overwrite)
            except FileNotFoundError:
                # The client asks again if an answer is lost, and then its own rename has taken the temporary file.
                if not self._is_there(name, written):
                    raise StorageError(
                        f"cannot write {self.uri}/{path}",
                        "its temporary file was removed by another process",
                    ) from None
        except BaseException:
            with suppress(Exception):
                client.delete(temporary, False)
            raise

    def _is_there(self, name: str, written: Any) -> bool:
        """Whether a file is the one that was written under another name: a rename changes neither size nor times."""
        try:
            found = self._client.get_file_info(name)
        except FileNotFoundError:
            return False
        return (found.length, found.modification_time) == (written.length, written.modification_time)

    def _walk(self, prefix: str) -> Iterator[tuple[Any | None, list[Any]]]:
        """The files of each folder from `prefix` down, and the folder itself if it is empty."""
        try:
            with self._errors(prefix):
                folders = [self._client.get_file_info(self._name(prefix))]
        except FileNotFoundError:
            return
        while folders:
            folder = folders.pop()
            try:
                with self._errors(folder.path[len(self._root) + 1 :]):
                    entries = list(self._client.list_status(folder.path)) if folder.isdir else []
            except FileNotFoundError:
                # Removed since its parent was listed, which an empty folder may be at any time.
                continue
            folders += [each for each in entries if each.isdir]
            yield folder if folder.isdir and not entries else None, [each for each in entries if not each.isdir]

    def _remove(self, name: str) -> bool:
        with suppress(OSError, RuntimeError):
            return bool(self._client.delete(name, False))
        return False

    def _remove_empty(self, path: str) -> None:
        """The folders above `path`, up to the first that is not empty, or the root."""
        folder = path.rpartition("/")[0]
        while folder and self._remove(self._name(folder)):
            folder = folder.rpartition("/")[0]

    @contextmanager
    def _errors(
        self, path: str, num_bytes: int | None = None, *, denied: type[StorageError] = StorageError
    ) -> Iterator[None]:
        with as_storage_error(f"{self.uri}/{path}", num_bytes, denied=denied):
            try:
                yield
            except RuntimeError as error:
                refusal = _REFUSAL.match(str(error))
                kind, message = refusal.groups() if refusal else ("", str(error).split("\n")[0])
                raise OSError(_ERRNO.get(kind, errno.EIO), message.replace('\\"', '"')) from error


@functools.cache
def connected(authority: str, pid: int) -> Any:
    """The client of one file system in this process: its threads do not survive a fork."""
    from hdfs_native import Client

    _check_reachable(authority)
    try:
        return Client(f"hdfs://{authority}" if authority else None)
    except RuntimeError as error:
        raise UsageError(
            f"no HDFS for hdfs://{authority}/: {error}",
            "expected hdfs://host:port/path, or a name service that HADOOP_CONF_DIR describes",
            "set HADOOP_CONF_DIR to the folder of core-site.xml and hdfs-site.xml",
        ) from None


def _check_reachable(authority: str) -> None:
    """Raise StorageError if nothing accepts connections at a `host:port`; a name service has more than one NameNode."""
    host, _, port = authority.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise StorageError(
            f"no NameNode answers at {authority}: {error.strerror or error}",
            "expected the address of its RPC port, as in fs.defaultFS",
            "check the address and that HDFS is running",
        ) from None
