"""Small image files of every kind for the tests of `shardmill.images`, made without the code under test.

Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping, Sequence

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from shardmill.images.decode import decode_image
from shardmill.images.pixels import DecodedImage, Refused
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

OPTIONS = NormalizeOptions(image_size=24)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def photo(height: int = 24, width: int = 32) -> np.ndarray:
    """RGB pixels with smooth edges, different in every corner (so that no flip or turn goes unnoticed)."""
    coarse = np.random.RandomState(7).randint(0, 256, (4, 5, 3)).astype(np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR_EXACT)


def gray_photo(height: int = 24, width: int = 32) -> np.ndarray:
    return np.ascontiguousarray(photo(height, width)[:, :, 1])


def ramp_alpha(height: int = 24, width: int = 32) -> np.ndarray:
    return np.tile(np.linspace(0, 255, width).astype(np.uint8), (height, 1))


def over_white(color_HWC: np.ndarray, alpha_HW: np.ndarray) -> np.ndarray:
    weight = alpha_HW[:, :, np.newaxis] / 255.0
    return np.floor(color_HWC * weight + 255.0 * (1.0 - weight) + 0.5)


def jpeg(pixels_HWC: np.ndarray, quality: int = 98) -> bytes:
    return simplejpeg.encode_jpeg(np.ascontiguousarray(pixels_HWC), quality, colorsubsampling="444")


def gray_jpeg(pixels_HW: np.ndarray) -> bytes:
    stored = np.ascontiguousarray(pixels_HW)[:, :, np.newaxis]
    return simplejpeg.encode_jpeg(stored, 98, colorspace="GRAY", colorsubsampling="Gray")


def by_opencv(extension: str, pixels: np.ndarray, parameters: Sequence[int] = ()) -> bytes:
    """`pixels` in RGB(A) order or gray."""
    if pixels.ndim == 3:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR if pixels.shape[2] == 3 else cv2.COLOR_RGBA2BGRA)
    done, encoded = cv2.imencode(extension, pixels, list(parameters))
    assert done
    return encoded.tobytes()


def png(pixels: np.ndarray) -> bytes:
    return by_opencv(".png", pixels)


def webp(pixels: np.ndarray, quality: int = 101) -> bytes:
    """Lossless above quality 100."""
    return by_opencv(".webp", pixels, [cv2.IMWRITE_WEBP_QUALITY, quality])


def avif(pixels_HWC: np.ndarray, quality: int = 90, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels_HWC).save(file, "AVIF", quality=quality, subsampling="4:4:4", **options)
    return file.getvalue()


def bmp(pixels: np.ndarray) -> bytes:
    return by_opencv(".bmp", pixels)


def with_segment(jpeg: bytes, marker: int, payload: bytes) -> bytes:
    """The JPEG with one more segment in front of all others."""
    return jpeg[:2] + bytes((0xFF, marker)) + struct.pack(">H", len(payload) + 2) + payload + jpeg[2:]


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    """The JPEG with an EXIF segment that holds this one tag."""
    directory = struct.pack("<HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)
    return with_segment(jpeg, 0xE1, b"Exif\0\0" + b"II*\0" + struct.pack("<I", 8) + directory)


def gif(*frames_HW: np.ndarray) -> bytes:
    """Gray frames of one size; an animation if there are several."""
    first, *others = (Image.fromarray(frame_HW) for frame_HW in frames_HW)
    file = io.BytesIO()
    first.save(file, "GIF", save_all=bool(others), append_images=others, interlace=0, optimize=False)
    return file.getvalue()


def png_chunk(chunk_type: bytes, payload: bytes) -> bytes:
    checksum = zlib.crc32(chunk_type + payload)
    return struct.pack(">I", len(payload)) + chunk_type + payload + struct.pack(">I", checksum)


def png_header(width: int, height: int, depth: int, color_type: int) -> bytes:
    """Signature and IHDR of a PNG that is not interlaced."""
    return PNG_SIGNATURE + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0))


def png_by_hand(rows: bytes, size: tuple[int, int], depth: int, color_type: int, extra_chunks: bytes = b"") -> bytes:
    """`rows` hold a filter byte in front of each row; `size` is (width, height)."""
    head = png_header(*size, depth, color_type) + extra_chunks
    return head + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")


def tiff(
    tags: Mapping[int, Sequence[int]], strips: Sequence[bytes], byte_order: str = "<", next_page: int = 0
) -> bytes:
    """One page of LONG tags; the tags of the strips' places are added."""
    longs = {**tags, 279: [len(strip) for strip in strips], 273: [0] * len(strips)}
    values_start = 8 + 2 + 12 * len(longs) + 4
    strips_start = values_start + sum(4 * len(values) for values in longs.values() if len(values) > 1)
    longs[273] = [strips_start + sum(map(len, strips[:index])) for index in range(len(strips))]
    entries, values_bytes = b"", b""
    for tag, values in sorted(longs.items()):
        packed = struct.pack(f"{byte_order}{len(values)}I", *values)
        if len(values) > 1:
            value = struct.pack(f"{byte_order}I", values_start + len(values_bytes))
            values_bytes += packed
        else:
            value = packed
        entries += struct.pack(f"{byte_order}HHI", tag, 4, len(values)) + value
    signature = b"II*\0" if byte_order == "<" else b"MM\0*"
    head = signature + struct.pack(f"{byte_order}IH", 8, len(longs)) + entries
    return head + struct.pack(f"{byte_order}I", next_page) + values_bytes + b"".join(strips)


