"""Selects the weights that `train.weight_decay` shrinks, the same in every framework: only those that multiply."""

from __future__ import annotations

import re

_BIAS = re.compile(r"(^|_)bias(_|$)")
"""Biases may have any number of axes: attention has one for each head, and `vit` one for each position."""
_POSITION_OR_TOKEN = re.compile(r"pos(ition(al)?)?_?(emb|enc)|(cls|class|dist|mask|register)_?token")
_SCALES_OF_NORMS = ("gamma", "beta")


def is_decayed(name: str, num_axes: int, owner: str = "") -> bool:
    """False for biases, scales and offsets of norms, and embeddings of positions and tokens.

    `name`: as the framework has it, `block/dense/kernel` or `block.dense.weight`. `owner`: the class of its module, if
    the framework tells.
    """
    *_, last = re.split(r"[./]", name)
    of_norm = last in _SCALES_OF_NORMS or "norm" in owner.lower()
    return not (num_axes <= 1 or of_norm or _BIAS.search(last) or _POSITION_OR_TOKEN.search(name.lower()))
