"""Which split an image belongs to: its folder's, or else what a hash of its content says."""

from __future__ import annotations

from etl.config import SPLITS, SplitFractions
from shardmill.values import SourceImage

_RANGE = 1 << 64


def split_of(source: SourceImage, source_sha256: str, fractions: SplitFractions) -> str:
    """The split of one image. Stable when a dataset grows; images with equal bytes are always in the same split."""
    if source.split is not None:
        return source.split
    position = int(source_sha256[-16:], 16)
    edge = 0.0
    for split in SPLITS:
        edge += getattr(fractions, split)
        if position < round(edge * _RANGE):
            return split
    return next(split for split in reversed(SPLITS) if getattr(fractions, split) > 0)
