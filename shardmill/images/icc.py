"""Converts embedded colour profiles to sRGB with LittleCMS (included in Pillow).

An image without a profile is taken for sRGB. So is one whose profile moves no colour by more than rounding does: most
photos embed some edition of sRGB, and their pixels stay as they are. Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageCms

from shardmill.images.icc_tables import ColourTables, colour_tables, gray_tables
from shardmill.images.pixels import CMYK_NOTE, cmyk_to_rgb, strips
from shardmill.kernel import shardmill_native

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
