"""What a commit is made of: facts of a build that the driver knows before its units run, and the result of each
finished work unit, which the driver keeps until then.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from shardmill.checksummed import verified_body, with_checksum
from shardmill.dataset.manifest import Operation, SourceRef
from shardmill.dataset.statistics import ImageSizes, add_sizes
from shardmill.errors import IntegrityError
from shardmill.ids import add_digests, format_digest
from shardmill.options import NormalizeOptions
from shardmill.storage import Store
from shardmill.values import PredictedBy, Rejection, ShardInfo

if TYPE_CHECKING:
    from shardmill.dataset.ledger import RejectionLog


@dataclass(frozen=True, slots=True)
class Build:
    """Facts of a build that the driver knows before its units run."""

    run_id: str
    source: SourceRef
    num_listed: int
    list_rejections: RejectionLog
    """Inputs refused by the listing; they are in no unit."""
    class_names: tuple[str, ...]
    columns: dict[str, str]
    formats: tuple[str, ...]
    normalize: NormalizeOptions
    normalization_fingerprint: str
    decoder_id: str
    config: dict[str, Any]
    config_fingerprint: str
    operation: Operation = "full"
    other_sources: tuple[SourceRef, ...] = ()
    """For an append: the sources of existing images."""
    predicted_by: PredictedBy | None = None
    """For predictions: what makes them."""


PENDING = "pending"
"""The folder of the units that have finished and wait for their commit."""


@dataclass(frozen=True, slots=True)
class SplitSums:
    """One unit's part of one split; sums of units are the sums of the dataset."""

    split: str
    num_rows: int
    image_bytes: int
    class_counts: tuple[int, ...]
    row_digest_sum: str
    num_pixels: int
    channel_sums: tuple[int, ...]
    channel_square_sums: tuple[int, ...]
    sizes: ImageSizes

    def plus(self, other: SplitSums) -> SplitSums:
        """Add the sums of two parts of one split."""
        return SplitSums(
            split=self.split,
            num_rows=self.num_rows + other.num_rows,
            image_bytes=self.image_bytes + other.image_bytes,
            class_counts=_added(self.class_counts, other.class_counts),
            row_digest_sum=format_digest(add_digests(int(self.row_digest_sum, 16), int(other.row_digest_sum, 16))),
            num_pixels=self.num_pixels + other.num_pixels,
            channel_sums=_added(self.channel_sums, other.channel_sums),
            channel_square_sums=_added(self.channel_square_sums, other.channel_square_sums),
            sizes=add_sizes((self.sizes, other.sizes)),
        )


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(left + right for left, right in zip(one, other, strict=True))


@dataclass(frozen=True, slots=True)
class UnitResult:
    """All outputs of a work unit: published shards, and every rejected input."""

    unit_index: int
    fingerprint: str
    shards: Sequence[ShardInfo]
    splits: Sequence[SplitSums]
    rejections: tuple[Rejection, ...]
    accepted_key_sum: str
    note_counts: tuple[tuple[str, int], ...]
    unchanged_ids: str = ""
    """Sample ids of inputs whose bytes are those of their rows in the latest version (see `encode_sample_ids`)."""
    retried_requests: int = 0
    """Requests to storage that its process sent again meanwhile."""


def count_notes(results: Iterable[UnitResult]) -> dict[str, int]:
    """Count the accepted images of all units with each note, by name."""
    notes: Counter[str] = Counter()
    for result in results:
        notes.update(dict(result.note_counts))
    return dict(sorted(notes.items()))


def encode_unit_result(result: UnitResult) -> bytes:
    """A unit result as JSON. (A key that is not UTF-8 is refused while listing and never gets here.)"""
    return _adapter().dump_json(result)


def decode_unit_result(data: bytes | str) -> UnitResult:
    """The unit result that `encode_unit_result` wrote. Raises IntegrityError for anything else."""
    try:
        return _adapter().validate_json(data)
    except ValidationError as error:
        raise IntegrityError(f"a unit result does not parse: {error.errors(include_url=False)[0]['msg']}") from None


def write_pending(store: Store, path: str, result: UnitResult) -> None:
    """Keep a unit's result until its commit."""
    store.put(path, with_checksum(encode_unit_result(result)))


def read_pending(store: Store, path: str) -> UnitResult:
    """Read the result of `write_pending`. Raises IntegrityError if it is damaged, FileNotFoundError if it does not
    exist.
    """
    return decode_unit_result(verified_body(store.read(path), path))


@cache
def _adapter() -> TypeAdapter[UnitResult]:
    """Made once: making one takes as long as encoding the results of ten units."""
    return TypeAdapter(UnitResult)


def encode_sample_ids(sample_ids: Iterable[int]) -> str:
    """Signed 64-bit ids, in order, as one base64 text."""
    return base64.b64encode(np.array([*sample_ids], "<i8").tobytes()).decode()


def decode_sample_ids(texts: Iterable[str]) -> np.ndarray:
    """The ids of all texts that `encode_sample_ids` made, one after the other, int64."""
    return np.frombuffer(b"".join(map(base64.b64decode, texts)), "<i8")
