"""GIF to the pixels of its first frame: the blocks are walked here, Pillow decompresses one plain frame.

OpenCV's wheels read no GIF before 4.12.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from PIL.GifImagePlugin import GifImageFile

from shardmill.images.pillow import decode_plain_gray
from shardmill.images.pixels import (
    TRAILING_NOTE,
    DecodedImage,
    Refused,
    check_allocation,
    check_dimensions,
    flatten_over_white,
)
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

EXTENSION, IMAGE, TRAILER = 0x21, 0x2C, 0x3B
GRAPHIC_CONTROL = 0xF9
IS_INTERLACED = 0x40
# With this palette a pixel is its own index.
INDEX_PALETTE = bytes(index for index in range(256) for _ in range(3))
# Frames and extensions together; an honest animation has at most some thousands.
MAX_BLOCKS = 100_000


@dataclass(frozen=True, slots=True)
class Frame:
    """The first image of the file, with the palette and transparency that are in force for it."""

    top: int
    left: int
    height: int
    width: int
    interlace_flag: int
    palette: bytes
    transparent_index: int | None
    root_bits: int
    sub_blocks: bytes
    """The compressed indexes, as they lie in the file: cut into blocks with a length byte each."""


class BlockReader:
    """Reads on through the file; running off its end means that the file was cut."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        taken = self._data[self.position : self.position + num_bytes]
        if len(taken) < num_bytes:
            raise Refused(RejectReason.TRUNCATED, f"the file ends at byte {len(self._data)} inside a block")
        self.position += num_bytes
        return taken

    def take_sub_blocks(self) -> bytes:
        start = position = self.position
        try:
            while length := self._data[position]:
                position += 1 + length
        except IndexError:
            position = len(self._data)
        self.position = start
        return self.take(position + 1 - start)


def decode_gif(data: bytes, options: NormalizeOptions) -> DecodedImage:
    blocks = BlockReader(data)
    blocks.take(6)
    screen = blocks.take(7)
    width, height = int.from_bytes(screen[0:2], "little"), int.from_bytes(screen[2:4], "little")
    check_dimensions(height, width, options)
    frame, num_frames = _read_frames(blocks, _take_palette(blocks, screen[4]))
    notes = [f"first_frame_of_{num_frames}"] if num_frames > 1 else []
    if blocks.position < len(data):
        notes.append(TRAILING_NOTE)

    # The frame may begin off the screen's edge; what hangs over is not shown.
    bottom, right = min(height, frame.top + frame.height), min(width, frame.left + frame.width)
    if frame.top >= bottom or frame.left >= right:
        raise Refused(RejectReason.BAD_HEADER, "the first frame lies outside the screen")
    indexes_HW = _decode_indexes(frame, options)[: bottom - frame.top, : right - frame.left]
    num_colors = len(frame.palette) // 3
    if indexes_HW.max() >= num_colors:
        raise Refused(RejectReason.CORRUPT_SCAN, f"colour {indexes_HW.max()} of {num_colors}")
    alpha_HW = np.zeros((height, width), dtype=np.uint8)
    color_HWC = np.zeros((height, width, 3), dtype=np.uint8)
    window = (slice(frame.top, bottom), slice(frame.left, right))
    color_HWC[window] = np.frombuffer(frame.palette, dtype=np.uint8).reshape(-1, 3)[indexes_HW]
    alpha_HW[window] = 255
    if frame.transparent_index is not None:
        alpha_HW[window][indexes_HW == frame.transparent_index] = 0
    return DecodedImage(pixels_HWC=flatten_over_white(color_HWC, alpha_HW, notes), notes=tuple(notes))


def _read_frames(blocks: BlockReader, global_palette: bytes) -> tuple[Frame, int]:
    """The first frame, and how many there are."""
    first: Frame | None = None
    num_frames = 0
    transparent_index: int | None = None
    for _ in range(MAX_BLOCKS):
        kind = blocks.take(1)[0]
        if kind == TRAILER:
            break
        if kind == EXTENSION:
            label = blocks.take(1)[0]
            control = blocks.take_sub_blocks()
            if label == GRAPHIC_CONTROL and control[0] >= 4:
                transparent_index = control[4] if control[1] & 1 else None
        elif kind == IMAGE:
            frame = _read_frame(blocks, global_palette, transparent_index)
            first = first or frame
            num_frames += 1
            transparent_index = None
        else:
            raise Refused(RejectReason.BAD_HEADER, f"block 0x{kind:02x} at byte {blocks.position - 1}")
    else:
        raise Refused(RejectReason.BAD_HEADER, f"more than {MAX_BLOCKS} blocks")
    if first is None:
        raise Refused(RejectReason.BAD_HEADER, "no image in the file")
    return first, num_frames


def _read_frame(blocks: BlockReader, global_palette: bytes, transparent_index: int | None) -> Frame:
    descriptor = blocks.take(9)
    left, top, width, height = (int.from_bytes(descriptor[i : i + 2], "little") for i in (0, 2, 4, 6))
    palette = _take_palette(blocks, descriptor[8]) or global_palette
    return Frame(
        top=top,
        left=left,
        height=height,
        width=width,
        interlace_flag=descriptor[8] & IS_INTERLACED,
        palette=palette,
        transparent_index=transparent_index,
        root_bits=blocks.take(1)[0],
        sub_blocks=blocks.take_sub_blocks(),
    )


def _take_palette(blocks: BlockReader, flags: int) -> bytes:
    return blocks.take(3 << ((flags & 7) + 1)) if flags & 0x80 else b""


def _decode_indexes(frame: Frame, options: NormalizeOptions) -> np.ndarray:
    check_allocation(frame.height, frame.width, options)
    if not 1 <= frame.root_bits <= 8:
        raise Refused(RejectReason.BAD_HEADER, f"LZW codes of {frame.root_bits} bits")
    size = struct.pack("<HH", frame.width, frame.height)
    screen = b"GIF87a" + size + bytes([0xF7, 0, 0]) + INDEX_PALETTE
    descriptor = b"\x2c" + bytes(4) + size + bytes([frame.interlace_flag, frame.root_bits])
    return decode_plain_gray(GifImageFile, screen + descriptor + frame.sub_blocks + bytes([TRAILER]))