def tiff_of(pixels: np.ndarray, extra_tags: Mapping[int, Sequence[int]] | None = None, byte_order: str = "<") -> bytes:
    """Uncompressed, in strips of ten rows; gray, RGB, or RGB and alpha."""
    height, width = pixels.shape[:2]
    num_samples = 1 if pixels.ndim == 2 else pixels.shape[2]
    stored = pixels if pixels.dtype == np.uint8 else pixels.astype(byte_order + "u2")
    strips = [stored[start : start + 10].tobytes() for start in range(0, height, 10)]
    tags = {
        256: [width], 257: [height], 258: [8 * pixels.dtype.itemsize] * num_samples,
        262: [1 if num_samples == 1 else 2], 277: [num_samples], 278: [10],
    }  # fmt: skip
    return tiff({**tags, **(extra_tags or {})}, strips, byte_order)


def one_of_each_format(picture_HWC: np.ndarray | None = None) -> dict[str, bytes]:
    """Small intact files of an RGB picture, to be mutated."""
    rgb = photo() if picture_HWC is None else picture_HWC
    gray = np.ascontiguousarray(rgb[:, :, 1])
    rgba = np.dstack([rgb, ramp_alpha(*gray.shape)])
    return {
        "jpeg": jpeg(rgb, 90), "progressive": by_opencv(".jpg", rgb, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]),
        "gray_jpeg": gray_jpeg(gray),
        "cmyk": simplejpeg.encode_jpeg(np.ascontiguousarray(rgba), 90, colorspace="CMYK"), "png": png(rgb),
        "rgba_png": png(rgba), "png_16": png(gray.astype(np.uint16) * 257), "gif": gif(gray, gray[::-1]),
        "webp": webp(rgb), "lossy_alpha_webp": webp(rgba, 80), "bmp": bmp(rgb), "tiff": tiff_of(rgb),
        "tiff_lzw": by_opencv(".tiff", rgb, [cv2.IMWRITE_TIFF_COMPRESSION, 5]), "avif": avif(rgb),
        "tiff_deflate": by_opencv(".tiff", rgb, [cv2.IMWRITE_TIFF_COMPRESSION, 8]),
    }  # fmt: skip


def decode(data: bytes, options: NormalizeOptions = OPTIONS) -> DecodedImage:
    return decode_image(data, options)[1]


def refusal(data: bytes, options: NormalizeOptions = OPTIONS) -> tuple[RejectReason, str]:
    """Reason and detail; fails if the bytes are accepted."""
    try:
        decoded = decode(data, options)
    except Refused as refused:
        return refused.reason, refused.detail
    raise AssertionError(f"accepted, with notes {decoded.notes}")


