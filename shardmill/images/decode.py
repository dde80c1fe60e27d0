"""Decodes bytes of any supported format to upright uint8 pixels, by content and never by name."""

from __future__ import annotations

from collections.abc import Callable

from shardmill.images.avif import decode_avif
from shardmill.images.bmp import decode_bmp
from shardmill.images.gif import decode_gif
from shardmill.images.jpeg import decode_jpeg
from shardmill.images.more_formats import MORE_FORMATS, more_decoder
from shardmill.images.pixels import DecodedImage, Refused
from shardmill.images.png import decode_png
from shardmill.images.sniff import sniff_format
from shardmill.images.tiff import decode_tiff
from shardmill.images.webp import decode_webp
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

DECODERS: dict[str, Callable[[bytes, NormalizeOptions], DecodedImage]] = {
    "jpeg": decode_jpeg,
    "png": decode_png,
    "gif": decode_gif,
    "webp": decode_webp,
    "bmp": decode_bmp,
    "tiff": decode_tiff,
    "avif": decode_avif,
}


def decode_image(data: bytes, options: NormalizeOptions) -> tuple[str, DecodedImage]:
    """The format's name and the decoded first frame; raises `Refused` for what is not an intact image within limits."""
    name = sniff_format(data)
    if name not in MORE_FORMATS:
        return name, DECODERS[name](data, options)
    if name not in options.more_formats:
        accepting = f'etl.more_formats = ["{name}"] accepts it, with an extra'
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, f"format={name}; {accepting}")
    return name, more_decoder(name)(data, options)
