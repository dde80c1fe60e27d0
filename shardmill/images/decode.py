"""Decodes bytes of any supported format to upright uint8 pixels, by content and never by name."""

from __future__ import annotations

from collections.abc import Callable

from shardmill.images.avif import decode_avif
from shardmill.images.bmp import decode_bmp
from shardmill.images.gif import decode_gif
from shardmill.images.jpeg import decode_jpeg
from shardmill.images.pixels import DecodedImage
from shardmill.images.png import decode_png
from shardmill.images.sniff import sniff_format
from shardmill.images.tiff import decode_tiff
from shardmill.images.webp import decode_webp
from shardmill.options import NormalizeOptions

DECODERS: dict[str, Callable[[bytes, NormalizeOptions], DecodedImage]] = {
    "jpeg": decode_jpeg,
    "png": decode_png,
    "gif": decode_gif,
    "webp": decode_webp,
    "bmp": decode_bmp,
    "tiff": decode_tiff,
    "avif": decode_avif,
}
FORMAT_BY_EXTENSION = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "jpeg"),
    **dict.fromkeys(("png", "apng"), "png"),
    **dict.fromkeys(("bmp", "dib"), "bmp"),
    **dict.fromkeys(("tif", "tiff"), "tiff"),
    "gif": "gif",
    "webp": "webp",
    "avif": "avif",
    "mpo": "jpeg",
}


def decode_image(data: bytes, options: NormalizeOptions) -> tuple[str, DecodedImage]:
    """The format's name and the decoded first frame; raises `Refused` for what is not an intact image within limits."""
    name = sniff_format(data)
    return name, DECODERS[name](data, options)


def has_other_extension(key: str, format_name: str) -> bool:
    """True if the name ends like one image format and the content is another."""
    extension = key.rpartition("/")[2].rpartition(".")[2].lower()
    return FORMAT_BY_EXTENSION.get(extension, format_name) != format_name