def mean_error(decoded_HWC: np.ndarray, expected: np.ndarray) -> float:
    if expected.ndim == 2:
        expected = expected[:, :, np.newaxis]
    assert decoded_HWC.shape == expected.shape
    return float(np.abs(decoded_HWC.astype(np.float64) - expected).mean())


# Chromaticities as D50 XYZ columns for red, green and blue, as profiles hold them.
SRGB_XYZ = ((0.43607, 0.38515, 0.14307), (0.22249, 0.71687, 0.06061), (0.01392, 0.09708, 0.71410))
ADOBE_RGB_XYZ = ((0.60974, 0.20528, 0.14919), (0.31111, 0.62567, 0.06322), (0.01947, 0.06087, 0.74457))


def icc_profile(
    space: bytes, tags: Mapping[bytes, bytes], pcs: bytes = b"XYZ ", device_class: bytes = b"mntr"
) -> bytes:
    """A profile of version 2 with these tags beside a name."""
    tags = {b"desc": b"desc" + bytes(4) + struct.pack(">I", 5) + b"test\0" + bytes(78), **tags}
    place = 128 + 4 + 12 * len(tags)
    table, body = struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        table += name + struct.pack(">II", place + len(body), len(value))
        body += value + bytes(-len(value) % 4)
    head = struct.pack(">I4sI4s4s4s", place + len(body), bytes(4), 0x02100000, device_class, space, pcs)
    head += bytes(12) + b"acsp" + bytes(28) + struct.pack(">iii", 0xF6D6, 0x10000, 0xD32D) + bytes(48)
    return head + table + body


def _xyz(x: float, y: float, z: float) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">iii", *(round(value * 65536) for value in (x, y, z)))


def _curve(gamma: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))


def rgb_profile(columns: Sequence[Sequence[float]] = ADOBE_RGB_XYZ, gamma: float = 563 / 256) -> bytes:
    """A monitor with these primaries; Adobe RGB unless told otherwise."""
    names = (b"rXYZ", b"gXYZ", b"bXYZ")
    tags = {name: _xyz(*(row[channel] for row in columns)) for channel, name in enumerate(names)}
    curves = dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), _curve(gamma))
    return icc_profile(b"RGB ", {**tags, **curves, b"wtpt": _xyz(0.9642, 1.0, 0.8249)})


def gray_profile(gamma: float) -> bytes:
    return icc_profile(b"GRAY", {b"kTRC": _curve(gamma), b"wtpt": _xyz(0.9642, 1.0, 0.8249)})


def cmyk_profile(cyan_lab: tuple[int, int, int] = (54, 81, 70)) -> bytes:
    """A print whose black is black, whose paper is white, and whose cyan is what is given as Lab: red by default."""
    lab_of_inks = {0: (100, 0, 0), 0b1000: cyan_lab}
    corners = [lab_of_inks.get(inks, (0, 0, 0)) for inks in range(16)]
    grid = bytes(byte for L, a, b in corners for byte in (round(L * 2.55), a + 128, b + 128))
    ramp = bytes(range(256))
    matrix = struct.pack(">9i", *(65536 if place % 4 == 0 else 0 for place in range(9)))
    table = b"mft1" + bytes(4) + bytes((4, 3, 2, 0)) + matrix + ramp * 4 + grid + ramp * 3
    return icc_profile(b"CMYK", {b"A2B0": table, b"wtpt": _xyz(0.9642, 1.0, 0.8249)}, b"Lab ", b"prtr")


def with_profile(jpeg: bytes, profile: bytes, part_bytes: int = 65000) -> bytes:
    """The JPEG with an embedded colour profile, in as many segments as it needs."""
    parts = [profile[start : start + part_bytes] for start in range(0, len(profile), part_bytes)]
    for number, part in reversed(list(enumerate(parts, start=1))):
        jpeg = with_segment(jpeg, 0xE2, b"ICC_PROFILE\0" + bytes((number, len(parts))) + part)
    return jpeg


