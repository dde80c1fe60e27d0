"""A class-per-folder tree, listed by ourselves: Spark's `binaryFile` silently skips names that people really use.

`cats/001.jpg` has the class `cats`; `train/cats/001.jpg` beside a `val/` or `test/` folder has the split `train` and
the class `cats`. A folder of images without class folders makes a dataset without labels.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from etl.listed import LISTED_SCHEMA, ListingBatch, batches_of, listed_table
from etl.sources.files import FileReader
from etl.sources.names import SPLIT_OF_NAME, is_image_name, is_utf8
from etl.sources.spool import Spool
from shardmill.errors import NoSuchRoot, StorageError, UsageError
from shardmill.printable import printable
from shardmill.stores import open_store
from shardmill.values import Rejection, RejectReason, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig


class FolderSource:
    """Every file below `source.uri`. Links, splits and classes are judged here; size and label by the listing."""

    def __init__(self, config: SourceConfig) -> None:
        self.uri = open_store(config.uri).uri
        self._config = config

    def open(self, max_source_bytes: int) -> FileReader:
        """Every image is a file of its own."""
        return FileReader(self.uri)

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no folder, or more than one level that may name the classes.

        The place of splits and classes follows from all names together, so the entries are spooled to a local file
        until the last of them is known.
        """
        layout, num_found_ahead = _Layout(), 0
        with Spool() as spool:
            for batch in batches_of(self._found()):
                for path in set(map(_folder_of, batch.images.column("key").to_numpy().tolist())):
                    layout.add(path)
                spool.write(batch.images)
                num_found_ahead += batch.images.num_rows
                yield replace(batch, images=batch.images.slice(0, 0), num_found_ahead=num_found_ahead)
            place = layout.label_place(self._config.label_level)
            for table in spool.read():
                num_found_ahead -= table.num_rows
                yield replace(place.labelled(table), num_found_ahead=num_found_ahead)
        yield from place.warnings()

    def _found(self) -> Iterator[SourceImage | Rejection]:
        walk = _walk_store(self.uri)
        if "://" not in self.uri:
            walk = _walk_local(Path(self.uri), self._config.follow_symlinks)
        return (entry if isinstance(entry, Rejection) else _named_like_an_image(entry) for entry in walk)


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


@dataclass(slots=True)
class _Layout:
    """What the names of all images say together. Grows with the number of folders, not of images."""

    names: dict[str, list[set[str]]] = field(default_factory=dict)
    """First folder -> the folders' names on each level, from that first one on."""
    fewest: dict[str, int] = field(default_factory=dict)
    """First folder -> the smallest number of folders above one of its images."""
    most: int = 0

    def add(self, path: str) -> None:
        """A folder in which an image lies directly."""
        folders = path.split("/") if path else []
        top = folders[0] if folders else ""
        levels = self.names.setdefault(top, [])
        for level, name in enumerate(folders):
            if level == len(levels):
                levels.append(set())
            levels[level].add(name)
        self.fewest[top] = min(self.fewest.get(top, len(folders)), len(folders))
        self.most = max(self.most, len(folders))

    def label_place(self, label_level: int) -> _LabelPlace:
        tops = {top for top in self.names if top}
        # `train` beside `bus` and `car` is a vehicle; alone or beside `val` or `test` it is a split.
        splits = {top for top in tops if top.lower() in SPLIT_OF_NAME}
        has_train = any(SPLIT_OF_NAME[split.lower()] == "train" for split in splits)
        has_splits = has_train and (tops == splits or len(splits) > 1)
        if label_level == 0:
            self._check_level_is_clear(splits if has_splits else set(self.names), first=int(has_splits))
        class_depth = has_splits + max(1, label_level)
        return _LabelPlace(has_splits, class_depth, has_classes=self.most >= class_depth)

    def _check_level_is_clear(self, tops: Iterable[str], first: int) -> None:
        """Raise UsageError if no image lies directly in a folder of the first level: any level may be the classes."""
        num_levels = min((self.fewest[top] - first for top in tops), default=0)
        if num_levels < 2:
            return
        seen: defaultdict[int, set[str]] = defaultdict(set)
        for top in tops:
            for level in range(num_levels):
                seen[level] |= self.names[top][first + level]
        named = [
            f"level {level + 1} ({', '.join(map(printable, sorted(names)[:3]))}{', ...' if len(names) > 3 else ''})"
            for level, names in sorted(seen.items())
        ]
        raise UsageError(
            f"every image lies {num_levels} or more folders deep, so that the classes may be {' or '.join(named)}",
            "expected one folder per class with its images directly in it",
            "say which with --set source.label_level=N, or set source.uri to the folder above the class folders",
        )


