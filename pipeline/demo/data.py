"""The demo's images: 1,797 handwritten digits, and one of each kind of file that breaks pipelines.

The digits are scikit-learn's (8 x 8 pixels from the UCI repository, here enlarged to 32 x 32); where it is not
installed, as many are drawn. The odd files come on top of them; those that are accepted hold a digit of the class in
whose folder they lie.
Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import functools
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import simplejpeg

from shardmill.values import RejectReason

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
GIF_CLEAR_CODE, GIF_END_CODE = 256, 257
# A reader widens its codes beyond 9 bits when it has seen 254 of them since the last clear code.
GIF_CODES_PER_CLEAR = 250


def with_exif_orientation(jpeg: bytes, orientation: int) -> bytes:
    """The JPEG with an EXIF segment that holds this one tag."""
    directory = struct.pack("<HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)
    payload = b"Exif\0\0" + b"II*\0" + struct.pack("<I", 8) + directory
    return with_jpeg_segment(jpeg, 0xE1, payload)


def with_jpeg_segment(jpeg: bytes, marker: int, payload: bytes) -> bytes:
    """The JPEG with one more segment in front of all others."""
    return jpeg[:2] + bytes((0xFF, marker)) + struct.pack(">H", len(payload) + 2) + payload + jpeg[2:]


def png_chunk(chunk_type: bytes, payload: bytes) -> bytes:
    checksum = zlib.crc32(chunk_type + payload)
    return struct.pack(">I", len(payload)) + chunk_type + payload + struct.pack(">I", checksum)


def png_header(width: int, height: int, depth: int, color_type: int) -> bytes:
    """Signature and IHDR of a PNG that is not interlaced."""
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    return PNG_SIGNATURE + png_chunk(b"IHDR", header)


def encode_gif(frames_HW: list[np.ndarray]) -> bytes:
    """Gray frames of one size as a GIF; an animation if there are several. Stored without compression."""
    height, width = frames_HW[0].shape
    grays = bytes(gray for gray in range(256) for _ in range(3))
    parts = [b"GIF89a", struct.pack("<HHBBB", width, height, 0xF7, 0, 0), grays]
    for frame_HW in frames_HW:
        parts.append(b"\x21\xf9\x04" + struct.pack("<BHB", 0, 10, 0) + b"\0")  # shown for a tenth of a second
        parts.append(b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x08")
        parts.append(_sub_blocks(_pack_codes(frame_HW.tobytes())))
    return b"".join(parts) + b"\x3b"


def _pack_codes(values: bytes) -> bytes:
    """One 9-bit code for each value, lowest bit first."""
    codes = []
    for start in range(0, len(values), GIF_CODES_PER_CLEAR):
        codes += [GIF_CLEAR_CODE, *values[start : start + GIF_CODES_PER_CLEAR]]
    bits = 0
    for position, code in enumerate([*codes, GIF_END_CODE]):
        bits |= code << 9 * position
    return bits.to_bytes((9 * (len(codes) + 1) + 7) // 8, "little")


def _sub_blocks(payload: bytes) -> bytes:
    pieces = [payload[start : start + 255] for start in range(0, len(payload), 255)]
    return b"".join(bytes((len(piece),)) + piece for piece in pieces) + b"\0"


IMAGE_SIDE_PIXELS = 32
JPEG_QUALITY = 95
NUM_DIGITS = 1_797
FONTS = (cv2.FONT_HERSHEY_SIMPLEX, cv2.FONT_HERSHEY_DUPLEX, cv2.FONT_HERSHEY_COMPLEX, cv2.FONT_HERSHEY_TRIPLEX)
# The first ten digits of the collection are a 0, a 1, ... and a 9: the odd files show these.
EXAMPLES = range(10)


@dataclass(frozen=True, slots=True)
class Digits:
    """Digits as white ink on black."""

    kind: str
    """`real handwritten`, or `drawn`."""
    images: tuple[np.ndarray, ...]
    """Each H x W, uint8."""
    labels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OddFile:
    """One file that is not plainly an image, and what the pipeline must do with it."""

    key: str
    data: bytes | None
    """Bytes of the file; None for a symlink."""
    symlink_target: str | None = None
    expected_reason: RejectReason | None = None
    """Expected reason of rejection; None if the file is accepted."""
    expected_note: str | None = None
    """Note that the accepted sample must have, or None."""


@dataclass(frozen=True, slots=True)
class DemoImages:
    """The images in the demo's folder."""

    folder: Path
    kind: str
    num_digits: int
    """Plain image files, all accepted."""
    odd_files: tuple[OddFile, ...]

    @property
    def num_files(self) -> int:
        """Everything that a lister finds, symlinks and system files included."""
        return self.num_digits + len(self.odd_files)

    @property
    def num_accepted(self) -> int:
        return self.num_digits + sum(odd_file.expected_reason is None for odd_file in self.odd_files)

    @property
    def words(self) -> str:
        return (
            f"demo: {self.num_digits:,} {self.kind} digits and {len(self.odd_files)} odd files in {self.folder}; "
            f"{self.num_accepted:,} of {self.num_files:,} should become samples"
        )


