"""The font of captions in pictures, and text as it can be written with it: names of classes are in any language."""

from __future__ import annotations

import unicodedata
from contextlib import suppress
from functools import cache

from PIL import Image, ImageDraw, ImageFont

# Where an operating system keeps its fonts, Pillow finds them by these names.
_SYSTEM_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial.ttf", "arial.ttf")
_SIZE_PIXELS = 11
_NO_CHARACTER = "\uffff"

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@cache
def caption_font() -> Font:
    """One of the system, or Pillow's bitmaps of Latin-1: its default font has not even these letters."""
    for name in _SYSTEM_FONTS:
        with suppress(OSError, ImportError):
            return ImageFont.truetype(name, _SIZE_PIXELS)
    return ImageFont.load_default_imagefont()


def writable(text: str, font: Font) -> str:
    """The text with a question mark for each character that the font lacks."""
    # Some file systems take letters apart from their accents.
    text = unicodedata.normalize("NFC", text)
    if isinstance(font, ImageFont.ImageFont):
        return text.encode("latin-1", "replace").decode("latin-1")
    absent = _drawn(_NO_CHARACTER, font)
    return "".join(each if each.isspace() or _drawn(each, font) != absent else "?" for each in text)


def _drawn(character: str, font: ImageFont.FreeTypeFont) -> bytes:
    picture = Image.new("L", (4 * _SIZE_PIXELS, 2 * _SIZE_PIXELS))
    ImageDraw.Draw(picture).text((_SIZE_PIXELS, 0), character, fill=255, font=font)
    return picture.tobytes()
