"""Decodes the photo of a TIFF: handles layout, planes and colours here; Pillow and zlib decompress the strips.

OpenCV silently leaves the rest of a damaged strip black and mixes up planes of 16 bits; here every strip must give
exactly its bytes. Whatever the samples are, to a decompressor a row is a row of bytes. Raw photos and some scanners put
a small preview first: pages are the directories of the chain that every reader follows, and those that one of them
names as its own (SubIFDs), and the photo is chosen among them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from PIL.TiffImagePlugin import TiffImageFile

from shardmill.images.exif import (
    ORIENTATION_TAG,
    BadDirectory,
    Directory,
    directory_at,
    next_directory,
    orient,
    read_directory,
)
from shardmill.images.icc import cmyk_to_srgb, to_srgb
from shardmill.images.pillow import decode_plain_gray
from shardmill.images.pixels import (
    EXTRA_BANDS_NOTE,
    LARGER_BEHIND_NOTE,
    PREVIEW_NOTE,
    DecodedImage,
    Refused,
    check_dimensions,
    flatten_over_white,
    scale_to_8_bit,
)
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

BITS_PER_SAMPLE, COMPRESSION, FILL_ORDER = 258, 259, 266
STRIP_OFFSETS, SAMPLES_PER_PIXEL, ROWS_PER_STRIP, STRIP_BYTE_COUNTS, PLANAR = 273, 277, 278, 279, 284
PREDICTOR, COLOR_MAP, TILE_WIDTH, INK_SET, EXTRA_SAMPLES, SAMPLE_FORMAT = 317, 320, 322, 332, 338, 339
MAX_SAMPLE_VALUE, LARGEST_SAMPLE_VALUE, ICC_PROFILE = 281, 341, 34675
"""The second is SMaxSampleValue, of any type."""
UNCOMPRESSED, LZW, DEFLATE, OLD_DEFLATE, PACKBITS = 1, 5, 8, 32946, 32773
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, CMYK = 0, 1, 2, 3, 5
NUM_COLOR_SAMPLES = {WHITE_IS_ZERO: 1, BLACK_IS_ZERO: 1, RGB: 3, PALETTE: 1, CMYK: 4}
PREMULTIPLIED_ALPHA, STRAIGHT_ALPHA = 1, 2


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a page's samples in its strips."""

    height: int
    width: int
    num_samples: int
    """Per pixel, alpha and others included."""
    bits: int
    photometric: int
    compression: int
    is_planar: bool
    uses_predictor: bool
    rows_per_strip: int
    alpha_kind: int
    """One of the two alpha constants, or 0 without alpha."""
    alpha_index: int
    """Index of the alpha sample."""
    byte_order: str

    def row_bytes(self) -> int:
        num_samples = 1 if self.is_planar else self.num_samples
        return (self.width * num_samples * self.bits + 7) // 8


def decode_tiff(data: bytes, options: NormalizeOptions) -> DecodedImage:
    if len(data) < 8:
        raise Refused(RejectReason.TRUNCATED, f"the header ends at byte {len(data)}")
    first_start = int.from_bytes(data[4:8], "little" if data[:2] == b"II" else "big")
    if first_start >= len(data):  # writers put the directory last, so a cut file points beyond its end
        raise Refused(RejectReason.TRUNCATED, f"the first directory is at byte {first_start} of {len(data)}")
    place = ""
    try:
        photo = choose_page(data)
        place = photo.place
        decoded = _decode_page(data, photo.page, options)
    except BadDirectory as error:
        raise Refused(RejectReason.BAD_HEADER, str(error)) from error
    except Refused as refusal:
        where = f" ({place}: the first one is a preview)" if place else ""
        raise Refused(refusal.reason, refusal.detail + where) from refusal
    notes = [f"first_frame_of_{photo.num_pages}"] if photo.num_pages > 1 else []
    notes += [PREVIEW_NOTE] if photo.is_preview else []
    notes += [LARGER_BEHIND_NOTE] if photo.has_larger_behind else []
    return replace(decoded, notes=(*notes, *decoded.notes))


def _decode_page(data: bytes, page: Directory, options: NormalizeOptions) -> DecodedImage:
    layout = _read_layout(page, options)
    samples_HWC = _read_samples(data, page, layout)
    notes: list[str] = []
    profile = page.raw(ICC_PROFILE)
    num_color_samples = NUM_COLOR_SAMPLES[layout.photometric]
    color_HWC, alpha_HW = scale_to_8_bit(
        samples_HWC[:, :, :num_color_samples],
        samples_HWC[:, :, layout.alpha_index] if layout.alpha_kind else None,
        _declared_bits(page),
        options,
        notes,
    )
    if layout.num_samples > num_color_samples + bool(layout.alpha_kind):
        notes.append(EXTRA_BANDS_NOTE)
    is_print = layout.photometric == CMYK
    if is_print:
        pixels_HWC = cmyk_to_srgb(color_HWC, profile, notes, stored_inverted=False)
    else:
        pixels_HWC = _to_color(color_HWC, layout.photometric, page.integers(COLOR_MAP))
    if alpha_HW is not None:
        is_premultiplied = layout.alpha_kind == PREMULTIPLIED_ALPHA
        pixels_HWC = flatten_over_white(pixels_HWC, alpha_HW, notes, premultiplied=is_premultiplied)
    if not is_print:
        # After alpha: premultiplied colours are none that the profile describes, and white is white in all of them.
        pixels_HWC = to_srgb(pixels_HWC, profile, notes)
    orientation = page.integer(ORIENTATION_TAG, default=1)
    return DecodedImage(orient(pixels_HWC, orientation, notes), tuple(notes), orientation=orientation)