def write_demo_images(folder: Path) -> DemoImages:
    """Fills `folder` with class folders `0` to `9`; a second call leaves every file untouched."""
    digits = load_digits()
    for index in range(len(digits.labels)):
        _write(folder / digit_key(digits, index), encode_digit(digits, index))
    for odd_file in odd_files():
        path = folder / odd_file.key
        if odd_file.data is not None:
            _write(path, odd_file.data)
        elif odd_file.symlink_target is not None and not path.is_symlink():
            path.symlink_to(odd_file.symlink_target)
    return DemoImages(folder=folder, kind=digits.kind, num_digits=len(digits.labels), odd_files=odd_files())


@functools.cache
def load_digits() -> Digits:
    try:
        from sklearn.datasets import load_digits as load_bunch  # an extra, and a second to import
    except ImportError:
        return draw_digits()
    inks_NK, labels_N = load_bunch(return_X_y=True)  # 64 values of 0 to 16 per digit
    small_NHW = (np.asarray(inks_NK).reshape(-1, 8, 8) * 255 / 16).round().astype(np.uint8)
    shape = (IMAGE_SIDE_PIXELS, IMAGE_SIDE_PIXELS)
    images = tuple(cv2.resize(small_HW, shape, interpolation=cv2.INTER_LINEAR_EXACT) for small_HW in small_NHW)
    return Digits("real handwritten", images, tuple(int(label) for label in np.asarray(labels_N)))


def draw_digits() -> Digits:
    """As many in OpenCV's fonts: each of another size, thickness, slant and place."""
    rng, labels = np.random.default_rng(0), tuple(index % 10 for index in range(NUM_DIGITS))
    return Digits("drawn", tuple(_draw(str(label), rng) for label in labels), labels)


