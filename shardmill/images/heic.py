"""Decodes the primary image of a HEIC with libheif, which turns it as the container says."""

from __future__ import annotations

import numpy as np

from shardmill.images.icc import to_srgb
from shardmill.images.pillow import opened
from shardmill.images.pixels import DecodedImage, check_dimensions, expect_size, flatten_over_white
from shardmill.options import NormalizeOptions


def decode_heic(data: bytes, options: NormalizeOptions) -> DecodedImage:
    import pillow_heif

    # The pool of workers already uses every core; previews in the file are not asked for.
    pillow_heif.options.DECODE_THREADS = 1
    pillow_heif.options.THUMBNAILS = False
    with opened(pillow_heif.HeifImageFile, data) as picture:
        width, height = picture.size
        check_dimensions(height, width, options)
        picture.load()
        num_frames = getattr(picture, "n_frames", 1)
        has_alpha = "A" in picture.mode
        pixels_HWC = np.asarray(picture.convert("RGBA" if has_alpha else "RGB"))
        profile = picture.info.get("icc_profile")
    expect_size(pixels_HWC, height, width)
    notes = [f"first_frame_of_{num_frames}"] if num_frames > 1 else []
    color_HWC = to_srgb(pixels_HWC[:, :, :3], profile, notes)
    if has_alpha:
        color_HWC = flatten_over_white(color_HWC, pixels_HWC[:, :, 3], notes)
    return DecodedImage(color_HWC, notes=tuple(notes))
