"""A class-per-folder tree, listed by ourselves: Spark's `binaryFile` silently skips names that people really use.

`cats/001.jpg` has the class `cats`; `train/cats/001.jpg` beside a `val/` or `test/` folder has the split `train` and
the class `cats`. A folder of images without class folders makes a dataset without labels.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from etl.sources import Listing
from shardmill.errors import StorageError, UsageError
from shardmill.ids import assign_sample_ids, key_bytes
from shardmill.printable import printable
from shardmill.storage import NoSuchRoot
from shardmill.stores import open_store
from shardmill.values import Rejection, RejectReason, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig

SPLIT_OF_FOLDER = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}

# By name alone: what may hold an image is decided by content later. No suffix at all is given the benefit of the doubt.
IMAGE_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "gif", "webp", "bmp", "dib", "tif", "tiff", "heic", "heif"),
        *("avif", "jp2", "j2k", "svg", "ico", "tga", "ppm", "pgm", "pbm", "pnm", "psd", "eps", "ps", "pdf"),
        *("fits", "wmf", "mpo"),
    )
)
_SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", ".ds_store", "icon\r"})

_MAX_LABEL_LENGTH = 255


def list_folders(source: SourceConfig, max_source_bytes: int) -> Listing:
    """Every file below `source.uri`.

    Raises UsageError (exit 2) if there is no folder, no image in it, or more than one level that may name the classes.
    """
    uri = source.uri
    local = "://" not in uri or uri.startswith("file://")
    found = _walk_local(Path(open_store(uri).uri), source.follow_symlinks) if local else _walk_store(uri)
    entries = _with_labels(sorted(found, key=lambda entry: key_bytes(entry.key)), source.label_level)
    judged = [
        entry if isinstance(entry, Rejection) else _accepted_or_rejected(entry, max_source_bytes) for entry in entries
    ]
    images = [entry for entry in judged if isinstance(entry, SourceImage)]
    rejections = tuple(entry for entry in judged if isinstance(entry, Rejection))
    if not images:
        raise UsageError(
            f"no images below {uri} ({len(rejections)} other files)",
            "expected image files, best in one folder per class",
            "check source.uri",
        )
    ids = assign_sample_ids([image.key for image in images])
    return Listing(
        tuple(replace(image, sample_id=sample_id) for image, sample_id in zip(images, ids, strict=True)), rejections
    )


def _walk_local(root: Path, follow_symlinks: bool) -> Iterator[SourceImage | Rejection]:
    """Every file, link and special file below `root`, each exactly once; links to folders are entered if told so."""
    if not root.is_dir():
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
        links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
        if follow_symlinks:
            links = [name for name in links if _leads_back(os.path.join(directory, name), root)]
            folders[:] = [name for name in folders if name not in links]
        for name in (*names, *links):
            path = os.path.join(directory, name)
            yield _entry(path, os.path.relpath(path, root), bounds)


def _leads_back(link: str, root: Path) -> bool:
    """Whether a link to a folder leads to a folder that contains it, so that a walk would never end."""
    target = os.path.realpath(link)
    folder = Path(link).parent
    return any(os.path.realpath(above) == target for above in (folder, *folder.parents) if above.is_relative_to(root))


def _entry(path: str, key: str, bounds: str | None) -> SourceImage | Rejection:
    def rejection(reason: RejectReason, detail: str) -> Rejection:
        return Rejection(key, reason, detail, stage="list")

    if os.path.islink(path):
        target = os.path.realpath(path)
        try:
            os.stat(path)
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
    try:
        status = os.stat(path)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError)
        return rejection(RejectReason.MISSING if gone else RejectReason.UNREADABLE, error.strerror or "")
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


def _with_labels(entries: list[SourceImage | Rejection], label_level: int) -> Iterator[SourceImage | Rejection]:
    """Read split and class from each image's folders."""
    images = [entry for entry in entries if isinstance(entry, SourceImage) and _is_image_name(entry.key)]
    tops = {entry.key.split("/")[0] for entry in images if "/" in entry.key}
    # `train` beside `bus` and `car` is a vehicle; alone or beside `val` or `test` it is a split.
    splits = tops & set(SPLIT_OF_FOLDER)
    has_splits = "train" in tops and (tops == splits or len(splits) > 1)
    levels = [
        entry.key.split("/")[has_splits:-1] for entry in images if not has_splits or entry.key.split("/")[0] in splits
    ]
    if label_level == 0:
        _check_level_is_clear(levels)
    class_depth = has_splits + max(1, label_level)
    has_classes = any(entry.key.count("/") >= class_depth for entry in images)
    for entry in entries:
        if isinstance(entry, Rejection):
            yield entry
            continue
        folders = entry.key.split("/")[:-1]
        split = SPLIT_OF_FOLDER.get(folders[0]) if has_splits and folders else None
        label = folders[class_depth - 1] if len(folders) >= class_depth else None
        if has_splits and split is None and _is_image_name(entry.key):
            yield Rejection(
                entry.key, RejectReason.BAD_LABEL, "lies in no split folder, and others do",
                entry.size_bytes, entry.mtime_ns, entry.etag, stage="list",
            )  # fmt: skip
        elif has_classes and label is None and _is_image_name(entry.key):
            yield Rejection(
                entry.key, RejectReason.BAD_LABEL, "lies in no class folder, and others do",
                entry.size_bytes, entry.mtime_ns, entry.etag, stage="list",
            )  # fmt: skip
        else:
            yield replace(entry, label=label if has_classes else None, split=split)


