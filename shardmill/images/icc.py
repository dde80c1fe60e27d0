"""Converts embedded colour profiles to sRGB with LittleCMS (included in Pillow).

An image without a profile is taken for sRGB. So is one whose profile moves no colour by more than rounding does: most
photos embed some edition of sRGB, and their pixels stay as they are. Profiles of three curves and a matrix become
integer tables, with which the native kernel reproduces LittleCMS bit by bit (tests compare every colour) in a third of
its time on each pixel; what it puts into such tables follows from its version, which is part of the decoder id.
Profiles whose curves are tables, and any that comes out otherwise on a probe, are left to it.

Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageCms

from shardmill.images.pixels import CMYK_NOTE, cmyk_to_rgb, strips
from shardmill.kernel import shardmill_native

if TYPE_CHECKING:
    from PIL._imagingcms import CmsProfile


CONVERTED_NOTE = "icc_converted"
IGNORED_NOTE = "icc_ignored"

# Profiles of printers take 0.5 to 2 MB; a larger one is damaged, or means harm.
MAX_PROFILE_BYTES = 4 << 20
# Editions of sRGB differ from each other by up to this much, rounding included.
SRGB_TOLERANCE_LEVELS = 2
# As Photoshop converts unless told otherwise.
_INTENT = ImageCms.Intent.RELATIVE_COLORIMETRIC
_FLAGS = ImageCms.Flags.BLACKPOINTCOMPENSATION
_MODES_BY_SPACE = {"GRAY": "L", "RGB ": "RGB", "CMYK": "CMYK"}
_NUM_CHANNELS = {"L": 1, "RGB": 3, "CMYK": 4}


@dataclass(frozen=True, slots=True)
class Conversion:
    """Converts a profile's colours to sRGB."""

    mode: str
    """`L`, `RGB` or `CMYK`: the samples that the profile describes. In CMYK 0 is no ink."""
    transform: ImageCms.ImageCmsTransform
    is_srgb: bool
    tables: ColourTables | None
    """The same for the native kernel, in a tenth of the time; None without it, for a profile that is not its kind, and
    for one that is not applied."""

    def apply(self, samples_HWC: np.ndarray) -> np.ndarray:
        """Convert pixels; keeps the number of channels, except three for CMYK."""
        if self.mode == "L":
            return _gray_levels(self.transform)[samples_HWC]
        if self.tables is not None:
            return _converted(samples_HWC, self.tables)
        converted_HWC = np.empty((*samples_HWC.shape[:2], 3), dtype=np.uint8)
        for rows in strips(samples_HWC):
            converted_HWC[rows] = by_littlecms(self.transform, samples_HWC[rows], self.mode)
        return converted_HWC


def conversion_of(profile: bytes | None, num_channels: int) -> Conversion | None:
    """By what `to_srgb` converts samples with this profile; None if it leaves them as they are."""
    conversion = read_profile(profile) if profile else None
    if conversion is None or conversion.is_srgb or _NUM_CHANNELS[conversion.mode] != num_channels:
        return None
    return conversion


def to_srgb(samples_HWC: np.ndarray, profile: bytes | None, notes: list[str]) -> np.ndarray:
    """Gray or RGB samples, converted if their profile is not sRGB; unchanged if it is damaged or of another colour."""
    if profile is None:
        return samples_HWC
    conversion = read_profile(profile)
    if conversion is not None and conversion.is_srgb:
        return samples_HWC
    if conversion is None or _NUM_CHANNELS[conversion.mode] != samples_HWC.shape[2]:
        notes.append(IGNORED_NOTE)
        return samples_HWC
    notes.append(CONVERTED_NOTE)
    return conversion.apply(samples_HWC)


def cmyk_to_srgb(inks_HWC: np.ndarray, profile: bytes | None, notes: list[str], *, stored_inverted: bool) -> np.ndarray:
    """RGB by the profile of the print, or by the plain formula if there is none that can be used."""
    notes.append(CMYK_NOTE)
    conversion = read_profile(profile) if profile is not None else None
    if conversion is not None and conversion.mode == "CMYK":
        notes.append(CONVERTED_NOTE)
        return conversion.apply(255 - inks_HWC if stored_inverted else inks_HWC)
    if profile is not None:
        notes.append(IGNORED_NOTE)
    return cmyk_to_rgb(inks_HWC, stored_inverted=stored_inverted)


