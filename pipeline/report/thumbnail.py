"""Small pictures for the pages that people look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

THUMBNAIL_SIDE = 96


def thumbnail(image_HWC: np.ndarray, longest_side: int = THUMBNAIL_SIDE) -> tuple[bytes, bool]:
    """PNG bytes of an RGB or grey image shrunk to fit, and whether it is so small that a browser should not blur it."""
    import cv2
    import numpy as np

    height, width = image_HWC.shape[:2]
    scale = longest_side / max(height, width)
    if scale < 1:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        image_HWC = cv2.resize(image_HWC, size, interpolation=cv2.INTER_AREA)
    if image_HWC.ndim == 3 and image_HWC.shape[2] == 3:
        image_HWC = image_HWC[..., ::-1]
    ok, png = cv2.imencode(".png", np.ascontiguousarray(image_HWC))
    return (png.tobytes() if ok else b"", scale > 1)
