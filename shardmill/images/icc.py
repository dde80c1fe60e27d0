"""Tells whether an embedded colour profile is plain sRGB; others are dropped unconverted, with a note."""

from __future__ import annotations


def names_srgb(profile: bytes | bytearray) -> bool:
    """True if the profile's description names sRGB, in ASCII (version 2) or UTF-16 (version 4)."""
    # Cameras and web exporters embed sRGB in most photos: a note on each of them would say nothing.
    head = profile[:65536]
    return b"sRGB" in head or "sRGB".encode("utf-16-be") in head
