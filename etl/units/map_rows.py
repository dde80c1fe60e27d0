"""Puts what a `RowMapping` makes of the images of a work unit in the place of their pixels, a batch at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from shardmill.errors import UsageError
from shardmill.formats.rows import NO_IMAGES, VECTOR, RowSchema
from shardmill.registry import load_object
from shardmill.row_mapping import RowMapper, RowMapping
from shardmill.typed_columns import decode_values, encode_values
from shardmill.values import ImageSample, Rejection, SourceImage

Outcome = tuple[SourceImage, ImageSample | Rejection]


def map_rows(outcomes: Iterator[Outcome], mapping: RowMapping) -> Iterator[Outcome]:
    """The same images and rejections in the same order: an image has its vector for pixels, and its values beside
    the source's.

    Batches are cut by the order alone, so that another attempt at the unit gives the mapper the same ones.
    """
    mapper = opened_mapper(mapping)
    waiting: list[Outcome] = []
    num_samples = 0
    for image, outcome in outcomes:
        waiting.append((image, outcome))
        num_samples += isinstance(outcome, ImageSample)
        if num_samples == mapper.batch_size:
            yield from _mapped(waiting, mapper)
            waiting, num_samples = [], 0
    yield from _mapped(waiting, mapper)


def opened_mapper(mapping: RowMapping) -> RowMapper:
    """The mapper, opened once in each process. Raises what its opener raises: IntegrityError for an altered model."""
    return _opened(os.getpid(), mapping.opener, mapping.options, mapping.encoding)


def listed_values(text: str, mapping: RowMapping) -> str:
    """The text of a row's values without those of the mapping: what the source lists of the image."""
    made = {column.name for column in mapping.columns}
    values = {name: value for name, value in decode_values(text).items() if name not in made}
    return encode_values(values) if values else ""


def mapped_schema(schema: RowSchema, mapping: RowMapping | None) -> RowSchema:
    """With the mapping's columns beside the source's, and no images. Raises UsageError if names clash."""
    if mapping is None:
        return schema
    if schema.has_annotations:
        raise UsageError(
            "the source lists boxes or masks, and predictions no images that they could lie in",
            "expected images alone",
            "leave boxes and masks out of what your source lists if source.label_kind = 'none'",
        )
    ours = {column.name for column in mapping.columns} | ({VECTOR} if mapping.vector_size else set())
    clash = next((column.name for column in schema.extra if column.name in ours), None)
    if clash is not None:
        raise UsageError(
            f"the source's column {clash!r} is also one of the predictions",
            "expected other names",
            "leave it out of source.extra_columns",
        )
    extra = tuple(sorted((*schema.extra, *mapping.columns)))
    return replace(schema, encoding=NO_IMAGES, extra=extra, vector_size=mapping.vector_size)


def deciding(normalization_fingerprint: str, mapping: RowMapping | None) -> str:
    """What decides the content of a row beside its source."""
    return normalization_fingerprint if mapping is None else f"{normalization_fingerprint}\0{mapping.fingerprint}"


def _mapped(outcomes: list[Outcome], mapper: RowMapper) -> Iterator[Outcome]:
    samples = [outcome for _, outcome in outcomes if isinstance(outcome, ImageSample)]
    rows = iter(mapper.map(samples) if samples else ())
    for image, outcome in outcomes:
        if isinstance(outcome, Rejection):
            yield image, outcome
            continue
        row = next(rows)
        values = encode_values({**decode_values(image.extra), **row.values})
        yield replace(image, extra=values), replace(outcome, image=row.vector)


@cache
def _opened(process_id: int, opener: str, options: str, encoding: str) -> RowMapper:
    """A fork must not use its parent's framework, so the process is part of the key."""
    open_mapper: Callable[[str, str], RowMapper] = load_object(opener)
    return open_mapper(options, encoding)
