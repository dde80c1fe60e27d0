"""Says which layers an export has, to whom has asked for one that it has not."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from shardmill.errors import UsageError

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
