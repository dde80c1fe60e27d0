"""Finds the optional native kernel (folder `native/`), and chooses between it and the wheels for decoding images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from shardmill.errors import UsageError
from shardmill.registry import install_hint

# A build of another version gives other pixels, and may lack functions: it counts as none.
KERNEL_VERSION = 2

try:
    import shardmill_native
except ImportError:
    shardmill_native = None
if shardmill_native is not None and not shardmill_native.KERNEL_ID.startswith(f"native-{KERNEL_VERSION}+"):
    shardmill_native = None

Kernel = Literal["wheels", "native"]

# Its version, and that of the libjpeg-turbo it was built with; empty without it.
NATIVE_ID: str = shardmill_native.KERNEL_ID if shardmill_native is not None else ""
HOW_TO_INSTALL = install_hint("native")


def resolve_kernel(wish: Literal["auto", "wheels", "native"]) -> Kernel:
    """Resolve `auto` for this machine. Raises UsageError for `native` if it is not installed."""
    if wish == "native" and not NATIVE_ID:
        raise UsageError(
            f"etl.kernel is native, but version {KERNEL_VERSION} of the package shardmill-native is not installed here",
            "expected the same kernel on the driver, on every executor, and for predict",
            f"install it: {HOW_TO_INSTALL}, or build with etl.kernel = wheels",
        )
    if wish == "auto":
        return "native" if NATIVE_ID else "wheels"
    return wish


_decode_jpegs = getattr(shardmill_native, "decode_jpegs", None)

CAN_DECODE_WINDOWS = _decode_jpegs is not None
"""Whether the native kernel is installed."""


def decode_windows(
    encoded: Sequence[bytes | memoryview], stored_HWC: tuple[int, int, int], boxes: np.ndarray, offsets_N: np.ndarray,
    pixels: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Decode box n of image n to the contiguous `pixels`, from `offsets_N[n]` on; bool, N: False for what it declines.

    `boxes` (int64, N x 4) has the top, left, height and width of each, inside of the images. The kernel declines files
    that libjpeg has an objection to, and those of other sizes or colours. Raises ValueError for other boxes.
    """
    assert _decode_jpegs is not None, "who calls it has looked at CAN_DECODE_WINDOWS"
    places = np.column_stack([boxes, offsets_N]).astype(np.int64)
    is_done_N = np.zeros(len(encoded), dtype=np.uint8)
    _decode_jpegs(encoded, stored_HWC, places, pixels, is_done_N)
    return is_done_N.astype(bool)
