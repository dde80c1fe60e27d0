"""The report of a loader: rows read so far, and time spent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardmill.dataset.chunk_cache import CacheCounts


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """What one dataset of a mix gives to an epoch of all ranks."""

    dataset: str
    """`URI@N`."""
    rows: int
    rows_repeated: int
    """Of `rows`: uses of a row after its first one."""
    rows_left_out: int
    """Rows of its split that an epoch does not use."""


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """Of one rank since its loader was made; the rows of an epoch are those of all ranks."""

    steps: int
    rows_seen: int
    """Handed out, without padding; a repeated row as often as it was."""
    rows_padded: int
    rows_dropped: int
    """0: a loader drops none."""
    epoch_rows: int
    epoch_rows_repeated: int
    """Of `epoch_rows`: uses of a row after its first one."""
    epoch_rows_left_out: int
    """Rows of the split that `where` or a weight of 0 leave out."""
    wait_seconds: float
    """That the loop waited for batches."""
    fetch_seconds: float
    """That threads read and verified chunks, summed over them."""
    decode_seconds: float
    """That threads decoded and changed images, summed over them."""
    retries: int
    """Requests to storages that this process repeated."""
    cache: CacheCounts | None = None
    """What the cache gave; None without one."""
    datasets: tuple[DatasetRows, ...] = ()
    """Of a mix: its datasets in order, the loader's own first."""

    def __str__(self) -> str:
        cached = "" if self.cache is None else f"; {self.cache}"
        mixed = "".join(f"; {each.rows} rows an epoch of {each.dataset}" for each in self.datasets)
        return (
            f"{self.steps} steps: {self.rows_seen} rows seen, {self.rows_padded} padded, {self.rows_dropped} dropped; "
            f"an epoch has {self.epoch_rows} rows, {self.epoch_rows_repeated} of them repeated, "
            f"{self.epoch_rows_left_out} left out; waited {self.wait_seconds:.2f} s (threads: "
            f"{self.fetch_seconds:.2f} s fetched, {self.decode_seconds:.2f} s decoded, {self.retries} retries)"
            f"{cached}{mixed}"
        )