@dataclass(frozen=True, slots=True)
class _Folder:
    """What the path of a folder says of the images that lie directly in it."""

    split: str | None
    label: str | None
    fault: str
    """Why they are rejected; empty if they are not."""
    is_deeper: bool
    """Whether the class is named by a folder above it."""


@dataclass(slots=True)
class _LabelPlace:
    """Which folders name split and class."""

    has_splits: bool
    class_depth: int
    has_classes: bool
    num_images: int = 0
    deeper: str | None = None
    """The first key of those below, so that it does not depend on the order of the walk."""
    num_deeper: int = 0

    def labelled(self, images: pa.Table) -> ListingBatch:
        """Listed images with split and class; folder by folder, because folders are few."""
        keys = images.column("key").to_numpy().tolist()
        paths = [_folder_of(key) for key in keys]
        folders = {path: self._judge(path) for path in set(paths)}
        deeper = [key for key, path in zip(keys, paths, strict=True) if folders[path].is_deeper]
        self.num_deeper += len(deeper)
        self.deeper = min((self.deeper, *deeper), key=lambda key: (key is None, key), default=None)
        for name in ("label", "split"):
            values = pa.array([getattr(folders[path], name) for path in paths], pa.string())
            images = images.set_column(images.column_names.index(name), LISTED_SCHEMA.field(name), values)
        if any(folder.fault for folder in folders.values()):
            is_kept_N = np.array([not folders[path].fault for path in paths])
            refused = images.filter(pa.array(~is_kept_N)).to_pylist()
            images = images.filter(pa.array(is_kept_N))
        else:
            refused = []
        self.num_images += images.num_rows
        return ListingBatch(images, tuple(self._refused(SourceImage(**row)) for row in refused))

    def _judge(self, path: str) -> _Folder:
        names = path.split("/") if path else []
        split = SPLIT_OF_NAME.get(names[0].lower()) if self.has_splits and names else None
        label = names[self.class_depth - 1] if len(names) >= self.class_depth else None
        fault = ""
        if self.has_splits and split is None:
            fault = "lies in no split folder, and others do"
        elif self.has_classes and label is None:
            fault = "lies in no class folder, and others do"
        is_deeper = not fault and label is not None and names[-1] != label
        return _Folder(split, label if self.has_classes else None, fault, is_deeper)

    def _refused(self, image: SourceImage) -> Rejection:
        fault = self._judge(_folder_of(image.key)).fault
        return image.rejected(RejectReason.BAD_LABEL, fault, "list")

    def warnings(self) -> Iterator[ListingBatch]:
        if self.deeper is not None:
            label = self._judge(_folder_of(self.deeper)).label
            yield ListingBatch(
                listed_table([]),
                warnings=(
                    f"{self.num_deeper} of {self.num_images} images lie deeper than their class folder, such as "
                    f"{printable(self.deeper)}, taken as class {label}; source.label_level says otherwise",
                ),
            )


def _folder_of(key: str) -> str:
    return key.rpartition("/")[0]


def _named_like_an_image(image: SourceImage) -> SourceImage | Rejection:
    if not is_utf8(image.key):
        return image.rejected(RejectReason.PATH_NOT_UTF8, "the name is not UTF-8", "list")
    if not is_image_name(image.key):
        return image.rejected(RejectReason.NOT_AN_IMAGE_NAME, "the name is not an image's", "list")
    return image