@functools.lru_cache(
    maxsize=32
)  # 500 photos from everywhere share 16; reading one takes as long as decoding two photos
def read_profile(profile: bytes) -> Conversion | None:
    """Read a profile; None if it is damaged, too large, or not gray, RGB or CMYK."""
    if len(profile) > MAX_PROFILE_BYTES:
        return None
    try:
        source = ImageCms.core.profile_frombytes(profile)
        mode = _MODES_BY_SPACE.get(source.xcolor_space, "")
        if not mode:
            return None
        srgb = ImageCms.createProfile("sRGB")
        profiles = ImageCms.ImageCmsProfile(source), ImageCms.ImageCmsProfile(srgb)
        transform = ImageCms.buildTransform(*profiles, mode, "RGB", _INTENT, _FLAGS)
    except (ImageCms.PyCMSError, OSError, ValueError):
        return None
    is_srgb = mode != "CMYK" and _is_identity(transform, mode)
    tables = None
    if shardmill_native is not None and not is_srgb and mode != "CMYK":
        tables = colour_tables(profile, source, srgb) if mode == "RGB" else gray_tables(_gray_levels(transform))
        if mode == "RGB" and tables is not None and not _gives_the_same(tables, transform):
            tables = None
    return Conversion(mode, transform, is_srgb, tables)


def _gray_levels(transform: ImageCms.ImageCmsTransform) -> np.ndarray:
    ramp = np.arange(256, dtype=np.uint8).reshape(1, 256, 1)
    return by_littlecms(transform, ramp, "L")[0, :, 1]  # neutral: its three channels are equal


def _is_identity(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    levels = np.linspace(0, 255, 17).astype(np.uint8)
    if mode == "L":
        probe_HWC = levels.reshape(1, 17, 1)
    else:
        probe_HWC = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(17, 289, 3)
    difference = by_littlecms(transform, probe_HWC, mode).astype(int) - probe_HWC
    return int(np.abs(difference).max()) <= SRGB_TOLERANCE_LEVELS


def _gives_the_same(tables: ColourTables, transform: ImageCms.ImageCmsTransform) -> bool:
    """Each level of each channel beside several others, and colours from everywhere."""
    levels = np.arange(256, dtype=np.uint8)
    others = np.random.RandomState(1).randint(0, 256, (40, 256, 3), np.uint8)
    others[::4, :, 0] = others[1::4, :, 1] = others[2::4, :, 2] = levels
    others[3] = levels[:, np.newaxis]
    return np.array_equal(_converted(others, tables), by_littlecms(transform, others, "RGB"))


def _converted(samples_HWC: np.ndarray, tables: ColourTables) -> np.ndarray:
    assert shardmill_native is not None, "there are tables only for it"
    converted_HWC = np.array(samples_HWC, order="C")
    shardmill_native.convert_colours(converted_HWC, tables.linear, tables.matrix, tables.levels)
    return converted_HWC


def by_littlecms(transform: ImageCms.ImageCmsTransform, samples_HWC: np.ndarray, mode: str) -> np.ndarray:
    """RGB, whatever the `mode` of the samples."""
    height, width = samples_HWC.shape[:2]
    samples = np.ascontiguousarray(samples_HWC)
    picture = Image.frombuffer(mode, (width, height), samples, "raw", mode, 0, 1)
    converted = ImageCms.applyTransform(picture, transform)
    assert converted is not None  # it is None only for a conversion in place
    return np.asarray(converted)


# Fixed point with 14 bits behind the point, as LittleCMS has it.
ONE = 1 << 14
_TAG = struct.Struct(">4sII")
_MOST_TAGS = 100
_CURVES = (b"rTRC", b"gTRC", b"bTRC")
# Tables of colours come before the matrix.
_LOOKUPS = (b"A2B0", b"A2B1", b"A2B2", b"D2B0", b"D2B1", b"D2B2")
# What LittleCMS makes of the two kinds of formula for a curve: (gamma, a, b, c, d) of IEC 61966-2-1.
_Curve = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True, eq=False)
class ColourTables:
    """What `shardmill_native.convert_colours` and `shrink_jpeg` take beside pixels."""

    linear: np.ndarray
    """Shape 3 x 256, int32: each stored level as light, in units of 1 / ONE."""
    matrix: np.ndarray
    """Shape 3 x 3, int32: from the profile's light to that of sRGB, in units of 1 / ONE."""
    levels: np.ndarray
    """Shape ONE + 1, uint8: the level of sRGB for each amount of light."""


