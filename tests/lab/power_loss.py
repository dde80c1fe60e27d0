"""What a disk may hold when its power is lost, after any of the calls that a program has made to the file system.

As POSIX promises it: the bytes of a file are there if it was synced after they were written; a name in a folder (of a
file or a folder, new or removed) is what it was told to be if the folder was synced after that. All else may be there
or not, each for itself.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_MAX_SUBSETS_OF = 4
_REMOVED = object()
_FOLDER = object()


@dataclass(frozen=True)
class Call:
    kind: str
    """`sync file`, `sync folder`, or `name`: a name in a folder was made, replaced or removed."""
    path: Path
    content: object = None
    """Of a name: the file's identity, `_FOLDER` or `_REMOVED`; of a synced file, its bytes."""
    by: str = ""
    """The function that asked for it."""


@dataclass
class RecordedDisk:
    """The calls of this process that concern what is below a folder, which itself is there."""

    root: Path
    calls: list[Call] = field(default_factory=list)
    _written: dict[Path, bytes] = field(default_factory=dict)

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def recorded(name: str, note: Callable[..., None]) -> None:
            real = getattr(os, name)

            def call(*arguments: Any, **options: Any) -> Any:
                outcome = real(*arguments, **options)
                note(*arguments)
                return outcome

            monkeypatch.setattr(os, name, call)

        recorded("mkdir", lambda path, *_: self._name(path, _FOLDER))
        recorded("rmdir", lambda path: self._name(path, _REMOVED))
        recorded("unlink", lambda path: self._name(path, _REMOVED))
        recorded("link", lambda source, target: self._name(target, Path(source)))
        recorded("replace", lambda source, target: self._name(target, Path(source)))
        recorded("fsync", self._synced)

    def _name(self, path: str | Path, content: object) -> None:
        if Path(path).is_relative_to(self.root) and not Path(path).name.startswith(".tmp-"):
            self.calls.append(Call("name", Path(path), content))

    def _synced(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        frame = sys._getframe(2)
        while frame.f_code.co_name in ("_sync", "_sync_folder") and frame.f_back is not None:
            frame = frame.f_back
        if path.is_relative_to(self.root):
            kind, content = ("sync folder", None) if path.is_dir() else ("sync file", path.read_bytes())
            self.calls.append(Call(kind, path, content, frame.f_code.co_name))

    def after_losses(self, without: tuple[str, str] | None = None) -> Iterator[tuple[int, dict[Path, bytes]]]:
        """(number of calls, the files that may be there if the power is lost after them).

        `without`: (kind, function) of syncs that did not happen.
        """
        names: dict[Path, object] = {}
        synced: dict[object, object] = {}
        pending: list[Call] = []
        for number, call in enumerate(self.calls, 1):
            if call.kind == "name":
                pending.append(call)
            elif (call.kind, call.by) == without:
                pass
            elif call.kind == "sync file":
                synced[call.path] = call.content
            else:
                names.update((each.path, each.content) for each in pending if each.path.parent == call.path)
                pending = [each for each in pending if each.path.parent != call.path]
            for kept in _subsets(pending):
                yield number, self._files({**names, **{each.path: each.content for each in kept}}, synced)

    def _files(self, names: dict[Path, object], synced: dict[object, object]) -> dict[Path, bytes]:
        def is_reached(path: Path) -> bool:
            return path == self.root or (names.get(path) is _FOLDER and is_reached(path.parent))

        files = {}
        for path, content in names.items():
            if isinstance(content, Path) and is_reached(path.parent):
                data = synced.get(content, b"")
                assert isinstance(data, bytes)
                files[path.relative_to(self.root)] = data
        return files


def _subsets(pending: list[Call]) -> Iterator[list[Call]]:
    if len(pending) <= _MAX_SUBSETS_OF:
        for size in range(len(pending) + 1):
            yield from map(list, itertools.combinations(pending, size))
        return
    yield from ([], pending)
    for place in range(len(pending)):
        yield [pending[place]]
        yield pending[:place] + pending[place + 1 :]
