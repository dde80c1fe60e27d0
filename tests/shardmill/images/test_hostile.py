"""Small files made to cost much: none takes the sandbox's ten seconds or two gigabytes, and each ends as it should.

Before the walks over their headers were made linear, some took from ten seconds to hours.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from PIL import Image

from shardmill.images.sandbox import DecodeSandbox
from shardmill.options import DecodeLimits
from shardmill.values import ImageSample, RejectReason, SourceImage
from tests.processes import children_of, peak_bytes
from tests.shardmill.images.make import (
    OPTIONS,
    gif,
    gray_photo,
    jpeg,
    one_of_each_format,
    photo,
    png_chunk,
    png_header,
    tiff,
    tiff_of,
    with_segment,
)

pytestmark = pytest.mark.starts("decoder")

# More than the decoders' own libraries take.
IDLE_BYTES = 300_000_000
LZW_NOISE = {256: [4000], 257: [4000], 258: [8], 262: [1], 259: [5]}


def jpeg_with_fill_bytes_in_its_scan() -> bytes:
    """A run of 0xFF that does not end in a marker: the pattern for one was tried again at each of its bytes."""
    data = jpeg(photo())
    return data[:-2] + b"\xff" * 1_000_000 + b"\0" + data[-2:] + b"tail"


def jpeg_with_many_fake_ends() -> bytes:
    data = jpeg(photo())
    return data[:-2] + b"\xff\xc4\0\2" * 250_000 + data[-2:] + b"tail"


def jpeg_with_fill_bytes_in_its_header() -> bytes:
    data = jpeg(photo())
    return data[:2] + b"\xff" * 40_000_000 + data[2:]


def jpeg_of_empty_segments() -> bytes:
    data = jpeg(photo())
    return data[:2] + b"\xff\xe0\0\2" * 5_000_000 + data[2:]


def jpeg_with_a_large_profile() -> bytes:
    """45 MB in 700 parts: each was joined to all before it. libjpeg says that there may be 255."""
    data = jpeg(photo())
    part = b"\xff\xe2\0\x10ICC_PROFILE\0\1\1" + b"x" * 65000
    part = part[:2] + (len(part) - 2).to_bytes(2) + part[4:]
    return data[:2] + part * 700 + data[2:]


def jpeg_of_many_scans() -> bytes:
    progressive = one_of_each_format()["progressive"]
    start = progressive.rindex(b"\xff\xda")
    return progressive[:-2] + progressive[start:-2] * 5000 + progressive[-2:]


def jpeg_with_a_directory_of_one_tag() -> bytes:
    """An orientation of 16,000 values."""
    exif = b"II*\0" + struct.pack("<IHHHII", 8, 1, 0x0112, 4, 16_000, 26) + bytes(64_000)
    return with_segment(jpeg(photo()), 0xE1, b"Exif\0\0" + exif)


def png_bomb(side: int) -> bytes:
    pixels = zlib.compress(bytes(1000 * 1000), 9)
    return png_header(side, side, 8, 2) + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")


def png_of_empty_chunks() -> bytes:
    return png_header(8, 8, 8, 0) + png_chunk(b"IDAT", b"") * 3_000_000 + png_chunk(b"IEND", b"")


def png_with_a_profile_bomb() -> bytes:
    profile = b"name\0\0" + zlib.compress(bytes(200_000_000), 9)
    rows = zlib.compress(bytes(9 * 8))
    return png_header(8, 8, 8, 0) + png_chunk(b"iCCP", profile) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


def webp_of_empty_chunks() -> bytes:
    body = b"WEBP" + b"".join(struct.pack("<II", number, 0) for number in range(2_000_000))
    return b"RIFF" + struct.pack("<I", len(body)) + body


def tiff_with_overlapping_strips() -> bytes:
    """Every row is a strip, and every strip is the whole file."""
    strip = zlib.compress(bytes(4000))
    data = bytearray(tiff({**LZW_NOISE, 259: [8], 278: [1]}, [strip] + [b""] * 3999))
    values = data.index(struct.pack("<HHI", 273, 4, 4000)) + 8
    sizes = data.index(struct.pack("<HHI", 279, 4, 4000)) + 8
    [starts_at], [sizes_at] = struct.unpack_from("<I", data, values), struct.unpack_from("<I", data, sizes)
    place = data.index(strip)
    data[starts_at : starts_at + 16_000] = struct.pack("<I", place) * 4000
    data[sizes_at : sizes_at + 16_000] = struct.pack("<I", len(strip)) * 4000
    return bytes(data)


def tiff_page_chain() -> bytes:
    """9,000 directories of 4,000 entries, each six bytes behind the one before: they share nearly all bytes."""
    page = tiff({256: [32], 257: [24], 258: [8], 262: [1]}, [gray_photo().tobytes()])
    first, entries = len(page), 4000
    # Two bytes of the count of one directory, four of the pointer behind the entries of an earlier one.
    pointers = [0] * (12 * entries // 6) + [first + 6 * number for number in range(1, 9000)] + [0]
    chain = b"".join(struct.pack("<HI", entries, pointer) for pointer in pointers)
    return with_next_page(page, first) + chain + bytes(12 * entries)


def with_next_page(page: bytes, start: int) -> bytes:
    place = 8 + 2 + 12 * struct.unpack_from("<H", page, 8)[0]
    return page[:place] + struct.pack("<I", start) + page[place + 4 :]


def tiff_page_loop() -> bytes:
    return tiff({256: [32], 257: [24], 258: [8], 262: [1]}, [gray_photo().tobytes()], next_page=8)


def tiff_with_a_tag_of_many_values() -> bytes:
    """Ten million bits-per-sample entries."""
    page = tiff_of(gray_photo())
    place = page.index(struct.pack("<HHI", 258, 4, 1))
    entry = struct.pack("<HHII", 258, 4, 10_000_000, len(page))
    return page[:place] + entry + page[place + 12 :] + struct.pack("<I", 8) * 10_000_000


def by_pillow(pixels_HW: np.ndarray, format_name: str, **parameters: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels_HW).save(file, format_name, **parameters)
    return file.getvalue()


def black(side: int) -> np.ndarray:
    return np.zeros((side, side), np.uint8)


def noise(side: int) -> np.ndarray:
    """Nearly every pixel a code of its own, the slow case of a decoder in Python."""
    return np.random.RandomState(3).randint(0, 256, (side, side)).astype(np.uint8)


def gif_of_tiny_blocks() -> bytes:
    data = gif(gray_photo(8, 8))
    return data[:-1] + b"\x21\xfe" + b"\1x" * 5_000_000 + b"\0\x3b"


def gif_of_many_frames() -> bytes:
    data = gif(gray_photo(8, 8))
    return data[:-1] + b"\x2c" + bytes(9) * 1 + b"\x02\0" * 1 + (b"\x2c" + bytes(9) + b"\x02\0") * 1_000_000 + b"\x3b"


def bmp_header(side: int) -> bytes:
    return (
        b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    )


CRAFTED: dict[str, tuple[Callable[[], bytes], RejectReason | None]] = {
    "jpeg: fill bytes in the scan": (jpeg_with_fill_bytes_in_its_scan, None),
    "jpeg: fake ends of the scan": (jpeg_with_many_fake_ends, RejectReason.BAD_HEADER),
    "jpeg: fill bytes in the header": (jpeg_with_fill_bytes_in_its_header, None),
    "jpeg: empty segments": (jpeg_of_empty_segments, RejectReason.BAD_HEADER),
    "jpeg: a profile in 700 parts": (jpeg_with_a_large_profile, RejectReason.CORRUPT_SCAN),
    "jpeg: 5,000 scans": (jpeg_of_many_scans, RejectReason.UNSUPPORTED_FORMAT),
    "jpeg: a tag of many values": (jpeg_with_a_directory_of_one_tag, None),
    "png: bomb of 64 megapixels": (lambda: png_bomb(8000), RejectReason.CORRUPT_SCAN),
    "png: bomb of 144 megapixels": (lambda: png_bomb(12_000), RejectReason.TOO_MANY_PIXELS),
    "png: 60,000 x 60,000": (lambda: png_bomb(60_000), RejectReason.TOO_MANY_PIXELS),
    "png: empty chunks": (png_of_empty_chunks, RejectReason.BAD_HEADER),
    "png: a profile of 200 MB": (png_with_a_profile_bomb, None),
    "webp: empty chunks": (webp_of_empty_chunks, RejectReason.BAD_HEADER),
    "tiff: overlapping strips": (tiff_with_overlapping_strips, RejectReason.BAD_HEADER),
    "tiff: chain of pages": (tiff_page_chain, None),
    "tiff: loop of pages": (tiff_page_loop, RejectReason.BAD_HEADER),
    "tiff: a tag of many values": (tiff_with_a_tag_of_many_values, RejectReason.BAD_HEADER),
    "tiff: LZW bomb of 64 megapixels": (lambda: by_pillow(black(8000), "TIFF", compression="tiff_lzw"), None),
    "tiff: 60,000 x 60,000": (lambda: tiff_of(photo(), {256: [60_000], 257: [60_000]}), RejectReason.TOO_MANY_PIXELS),
    "gif: noise of 25 megapixels": (lambda: by_pillow(noise(5000), "GIF"), None),
    "gif: bomb of 64 megapixels": (lambda: by_pillow(black(8000), "GIF"), None),
    "gif: tiny blocks": (gif_of_tiny_blocks, None),
    "gif: a million frames": (gif_of_many_frames, None),
    "gif: 65,535 x 65,535": (
        lambda: gif(gray_photo(8, 8))[:6] + b"\xff" * 4 + bytes(9),
        RejectReason.TOO_MANY_PIXELS,
    ),
    "bmp: 60,000 x 60,000": (lambda: bmp_header(60_000), RejectReason.TOO_MANY_PIXELS),
}


@pytest.fixture(scope="module")
def others() -> set[int]:
    """The children of this process but for the sandbox's."""
    return children_of(os.getpid())