def _declared_bits(page: Directory) -> int:
    """Of the samples, if the largest value that the page allows is that of some whole number of bits; 0 if not."""
    allowed = [page.small_integer(tag) for tag in (MAX_SAMPLE_VALUE, LARGEST_SAMPLE_VALUE)]
    return max((value.bit_length() for value in allowed if value & (value + 1) == 0), default=0)


def _read_layout(page: Directory, options: NormalizeOptions) -> Layout:
    height, width = page.integer(HEIGHT, default=0), page.integer(WIDTH, default=0)
    check_dimensions(height, width, options)
    photometric = page.integer(PHOTOMETRIC, default=-1)
    num_samples = page.integer(SAMPLES_PER_PIXEL, default=1)
    all_bits = set(page.integers(BITS_PER_SAMPLE) or (1,))
    alphas = [
        (kind, NUM_COLOR_SAMPLES.get(photometric, 0) + number)
        for number, kind in enumerate(page.integers(EXTRA_SAMPLES))
        if kind in (PREMULTIPLIED_ALPHA, STRAIGHT_ALPHA)
    ]
    alpha_kind, alpha_index = alphas[0] if alphas else (0, 0)
    layout = Layout(
        height=height,
        width=width,
        num_samples=num_samples,
        bits=min(all_bits),
        photometric=photometric,
        compression=page.integer(COMPRESSION, default=UNCOMPRESSED),
        is_planar=page.integer(PLANAR, default=1) == 2,
        uses_predictor=page.integer(PREDICTOR, default=1) == 2,
        rows_per_strip=max(1, min(height, page.integer(ROWS_PER_STRIP, default=height))),
        alpha_kind=alpha_kind,
        alpha_index=alpha_index,
        byte_order=page.byte_order,
    )
    problem = _find_unsupported(page, layout, all_bits)
    if problem:
        raise Refused(RejectReason.UNSUPPORTED_MODE, f"tiff with {problem}")
    if num_samples <= max(NUM_COLOR_SAMPLES[photometric] - 1, alpha_index):
        raise Refused(RejectReason.BAD_HEADER, f"{num_samples} samples per pixel in photometric {photometric}")
    return layout


def _find_unsupported(page: Directory, layout: Layout, all_bits: set[int]) -> str:
    if TILE_WIDTH in page.entries:
        return "tiles"
    if layout.photometric not in NUM_COLOR_SAMPLES:
        return f"photometric interpretation {layout.photometric}"
    if layout.compression not in (UNCOMPRESSED, LZW, DEFLATE, OLD_DEFLATE, PACKBITS):
        return f"compression {layout.compression}"
    if set(page.integers(SAMPLE_FORMAT)) - {1}:
        return f"sample format {page.integers(SAMPLE_FORMAT)[0]}"
    if len(all_bits) > 1 or layout.bits not in (1, 8, 16) or (layout.bits == 1 and layout.num_samples > 1):
        return f"{sorted(all_bits)} bits per sample"
    if layout.photometric == PALETTE and layout.bits != 8:
        return f"a palette of {layout.bits} bits"
    num_others = layout.num_samples - NUM_COLOR_SAMPLES[layout.photometric] - bool(layout.alpha_kind)
    if layout.num_samples > 8 or (num_others > 0 and NUM_COLOR_SAMPLES[layout.photometric] == 1):
        return f"{layout.num_samples} bands that are no colours (photometric interpretation {layout.photometric})"
    if page.integer(PREDICTOR, default=1) not in (1, 2) or (layout.uses_predictor and layout.bits == 1):
        return f"predictor {page.integer(PREDICTOR, default=1)}"
    if page.integer(FILL_ORDER, default=1) != 1 or page.integer(INK_SET, default=1) != 1:
        return "a reversed fill order or other inks than CMYK"
    return ""


