"""Decodes the first frame of a WebP: walks over the container here, and passes one plain image to libwebp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardmill.images.exif import orient, read_orientation
from shardmill.images.icc import to_srgb
from shardmill.images.pixels import (
    TRAILING_NOTE,
    DecodedImage,
    Refused,
    check_allocation,
    check_dimensions,
    decode_with_opencv,
    expect_size,
    flatten_over_white,
)
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

ALPHA_FLAG = 0x10
VP8_START_CODE = b"\x9d\x01\x2a"
VP8L_SIGNATURE = 0x2F
MAX_CHUNKS = 100_000


@dataclass(frozen=True, slots=True)
class Frame:
    """One image of the container and its place on the canvas."""

    top: int
    left: int
    height: int
    width: int
    alpha: bytes | None
    bitstream_type: bytes
    bitstream: bytes


def decode_webp(data: bytes, options: NormalizeOptions) -> DecodedImage:
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise Refused(RejectReason.TRUNCATED, f"the file declares {end} bytes and has {len(data)}")
    chunks: dict[bytes, bytes] = {}
    num_frames = 0
    for type_, payload in _walk_chunks(data, 12, end):
        chunks.setdefault(type_, payload)  # the first frame of an animation; later ones are ignored
        num_frames += type_ == b"ANMF"
    notes = [f"first_frame_of_{num_frames}"] if num_frames > 1 else []
    if end + end % 2 < len(data):
        notes.append(TRAILING_NOTE)

    frame = _read_animation_frame(chunks[b"ANMF"]) if b"ANMF" in chunks else _read_still(chunks, top=0, left=0)
    height, width = _read_canvas(chunks) if b"VP8X" in chunks else (frame.height, frame.width)
    check_dimensions(height, width, options)
    check_allocation(frame.height, frame.width, options)
    if frame.top + frame.height > height or frame.left + frame.width > width:
        raise Refused(RejectReason.BAD_HEADER, "the first frame lies outside the canvas")
    bare_file = _as_plain_file(frame)
    frame_HWC = decode_with_opencv(bare_file, keep_alpha_and_depth=True)
    expect_size(frame_HWC, frame.height, frame.width)
    color_HWC = to_srgb(frame_HWC[:, :, :3], chunks.get(b"ICCP"), notes)
    alpha_HW = frame_HWC[:, :, 3] if frame_HWC.shape[2] == 4 else None
    pixels_HWC = _place_on_white(color_HWC, alpha_HW, frame, (height, width), notes)
    orientation = read_orientation(chunks.get(b"EXIF"))
    pixels_HWC = orient(pixels_HWC, orientation, notes)
    is_bare = options.keep_bytes and alpha_HW is None and (frame.height, frame.width) == (height, width)
    return DecodedImage(pixels_HWC, tuple(notes), bare_file if is_bare else None, orientation=orientation)


def _place_on_white(
    color_HWC: np.ndarray, alpha_HW: np.ndarray | None, frame: Frame, canvas: tuple[int, int], notes: list[str]
) -> np.ndarray:
    if color_HWC.shape[:2] == canvas:
        return color_HWC if alpha_HW is None else flatten_over_white(color_HWC, alpha_HW, notes)
    canvas_HWC = np.zeros((*canvas, 3), dtype=np.uint8)
    canvas_alpha_HW = np.zeros(canvas, dtype=np.uint8)
    window = (slice(frame.top, frame.top + frame.height), slice(frame.left, frame.left + frame.width))
    canvas_HWC[window] = color_HWC
    canvas_alpha_HW[window] = 255 if alpha_HW is None else alpha_HW
    return flatten_over_white(canvas_HWC, canvas_alpha_HW, notes)


def _walk_chunks(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    """Type and payload of each chunk in turn."""
    position = start
    for _ in range(MAX_CHUNKS):
        if position + 8 > end:
            return
        payload_end = position + 8 + int.from_bytes(data[position + 4 : position + 8], "little")
        if payload_end > end:
            raise Refused(RejectReason.TRUNCATED, f"a chunk ends at byte {payload_end} of {end}")
        yield data[position : position + 4], data[position + 8 : payload_end]
        position = payload_end + (payload_end - position) % 2  # chunks of odd length are padded
    raise Refused(RejectReason.BAD_HEADER, f"more than {MAX_CHUNKS} chunks")


def _read_canvas(chunks: dict[bytes, bytes]) -> tuple[int, int]:
    header = chunks[b"VP8X"]
    if len(header) < 10:
        raise Refused(RejectReason.BAD_HEADER, f"VP8X chunk of {len(header)} bytes")
    return 1 + int.from_bytes(header[7:10], "little"), 1 + int.from_bytes(header[4:7], "little")


def _read_animation_frame(payload: bytes) -> Frame:
    if len(payload) < 16:
        raise Refused(RejectReason.BAD_HEADER, f"ANMF chunk of {len(payload)} bytes")
    chunks = dict(_walk_chunks(payload, 16, len(payload)))
    left, top = (2 * int.from_bytes(payload[i : i + 3], "little") for i in (0, 3))
    return _read_still(chunks, top=top, left=left)


def _read_still(chunks: dict[bytes, bytes], top: int, left: int) -> Frame:
    if b"VP8 " in chunks:
        type_, bitstream = b"VP8 ", chunks[b"VP8 "]
        if len(bitstream) < 10 or bitstream[3:6] != VP8_START_CODE:
            raise Refused(RejectReason.BAD_HEADER, "no start code in the VP8 chunk")
        width, height = (int.from_bytes(bitstream[i : i + 2], "little") & 0x3FFF for i in (6, 8))
    elif b"VP8L" in chunks:
        type_, bitstream = b"VP8L", chunks[b"VP8L"]
        if len(bitstream) < 5 or bitstream[0] != VP8L_SIGNATURE:
            raise Refused(RejectReason.BAD_HEADER, "no signature in the VP8L chunk")
        bits = int.from_bytes(bitstream[1:5], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        raise Refused(RejectReason.BAD_HEADER, "no image chunk")
    alpha = chunks.get(b"ALPH") if type_ == b"VP8 " else None  # VP8L holds its own
    return Frame(top=top, left=left, height=height, width=width, alpha=alpha, bitstream_type=type_, bitstream=bitstream)


def _as_plain_file(frame: Frame) -> bytes:
    chunks = b""
    if frame.alpha is not None:
        canvas = (frame.width - 1).to_bytes(3, "little") + (frame.height - 1).to_bytes(3, "little")
        chunks = _chunk(b"VP8X", bytes([ALPHA_FLAG, 0, 0, 0]) + canvas) + _chunk(b"ALPH", frame.alpha)
    chunks += _chunk(frame.bitstream_type, frame.bitstream)
    return b"RIFF" + (4 + len(chunks)).to_bytes(4, "little") + b"WEBP" + chunks


def _chunk(type_: bytes, payload: bytes) -> bytes:
    return type_ + len(payload).to_bytes(4, "little") + payload + b"\0" * (len(payload) % 2)