@pytest.fixture(scope="module")
def sandbox(others: set[int]) -> Iterator[DecodeSandbox]:
    """With the product's own limits: what takes longer or more is not decoded but rejected."""
    with DecodeSandbox() as sandbox:
        yield sandbox


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_ends_as_it_should_within_the_limits(name: str, others: set[int], sandbox: DecodeSandbox):
    build, expected = CRAFTED[name]
    data = build()
    outcome = sandbox.process(SourceImage(key="x", size_bytes=len(data)), data, OPTIONS)
    [child] = children_of(os.getpid()) - others
    assert peak_bytes(child) < IDLE_BYTES + DecodeLimits().decode_memory_bytes
    if expected is None:
        assert isinstance(outcome, ImageSample), outcome
    else:
        assert not isinstance(outcome, ImageSample), outcome.notes
        assert outcome.reason is expected, outcome


@pytest.mark.drill
def test_the_largest_honest_image_fits_into_the_default_limits(sandbox: DecodeSandbox) -> None:
    """64 megapixels of 16-bit RGBA, the most bytes that `max_source_pixels` lets through."""
    row = b"\0" + bytes(8 * 8000)
    deflate = zlib.compressobj(1)
    rows = b"".join(deflate.compress(row) for _ in range(8000)) + deflate.flush()
    data = png_header(8000, 8000, 16, 6) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")
    outcome = sandbox.process(SourceImage(key="x", size_bytes=len(data)), data, OPTIONS)
    assert isinstance(outcome, ImageSample), outcome
