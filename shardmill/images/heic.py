"""Decodes the primary image of a HEIC with libheif, which turns it as the container says."""

from __future__ import annotations

from shardmill.images.pillow import loaded, opened, to_srgb_over_white
from shardmill.images.pixels import DecodedImage, check_dimensions, expect_size
from shardmill.options import NormalizeOptions


def decode_heic(data: bytes, options: NormalizeOptions) -> DecodedImage:
    import pillow_heif

    # The pool of workers already uses every core; previews in the file are not asked for.
    pillow_heif.options.DECODE_THREADS = 1
    pillow_heif.options.THUMBNAILS = False
    with opened(pillow_heif.HeifImageFile, data) as picture:
        width, height = picture.size
        check_dimensions(height, width, options)
        pixels_HWC = loaded(picture)
        num_frames = getattr(picture, "n_frames", 1)
        profile = picture.info.get("icc_profile")
    expect_size(pixels_HWC, height, width)
    notes = [f"first_frame_of_{num_frames}"] if num_frames > 1 else []
    return DecodedImage(to_srgb_over_white(pixels_HWC, profile, notes), notes=tuple(notes))
