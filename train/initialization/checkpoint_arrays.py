"""The arrays of a checkpoint that ranks have written together, by name and slice by slice: for `train.init_from`.

Weights are boxes in the files of their ranks (train/checkpoints/shards.py), frozen weights and moving statistics are in
that of rank 0. The driver and rank 0 verify these files by the marker, which has the SHA-256 of each.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardmill.errors import IntegrityError
from shardmill.storage import Store
from shardmill.stores import open_store
from train.checkpoints.checkpoint import open_checkpoint
from train.checkpoints.shards import WEIGHTS_PART, Shard, filled, read_index
from train.checkpoints.state import rank_file
from train.checkpoints.stored_arrays import ArrayLike, Places, StoredArray, WeightFile, box_of

_LOCAL_HEADER_BYTES = 30
_LONGEST_NPY_HEADER = 1 << 12


def arrays_of_checkpoint(marker_uri: str) -> Mapping[str, ArrayLike]:
    """Raises IntegrityError if the checkpoint is not complete by marker and sizes."""
    root, folder, _ = marker_uri.rsplit("/", 2)
    store = open_store(root)
    index = read_index(open_checkpoint(store, folder).files(store).read)
    boxes: dict[str, list[tuple[Shard, ArrayLike]]] = {}
    for rank in range(len(index.of_ranks)):
        written = index.written_by(rank, WEIGHTS_PART)
        stored = _stored_in_npz(store, f"{folder}/{index.file(WEIGHTS_PART, rank)}") if written else []
        for shard, array in zip(written, stored, strict=True):
            boxes.setdefault(shard.name, []).append((shard, array))
    own = dict(zip(index.own, _stored_in_npz(store, f"{folder}/{rank_file(0)}"), strict=False)) if index.own else {}
    return {name: _BoxedArray(each[0][0].global_shape, each, marker_uri) for name, each in boxes.items()} | own


@dataclass(frozen=True, slots=True)
class _BoxedArray:
    """An array of which each box is in a place of its own."""

    shape: tuple[int, ...]
    boxes: Sequence[tuple[Shard, ArrayLike]]
    where: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, places: Places) -> np.ndarray:
        places = box_of(self.shape, places)
        any_box = self.boxes[0][0]
        offsets, sizes = tuple(each.start for each in places), tuple(each.stop - each.start for each in places)
        return filled(Shard(any_box.part, any_box.name, self.shape, offsets, sizes), self.boxes, self.where)


def _stored_in_npz(store: Store, path: str) -> list[StoredArray]:
    """The arrays of a file that `train.checkpoints.state.dump_arrays` has made, in its order."""
    found = store.stat(path)
    assert found is not None
    file = WeightFile(".npz", f"{store.uri}/{path}", found.size_bytes, partial(store.read_range, path))
    with zipfile.ZipFile(file.opened()) as archive:
        return [_stored_in(file, entry) for entry in sorted(archive.infolist(), key=lambda entry: entry.filename)]


def _stored_in(file: WeightFile, entry: zipfile.ZipInfo) -> StoredArray:
    local = file.read_range(entry.header_offset, _LOCAL_HEADER_BYTES)
    # Lengths of the name and of an extra field, which follow.
    start = (
        entry.header_offset + _LOCAL_HEADER_BYTES + sum(int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
    )
    head = io.BytesIO(file.read_range(start, min(entry.file_size, _LONGEST_NPY_HEADER)))
    version = np.lib.format.read_magic(head)
    shape, is_by_column, dtype = np.lib.format.read_array_header_1_0(head)
    if entry.compress_type != zipfile.ZIP_STORED or version != (1, 0) or is_by_column or dtype.hasobject:
        raise IntegrityError(
            f"{file.where} holds {entry.filename} in another form", "expected plain arrays, row by row", "save it again"
        )
    return StoredArray(file, start + head.tell(), dtype, shape)
