"""Assigns splits with the configured shares in every class, for `etl.stratified_splits`.

A hash of each image alone cannot do it: of 20 images of a class, 10 % are one to four. So the source is listed twice.
The first pass counts the classes and cuts each one, in hash order, where its quotas end; the second names the splits.
Images that the latest version holds keep their split, whatever it was, and count towards the quotas.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.listing.segments import find_sorted, key_digests, sample_ids
from etl.sources.listed import SPLITS, ListingBatch
from shardmill.dataset.row_segments import ROWS_SCHEMA, read_segment, rows_file
from shardmill.mix import mix64_array

if TYPE_CHECKING:
    from etl.config import SplitFractions
    from etl.sources import Lists
    from shardmill.jobs.observer import Observer
    from shardmill.storage import Store
    from shardmill.values import ShardInfo

# Not the config's seed: another seed orders samples anew, and must not move them between splits.
_SEED = 0x5711
_UNKNOWN = -1
_READ = pa.schema([ROWS_SCHEMA.field("sample_id")])


@dataclass(frozen=True, slots=True)
class KnownSplits:
    """The split of every image that a version holds: 9 bytes each."""

    ids_M: np.ndarray
    """Sample ids, int64, ascending."""
    splits_M: np.ndarray
    """Places in `SPLITS`, int8."""

    @classmethod
    def of(cls, store: Store, shards: Iterable[ShardInfo]) -> KnownSplits:
        """Read the row segments of `shards`, in one format. Raises IntegrityError for a missing or altered one."""
        ids, splits = [np.empty(0, np.int64)], [np.empty(0, np.int8)]
        for shard in shards:
            rows = read_segment(store, rows_file(shard), _READ, shard.num_rows)
            ids.append(rows.column("sample_id").to_numpy())
            splits.append(np.full(rows.num_rows, SPLITS.index(shard.split), np.int8))
        all_ids = np.concatenate(ids)
        order = np.argsort(all_ids, kind="stable")
        return cls(all_ids[order], np.concatenate(splits)[order])

    def look_up(self, ids_N: np.ndarray) -> np.ndarray:
        """Places in `SPLITS`, int8; -1 for an image that is not there."""
        places_N, is_known_N = find_sorted(self.ids_M, ids_N)
        splits_N = np.full(len(ids_N), _UNKNOWN, np.int8)
        splits_N[is_known_N] = self.splits_M[places_N[is_known_N]]
        return splits_N


class WithStratifiedSplits:
    """A source whose images have their splits; one that is named by the source, or by its group, stays as it is."""

    def __init__(self, source: Lists, fractions: SplitFractions, known: KnownSplits, observer: Observer) -> None:
        self.uri = source.uri
        self._source = source
        self._shares = [getattr(fractions, split) for split in SPLITS]
        self._known = known
        self._observer = observer

    def list(self) -> Iterator[ListingBatch]:
        """List like the source, with a split for each image; uses 12 bytes of memory per image while the classes are
        divided.
        """
        names, edges_CS = self._cut_classes()
        for batch in self._source.list():
            images = batch.images
            keys_N32 = key_digests(images)
            ids_N = sample_ids(keys_N32)
            classes_N = pc.index_in(images.column("label"), pa.array(names, pa.string())).fill_null(len(names))
            positions_N1 = mix64_array(ids_N, _SEED)[:, None]
            # How many edges of its class an image has passed is its split.
            new_N = (positions_N1 >= edges_CS[classes_N.to_numpy()]).sum(axis=1).astype(np.int8)
            known_N = self._known.look_up(ids_N)
            chosen = pa.array(SPLITS).take(pa.array(np.where(known_N == _UNKNOWN, new_N, known_N)))
            place = images.schema.get_field_index("split")
            column = pc.coalesce(images.column("split"), chosen)
            split = images.set_column(place, images.field(place), column)
            yield replace(batch, images=split, keys_N32=keys_N32)

    def _cut_classes(self) -> tuple[list[str | None], np.ndarray]:
        """Class names in order, and for each the hash positions where its splits end; the last row is of no class."""
        positions, classes = [np.empty(0, np.uint64)], [np.empty(0, np.int32)]
        numbers: dict[str | None, int] = {}
        held: Counter[tuple[str | None, int]] = Counter()
        num_listed = 0
        for batch in self._source.list():
            images = batch.images.filter(pc.is_null(batch.images.column("split")))
            num_listed += batch.images.num_rows + len(batch.rejections)
            self._observer.event("list.progress", {"num_listed": num_listed + batch.num_found_ahead})
            ids_N = sample_ids(key_digests(images))
            encoded = images.column("label").combine_chunks().dictionary_encode(null_encoding="encode")
            labels = encoded.dictionary.to_pylist()
            known_N = self._known.look_up(ids_N)
            indices_N = encoded.indices.to_numpy()
            for (label, split), times in _count_pairs(indices_N, known_N):
                held[labels[label], split] += times
            of_label = np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int32)
            is_new_N = known_N == _UNKNOWN
            positions.append(mix64_array(ids_N[is_new_N], _SEED))
            classes.append(of_label[indices_N[is_new_N]] if len(labels) else np.empty(0, np.int32))
        names = sorted(numbers, key=lambda name: (name is None, name))
        all_positions, all_classes = np.concatenate(positions), np.concatenate(classes)
        order = np.lexsort((all_positions, all_classes))
        starts = np.searchsorted(all_classes[order], np.arange(len(numbers) + 1))
        edges_CS = np.full((len(names) + 1, len(SPLITS) - 1), np.iinfo(np.uint64).max, np.uint64)
        carried = [0.0] * len(SPLITS)
        for row, name in enumerate(names):
            number = numbers[name]
            own = all_positions[order[starts[number] : starts[number + 1]]]
            held_here = [held[name, split] for split in range(len(SPLITS))]
            num_all = len(own) + sum(held_here)
            ideals = [share * num_all + carry for share, carry in zip(self._shares, carried, strict=True)]
            wanted = whole_quotas(ideals, num_all)
            carried = [ideal - want for ideal, want in zip(ideals, wanted, strict=True)]
            ends = np.cumsum(share_out(wanted, held_here, len(own)))[:-1]
            edges_CS[row, ends < len(own)] = own[ends[ends < len(own)]]
        return names, edges_CS


def whole_quotas(ideals: Sequence[float], num_images: int) -> list[int]:
    """Round `ideals`, which add up to `num_images`, to whole numbers of images per split.

    By largest remainders. The caller adds what rounding took away to the next class's ideals; so each class is within
    two images of its shares, and the whole dataset within two, even if all classes are small.
    """
    quotas = [max(0, math.floor(ideal)) for ideal in ideals]
    by_remainder = sorted(range(len(ideals)), key=lambda split: quotas[split] - ideals[split])
    for split in itertools.islice(itertools.cycle(by_remainder), max(0, num_images - sum(quotas))):
        quotas[split] += 1
    # An ideal below zero was raised to it: what that took comes from the largest.
    quotas[quotas.index(max(quotas))] -= sum(quotas) - num_images
    return quotas


def share_out(wanted: Sequence[int], held: Sequence[int], num_new: int) -> list[int]:
    """Assign the new images of a class to splits: fill missing shares first, and never assign more than there are new
    images.
    """
    missing = [max(0, want - have) for want, have in zip(wanted, held, strict=True)]
    total = sum(missing)
    if total == num_new:
        return missing
    # Some split holds more than its quota already, so not all of the others' can be met.
    shared = [each * num_new // total for each in missing]
    shared[missing.index(max(missing))] += num_new - sum(shared)
    return shared


def _count_pairs(labels_N: np.ndarray, splits_N: np.ndarray) -> Iterator[tuple[tuple[int, int], int]]:
    """Count the known images of each label and split."""
    is_known_N = splits_N != _UNKNOWN
    pairs, times = np.unique(np.stack([labels_N[is_known_N], splits_N[is_known_N]]), axis=1, return_counts=True)
    yield from zip(zip(*pairs.tolist(), strict=True), times.tolist(), strict=True)
