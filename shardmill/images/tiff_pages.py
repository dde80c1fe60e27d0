"""Finds the page of a TIFF that is the photo: raw photos and some scanners put a small preview first.

Pages are the directories of the chain that every reader follows, and those that one of them names as its own (SubIFDs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardmill.images.exif import BadDirectory, Directory, directory_at, next_directory, read_directory
from shardmill.images.pixels import Refused
from shardmill.values import RejectReason

WIDTH, HEIGHT, PHOTOMETRIC = 256, 257, 262
NEW_SUBFILE_TYPE, SUBFILE_TYPE, SUB_DIRECTORIES, DNG_VERSION = 254, 255, 330, 50706
REDUCED, MASK = 1, 4
"""Bits of NewSubfileType."""
OLD_REDUCED = 2
"""The value of SubfileType."""
# Samples behind a filter of colours, or of a sensor: only a raw converter makes a picture of them.
RAW_PHOTOMETRICS = frozenset({32803, 34892})
CANON_RAW = b"CR"
"""Behind the header."""
MAX_PAGES = 10_000
# Each costs a look at its tags, and directories may share bytes.
MAX_JUDGED_PAGES = 64


@dataclass(frozen=True, slots=True)
class Photo:
    """The page that is taken."""

    page: Directory
    num_pages: int
    """Number of full-resolution pages in the chain."""
    is_preview: bool
    """The file calls each of its pages a preview."""
    has_larger_behind: bool
    """Another page may be the photo of which this one is the preview, though the file does not say so."""
    place: str
    """Position of the page; empty for the first one."""


def choose_page(data: bytes) -> Photo:
    """The first page of full resolution, or one that it names as its own and that is larger.

    Raises `BadDirectory` if directories are damaged or form a loop, and `Refused` for a raw photo.
    """
    first = read_directory(data)
    starts = _chain(data, first)
    pages = [first, *_readable(data, first, starts[1:MAX_JUDGED_PAGES])]
    own_pages = [own for page in pages for own in _own_pages(data, page)][:MAX_JUDGED_PAGES]
    _refuse_raw(data, first, [*pages, *own_pages])
    of_chain = [page for page in pages if not _is_aside(page)]
    others = [page for page in own_pages if not _is_aside(page)]
    num_pages = len(of_chain) + len(starts) - len(pages)
    photo = of_chain[0] if of_chain else None
    largest = max(others, key=_num_pixels, default=None)
    if largest is not None and (photo is None or (photo is first and _num_pixels(largest) > _num_pixels(photo))):
        place = "a page below the first one"
        return Photo(largest, num_pages or 1, is_preview=False, has_larger_behind=False, place=place)
    if photo is None:
        return Photo(first, len(starts), is_preview=True, has_larger_behind=False, place="")
    place = "" if photo is first else f"page {1 + pages.index(photo)}"
    has_larger_behind = any(_may_be_preview(photo, of=page) for page in of_chain[1:])
    return Photo(photo, num_pages, is_preview=False, has_larger_behind=has_larger_behind, place=place)


def _chain(data: bytes, first: Directory) -> list[int]:
    """Return the offset of each page; 0 means the first one."""
    seen = {0: None}
    start = first.next_start
    while start:
        if start in seen or len(seen) > MAX_PAGES:
            raise BadDirectory("the directories form a loop")
        seen[start] = None
        start = next_directory(data, first.byte_order, start)
    return list(seen)


def _readable(data: bytes, first: Directory, starts: list[int]) -> Iterator[Directory]:
    """The pages that can be read: damage beside the photo is not the photo's."""
    for start in starts:
        try:
            yield directory_at(data, first.byte_order, start)
        except BadDirectory:
            continue


def _own_pages(data: bytes, page: Directory) -> list[Directory]:
    try:
        starts = page.integers(SUB_DIRECTORIES)[:MAX_JUDGED_PAGES]
    except BadDirectory:
        return []
    own_pages = list(_readable(data, page, list(starts)))
    if len(own_pages) < len(starts) and _is_aside(page):
        raise BadDirectory("the first page is a preview, and the directory of the photo is damaged")
    return own_pages


def _refuse_raw(data: bytes, first: Directory, pages: list[Directory]) -> None:
    if data[8:10] == CANON_RAW:
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, "format=cr2, a raw photo")
    if any(page.small_integer(PHOTOMETRIC) in RAW_PHOTOMETRICS for page in pages):
        name = "dng" if DNG_VERSION in first.entries else "raw"
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, f"format={name}, a raw photo; only its preview is a picture")


def _is_aside(page: Directory) -> bool:
    """Whether it is a preview, or the mask of another page."""
    is_old_preview = page.small_integer(SUBFILE_TYPE) == OLD_REDUCED
    return bool(page.small_integer(NEW_SUBFILE_TYPE) & (REDUCED | MASK)) or is_old_preview


def _may_be_preview(page: Directory, *, of: Directory) -> bool:
    """At most half as high and wide, and of the same shape: some scale gives both of its sides, to within a pixel.

    Pages of a document may be so too: it is a reason for a warning, and none for another page.
    """
    height, width = page.small_integer(HEIGHT), page.small_integer(WIDTH)
    full_height, full_width = of.small_integer(HEIGHT), of.small_integer(WIDTH)
    is_half = full_height >= 2 * height > 0 and full_width >= 2 * width > 0
    may_be_higher = full_width * (height - 1) < full_height * (width + 1)
    may_be_wider = full_height * (width - 1) < full_width * (height + 1)
    return is_half and may_be_higher and may_be_wider


def _num_pixels(page: Directory) -> int:
    return page.small_integer(WIDTH) * page.small_integer(HEIGHT)
