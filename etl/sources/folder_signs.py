"""Detects labels in an archive's folders if text files beside the images kept the folders from being used
as classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from etl.sources.split_words import is_split, names_splits
from shardmill.printable import printable
from shardmill.words import first_of

_NUM_NAMED = 3
_MAX_FOLDERS = 100_000
# Shards and samples: `00`, `part-3`, `a7` and longer hashes.
_NUMBERED = re.compile(
    r"(?:shard|part|chunk|batch|group|sample|image|img|data|set|folder|dir|bucket)?s?[-_. ]?\d+(?:[-_.]\d+)*"
    r"|[0-9a-f]{2}|[0-9a-f-]{8,}",
    re.IGNORECASE,
)


class FolderSigns:
    """Signs of labels in the folders of images. Grows with their number, up to a bound."""

    def __init__(self) -> None:
        self._folders: set[str] = set()

    def look(self, image: str) -> None:
        """Take in an image's name in its archive."""
        if len(self._folders) < _MAX_FOLDERS:
            self._folders.add(image.rpartition("/")[0].removeprefix("./"))

    def found(self) -> Iterator[str]:
        """A phrase if two or more folders have names that are neither numbers nor splits."""
        folders = [folder.split("/") for folder in sorted(self._folders) if folder]
        has_splits = names_splits({folder[0] for folder in folders})
        levels: dict[str, int] = {}
        for folder in folders:
            while folder and is_split(folder[-1]):
                folder.pop()
            if folder and not _NUMBERED.fullmatch(folder[-1]):
                levels.setdefault(folder[-1], len(folder) - (has_splits and is_split(folder[0])))
        if len(levels) < 2:
            return
        named = first_of([*map(printable, sorted(levels))], _NUM_NAMED)
        level = levels.popitem()[1] if len(set(levels.values())) == 1 else "N"
        yield (
            f"the images are in the folders {named}, with text files beside them (if these folders are the classes, "
            f"set source.label_level = {level})"
        )
