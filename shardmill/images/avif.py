"""Decodes the first frame of an AVIF with Pillow's libavif, turned as the container says."""

from __future__ import annotations

from shardmill.images.exif import orient, read_orientation
from shardmill.images.pillow import loaded, opened, to_srgb_over_white
from shardmill.images.pixels import DecodedImage, Refused, check_dimensions, expect_size
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
        pixels_HWC = loaded(picture)
        num_frames = getattr(picture, "n_frames", 1)
        profile, exif = picture.info.get("icc_profile"), picture.info.get("exif")
    expect_size(pixels_HWC, height, width)
    notes = [f"first_frame_of_{num_frames}"] if num_frames > 1 else []
    color_HWC = to_srgb_over_white(pixels_HWC, profile, notes)
    # Pillow has put the container's own turn there, which goes before that of the camera's EXIF.
    orientation = read_orientation(exif)
    upright_HWC = orient(color_HWC, orientation, notes)
    return DecodedImage(upright_HWC, tuple(notes), orientation=orientation)
