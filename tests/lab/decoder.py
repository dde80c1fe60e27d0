"""Images are decoded in pytest's own process, but for the tests that name "decoder" among what they start.

What a sandbox does around its child is unchanged, messages included; the child's limits of time and memory are its own
tests' subject.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any

from shardmill.child_process import read_message
from shardmill.images import sandbox
from shardmill.images.sandbox import pack_outcome
from shardmill.options import DecodeLimits, NormalizeOptions
from shardmill.values import SourceImage

_RealChild = sandbox._Child
starts_children = False


class _DecodesHere:
    """The child of a `DecodeSandbox`, without a process."""

    def __init__(self, limits: DecodeLimits, entry: str) -> None:
        module, _, function = entry.partition(":")
        self._process = getattr(importlib.import_module(module), function)

    def send(self, source: SourceImage, data: bytes, options: NormalizeOptions) -> None:
        facts = SourceImage(source.key, source.size_bytes, mtime_ns=source.mtime_ns, etag=source.etag)
        self._answer = b"".join(pack_outcome(self._process(facts, data, options)))

    def receive(self) -> tuple[dict[str, Any], bytes]:
        answer = read_message(io.BytesIO(self._answer))
        assert answer is not None
        return answer

    def end(self) -> None:
        pass


def _child(limits: DecodeLimits, entry: str, clock: Callable[[], float]) -> Any:
    return _RealChild(limits, entry, clock) if starts_children else _DecodesHere(limits, entry)


sandbox._Child = _child  # pyright: ignore[reportAttributeAccessIssue]
