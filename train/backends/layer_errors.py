"""What a layer raises, as it raised it: Keras wraps it in what the layer was called with, TensorFlow in its trace."""

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
