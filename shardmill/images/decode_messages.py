"""The messages between the sandbox and its child: two lengths, a JSON header, raw bytes. Nothing is unpickled."""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any, BinaryIO

from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage

LENGTHS = struct.Struct("<IQ")
"""Bytes of the header and of the body, before both."""
_SAMPLE_FIELDS = tuple(field.name for field in dataclasses.fields(ImageSample) if field.name != "image")


def pack_message(header: dict[str, Any], body: bytes) -> tuple[bytes, bytes]:
    """Header and body, to be written one after the other: a large body is not copied."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(body)) + text, body


def read_message(requests: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next request, or None if the parent closed its end."""
    lengths = requests.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header_bytes, body_bytes = LENGTHS.unpack(lengths)
    return json.loads(requests.read(header_bytes)), requests.read(body_bytes)


def pack_outcome(outcome: ImageSample | Rejection | None) -> tuple[bytes, bytes]:
    """The child's answer; None for an image for which memory ran out."""
    if outcome is None:
        return pack_message({"memory_error": True}, b"")
    if isinstance(outcome, Rejection):
        facts = {"reason": outcome.reason, "detail": outcome.detail, "source_sha256": outcome.source_sha256}
        return pack_message(facts, b"")
    return pack_message({name: getattr(outcome, name) for name in _SAMPLE_FIELDS}, outcome.image)


def unpack_outcome(source: SourceImage, header: dict[str, Any], body: bytes) -> ImageSample | Rejection:
    """What `pack_outcome` packed. What the parent knows of the source is not taken from the child."""
    if "reason" in header:
        return Rejection(
            key=source.key,
            reason=RejectReason(header["reason"]),
            detail=header["detail"],
            size_bytes=source.size_bytes,
            mtime_ns=source.mtime_ns,
            etag=source.etag,
            source_sha256=header["source_sha256"],
        )
    lists = ("channel_sums", "channel_square_sums", "notes")
    return ImageSample(image=body, **{**header, **{name: tuple(header[name]) for name in lists}})
