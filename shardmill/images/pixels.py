"""Helpers that all decoders share: rejections, the limits that are checked first, and exact pixel arithmetic.

Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cv2
import numpy as np

from shardmill.values import RejectReason
from shardmill.words import printable

if TYPE_CHECKING:
    from shardmill.options import NormalizeOptions

MAX_DETAIL_CHARACTERS = 300
# Rows are worked on in strips of about this many pixels, so that temporaries stay small next to a 64 MP image.
STRIP_PIXELS = 1 << 18

FLATTENED_NOTE = "alpha_flattened"
LOW_RANGE_NOTE = "low_range_16_bit"
EXTRA_BANDS_NOTE = "extra_bands_dropped"
PREVIEW_NOTE = "preview_only"
LARGER_BEHIND_NOTE = "larger_page_behind"
CMYK_NOTE = "cmyk_converted"
TRAILING_NOTE = "trailing_bytes"

# A 16-bit image whose samples need no more bits is at most a quarter as bright as it can be.
LOW_RANGE_BITS = 14

# EXIF's orientations: how stored pixels are turned upright, the exchange of rows and columns first.
SWAPS_SIDES = frozenset({5, 6, 7, 8})
FLIPS_ROWS = frozenset({3, 4, 7, 8})
FLIPS_COLUMNS = frozenset({2, 3, 6, 7})


class Refused(Exception):
    """Ends the decoding of one image; `process_image` turns it into a `Rejection`."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


def refusal_of(error: Exception, of_a_bug: RejectReason) -> Refused:
    """The refusal that `error` is, or for one image stands for: a decoder's bug must not end a job over a billion
    others.

    Raises MemoryError, which concerns the machine and not the image, also for OpenCV's own.
    """
    if isinstance(error, Refused):
        return error
    if isinstance(error, MemoryError):
        raise error
    if isinstance(error, cv2.error) and error.code == cv2.Error.StsNoMem:
        raise MemoryError(str(error)) from error
    return Refused(of_a_bug, printable(f"{type(error).__name__}: {error}")[:MAX_DETAIL_CHARACTERS])


class Complaint(Refused):
    """A warning of libjpeg about a JPEG whose pixels may all be intact: `jpeg_repair` decides."""

    def __init__(self, detail: str, *, is_of_scans: bool = False) -> None:
        """`is_of_scans`: there are bytes behind a scan."""
        super().__init__(RejectReason.CORRUPT_SCAN, detail)
        self.is_of_scans = is_of_scans


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """Upright uint8 pixels of one source image: whole, at a reduced scale, cut to the part that `normalize` keeps, or
    shrunk to what it would make of that part.

    The array may be a view with any strides.
    """

    pixels_HWC: np.ndarray
    """One channel (gray) or three (RGB)."""
    notes: tuple[str, ...]
    """Changes made so far; `docs/rejects.md` lists them all."""
    bare_file: bytes | None = None
    """With `keep_bytes`: the file without metadata, in its own format. Unless a profile or an orientation was applied
    (the notes say so), it decodes to these very pixels. None if it could not be stored like that."""
    whole_shape_HW: tuple[int, int] | None = None
    """Upright, if the pixels are fewer than the source's."""
    orientation: int = 1
    """EXIF's, by which the pixels were turned upright; values outside 1 to 8 turned nothing."""


def check_dimensions(height: int, width: int, options: NormalizeOptions) -> None:
    """Refuses an image by its declared size; every decoder calls it before it allocates anything of that size."""
    check_allocation(height, width, options)
    if min(height, width) < options.min_source_side_pixels:
        raise Refused(
            RejectReason.TOO_SMALL,
            f"declares {width}x{height}; min_source_side_pixels is {options.min_source_side_pixels}",
        )
    if max(height, width) > options.max_aspect_ratio * min(height, width):
        raise Refused(
            RejectReason.ASPECT_RATIO, f"declares {width}x{height}; max_aspect_ratio is {options.max_aspect_ratio:g}"
        )


def check_allocation(height: int, width: int, options: NormalizeOptions) -> None:
    """Refuses by what pixels cost alone; for the frames of an image, which may be small or long parts of its canvas."""
    if height < 1 or width < 1:
        raise Refused(RejectReason.BAD_HEADER, f"declares {width}x{height} pixels")
    if max(height, width) > options.max_source_side_pixels:
        raise Refused(
            RejectReason.TOO_MANY_PIXELS,
            f"declares {width}x{height}; max_source_side_pixels is {options.max_source_side_pixels}",
        )
    if height * width > options.max_source_pixels:
        raise Refused(
            RejectReason.TOO_MANY_PIXELS, f"declares {width}x{height}; max_source_pixels is {options.max_source_pixels}"
        )


# OpenCV 5 has it at another place; 0 is silent in both.
_set_log_level = (
    cv2.setLogLevel if hasattr(cv2, "setLogLevel") else cv2.utils.logging.setLogLevel  # pyright: ignore[reportAttributeAccessIssue]  the stubs are OpenCV 4's
)


def prepare_opencv() -> None:
    """Makes OpenCV's kernels the same on every machine; call it before any of them."""
    # IPP picks other kernels on other CPUs. The switch is per thread, so it is set on every call (it costs 0.1 us).
    cv2.ipp.setUseIPP(False)
    # Spark and the process pool already use every core.
    if cv2.getNumThreads() != 1:
        cv2.setNumThreads(1)


