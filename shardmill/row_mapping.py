"""What a build may store of each image in place of its pixels: values that somebody else makes of them, named by text.

The ETL runs it and knows no model; training provides it and knows no work unit. Whoever composes the two (the command
`predict`, `etl/predict_job.py`) passes the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shardmill.options import ENCODINGS, NormalizeOptions
from shardmill.typed_columns import ExtraColumn
from shardmill.values import ImageSample, PredictedBy, Value


class MappedRow(NamedTuple):
    """What is stored of one image."""

    values: dict[str, Value]
    """Of each column of the mapping."""
    vector: bytes
    """Its float32 numbers, little-endian; empty unless the mapping has vectors."""


class RowMapper(Protocol):
    """Maps images in a worker process, which opens it once."""

    batch_size: int
    """Images that `map` is given at once; the last ones of a work unit may be fewer."""

    def map(self, samples: Sequence[ImageSample]) -> Sequence[MappedRow]:
        """One row for each sample, in order. What it makes of one must not depend on the others."""
        ...


@dataclass(frozen=True, slots=True)
class RowMapping:
    """Everything about a mapping that the driver and its workers must know."""

    opener: str
    """`package.module:function`: (`options`, `encoding`) -> RowMapper."""
    options: str
    encoding: str
    """Encoding of the samples that it is given."""
    fingerprint: str
    """Of all that decides what it makes of an image."""
    columns: tuple[ExtraColumn, ...]
    vector_size: int
    """Length of each row's vector; 0 for none."""
    normalize: NormalizeOptions
    """The images that it takes."""
    normalization_fingerprint: str
    """That of the images from which it was made."""
    predicted_by: PredictedBy

    @property
    def decode_options(self) -> NormalizeOptions:
        """Options of the samples that it is given."""
        return self.normalize.model_copy(update={"encoding": self.encoding})


def sample_encoding(normalize: NormalizeOptions) -> str:
    """Encoding of images that nobody stores: they are compressed only if that changes pixels."""
    return "raw" if ENCODINGS[normalize.encoding].is_lossless else normalize.encoding