def _read_samples(data: bytes, page: Directory, layout: Layout) -> np.ndarray:
    """All samples of the page, H x W x samples, as uint8 or uint16."""
    strips = _cut_strips(data, page, layout)
    strips_per_plane = -(-layout.height // layout.rows_per_strip)
    planes = [
        _unpack_rows(_decompress(strips[start : start + strips_per_plane], layout), layout)
        for start in range(0, len(strips), strips_per_plane)
    ]
    return np.concatenate(planes, axis=2) if len(planes) > 1 else planes[0]


def _cut_strips(data: bytes, page: Directory, layout: Layout) -> list[memoryview]:
    num_strips = (layout.num_samples if layout.is_planar else 1) * -(-layout.height // layout.rows_per_strip)
    starts, sizes = page.integers(STRIP_OFFSETS), page.integers(STRIP_BYTE_COUNTS)
    if not len(starts) == len(sizes) == num_strips:
        raise BadDirectory(f"{len(starts)} strips of {num_strips}")
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    if max(ends) > len(data):
        raise Refused(RejectReason.TRUNCATED, f"a strip ends at byte {max(ends)} of {len(data)}")
    # Strips that share bytes would let a small file hold any amount of work.
    if sum(sizes) > len(data):
        raise BadDirectory(f"strips of {sum(sizes)} bytes in a file of {len(data)}: they overlap")
    view = memoryview(data)
    return [view[start:end] for start, end in zip(starts, ends, strict=True)]


def _unpack_rows(rows: np.ndarray, layout: Layout) -> np.ndarray:
    if layout.bits == 1:
        bits_HW = np.unpackbits(rows.reshape(layout.height, -1), axis=1)[:, : layout.width]
        return (bits_HW * 255)[:, :, np.newaxis]
    dtype = np.dtype(np.uint8) if layout.bits == 8 else np.dtype(layout.byte_order + "u2")
    samples_HWC = rows.view(dtype).reshape(layout.height, layout.width, -1).astype(dtype.newbyteorder("="))
    if layout.uses_predictor:  # each sample was stored as the difference to the one on its left
        np.cumsum(samples_HWC, axis=1, dtype=samples_HWC.dtype, out=samples_HWC)
    return samples_HWC


def _decompress(strips: Sequence[memoryview], layout: Layout) -> np.ndarray:
    """The rows of one plane."""
    if layout.compression in (LZW, PACKBITS):
        return decode_plain_gray(TiffImageFile, _as_plain_file(strips, layout))
    rows = bytearray()
    for number, strip in enumerate(strips):
        num_rows = min(layout.rows_per_strip, layout.height - number * layout.rows_per_strip)
        num_bytes = num_rows * layout.row_bytes()
        raw = strip[:num_bytes] if layout.compression == UNCOMPRESSED else _inflate(strip, num_bytes)
        if len(raw) < num_bytes:
            raise Refused(RejectReason.CORRUPT_SCAN, f"a strip gives {len(raw)} of {num_bytes} bytes")
        rows += raw
    return np.frombuffer(rows, np.uint8)


def _inflate(strip: memoryview, num_bytes: int) -> bytes:
    """By zlib itself: libtiff accepts a strip whose checksum was cut off."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(strip, num_bytes)
    except zlib.error as error:
        raise Refused(RejectReason.CORRUPT_SCAN, f"a strip: {error}") from error
    # At the end zlib has compared its checksum. Data that is left over is no damage: some writers fill up the last
    # strip.
    if not inflater.eof and not inflater.unconsumed_tail:
        raise Refused(RejectReason.CORRUPT_SCAN, "a strip whose compressed data has no end")
    return raw


def _as_plain_file(strips: Sequence[memoryview], layout: Layout) -> bytes:
    """The plane as a gray picture of 8 bits that is as wide as a row has bytes."""
    tables_start = 8 + 2 + 12 * 8 + 4
    strips_start = tables_start + 8 * len(strips)
    sizes = [len(strip) for strip in strips]
    starts = [strips_start + before for before in accumulate(sizes[:-1], initial=0)]
    tags = {
        WIDTH: layout.row_bytes(),
        HEIGHT: layout.height,
        BITS_PER_SAMPLE: 8,
        COMPRESSION: layout.compression,
        PHOTOMETRIC: BLACK_IS_ZERO,
        STRIP_OFFSETS: tables_start if len(strips) > 1 else strips_start,
        ROWS_PER_STRIP: layout.rows_per_strip,
        STRIP_BYTE_COUNTS: tables_start + 4 * len(strips) if len(strips) > 1 else sizes[0],
    }
    counts = {STRIP_OFFSETS: len(strips), STRIP_BYTE_COUNTS: len(strips)}
    entries = b"".join(struct.pack("<HHII", tag, 4, counts.get(tag, 1), value) for tag, value in tags.items())
    tables = struct.pack(f"<{2 * len(strips)}I", *starts, *sizes)
    return b"".join([b"II*\0", struct.pack("<IH", 8, len(tags)), entries, bytes(4), tables, *strips])


def _to_color(samples_HWC: np.ndarray, photometric: int, color_map: tuple[int, ...]) -> np.ndarray:
    if photometric == WHITE_IS_ZERO:
        return 255 - samples_HWC
    if photometric == PALETTE:
        if len(color_map) != 3 * 256:
            raise Refused(RejectReason.BAD_HEADER, f"a palette of {len(color_map)} values")
        # Colours have 16 bits; some writers use eight of them.
        shift = 8 if max(color_map) > 255 else 0
        palette_KC = (np.array(color_map, dtype=np.uint16) >> shift).astype(np.uint8).reshape(3, 256).T
        return palette_KC[samples_HWC[:, :, 0]]
    return samples_HWC


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
