"""The images of the bad-input table (rows 1 to 83): of every format, intact, odd, damaged and hostile."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator

import cv2
import numpy as np
import simplejpeg
from PIL import ImageCms

from pipeline.demo.data import damage_scan
from shardmill.values import RejectReason
from tests.bad_input import BadInput
from tests.shardmill.images import make
from tests.shardmill.images.make import (
    animated_webp,
    gif_by_hand,
    gif_frame,
    gray_photo,
    jpeg,
    photo,
    png,
    ramp_alpha,
    run_length_bmp,
)

R = RejectReason
RGBA = np.dstack([photo(), ramp_alpha()])
MPF_OF_2 = b"MPF\0II*\0" + struct.pack("<IHHHIII", 8, 1, 0xB001, 4, 1, 2, 0)


def jpegs() -> Iterator[BadInput]:
    good = jpeg(photo())

    def case(row: int, name: str, data: bytes, reason: R | None = None, *notes: str, detail: str = "") -> BadInput:
        return BadInput(row, f"jpeg/{row} {name}.jpg", data, reason, detail, notes)

    yield case(1, "baseline", make.by_opencv(".jpg", photo()))
    yield case(2, "progressive", make.by_opencv(".jpg", photo(), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]))
    yield case(3, "full colour resolution", good)
    yield case(4, "gray", make.gray_jpeg(gray_photo()))
    ycck = simplejpeg.encode_jpeg(np.ascontiguousarray(RGBA), 98, colorspace="CMYK", colorsubsampling="444")
    adobe = ycck.index(b"\xff\xee")
    inks = ycck[: adobe + 15] + b"\0" + ycck[adobe + 16 :]
    yield case(5, "inks with marker", inks, None, "cmyk_converted")
    yield case(6, "inks without marker", ycck[:adobe] + ycck[adobe + 16 :], None, "cmyk_converted")
    yield case(7, "YCCK", ycck, None, "cmyk_converted")
    for orientation in range(1, 9):
        turned = make.with_orientation(good, orientation)
        yield case(7 + orientation, f"orientation {orientation}", turned, None, *["exif_rotated"][: orientation - 1])
    yield case(16, "orientation 0", make.with_orientation(good, 0), None, "exif_ignored")
    yield case(16, "orientation 9", make.with_orientation(good, 9), None, "exif_ignored")
    yield case(17, "corrupt exif", make.with_segment(good, 0xE1, b"Exif\0\0XX*\0"), None, "exif_ignored")
    mpo = make.with_segment(good, 0xE2, MPF_OF_2) + good
    yield case(18, "turned MPO", make.with_orientation(mpo, 6), None, "first_frame_of_2", "exif_rotated")
    for row, share in ((19, 0.5), (20, 0.99), (21, 0.02)):
        yield case(row, f"{share:.0%} of it", good[: int(len(good) * share)], R.TRUNCATED)
    yield case(22, "no end marker", good[:-2], R.TRUNCATED)
    yield case(23, "damaged scan", damage_scan(make.gray_jpeg(gray_photo())), R.CORRUPT_SCAN)
    yield case(24, "trailing bytes", good + b"\0" * 100, None, "trailing_bytes")
    archive = io.BytesIO(good)
    with zipfile.ZipFile(archive, "a") as zipped:
        zipped.writestr("x", "y")
    yield case(25, "a zip too", archive.getvalue(), None, "trailing_bytes")
    yield case(26, "another behind it", good + good, None, "trailing_bytes")
    yield case(27, "junk before it", b"junk" + good, R.NOT_AN_IMAGE)
    yield case(28, "65000 x 65000", _with_frame(good, 4, struct.pack(">HH", 65000, 65000)), R.TOO_MANY_PIXELS)
    yield case(29, "height in DNL", _with_frame(good, 4, b"\0\0"), R.UNSUPPORTED_FORMAT)
    for row_name, offset, value in (("arithmetic", 0, b"\xc9"), ("12 bits", 3, b"\x0c"), ("lossless", 0, b"\xc3")):
        yield case(30, row_name, _with_frame(good, offset, value), R.UNSUPPORTED_FORMAT)
    yield from _no_images()
    yield BadInput(38, "jpeg/38 really PNG.jpg", png(photo()), notes=("extension_mismatch",))
    yield case(57, "Adobe RGB", make.with_profile(good, make.rgb_profile()), None, "icc_converted")
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    yield case(57, "sRGB", make.with_profile(good, srgb))
    yield case(58, "corrupt profile", make.with_profile(good, bytes(200)), None, "icc_ignored")
    yield case(72, "MPO", mpo, None, "first_frame_of_2")


def _no_images() -> Iterator[BadInput]:
    for row, name, data, looks_like in (
        (32, "one byte", b"\xff", "unknown"),
        (33, "zeros", bytes(10_000_000), "zeros"),
        (34, "page", b"<!DOCTYPE html><html>403 Forbidden</html>", "html"),
        (35, "text", b"This is not the picture that you look for.", "text"),
        (36, "error body", b'{"error": "AccessDenied"}', "json"),
        (37, "lfs pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git_lfs"),
    ):
        yield BadInput(row, f"jpeg/{row} {name}.jpg", data, R.NOT_AN_IMAGE, f"looks_like={looks_like}")
    yield BadInput(31, "jpeg/31 nothing.jpg", b"", R.EMPTY_FILE)


def pngs() -> Iterator[BadInput]:
    good = png(photo())

    def case(row: int, name: str, data: bytes, reason: R | None = None, *notes: str) -> BadInput:
        return BadInput(row, f"png/{row} {name}.png", data, reason, "", notes)

    yield case(39, "rgb", good)
    yield case(40, "gray", png(gray_photo()))
    yield case(40, "one bit", make.png_by_hand(b"\0\xaa" * 8 + b"\0\x55" * 8, (8, 16), 1, 0))
    yield case(41, "interlaced", interlaced_png(gray_photo()))
    yield case(42, "alpha", png(RGBA), None, "alpha_flattened")
    hidden = np.dstack([photo(), np.zeros((24, 32), np.uint8)])
    yield case(43, "hidden colour", png(hidden), None, "alpha_flattened", "constant")
    gray_alpha = np.dstack([gray_photo(), ramp_alpha()])
    rows = b"".join(b"\0" + row.tobytes() for row in gray_alpha)
    yield case(44, "gray and alpha", make.png_by_hand(rows, (32, 24), 8, 4), None, "alpha_flattened")
    palette = make.png_chunk(b"PLTE", bytes(range(0, 240, 20)))
    indexes, size = b"\0\0\1\2\3\3\2\1\0" * 16, (8, 16)
    yield case(45, "palette", make.png_by_hand(indexes, size, 8, 3, palette))
    some_alpha = palette + make.png_chunk(b"tRNS", b"\0\x80")
    yield case(45, "palette and alpha", make.png_by_hand(indexes, size, 8, 3, some_alpha), None, "alpha_flattened")
    one_gray = make.png_chunk(b"tRNS", b"\0\2")
    yield case(46, "transparent gray", make.png_by_hand(indexes, size, 8, 0, one_gray), None, "alpha_flattened")
    yield case(47, "gray of 16 bits", png(gray_photo().astype(np.uint16) * 257), None, "scaled_16_bit")
    yield case(48, "rgb of 16 bits", png(photo().astype(np.uint16) * 257), None, "scaled_16_bit")
    deep = png(RGBA.astype(np.uint16) * 257)
    yield case(48, "alpha of 16 bits", deep, None, "scaled_16_bit", "alpha_flattened")
    yield case(49, "animated", _with_chunk(good, b"acTL", struct.pack(">II", 3, 0)), None, "first_frame_of_3")
    yield case(50, "half of it", good[: len(good) // 2], R.TRUNCATED)
    flipped = bytearray(good)
    flipped[good.index(b"IDAT") + 10] ^= 1
    yield case(51, "flipped bit", bytes(flipped), R.CHECKSUM)
    for row, side in ((52, 20_000), (53, 12_000), (54, 60_000)):
        yield case(row, f"bomb {side}", _bomb(side, side), R.TOO_MANY_PIXELS)
    text = b"Comment\0\0" + zlib.compress(bytes(64_000_000), 9)
    yield case(55, "text bomb", _with_chunk(good, b"zTXt", text))
    gamma = _with_chunk(_with_chunk(good, b"gAMA", (45_455).to_bytes(4)), b"cHRM", bytes(32))
    yield case(56, "gamma", gamma)
    profile = b"name\0\0" + zlib.compress(make.rgb_profile())
    yield case(57, "Adobe RGB", _with_chunk(good, b"iCCP", profile), None, "icc_converted")
    large = b"name\0\0" + zlib.compress(make.rgb_profile() + bytes(10_000_000))
    yield case(58, "large profile", _with_chunk(good, b"iCCP", large), None, "icc_ignored")
    yield case(79, "1x1", png(photo(1, 1)), None, "tiny", "constant")
    yield case(80, "1x5000", png(np.zeros((5000, 1), np.uint8)), R.ASPECT_RATIO)
    yield case(81, "65500x1", png(np.zeros((1, 65500), np.uint8)), R.TOO_MANY_PIXELS)
    yield case(82, "10000x10000", _bomb(10_000, 10_000), R.TOO_MANY_PIXELS)
    for name, level in (("black", 0), ("white", 255), ("constant", 77)):
        yield case(83, name, png(np.full((24, 24, 3), level, np.uint8)), None, "constant")


def other_formats() -> Iterator[BadInput]:
    def case(row: int, name: str, data: bytes, reason: R | None = None, *notes: str, detail: str = "") -> BadInput:
        return BadInput(row, f"other/{row} {name}", data, reason, detail, notes)

    yield case(59, "still.gif", make.gif(gray_photo()))
    yield case(60, "animated.gif", make.gif(gray_photo(), 255 - gray_photo(), gray_photo()), None, "first_frame_of_3")
    offset = gif_by_hand(gif_frame(1, 1, 2, 1, [4, 1, 2, 5]), (8, 8))
    yield case(60, "offset.gif", offset, None, "alpha_flattened")
    yield case(61, "zero width.gif", gif_by_hand(gif_frame(0, 0, 1, 1, [4, 1, 5]), (0, 2)), R.BAD_HEADER)
    yield case(62, "lossy.webp", make.webp(photo(), 80))
    yield case(63, "alpha.webp", make.webp(RGBA, 80), None, "alpha_flattened")
    yield case(64, "animated.webp", animated_webp(3), None, "first_frame_of_3", "alpha_flattened")
    yield case(65, "plain.bmp", make.bmp(photo()))
    yield case(65, "run lengths.bmp", run_length_bmp(), None, "tiny")
    huge = bytearray(make.bmp(photo()))
    huge[18:26] = struct.pack("<ii", 60_000, 60_000)
    yield case(65, "huge.bmp", bytes(huge), R.TOO_MANY_PIXELS)
    yield case(66, "rgb.tiff", make.tiff_of(photo()))
    yield case(67, "lzw.tiff", make.by_opencv(".tiff", photo(), [cv2.IMWRITE_TIFF_COMPRESSION, 5]))
    _, pages = cv2.imencodemulti(".tiff", [photo(), photo()])
    yield case(68, "pages.tiff", pages.tobytes(), None, "first_frame_of_2")
    inks = {256: [32], 257: [24], 258: [8] * 4, 262: [5], 277: [4]}
    yield case(69, "inks.tiff", make.tiff(inks, [RGBA.tobytes()]), None, "cmyk_converted")
    for name, tags in (("float", {339: [3]}), ("lab", {262: [8]}), ("tiles", {322: [16]})):
        yield case(70, f"{name}.tiff", make.tiff_of(photo(), tags), R.UNSUPPORTED_MODE)
    looped = make.tiff({256: [32], 257: [24], 258: [8], 262: [1]}, [gray_photo().tobytes()], next_page=8)
    yield case(71, "loop.tiff", looped, R.BAD_HEADER)
    yield case(73, "picture.avif", make.avif(photo()))
    yield case(73, "cut.avif", make.avif(photo())[:60], R.TRUNCATED)
    for row, extension, data in (
        (74, "jp2", b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(20)),
        (75, "heic", b"\0\0\0\x1cftypheic" + bytes(20)),
        (76, "svg", b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>'),
        (78, "ico", b"\0\0\1\0\1\0" + bytes(20)),
        (78, "tga", b"\0\0\2\0" + bytes(20) + b"TRUEVISION-XFILE.\0"),
        (78, "netpbm", b"P6\n1 1\n255\n..."),
        (78, "psd", b"8BPS\0\1" + bytes(20)),
        (78, "fits", b"SIMPLE  =                    T"),
        (78, "wmf", b"\xd7\xcd\xc6\x9a" + bytes(20)),
    ):
        yield case(row, f"{extension}.jpg", data, R.UNSUPPORTED_FORMAT, detail=f"format={extension}")
    for name, data in (("postscript", b"%!PS-Adobe-3.0\n"), ("eps", b"\xc5\xd0\xd3\xc6"), ("pdf", b"%PDF-1.7\n")):
        yield case(77, f"{name}.jpg", data, R.UNSAFE_FORMAT, detail=f"format={name}")


def interlaced_png(pixels_HW: np.ndarray) -> bytes:
    """Adam7: seven passes, each a coarser or shifted grid of the pixels."""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    grids = [pixels_HW[top::down, left::across] for top, left, down, across in passes]
    rows = b"".join(b"\0" + row.tobytes() for grid in grids for row in grid)
    height, width = pixels_HW.shape
    header = make.png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 1))
    pixels = make.png_chunk(b"IDAT", zlib.compress(rows)) + make.png_chunk(b"IEND", b"")
    return make.PNG_SIGNATURE + header + pixels


def _with_frame(data: bytes, offset: int, value: bytes) -> bytes:
    """The JPEG with bytes of its frame header changed; offset 0 is the marker's code, 4 the height."""
    start = data.index(b"\xff\xc0") + 1 + offset
    return data[:start] + value + data[start + len(value) :]


def _with_chunk(data: bytes, chunk_type: bytes, payload: bytes) -> bytes:
    return data[:33] + make.png_chunk(chunk_type, payload) + data[33:]


def _bomb(width: int, height: int) -> bytes:
    pixels = make.png_chunk(b"IDAT", zlib.compress(bytes(1000))) + make.png_chunk(b"IEND", b"")
    return make.png_header(width, height, 8, 2) + pixels
