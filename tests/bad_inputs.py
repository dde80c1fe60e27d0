"""Every file of the bad-input table in docs/rejects.md, built from nothing, with the one disposition that it must have.

    python -m tests.bad_inputs DIR

writes them all below DIR, a source of class folders. `tests/etl/test_limits.py` runs the ETL over it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from shardmill.values import RejectReason
from tests.bad_images import jpegs, other_formats, pngs
from tests.bad_input import BadInput
from tests.shardmill.images.make import gray_photo, jpeg, photo, png

BEYOND_2_GIB = (2 << 30) + 1


def all_inputs() -> list[BadInput]:
    return [*jpegs(), *pngs(), *other_formats(), *names(), *links(), *labels()]


def names() -> Iterator[BadInput]:
    data = png(photo())
    for name in ("_x.png", ".x.png", "x._COPYING_.png"):
        yield BadInput(84, f"_class/{name}", data)
    yield BadInput(84, "names/notes.txt", b"notes", RejectReason.NOT_AN_IMAGE_NAME)
    yield BadInput(85, os.fsdecode(b"names/bad\xff.png"), data, RejectReason.PATH_NOT_UTF8)
    odd = ("a b.png", "%20.png", "#?.png", "{a,b}[ab]*.png", "colon:.png", "'\".png", "back\\slash.png", "-n.png")
    for name in (*odd, "new\nline.png", "\N{CAT} 日本語.png", "x" * 251 + ".png"):
        yield BadInput(86, f"names/{name}", data)
    for name in ("\u00e9.png", "e\u0301.png", "UP.png", "up.png"):
        yield BadInput(87, f"names/{name}", data)
    for label in ("cat", "dog"):
        yield BadInput(88, f"{label}/same name.png", png(gray_photo()))
    for number in (1, 2):
        yield BadInput(89, f"twins/{number}.jpg", jpeg(photo(), 51))
    for label in ("cat", "dog"):
        yield BadInput(90, f"{label}/conflict.jpg", jpeg(photo(), 52))


def links() -> Iterator[BadInput]:
    """`/outside` is made beside the source."""

    def link_to(target: str) -> Callable[[Path], None]:
        return lambda path: path.symlink_to(target)

    def make_outside(path: Path) -> None:
        outside = path.parent.parent.parent / "outside"
        outside.mkdir(exist_ok=True)
        (outside / "secret.png").write_bytes(png(photo()))
        path.symlink_to(outside / "secret.png")

    yield BadInput(92, "links/inside.png", link_to("../cat/same name.png"))
    yield BadInput(93, "links/outside.png", make_outside, RejectReason.SYMLINK_OUTSIDE_ROOT)
    yield BadInput(94, "links/loop.png", link_to("loop.png"), RejectReason.SYMLINK_LOOP)
    yield BadInput(94, "links/upwards", link_to(".."), RejectReason.SYMLINK_LOOP)
    yield BadInput(95, "links/dangling.png", link_to("gone.png"), RejectReason.DANGLING_SYMLINK)
    yield BadInput(96, "links/fifo.png", lambda path: os.mkfifo(path), RejectReason.NOT_REGULAR_FILE)
    yield BadInput(96, "links/socket.png", _make_socket, RejectReason.NOT_REGULAR_FILE)
    yield BadInput(96, "links/zero.png", link_to("/dev/zero"), RejectReason.SYMLINK_OUTSIDE_ROOT)
    yield BadInput(97, "links/folder.jpg/x.png", png(photo()))
    yield BadInput(99, "links/huge.png", _make_sparse, RejectReason.TOO_LARGE_BYTES)


def labels() -> Iterator[BadInput]:
    for label in ("new\nline", "\u202ertl", "zero\u200bwidth", " "):
        yield BadInput(100, f"{label}/x.png", png(photo()), RejectReason.BAD_LABEL)
    for label in ("CON", "..."):
        yield BadInput(100, f"{label}/x.png", png(photo()))
    for label in ("日本語", "\N{CAT}", "with space", 'comma, "quotes" = more', "עברית"):
        yield BadInput(101, f"{label}/x.png", png(photo()))


def _make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may have 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, BEYOND_2_GIB)


def write_inputs(root: Path) -> list[BadInput]:
    """All of them below `root`, which should be empty."""
    inputs = all_inputs()
    for each in inputs:
        path = root / each.key
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(each.content, bytes):
            path.write_bytes(each.content)
        else:
            each.content(path)
    return inputs


if __name__ == "__main__":
    print(f"{len(write_inputs(Path(sys.argv[1])))} files below {sys.argv[1]}")
