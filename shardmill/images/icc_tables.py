"""Converts RGB profiles of three curves and a matrix to integer tables, with which the native kernel reproduces
LittleCMS bit by bit (tests compare every colour).

LittleCMS makes such tables itself, but spends three times as long on each pixel. What it puts into them follows from
its version, which is part of the decoder id. Profiles whose curves are tables, and any that comes out otherwise on a
probe, are left to it (`shardmill.images.icc`).
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL._imagingcms import CmsProfile

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
        linear = np.array([[_fixed(_light(level, curve)) for level in range(256)] for curve in curves if curve])
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


def _fixed(value: float) -> int:
    return math.floor(value * ONE + 0.5)


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
