"""Assigns images to splits: the split that the source names, or a hash of the image's group or content, or shares that
are kept in every class, for `etl.stratified_splits`.

A hash of each image alone cannot do the last: of 20 images of a class, 10 % are one to four. So the source is listed
twice. The first pass counts the classes and cuts each one, in hash order, where its quotas end; the second names the
splits. Images that the latest version holds keep their split, whatever it was, and count towards the quotas.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.listing.listing import find_sorted, key_digests, sample_ids
from etl.sources.listed import SPLITS, ListingBatch
from shardmill.mix import mix64_array

if TYPE_CHECKING:
    from etl.config import SplitFractions
    from shardmill.jobs.observer import Observer
    from shardmill.values import ShardInfo, SourceImage


# Splits are cut from the last 64 bits of a SHA-256.
_HASH_RANGE = 1 << 64


def split_of(source: SourceImage, source_sha256: str, fractions: SplitFractions) -> str:
    """The split of one image. Stable when a dataset grows; where contents decide, equal bytes are in the same split."""
    return source.split if source.split is not None else split_of_digest(source_sha256, fractions)


def split_of_digest(sha256: str, fractions: SplitFractions) -> str:
    """The split that a SHA-256 (hex) falls into."""
    position = int(sha256[-16:], 16)
    edge = 0.0
    for split in SPLITS:
        edge += getattr(fractions, split)
        if position < round(edge * _HASH_RANGE):
            return split
    return next(split for split in reversed(SPLITS) if getattr(fractions, split) > 0)


def with_group_splits(batches: Iterable[ListingBatch], fractions: SplitFractions) -> Iterator[ListingBatch]:
    """All images of a group (patients, videos) in the split of the group's hash, unless the source names one."""
    for batch in batches:
        if batch.groups is None:
            yield batch
            continue
        encoded = batch.groups.dictionary_encode()
        hashes = (hashlib.sha256(name.encode()).hexdigest() for name in encoded.dictionary.to_pylist())
        names = pa.array([split_of_digest(each, fractions) for each in hashes], pa.string())
        yield replace(_with_splits(batch, names.take(encoded.indices)), groups=None)


def _with_splits(batch: ListingBatch, splits: pa.Array) -> ListingBatch:
    """With these for the images whose split the source does not name."""
    place = batch.images.schema.get_field_index("split")
    column = pc.coalesce(batch.images.column("split"), splits)
    return replace(batch, images=batch.images.set_column(place, batch.images.field(place), column))


# Not the config's seed: another seed orders samples anew, and must not move them between splits.
_SEED = 0x5711
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class KnownSplits:
    """The split of every image that a version holds: 9 bytes each."""

    ids_M: np.ndarray
    """Sample ids, int64, ascending."""
    splits_M: np.ndarray
    """Places in `SPLITS`, int8."""

    @classmethod
    def of(cls, rows: Iterable[tuple[ShardInfo, np.ndarray]]) -> KnownSplits:
        """From the sample ids of the rows of each shard."""
        ids, splits = [np.empty(0, np.int64)], [np.empty(0, np.int8)]
        for shard, ids_N in rows:
            ids.append(ids_N)
            splits.append(np.full(len(ids_N), SPLITS.index(shard.split), np.int8))
        all_ids = np.concatenate(ids)
        order = np.argsort(all_ids, kind="stable")
        return cls(all_ids[order], np.concatenate(splits)[order])

    def look_up(self, ids_N: np.ndarray) -> np.ndarray:
        """Places in `SPLITS`, int8; -1 for an image that is not there."""
        places_N, is_known_N = find_sorted(self.ids_M, ids_N)
        splits_N = np.full(len(ids_N), _UNKNOWN, np.int8)
        splits_N[is_known_N] = self.splits_M[places_N[is_known_N]]
        return splits_N


def with_stratified_splits(
    listed: Callable[[], Iterator[ListingBatch]], fractions: SplitFractions, known: KnownSplits, observer: Observer
) -> Iterator[ListingBatch]:
    """What is `listed`, twice, with a split for each image; one that is named by the source, or by its group, stays.

    Uses 12 bytes of memory per image while the classes are divided.
    """
    names, edges_CS = _cut_classes(listed(), [getattr(fractions, split) for split in SPLITS], known, observer)
    for batch in listed():
        keys_N32 = key_digests(batch.images)
        ids_N = sample_ids(keys_N32)
        classes_N = pc.index_in(batch.images.column("label"), pa.array(names, pa.string())).fill_null(len(names))
        positions_N1 = mix64_array(ids_N, _SEED)[:, None]
        # How many edges of its class an image has passed is its split.
        new_N = (positions_N1 >= edges_CS[classes_N.to_numpy()]).sum(axis=1).astype(np.int8)
        known_N = known.look_up(ids_N)
        chosen = pa.array(SPLITS).take(pa.array(np.where(known_N == _UNKNOWN, new_N, known_N)))
        yield replace(_with_splits(batch, chosen), keys_N32=keys_N32)


def _cut_classes(
    batches: Iterable[ListingBatch], shares: Sequence[float], known: KnownSplits, observer: Observer
) -> tuple[list[str | None], np.ndarray]:
    """Class names in order, and for each the hash positions where its splits end; the last row is of no class."""
    positions, classes = [np.empty(0, np.uint64)], [np.empty(0, np.int32)]
    numbers: dict[str | None, int] = {}
    held: Counter[tuple[str | None, int]] = Counter()
    num_listed = 0
    for batch in batches:
        images = batch.images.filter(pc.is_null(batch.images.column("split")))
        num_listed += batch.images.num_rows + len(batch.rejections)
        observer.event("list.progress", {"num_listed": num_listed + batch.num_found_ahead})
        ids_N = sample_ids(key_digests(images))
        encoded = images.column("label").combine_chunks().dictionary_encode(null_encoding="encode")
        labels = encoded.dictionary.to_pylist()
        known_N, indices_N = known.look_up(ids_N), encoded.indices.to_numpy()
        is_new_N = known_N == _UNKNOWN
        pairs, times = np.unique(np.stack([indices_N, known_N])[:, ~is_new_N], axis=1, return_counts=True)
        for label, split, number in zip(*pairs.tolist(), times.tolist(), strict=True):
            held[labels[label], split] += number
        of_label = np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int32)
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
        ideals = [share * num_all + carry for share, carry in zip(shares, carried, strict=True)]
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