def colour_tables(data: bytes, source: CmsProfile, srgb: CmsProfile) -> ColourTables | None:
    """The tables of the RGB profile `data`, which is read as `source`; None for one of another kind."""
    tags = _tags(data)
    curves = [_curve(tags.get(name, b"")) for name in _CURVES]
    has_lookup = any(name in tags for name in _LOOKUPS)
    into, out_of = _colorants(srgb), _colorants(source)
    if has_lookup or source.connection_space.strip() != "XYZ" or into is None or out_of is None or None in curves:
        return None
    matrix = np.floor(_product(_inverse(into), out_of) * ONE + 0.5)
    try:
        linear = np.array(
            [[math.floor(_light(level, curve) * ONE + 0.5) for level in range(256)] for curve in curves if curve]
        )
    except OverflowError:
        # A formula that leads beyond all numbers.
        return None
    # LittleCMS's sums have 32 bits, as the kernel's.
    if np.abs(matrix).sum(axis=1).max() >= 1 << 16 or linear.min() < 0 or linear.max() > ONE:
        return None
    return ColourTables(linear.astype(np.int32), matrix.astype(np.int32), _srgb_levels())


def gray_tables(levels: np.ndarray) -> ColourTables:
    """The tables that make of each gray level the one of `levels`."""
    step = ONE // 256
    linear = np.tile(np.arange(256, dtype=np.int32) * step, (3, 1))
    return ColourTables(linear, np.eye(3, dtype=np.int32) * ONE, np.append(levels.repeat(step), levels[-1:]))


def _tags(data: bytes) -> dict[bytes, bytes]:
    """Each tag's data; of two with one name, the first."""
    count = int.from_bytes(data[128:132])
    found: dict[bytes, bytes] = {}
    if count <= _MOST_TAGS and len(data) >= 132 + count * _TAG.size:
        for name, start, length in _TAG.iter_unpack(data[132 : 132 + count * _TAG.size]):
            found.setdefault(name, data[start : start + length])
    return found


def _curve(tag: bytes) -> _Curve | None:
    """A gamma, or the formula with a linear part of sRGB and Display P3; None for tables and other formulas."""
    if tag[:4] == b"curv" and len(tag) >= 14 and tag[8:12] == b"\0\0\0\1":
        return int.from_bytes(tag[12:14]) / 256, 1.0, 0.0, 0.0, 0.0
    if tag[:4] == b"para" and len(tag) >= 32 and tag[8:10] == b"\0\3":
        gamma, a, b, c, d = (value / 65536 for value in struct.unpack_from(">5i", tag, 12))
        return gamma, a, b, c, d
    return None


def _light(level: int, curve: _Curve) -> float:
    gamma, a, b, c, d = curve
    value = float(np.float32(level / 255))
    if value < d:
        return float(np.float32(value * c))
    base = a * value + b
    return float(np.float32(base**gamma)) if base > 0 else float(base == 0 and gamma == 0)


def _colorants(profile: CmsProfile) -> np.ndarray | None:
    """Columns of XYZ."""
    found = (profile.red_colorant, profile.green_colorant, profile.blue_colorant)
    return None if None in found else np.array([colorant[0] for colorant in found if colorant]).T


def _inverse(matrix: np.ndarray) -> np.ndarray:
    """By cofactors, in LittleCMS's order of operations."""
    (a, b, c), (d, e, f), (g, h, i) = matrix.tolist()
    first, second, third = e * i - f * h, -d * i + f * g, d * h - e * g
    determinant = a * first + b * second + c * third
    cofactors = [
        [first, c * h - b * i, b * f - c * e],
        [second, a * i - c * g, c * d - a * f],
        [third, b * g - a * h, a * e - b * d],
    ]
    return np.array(cofactors) / determinant


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Added up from the left, as no library promises."""
    return left[:, :1] * right[:1] + left[:, 1:2] * right[1:2] + left[:, 2:] * right[2:]


@functools.cache
def _srgb_levels() -> np.ndarray:
    gamma, a, b, c, d = 2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045
    limit = (a * d + b) ** gamma
    lights = [float(np.float32(step / ONE)) for step in range(ONE + 1)]
    values = np.array(
        [(light ** (1 / gamma) - b) / a if light >= limit else light / c for light in lights], dtype=np.float32
    )
    # To 16 bits and then to 8, each rounded.
    words = np.floor(np.clip(values, 0, 1).astype(np.float64) * 65535.0 + 0.5).astype(np.uint32)
    return ((words * 65281 + (1 << 23)) >> 24).astype(np.uint8)