def _check_level_is_clear(levels: list[list[str]]) -> None:
    """Raise UsageError if no image lies directly in a folder of the first level: any level may be the classes then."""
    if min(map(len, levels), default=0) < 2:
        return
    seen = [sorted({folders[level] for folders in levels}) for level in range(min(map(len, levels)))]
    named = [
        f"level {number} ({', '.join(map(printable, names[:3]))}{', ...' if len(names) > 3 else ''})"
        for number, names in enumerate(seen, start=1)
    ]
    raise UsageError(
        f"every image lies {len(seen)} or more folders deep, so that the classes may be {' or '.join(named)}",
        "expected one folder per class with its images directly in it",
        "say which with --set source.label_level=N, or set source.uri to the folder above the class folders",
    )


def _accepted_or_rejected(image: SourceImage, max_source_bytes: int) -> SourceImage | Rejection:
    """Refuse by name and size, before any byte is read."""

    def rejection(reason: RejectReason, detail: str) -> Rejection:
        return Rejection(image.key, reason, detail, image.size_bytes, image.mtime_ns, image.etag, stage="list")

    if not _is_utf8(image.key):
        return rejection(RejectReason.PATH_NOT_UTF8, "the name is not UTF-8")
    if not _is_image_name(image.key):
        return rejection(RejectReason.NOT_AN_IMAGE_NAME, "the name is not an image's")
    if len((image.label or "").encode()) > _MAX_LABEL_LENGTH:
        return rejection(RejectReason.BAD_LABEL, "too long")
    if _is_invalid_label(image.label):
        return rejection(RejectReason.BAD_LABEL, f"{image.label!r} is no class name")
    if image.size_bytes > max_source_bytes:
        detail = f"{image.size_bytes} bytes; etl.max_source_bytes is {max_source_bytes}"
        return rejection(RejectReason.TOO_LARGE_BYTES, detail)
    return image


def _is_image_name(key: str) -> bool:
    name = key.rsplit("/", 1)[-1].lower()
    if name in _SYSTEM_FILES or name.startswith("._"):
        return False
    suffix = os.path.splitext(name.lstrip("."))[1]
    return suffix == "" or suffix in IMAGE_SUFFIXES


def _is_invalid_label(label: str | None) -> bool:
    """Nothing but spaces or dots, or with characters that nobody sees: `\\x1b[2J` clears the screen of who reads it."""
    return label is not None and (label.strip() in ("", ".", "..") or printable(label) != label)


def _is_utf8(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
