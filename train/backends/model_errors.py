"""Errors about a model, the same in every framework: of its layers, and of what it does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
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


_NUM_SHOWN = 8


def no_layer(name: str, known: Sequence[str]) -> UsageError:
    """The error for a layer that is not there: the last layers are those that people mean."""
    near = difflib.get_close_matches(name, known, n=1)
    shown = ", ".join(known[-_NUM_SHOWN:])
    return UsageError(
        f"the model has no layer {name!r}",
        f"expected one of its {len(known)} layers; the last ones are {shown}",
        f"did you mean {near[0]!r}?" if near else "choose one of them for --layer",
    )


def nothing_to_recompute(model: str, expected: str) -> UsageError:
    """For activation checkpointing: of a block only its inputs are kept, and the backward pass computes the rest again.

    `model`: what `train.model` names.
    """
    return UsageError(
        f"train.memory.activation_checkpointing: train.model = {model!r} has no part that can be recomputed",
        f"expected {expected}",
        "set train.memory.activation_checkpointing = 'off'",
    )