def _draw(text: str, rng: np.random.Generator) -> np.ndarray:
    side, font, thickness = IMAGE_SIDE_PIXELS, int(rng.choice(FONTS)), int(rng.integers(2, 5))
    large_HW = np.zeros((2 * side, 2 * side), np.uint8)
    (width, height), _ = cv2.getTextSize(text, font, 1.6, thickness)
    cv2.putText(large_HW, text, (side - width // 2, side + height // 2), font, 1.6, (255,), thickness, cv2.LINE_AA)
    # Turned by up to 15 degrees, 0.4 to 0.6 of the size, and moved by up to 3 pixels.
    turn = cv2.getRotationMatrix2D((side, side), rng.uniform(-15, 15), rng.uniform(0.4, 0.6))
    turn[:, 2] += rng.uniform(-3, 3, 2) - side / 2
    return cv2.warpAffine(large_HW, turn, (side, side), flags=cv2.INTER_LINEAR)


def digit_key(digits: Digits, index: int) -> str:
    extension = "png" if index % 2 == 0 else "jpg"
    return f"{digits.labels[index]}/digit_{index:04d}.{extension}"


def encode_digit(digits: Digits, index: int) -> bytes:
    image_HW = digits.images[index]
    return _png(image_HW) if index % 2 == 0 else _jpeg(image_HW)


@functools.cache
def odd_files() -> tuple[OddFile, ...]:
    """All of them, the same bytes on every call."""
    return (*_refused_files(), *_accepted_files(), *_system_files())


def _refused_files() -> tuple[OddFile, ...]:
    digits = load_digits()
    jpegs = [_jpeg(digits.images[label]) for label in EXAMPLES]
    bad_checksum = bytearray(_png(digits.images[3]))
    bad_checksum[bad_checksum.index(b"IDAT") + 10] ^= 0x01
    html = b"<!DOCTYPE html><html><body>403 Forbidden</body></html>\n"
    return (
        OddFile("0/empty.jpg", b"", expected_reason=RejectReason.EMPTY_FILE),
        OddFile("0/one_byte.png", b"\xff", expected_reason=RejectReason.NOT_AN_IMAGE),
        OddFile("1/html_page.jpg", html, expected_reason=RejectReason.NOT_AN_IMAGE),
        OddFile("1/cut_at_half.jpg", jpegs[1][: len(jpegs[1]) // 2], expected_reason=RejectReason.TRUNCATED),
        OddFile("2/no_end_marker.jpg", jpegs[2][:-2], expected_reason=RejectReason.TRUNCATED),
        OddFile("2/damaged_scan.jpg", damage_scan(jpegs[2]), expected_reason=RejectReason.CORRUPT_SCAN),
        OddFile("3/bad_checksum.png", bytes(bad_checksum), expected_reason=RejectReason.CHECKSUM),
        OddFile("8/header_bomb.png", png_header(60_000, 60_000, 8, 2), expected_reason=RejectReason.TOO_MANY_PIXELS),
        OddFile(
            "8/dangling.jpg",
            None,
            symlink_target="no_such_file.jpg",
            expected_reason=RejectReason.DANGLING_SYMLINK,
        ),
    )


def _accepted_files() -> tuple[OddFile, ...]:
    digits = load_digits()
    three_HW, four_HW, five_HW, six_HW, seven_HW, nine_HW = (digits.images[label] for label in (3, 4, 5, 6, 7, 9))
    frames_HW = [three_HW, three_HW.T, 255 - three_HW]
    return (
        OddFile("3/animated.gif", encode_gif(frames_HW), expected_note="first_frame_of_3"),
        OddFile("4/cmyk.jpg", _cmyk_jpeg(four_HW), expected_note="cmyk_converted"),
        OddFile("4/gray_16_bit.png", _png(four_HW.astype(np.uint16) * 257), expected_note="scaled_16_bit"),
        OddFile("5/transparent.png", _transparent_png(five_HW), expected_note="alpha_flattened"),
        OddFile(
            "5/exif_orientation_6.jpg",
            # Orientation 6 asks for a quarter turn clockwise, so the stored pixels are turned the other way.
            with_exif_orientation(_jpeg(np.rot90(five_HW)), 6),
            expected_note="exif_rotated",
        ),
        OddFile("6/png_named.jpg", _png(six_HW), expected_note="extension_mismatch"),
        OddFile("6/_hidden.png", _png(six_HW)),
        OddFile("7/name with spaces and %20.png", _png(seven_HW)),
        OddFile("7/exact_duplicate.jpg", encode_digit(digits, 7)),
        OddFile("9/trailing_bytes.jpg", _jpeg(nine_HW) + b"\0" * 100, expected_note="trailing_bytes"),
    )


def _system_files() -> tuple[OddFile, ...]:
    """Files of operating systems and cameras that are not meant to be images."""
    apple_double = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + b"\0" * 26
    names = {
        ".DS_Store": b"\0\0\0\1Bud1" + b"\0" * 24,
        "0/Thumbs.db": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 24,
        "1/._digit_0001.jpg": apple_double,
        "9/clip.mp4": b"\0\0\0\x18ftypisom\0\0\2\0isomiso2",
    }
    return tuple(OddFile(key, data, expected_reason=RejectReason.NOT_AN_IMAGE_NAME) for key, data in names.items())


def damage_scan(jpeg: bytes) -> bytes:
    """The first change of one byte that most decoders accept silently although it ruins pixels; libjpeg only warns."""
    scan_start = jpeg.index(b"\xff\xda") + 10
    for position in range(scan_start, len(jpeg) - 2):
        for mask in (0x01, 0x10, 0x55):
            damaged = bytearray(jpeg)
            damaged[position] ^= mask
            # A new 0xFF could end the scan: that is another kind of damage.
            if 0xFF not in damaged[position - 1 : position + 1] and _only_warns(bytes(damaged)):
                return bytes(damaged)
    raise AssertionError("no single changed byte makes libjpeg warn")


def _only_warns(jpeg: bytes) -> bool:
    try:
        simplejpeg.decode_jpeg(jpeg, "GRAY", strict=False)
    except ValueError:
        return False
    try:
        simplejpeg.decode_jpeg(jpeg, "GRAY", strict=True)
    except ValueError as warning:
        return "Corrupt JPEG data" in str(warning)
    return False


def _png(image: np.ndarray) -> bytes:
    _, encoded = cv2.imencode(".png", image)
    return encoded.tobytes()


def _jpeg(image_HW: np.ndarray) -> bytes:
    image_HWC = np.ascontiguousarray(image_HW)[:, :, np.newaxis]
    return simplejpeg.encode_jpeg(image_HWC, JPEG_QUALITY, colorspace="GRAY", colorsubsampling="Gray")


def _cmyk_jpeg(image_HW: np.ndarray) -> bytes:
    """Black ink only. simplejpeg writes Adobe's marker, which means that 255 stands for no ink."""
    no_ink_HW = np.full_like(image_HW, 255)
    light_HWC = np.dstack([no_ink_HW, no_ink_HW, no_ink_HW, image_HW])
    return simplejpeg.encode_jpeg(light_HWC, JPEG_QUALITY, colorspace="CMYK", colorsubsampling="444")


def _transparent_png(image_HW: np.ndarray) -> bytes:
    """All black, and transparent at the ink: the digit appears only over white."""
    black_HW = np.zeros_like(image_HW)
    return _png(np.dstack([black_HW, black_HW, black_HW, 255 - image_HW]))


def _write(path: Path, data: bytes) -> None:
    if path.is_file() and path.read_bytes() == data:
        return  # a new modification time would make the next run read the file again
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
