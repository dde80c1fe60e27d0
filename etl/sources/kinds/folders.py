"""Lists a class-per-folder tree without Spark's `binaryFile`, which silently skips file names that people really use.

`cats/001.jpg` has the class `cats`; `train/cats/001.jpg` beside a `val/` or `test/` folder has the split `train` and
the class `cats`. A folder of images without class folders makes a dataset without labels.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from etl.sources.listed import ListingBatch, batches_of
from etl.sources.names import hidden_folder_of, is_image_name, is_utf8, unread_archive
from etl.sources.path_labels import FolderRule, with_folder_labels
from etl.sources.unused_labels import FilesBeside
from shardmill.errors import NoSuchRoot, StorageError, UsageError
from shardmill.stores import open_store
from shardmill.stores.local import bring_near
from shardmill.values import Rejection, RejectReason, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig


# A request takes some 20 to 100 ms, of which the machine works one.
_NUM_REMOTE_READS = 16


class FileReader:
    """Reads `image.key` below the source root."""

    def __init__(self, uri: str) -> None:
        self._store = open_store(uri)
        self.num_parallel = 1 if self._store.local_root is not None else _NUM_REMOTE_READS

    def read(self, image: SourceImage) -> bytes:
        return self._store.read(image.key)

    def expect(self, image: SourceImage) -> None:
        """The disk reads it while images before it are decoded."""
        if self._store.local_root is not None:
            bring_near(os.path.join(self._store.local_root, image.key))

    def is_there(self, path: str) -> bool:
        return self._store.stat(path) is not None


class FolderSource:
    """Every file below `source.uri`. Links, splits and classes are judged here; size and label by the listing."""

    def __init__(self, config: SourceConfig) -> None:
        self.uri = open_store(config.uri).uri
        self._config = config

    def open(self, max_source_bytes: int) -> FileReader:
        """Every image is a file of its own."""
        return FileReader(self.uri)

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no folder, or more than one level that may name the classes."""
        rule, batches = FolderRule.of(self._config, is_innermost=False), batches_of(self._found())
        if rule.takes_labels:
            store = open_store(self.uri)
            batches = FilesBeside().noting(batches, lambda key, num_bytes: store.read_range(key, 0, num_bytes))
        return with_folder_labels(batches, rule)

    def _found(self) -> Iterator[SourceImage | Rejection]:
        walk = _walk_store(self.uri)
        if "://" not in self.uri:
            walk = _walk_local(Path(self.uri), self._config.follow_symlinks)
        return (entry if isinstance(entry, Rejection) else _named_like_an_image(entry) for entry in walk)


def _walk_local(root: Path, follow_symlinks: bool) -> Iterator[SourceImage | Rejection]:
    """Every file, link and special file below `root`, each exactly once; links to folders are entered if told so."""
    if not root.is_dir():
        archive = unread_archive(root.name)
        if archive and root.exists():
            raise UsageError(
                f"source {root} is a {archive} file, which is not supported",
            "expected a folder, or a ZIP or tar archive", "unpack it, and pass the folder",
            )  # fmt: skip
        raise UsageError(
            f"source {root} is not a folder" if root.exists() else f"source {root} does not exist",
            "expected a folder with one folder per class",
            "check source.uri",
        )
    # Links may lead anywhere below this.
    bounds = None if follow_symlinks else os.path.realpath(root)

    def refuse_unreadable(error: OSError) -> None:
        raise StorageError(f"cannot list {error.filename}: {error.strerror}") from error

    for directory, folders, names in os.walk(root, onerror=refuse_unreadable, followlinks=follow_symlinks):
        prefix = "" if directory == str(root) else f"{os.path.relpath(directory, root)}/"
        links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
        if follow_symlinks:
            links = [name for name in links if _leads_back(os.path.join(directory, name), root)]
            folders[:] = [name for name in folders if name not in links]
        for name in (*names, *links):
            yield _entry(os.path.join(directory, name), prefix + name, bounds)


def _leads_back(link: str, root: Path) -> bool:
    """Whether a link to a folder leads to a folder that contains it, so that a walk would never end."""
    target = os.path.realpath(link)
    folder = Path(link).parent
    return any(os.path.realpath(above) == target for above in (folder, *folder.parents) if above.is_relative_to(root))


def _entry(path: str, key: str, bounds: str | None) -> SourceImage | Rejection:
    def rejection(reason: RejectReason, detail: str) -> Rejection:
        return Rejection(key, reason, detail, stage="list")

    try:
        status = os.lstat(path)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        return rejection(RejectReason.MISSING if gone else RejectReason.UNREADABLE, error.strerror or "")
    if stat.S_ISLNK(status.st_mode):
        target = os.path.realpath(path)
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return rejection(RejectReason.DANGLING_SYMLINK, f"links to {os.readlink(path)}")
        except OSError as error:
            return rejection(RejectReason.SYMLINK_LOOP, error.strerror or "")
        if bounds is not None and os.path.commonpath([bounds, target]) != bounds:
            return rejection(RejectReason.SYMLINK_OUTSIDE_ROOT, f"links to {target}")
        if os.path.isdir(path):
            # A link that the walk would have entered is here only because it leads back.
            if bounds is None or Path(os.path.realpath(os.path.dirname(path))).is_relative_to(target):
                return rejection(RejectReason.SYMLINK_LOOP, f"leads back to {target}")
            return rejection(RejectReason.SYMLINK_DIRECTORY, "its files are listed where they are")
    if not stat.S_ISREG(status.st_mode):
        return rejection(RejectReason.NOT_REGULAR_FILE, stat.filemode(status.st_mode))
    if not os.access(path, os.R_OK):
        return rejection(RejectReason.UNREADABLE, "no permission to read it")
    return SourceImage(key, status.st_size, status.st_mtime_ns)


def _walk_store(uri: str) -> Iterator[SourceImage | Rejection]:
    try:
        for file in open_store(uri).list(""):
            yield SourceImage(file.path, file.size_bytes, 0, file.etag)
    except NoSuchRoot as error:
        raise UsageError(f"source {uri} does not exist: {error.what}", "", "check source.uri") from None


def _named_like_an_image(image: SourceImage) -> SourceImage | Rejection:
    if not is_utf8(image.key):
        return image.rejected(RejectReason.PATH_NOT_UTF8, "the name is not UTF-8", "list")
    if not is_image_name(image.key):
        hidden = hidden_folder_of(image.key)
        detail = f"is in the hidden folder {hidden}" if hidden else "the name is not an image's"
        return image.rejected(RejectReason.NOT_AN_IMAGE_NAME, detail, "list")
    return image
