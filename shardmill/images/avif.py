"""Decodes the first frame of an AVIF with Pillow's libavif, turned as the container says."""

from __future__ import annotations

from shardmill.images.exif import orient, read_orientation
from shardmill.images.pillow import decode_first_frame
from shardmill.images.pixels import DecodedImage, Refused
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason


def decode_avif(data: bytes, options: NormalizeOptions) -> DecodedImage:
    # Workers that meet none do not load its library.
    from PIL import AvifImagePlugin

    if not AvifImagePlugin.SUPPORTED:
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, "format=avif; this Pillow was built without it")
    # The pool of workers already uses every core.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    frame = decode_first_frame(AvifImagePlugin.AvifImageFile, data, options)
    # Pillow has put the container's own turn there, which goes before that of the camera's EXIF.
    orientation = read_orientation(frame.picture.info.get("exif"))
    upright_HWC = orient(frame.pixels_HWC, orientation, frame.notes)
    return DecodedImage(upright_HWC, tuple(frame.notes), orientation=orientation)
