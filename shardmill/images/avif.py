"""Decodes the first frame of an AVIF with Pillow's libavif, turned as the container says."""

from __future__ import annotations

import numpy as np

from shardmill.images.exif import orient, read_orientation
from shardmill.images.icc import to_srgb
from shardmill.images.pillow import opened
from shardmill.images.pixels import DecodedImage, Refused, check_dimensions, expect_size, flatten_over_white
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason


def decode_avif(data: bytes, options: NormalizeOptions) -> DecodedImage:
    # Workers that meet none do not load its library.
    from PIL import AvifImagePlugin

    if not AvifImagePlugin.SUPPORTED:
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, "format=avif; this Pillow was built without it")
    # The pool of workers already uses every core.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    with opened(AvifImagePlugin.AvifImageFile, data) as picture:
        width, height = picture.size
        check_dimensions(height, width, options)
        picture.load()
        num_frames = getattr(picture, "n_frames", 1)
        has_alpha = "A" in picture.mode
        pixels_HWC = np.asarray(picture.convert("RGBA" if has_alpha else "RGB"))
        profile, exif = picture.info.get("icc_profile"), picture.info.get("exif")
    expect_size(pixels_HWC, height, width)
    notes = [f"first_frame_of_{num_frames}"] if num_frames > 1 else []
    color_HWC = to_srgb(pixels_HWC[:, :, :3], profile, notes)
    if has_alpha:
        color_HWC = flatten_over_white(color_HWC, pixels_HWC[:, :, 3], notes)
    # Pillow has put the container's own turn there, which goes before that of the camera's EXIF.
    orientation = read_orientation(exif)
    upright_HWC = orient(color_HWC, orientation, notes)
    return DecodedImage(upright_HWC, tuple(notes), orientation=orientation)
