"""Decodes the primary image of a HEIC with libheif, which turns it as the container says."""

from __future__ import annotations

from shardmill.images.pillow import decode_first_frame
from shardmill.images.pixels import DecodedImage
from shardmill.options import NormalizeOptions


def decode_heic(data: bytes, options: NormalizeOptions) -> DecodedImage:
    import pillow_heif

    # The pool of workers already uses every core; previews in the file are not asked for.
    pillow_heif.options.DECODE_THREADS = 1
    pillow_heif.options.THUMBNAILS = False
    frame = decode_first_frame(pillow_heif.HeifImageFile, data, options)
    return DecodedImage(frame.pixels_HWC, notes=tuple(frame.notes))