# How pixels must be stored so that each orientation makes them upright again (EXIF 2.32, table 6).
STORED_FOR_ORIENTATION = {
    1: lambda upright: upright, 2: np.fliplr, 3: lambda upright: np.rot90(upright, 2), 4: np.flipud,
    5: lambda upright: upright.transpose(1, 0, 2), 6: np.rot90,
    7: lambda upright: np.rot90(upright, 2).transpose(1, 0, 2), 8: lambda upright: np.rot90(upright, -1),
}  # fmt: skip


def run_length_bmp() -> bytes:
    palette = bytes([0, 0, 0, 0, 30, 20, 10, 0, 60, 50, 40, 0])
    head = struct.pack("<IiiHHIIiiII", 40, 4, 2, 1, 8, 1, 0, 0, 0, 3, 0)
    rows = b"\4\1\0\0" + b"\0\4\1\2\1\2\0\0" + b"\0\1"  # a run of four, then four in the raw
    start = 14 + len(head) + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(rows), 0, 0, start) + head + palette + rows


def animated_webp(num_frames: int) -> bytes:
    """A 40 x 30 canvas whose first frame lies at (left 4, top 2)."""
    bitstream = webp(photo())[12:]
    frame = b"\2\0\0\1\0\0" + struct.pack("<I", 31)[:3] + struct.pack("<I", 23)[:3] + b"\x64\0\0\0" + bitstream
    canvas = b"\x02\0\0\0" + struct.pack("<I", 39)[:3] + struct.pack("<I", 29)[:3]
    chunks = [(b"VP8X", canvas), (b"ANIM", bytes(6)), *[(b"ANMF", frame)] * num_frames]
    body = b"".join(type_ + struct.pack("<I", len(payload)) + payload for type_, payload in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def gif_by_hand(frame: bytes, screen: tuple[int, int] = (3, 2), control: bytes = b"") -> bytes:
    palette = bytes([0, 0, 0, 10, 20, 30, 40, 50, 60, 70, 80, 90])
    return b"GIF89a" + struct.pack("<HHBBB", *screen, 0xF1, 0, 0) + palette + control + frame + b"\x3b"


def gif_frame(left: int, top: int, width: int, height: int, codes: list[int]) -> bytes:
    """Codes of three bits each: 0 to 3 are colours, 4 clears, 5 ends. At most four may follow a clear code."""
    packed = sum(code << 3 * position for position, code in enumerate(codes))
    payload = packed.to_bytes((3 * len(codes) + 7) // 8, "little")
    return (
        b"\x2c" + struct.pack("<HHHHB", left, top, width, height, 0) + b"\2" + bytes([len(payload)]) + payload + b"\0"
    )


def with_pages(pages: Sequence[bytes], tag: int = 0) -> bytes:
    """One file of the first page and the others: chained, or with `tag` below the first one (which has that tag)."""
    starts, place = [], 0
    for page in pages:
        starts.append(place + 8)
        place += len(page) + len(page) % 2
    joined = b""
    for number, page in enumerate(pages):
        moved = bytearray(page + bytes(len(page) % 2))
        num_entries = struct.unpack_from("<H", moved, 8)[0]
        for entry in range(10, 10 + 12 * num_entries, 12):
            name, _, count, value = struct.unpack_from("<HHII", moved, entry)
            if name == 273 and count > 1:
                for place in range(value, value + 4 * count, 4):
                    struct.pack_into("<I", moved, place, struct.unpack_from("<I", moved, place)[0] + len(joined))
            if count > 1 or name == 273:
                struct.pack_into("<I", moved, entry + 8, value + len(joined))
            if tag and name == tag:
                struct.pack_into("<HII", moved, entry + 2, 13, 1, starts[1])
        if not tag and number + 1 < len(pages):
            struct.pack_into("<I", moved, 10 + 12 * num_entries, starts[number + 1])
        joined += bytes(moved)
    return joined
