"""Extracts the original error of a layer: Keras adds the call's arguments to it, and TensorFlow adds its trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardmill.errors import UsageError


@contextmanager
def as_layers_raised_them() -> Iterator[None]:
    """Around a call or a trace of a model: a UsageError of one of its layers comes out of it untouched."""
    try:
        yield
    except Exception as error:
        innermost: BaseException | None = error
        found = None
        while innermost is not None:
            found = innermost if isinstance(innermost, UsageError) else found
            innermost = innermost.__cause__ or innermost.__context__
        if found is None or found is error:
            raise
        raise found from None
