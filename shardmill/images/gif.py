"""Decodes the first frame of a GIF with Pillow; OpenCV's wheels read no GIF before 4.12."""

from __future__ import annotations

import struct

import numpy as np
from PIL.GifImagePlugin import GifImageFile

from shardmill.images.pillow import opened
from shardmill.images.pixels import DecodedImage, Refused, check_allocation, check_dimensions, flatten_over_white
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason


def decode_gif(data: bytes, options: NormalizeOptions) -> DecodedImage:
    if len(data) < 13:
        raise Refused(RejectReason.TRUNCATED, f"the header ends at byte {len(data)}")
    width, height = struct.unpack_from("<HH", data, 6)
    check_dimensions(height, width, options)
    with opened(GifImageFile, data) as picture:
        assert isinstance(picture, GifImageFile)
        # Pillow makes the picture as large as a frame that hangs over the screen; what hangs over is not shown.
        left, top, right, bottom = picture.tile[0].extents or (0, 0, width, height)
        check_allocation(bottom - top, right - left, options)
        if left >= width or top >= height:
            raise Refused(RejectReason.BAD_HEADER, "the first frame lies outside the screen")
        picture.load()
        _check_colors(picture)
        rgba_HWC = np.asarray(picture.convert("RGBA"))[:height, :width]
        num_frames = picture.n_frames
    # Pillow gives what the frame leaves free the background's colour; no viewer shows that.
    alpha_HW = np.zeros((height, width), dtype=np.uint8)
    window = (slice(top, bottom), slice(left, right))
    alpha_HW[window] = rgba_HWC[window][:, :, 3]
    notes = [f"first_frame_of_{num_frames}"] if num_frames > 1 else []
    return DecodedImage(flatten_over_white(rgba_HWC[:, :, :3], alpha_HW, notes), notes=tuple(notes))


def _check_colors(picture: GifImageFile) -> None:
    """Pillow makes a colour that the palette lacks black."""
    if picture.mode == "P" and picture.palette is not None:
        last, num_colors = picture.getextrema()[1], len(picture.palette.palette) // 3
        if isinstance(last, int) and last >= num_colors:
            raise Refused(RejectReason.CORRUPT_SCAN, f"colour {last} of {num_colors}")
