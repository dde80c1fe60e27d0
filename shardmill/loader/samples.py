"""Single rows of a split in stored order: for looking at a dataset, for reports, and for map-style datasets."""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np

from shardmill.dataset.chunks import ChunkFetcher
from shardmill.dataset.dataset import open_pinned
from shardmill.formats.encodings import decode_row
from shardmill.loader.annotations import stored_annotations
from shardmill.loader.metadata import read_metadata
from shardmill.typed_columns import LABEL

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.formats.rows import ChunkRows
    from shardmill.values import DatasetPin

_OWN = ("image", LABEL, "sample_id", "source")
_KEPT_CHUNKS = 4
"""Chunks that a `Samples` keeps, as neighbours are often asked for one after the other."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredSample(Mapping[str, Any]):
    """One decoded row; also a mapping of `image`, `label`, `sample_id`, `source` and the extra columns."""

    image_HWC: np.ndarray
    label: int | None
    """The class number; labels of other kinds are in `extra`."""
    sample_id: int
    source: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values of the extra columns; `boxes` is a `shardmill.loader.annotations.RowBoxes`, `mask` uint8 (H, W)."""

    def __getitem__(self, name: str) -> Any:
        if name == "image":
            return self.image_HWC
        return self.extra[name] if name in self.extra or name not in _OWN else getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        yield from _OWN
        yield from (name for name in self.extra if name not in _OWN)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Samples:
    """The rows of a split by their number in stored order: `len(samples)`, `samples[3]`, `samples[[3, 7]]`,
    `samples[mask]` with a bool for each row.

    A map-style dataset for `torch.utils.data.DataLoader`, in workers as well: each opens the dataset for itself. A row
    costs its whole chunk (about 4 MB are read, verified, and kept for neighbours): a training is faster with a loader.
    """

    def __init__(self, dataset: Dataset, split: str, format: str = "auto") -> None:
        self._open(dataset, split, format)

    def _open(self, dataset: Dataset, split: str, format: str) -> None:
        self._dataset, self._split, self._format, self._pid = dataset, split, format, os.getpid()
        dataset.require_images()
        index = dataset.index(split, format)
        self._fetcher = ChunkFetcher(dataset.store, index, dataset.manifest.row_schema)
        self._starts = np.concatenate([[0], np.cumsum(index.chunk_rows, dtype=np.int64)])
        self._chunks: OrderedDict[int, ChunkRows] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, which: int) -> StoredSample: ...

    @overload
    def __getitem__(self, which: slice | Iterable[int]) -> list[StoredSample]: ...

    def __getitem__(self, which: int | slice | Iterable[int]) -> StoredSample | list[StoredSample]:
        """One row, or several: in the order of their numbers in `which`, or those for which a mask of bools is true.

        Raises IndexError for a number that no row has and a mask of another length, IntegrityError for a chunk that is
        missing or altered.
        """
        if isinstance(which, slice):
            return self.__getitems__(range(*which.indices(len(self))))
        # An array without dimensions is one number.
        if isinstance(which, Iterable) and getattr(which, "ndim", 1) > 0:
            return self.__getitems__(which)
        return self.__getitems__([which])[0]  # pyright: ignore[reportArgumentType]

    def __getitems__(self, numbers: Iterable[int]) -> list[StoredSample]:
        """Return a whole batch; called by `DataLoader`."""
        if self._pid != os.getpid():
            # A fork shares connections and locks with the process that it left.
            self._open(open_pinned(self._dataset.pin), self._split, self._format)
        places = self._places(numbers)
        found: dict[int, StoredSample] = {}
        # Each chunk once, whatever the order.
        for number in sorted(set(places)):
            chunk = int(np.searchsorted(self._starts, number, side="right")) - 1
            row = number - int(self._starts[chunk])
            found[number] = stored_sample(self._dataset, self._read(chunk), row)
        return [found[number] for number in places]

    def __iter__(self) -> Iterator[StoredSample]:
        return iterate_samples(self._dataset, self._split, self._format)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._dataset.pin, self._split, self._format)

    def _places(self, numbers: Iterable[int]) -> list[int]:
        # Of Arrow, whose items are no numbers of Python.
        given = numbers.to_pylist() if hasattr(numbers, "to_pylist") else list(numbers)  # pyright: ignore
        is_true = [_is_true(each) for each in given]
        if set(is_true) <= {None}:
            return list(map(self._place, given))
        if None in is_true or len(given) != len(self):
            raise IndexError(
                f"{len(given)} values, {len(given) - is_true.count(None)} of them bools, for the {len(self)} rows of "
                f"split {self._split!r}; expected a mask of a bool for each row, or numbers alone"
            )
        return [place for place, is_chosen in enumerate(is_true) if is_chosen]

    def _place(self, number: int) -> int:
        place = operator.index(number)
        if not -len(self) <= place < len(self):
            raise IndexError(f"sample {place} of the {len(self)} of split {self._split!r}")
        return place % len(self)

    def _read(self, chunk: int) -> ChunkRows:
        with self._lock:
            rows = self._chunks.get(chunk)
        # Outside of the lock: threads wait for nobody else's storage.
        rows = rows or self._fetcher.read_chunk(chunk)
        with self._lock:
            self._chunks[chunk] = rows
            self._chunks.move_to_end(chunk)
            while len(self._chunks) > _KEPT_CHUNKS:
                self._chunks.popitem(last=False)
        return rows