def decode_with_opencv(data: bytes, *, keep_alpha_and_depth: bool) -> np.ndarray:
    """The pixels in RGB(A) order, H x W x C; refuses with `corrupt_scan` if OpenCV makes nothing of the bytes."""
    prepare_opencv()
    flags = cv2.IMREAD_UNCHANGED if keep_alpha_and_depth else cv2.IMREAD_COLOR
    log_level = _set_log_level(0)  # what it would print comes back to the caller as a refusal
    try:
        pixels = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), flags | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError(str(error)) from error
        raise Refused(RejectReason.CORRUPT_SCAN, f"OpenCV: {error.err}") from error
    finally:
        _set_log_level(log_level)
    if pixels is None:
        raise Refused(RejectReason.CORRUPT_SCAN, "OpenCV could not decode the pixel data")
    if pixels.ndim == 2:
        return pixels[:, :, np.newaxis]
    if pixels.shape[2] == 4:
        return cv2.cvtColor(pixels, cv2.COLOR_BGRA2RGBA)
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def expect_size(pixels_HWC: np.ndarray, height: int, width: int) -> None:
    """The limits were checked on the header that we parsed: a decoder that saw another size was misled by the file."""
    if pixels_HWC.shape[:2] != (height, width):
        found = f"{pixels_HWC.shape[1]}x{pixels_HWC.shape[0]}"
        raise Refused(RejectReason.BAD_HEADER, f"declares {width}x{height} pixels but holds {found}")


def scale_to_8_bit(
    color_HWC: np.ndarray,
    alpha_HW: np.ndarray | None,
    declared_bits: int,
    options: NormalizeOptions,
    notes: list[str],
) -> tuple[np.ndarray, np.ndarray | None]:
    """Samples of 8 bits as they are, of 16 by those of their bits that are used.

    Cameras and scanners of 10, 12 or 14 bits store their samples in 16. `declared_bits` is the value declared by the
    file (0: nothing); it counts if no sample has more.
    """
    if color_HWC.dtype == np.uint8:
        return color_HWC, alpha_HW
    if color_HWC.dtype != np.uint16:
        raise Refused(RejectReason.UNSUPPORTED_MODE, f"samples of type {color_HWC.dtype}")
    num_bits, brightest = options.significant_bits, int(color_HWC.max())
    if 8 < declared_bits < 16 and brightest < 1 << declared_bits:
        num_bits = declared_bits
    elif brightest >= 1 << num_bits:
        raise Refused(
            RejectReason.UNSUPPORTED_MODE, f"a sample of {brightest} has more bits than significant_bits = {num_bits}"
        )
    elif num_bits == 16 and 0 < brightest < 1 << LOW_RANGE_BITS:
        notes.append(LOW_RANGE_NOTE)
    notes.append(f"scaled_{num_bits}_bit")
    color_HWC = (color_HWC >> (num_bits - 8)).astype(np.uint8)
    if alpha_HW is not None and alpha_HW.dtype == np.uint16:
        alpha_bits = 16 if alpha_HW.max() >= 1 << num_bits else num_bits
        alpha_HW = (alpha_HW >> (alpha_bits - 8)).astype(np.uint8)
    return color_HWC, alpha_HW


def flatten_over_white(
    color_HWC: np.ndarray, alpha_HW: np.ndarray, notes: list[str], *, premultiplied: bool = False
) -> np.ndarray:
    """Composites uint8 colour over white with integers: round(c * a + 255 * (255 - a)) / 255."""
    if alpha_HW.min() == 255:
        return color_HWC
    notes.append(FLATTENED_NOTE)
    flat_HWC = np.empty(color_HWC.shape, dtype=np.uint8)
    for rows in strips(color_HWC):
        color = color_HWC[rows].astype(np.uint32)
        uncovered = 255 - alpha_HW[rows, :, np.newaxis].astype(np.uint32)
        if premultiplied:
            flat_HWC[rows] = np.minimum(color + uncovered, 255)
        else:
            flat_HWC[rows] = (color * (255 - uncovered) + 255 * uncovered + 127) // 255
    return flat_HWC


def cmyk_to_rgb(cmyk_HWC: np.ndarray, *, stored_inverted: bool) -> np.ndarray:
    """Without a colour profile: R = (255 - C) * (255 - K) / 255, rounded; 0 means no ink unless `stored_inverted`."""
    rgb_HWC = np.empty((*cmyk_HWC.shape[:2], 3), dtype=np.uint8)
    for rows in strips(cmyk_HWC):
        light = cmyk_HWC[rows] if stored_inverted else 255 - cmyk_HWC[rows]
        light = light.astype(np.uint32)
        rgb_HWC[rows] = (light[:, :, :3] * light[:, :, 3:] + 127) // 255
    return rgb_HWC


def apply_orientation(pixels_HWC: np.ndarray, orientation: int) -> np.ndarray:
    """Turns stored pixels upright, as a view. `orientation` is EXIF's 1 to 8."""
    if orientation in SWAPS_SIDES:
        pixels_HWC = pixels_HWC.transpose(1, 0, 2)
    return pixels_HWC[:: -1 if orientation in FLIPS_ROWS else 1, :: -1 if orientation in FLIPS_COLUMNS else 1]


def strips(pixels_HWC: np.ndarray) -> list[slice]:
    """Runs of rows that cover the image, of about `STRIP_PIXELS` each."""
    height, width = pixels_HWC.shape[:2]
    rows_per_strip = max(1, STRIP_PIXELS // width)
    return [slice(start, start + rows_per_strip) for start in range(0, height, rows_per_strip)]
