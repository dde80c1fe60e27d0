"""Messages about one image between the sandbox and its child, in the format of `shardmill.messages`."""

from __future__ import annotations

import dataclasses
from typing import Any

from shardmill.messages import pack_message
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage

_SAMPLE_FIELDS = tuple(field.name for field in dataclasses.fields(ImageSample) if field.name != "image")


def pack_outcome(outcome: ImageSample | Rejection | None) -> tuple[bytes, bytes]:
    """The child's answer; None for an image for which memory ran out."""
    if outcome is None:
        return pack_message({"memory_error": True}, b"")
    if isinstance(outcome, Rejection):
        facts = {"reason": outcome.reason, "detail": outcome.detail, "source_sha256": outcome.source_sha256}
        return pack_message(facts, b"")
    return pack_message({name: getattr(outcome, name) for name in _SAMPLE_FIELDS}, outcome.image)


def unpack_outcome(source: SourceImage, header: dict[str, Any], body: bytes) -> ImageSample | Rejection:
    """Unpack the outcome of `pack_outcome`. Facts that the parent knows about the source are not taken from
    the child.
    """
    if "reason" in header:
        return source.rejected(RejectReason(header["reason"]), header["detail"], "decode", header["source_sha256"])
    lists = ("channel_sums", "channel_square_sums", "notes")
    return ImageSample(image=body, **{**header, **{name: tuple(header[name]) for name in lists}})