def _is_true(value: Any) -> bool | None:
    """A bool of Python, NumPy or torch; None for what is none."""
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    return bool(value) if is_bool and getattr(value, "ndim", 0) == 0 else None


def _reopened(pin: DatasetPin, split: str, format: str) -> Samples:
    return Samples(open_pinned(pin), split, format)


def read_samples(dataset: Dataset, split: str, limit: int) -> list[StoredSample]:
    """The first `limit` rows of a split in layout order, verified and decoded. Raises as iterating a reader does."""
    return list(itertools.islice(iterate_samples(dataset, split), limit))


def iterate_samples(dataset: Dataset, split: str, format: str = "auto") -> Iterator[StoredSample]:
    """Every row of a split in layout order, verified and decoded, one chunk in memory."""
    dataset.require_images()
    index = dataset.index(split, format)
    fetcher = ChunkFetcher(dataset.store, index, dataset.manifest.row_schema)
    for chunk in range(index.num_chunks):
        rows = fetcher.read_chunk(chunk)
        for row in range(len(rows.images)):
            yield stored_sample(dataset, rows, row)


class NamesSample(Protocol):
    """An entry of a list about images."""

    @property
    def split(self) -> str: ...
    @property
    def sample_id(self) -> int: ...


def samples_by_id(dataset: Dataset, entries: Iterable[NamesSample]) -> dict[int, StoredSample]:
    """The samples that entries name, wherever they lie; each chunk of the dataset is read once."""
    found: dict[int, StoredSample] = {}
    ids_of: defaultdict[str, set[int]] = defaultdict(set)
    for each in entries:
        ids_of[each.split].add(each.sample_id)
    for split, ids in ids_of.items():
        ids_N = read_metadata(dataset, split, ("sample_id",)).column("sample_id").to_numpy()
        rows = np.flatnonzero(np.isin(ids_N, list(ids)))
        found |= {sample.sample_id: sample for sample in Samples(dataset, split)[rows.tolist()]}
    return found


def stored_sample(dataset: Dataset, rows: ChunkRows, row: int) -> StoredSample:
    """A row of a chunk, decoded."""
    label, is_class = rows.labels_N[row], dataset.manifest.row_schema.has_class
    extra = {name: values[row] for name, values in rows.extra.items()}
    image_HWC = decode_row(rows.images[row], dataset.manifest.normalize)
    height, width, _ = image_HWC.shape
    extra = stored_annotations(extra, dataset.manifest.row_schema, (height, width))
    return StoredSample(
        image_HWC,
        int(label) if is_class and label >= 0 else None,
        int(rows.sample_ids_N[row]),
        rows.sources[row],
        extra if is_class else {**extra, LABEL: label if isinstance(label, list) else label.tolist()},
    )
