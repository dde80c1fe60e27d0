"""Finds stored images that look alike although their bytes differ: resized, recompressed or slightly edited copies.

Images whose difference hashes (`shardmill.images.look`) differ in few bits form a group. `connect` finds
which of many hashes are connected by steps of few bits, without a comparison of each with each.

Shape legend: U different hashes, R rows of a part of them, S a sample of these, N rows, P pairs, B bits.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardmill.data_quality.row_looks import RowLooks
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.row_segments import read_rows
from shardmill.errors import UsageError
from shardmill.result import Result, Rows, plain
from shardmill.words import counted

MAX_COMPARISONS = 2_000_000_000
"""A part of the hashes that would need more is left out: they are too alike to tell copies from others."""
_HASH_BITS = 64
# Fewer are compared each with each in less time than they are divided.
_ROWS_COMPARED_AT_ONCE = 512
# Sorting a row by one band takes as long as so many comparisons.
_COMPARISONS_PER_SORTED_ROW = 16
# A block's arrays take about 60 bytes for each pair, and stay in the processor's cache.
_BLOCK_PAIRS = 1 << 16
_PAIRS_UNITED_AT_ONCE = 1 << 20
_MAX_ROWS_SAMPLED = 1 << 14


@dataclass(frozen=True, slots=True)
class Connected:
    """What hashes are connected with, directly or through others."""

    representative_U: np.ndarray
    """The place of one hash of the same component."""
    is_left_out_U: np.ndarray
    """Whether a hash was not compared with all that may be near it."""


def connect(hashes_U: np.ndarray, max_bits: int, max_comparisons: int = MAX_COMPARISONS) -> Connected:
    """Connect different uint64 hashes that differ in at most `max_bits`.

    Exact, but for those that are left out because more than `max_comparisons` would be needed.
    """
    search = _Search(hashes_U, max_bits, max_comparisons)
    search.connect(np.arange(len(hashes_U)))
    search.unite()
    return Connected(search.parent_U, search.is_left_out_U)


@dataclass(slots=True)
class _Search:
    hashes_U: np.ndarray
    max_bits: int
    comparisons_left: int
    parent_U: np.ndarray = field(init=False)
    """Of each hash the smallest place of its component, without the pairs that wait."""
    is_left_out_U: np.ndarray = field(init=False)
    waiting: list[np.ndarray] = field(default_factory=list)
    """Near pairs, each array of shape (P, 2)."""
    num_waiting: int = 0

    def __post_init__(self) -> None:
        self.parent_U = np.arange(len(self.hashes_U))
        self.is_left_out_U = np.zeros(len(self.hashes_U), bool)

    def connect(self, rows_R: np.ndarray) -> None:
        """Connect some of the hashes: of b + 1 bands, two that differ in b bits have at least one in common.

        Those of one band are divided by bands again, as long as that saves comparisons: a white margin is a band that
        most of the images have in common.
        """
        num_pairs, everything = _num_pairs(np.array([len(rows_R)])), np.array([0, len(rows_R)])
        if len(rows_R) <= _ROWS_COMPARED_AT_ONCE:
            return self._compare(rows_R, everything)
        sorting = len(rows_R) * (self.max_bits + 1) * _COMPARISONS_PER_SORTED_ROW
        if not self._may_spend(sorting, rows_R):
            return None
        divisions = self._divisions(rows_R)
        num_left = sorting + sum(_num_pairs(np.diff(edges)) for _, edges in divisions)
        if 2 * num_left > num_pairs and num_pairs <= self.comparisons_left:
            return self._compare(rows_R, everything)
        # The small ones first, so that what the limit leaves out is in a crowd.
        large = [bucket_R for division in divisions for bucket_R in self._compare_small(*division)]
        for bucket_R in sorted(large, key=len):
            if len(bucket_R) == len(rows_R):
                self._compare(bucket_R, everything)
            else:
                self.connect(bucket_R)
        return None

    def _divisions(self, rows_R: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """The rows sorted by each of the bands, with the places where buckets start, and the end."""
        divisions = []
        for mask in _bands(self.hashes_U[rows_R], self.max_bits + 1):
            keys_R = self.hashes_U[rows_R] & mask
            order_R = np.argsort(keys_R)
            starts = np.flatnonzero(np.diff(keys_R[order_R])) + 1
            divisions.append((rows_R[order_R], np.concatenate(([0], starts, [len(rows_R)]))))
        return divisions

    def _compare_small(self, sorted_R: np.ndarray, edges: np.ndarray) -> list[np.ndarray]:
        """Return the buckets that are too large to compare each with each."""
        sizes = np.diff(edges)
        is_small = sizes <= _ROWS_COMPARED_AT_ONCE
        small_edges = np.concatenate(([0], np.cumsum(sizes[is_small])))
        self._compare(sorted_R[np.repeat(is_small, sizes)], small_edges)
        return [sorted_R[edges[place] : edges[place + 1]] for place in np.flatnonzero(~is_small)]

    def _compare(self, rows_R: np.ndarray, edges: np.ndarray) -> None:
        """Compare each row with each of the same bucket; `edges` are the places where buckets start, and the end."""
        rows_R, edges = self._affordable(rows_R, edges)
        hashes_R = self.hashes_U[rows_R]
        for first_P, second_P in _pairs_of_buckets(edges):
            is_near_P = _num_ones(hashes_R[first_P] ^ hashes_R[second_P]) <= self.max_bits
            self._wait(np.stack([rows_R[first_P[is_near_P]], rows_R[second_P[is_near_P]]], axis=1))

    def _affordable(self, rows_R: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The buckets that can be compared within the limit, of too many the smallest; the others are left out."""
        if self._may_spend(_num_pairs(sizes := np.diff(edges)), rows_R[:0]):
            return rows_R, edges
        order = np.argsort(sizes, kind="stable")
        ends = np.cumsum(sizes[order] * (sizes[order] - 1) // 2)
        is_kept = np.zeros(len(sizes), bool)
        is_kept[order[ends <= self.comparisons_left]] = True
        self.comparisons_left -= _num_pairs(sizes[is_kept])
        is_kept_R = np.repeat(is_kept, sizes)
        self.is_left_out_U[rows_R[~is_kept_R]] = True
        return rows_R[is_kept_R], np.concatenate(([0], np.cumsum(sizes[is_kept])))

    def _may_spend(self, num_comparisons: int, rows_R: np.ndarray) -> bool:
        if num_comparisons > self.comparisons_left:
            self.is_left_out_U[rows_R] = True
            return False
        self.comparisons_left -= num_comparisons
        return True

    def _wait(self, pairs_P2: np.ndarray) -> None:
        """To unite a few takes as long as to unite many: all parents are followed."""
        self.waiting.append(pairs_P2)
        self.num_waiting += len(pairs_P2)
        if self.num_waiting >= _PAIRS_UNITED_AT_ONCE:
            self.unite()

    def unite(self) -> None:
        """Unite the components of the pairs that wait."""
        parent_U, pairs_P2 = self.parent_U, np.concatenate([np.empty((0, 2), np.int64), *self.waiting])
        self.waiting, self.num_waiting = [], 0
        while True:
            roots_P2 = parent_U[pairs_P2]
            pairs_P2 = roots_P2[roots_P2[:, 0] != roots_P2[:, 1]]
            if not len(pairs_P2):
                return
            # A root gets a smaller one, so that there is no circle.
            np.minimum.at(parent_U, pairs_P2.max(axis=1), pairs_P2.min(axis=1))
            while not np.array_equal(parents_U := parent_U[parent_U], parent_U):
                parent_U[:] = parents_U


def _bands(hashes_R: np.ndarray, num_bands: int) -> list[np.uint64]:
    """Masks of bits, each bit in one of them. Bits that tell many hashes apart are dealt out to all bands."""
    some_S = hashes_R[:: -(-len(hashes_R) // _MAX_ROWS_SAMPLED)]
    bits_SB = np.unpackbits(some_S.astype("<u8").view(np.uint8).reshape(len(some_S), -1), axis=1, bitorder="little")
    balance_B = np.abs(bits_SB.mean(axis=0) - 0.5)
    order_B = np.argsort(balance_B, kind="stable")
    bits_of_band = (order_B[band::num_bands].tolist() for band in range(num_bands))
    return [np.uint64(sum(1 << bit for bit in bits)) for bits in bits_of_band]


def _num_pairs(sizes: np.ndarray) -> int:
    return int((sizes * (sizes - 1) // 2).sum())


def _pairs_of_buckets(edges: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each place with each later one of its bucket, in blocks."""
    sizes = np.diff(edges)
    num_later_R = np.repeat(edges[1:], sizes) - np.arange(edges[-1]) - 1
    end_R = np.cumsum(num_later_R)
    num_blocks = -(-int(end_R[-1] if len(end_R) else 0) // _BLOCK_PAIRS)
    # A row is never divided: a block has up to one row's pairs more.
    cuts = np.searchsorted(end_R, np.arange(1, num_blocks) * _BLOCK_PAIRS, side="left") + 1
    for first, stop in pairwise(np.unique(np.concatenate(([0], cuts, [len(end_R)]))).tolist()):
        counts = num_later_R[first:stop]
        first_P = np.repeat(np.arange(first, stop), counts)
        starts = np.cumsum(counts) - counts
        yield first_P, first_P + 1 + np.arange(len(first_P)) - np.repeat(starts, counts)


def _table_of_ones() -> np.ndarray:
    table = np.zeros(1 << 16, np.uint8)
    for bit in range(16):
        table += (np.arange(1 << 16) >> bit & 1).astype(np.uint8)
    return table


_ONES_OF_16_BITS = _table_of_ones()


def _num_ones(values_P: np.ndarray) -> np.ndarray:
    # NumPy 1 has no bitwise_count.
    ones_P4 = _ONES_OF_16_BITS[values_P.view(np.uint16).reshape(-1, _HASH_BITS // 16)]
    return ones_P4[:, 0] + ones_P4[:, 1] + ones_P4[:, 2] + ones_P4[:, 3]


MAX_BITS = 7
_NUM_GROUPS_SHOWN = 20
_NUM_MEMBERS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class SimilarImage:
    """A member of a group."""

    source: str
    split: str
    class_name: str | None


@dataclass(frozen=True, slots=True)
class SimilarImages:
    """Images that look alike, sorted by source; each is near at least one of the others."""

    images: tuple[SimilarImage, ...]

    @property
    def crosses_splits(self) -> bool:
        """Whether a model would be tested on what it was trained on."""
        return len({image.split for image in self.images}) > 1

    @property
    def has_conflict(self) -> bool:
        """Whether they are of several classes."""
        return len({image.class_name for image in self.images}) > 1

    @property
    def words(self) -> str:
        """The first of them."""
        images = [f"{each.source} ({each.split}, {each.class_name or 'no class'})" for each in self.images]
        return "; ".join(images[:_NUM_MEMBERS_SHOWN]) + (" ..." if len(images) > _NUM_MEMBERS_SHOWN else "")

    def document(self) -> dict[str, Any]:
        return {"crosses_splits": self.crosses_splits, "conflicting_label": self.has_conflict, **plain(self)}


@dataclass(frozen=True, slots=True, repr=False)
class NearDuplicates(Result):
    """Groups of images that look alike (`shardmill.inspect` with `near_duplicates`)."""

    groups: tuple[SimilarImages, ...]
    """Those that cross splits first, then those of several classes."""
    num_left_out: int
    """Images that look too alike to be compared with each other: of those, groups may be missing."""

    def document(self) -> dict[str, Any]:
        return {"groups": [group.document() for group in self.groups], "num_left_out": self.num_left_out}

    def table(self) -> Rows:
        """The number of groups, then the first groups; leaks between splits come first."""
        if not self.groups:
            return left_out_rows(self.num_left_out) or [("none", "no two images look alike")]
        rows = [
            ("groups", f"{len(self.groups):,} of images that look alike"),
            ("leaks", f"{sum(group.crosses_splits for group in self.groups):,} with images in several splits"),
            ("labels", f"{sum(group.has_conflict for group in self.groups):,} with images of several classes"),
        ]
        for group in self.groups[:_NUM_GROUPS_SHOWN]:
            facts = [*(["leak"] if group.crosses_splits else []), *(["labels"] if group.has_conflict else [])]
            rows.append((", ".join(facts) or "alike", group.words))
        left = len(self.groups) - _NUM_GROUPS_SHOWN
        more = [("", f"and {left:,} more: --json lists all")] if left > 0 else []
        return [*rows, *more, *left_out_rows(self.num_left_out)]


def left_out_rows(num_images: int) -> Rows:
    if not num_images:
        return []
    return [("WARNING", f"{counted(num_images, 'image')} look too alike to compare all: their groups are incomplete")]


def find_near_duplicates(looks: RowLooks, max_bits: int) -> NearDuplicates:
    """Groups of images whose hashes differ in at most `max_bits` of 64, by steps from one to the next.

    Raises UsageError unless 0 <= max_bits <= 7.
    """
    if not 0 <= max_bits <= MAX_BITS:
        raise UsageError(f"{max_bits} bits may differ", f"expected 0 to {MAX_BITS}; 3 finds most copies", "")
    hashes = looks.rows.column("difference_hash")
    rows_N = np.flatnonzero(pc.is_valid(hashes).to_numpy())
    unique_U, place_of_N = np.unique(
        hashes.drop_null().to_numpy().astype(np.int64).view(np.uint64), return_inverse=True
    )
    found = connect(unique_U, max_bits)
    groups = [
        SimilarImages(tuple(sorted((_image(looks, row) for row in group), key=lambda each: each.source)))
        for group in _groups(rows_N, found.representative_U[place_of_N])
    ]
    groups.sort(key=lambda each: (not each.crosses_splits, not each.has_conflict, each.images[0].source))
    return NearDuplicates(tuple(groups), int(found.is_left_out_U[place_of_N].sum()))


def _image(looks: RowLooks, row: int) -> SimilarImage:
    return SimilarImage(looks.sources[row], looks.split(row), looks.class_name(row))


def _groups(rows_N: np.ndarray, group_of_N: np.ndarray) -> list[list[int]]:
    """Rows of the same number; groups of one are left out."""
    order_N = np.argsort(group_of_N, kind="stable")
    parts = np.split(rows_N[order_N], np.flatnonzero(np.diff(group_of_N[order_N])) + 1)
    return [part.tolist() for part in parts if len(part) > 1]


_COLUMNS = ("source", "source_sha256", "label")


def find_equal_bytes(dataset: Dataset) -> list[SimilarImages]:
    """Groups of images with equal bytes, those that cross splits first, then those of several classes.

    Reads nothing if the build has counted none. About 150 bytes a row in memory.
    """
    manifest = dataset.manifest
    if not manifest.counts.duplicate_content:
        return []
    rows = pa.concat_tables(_rows_of_split(dataset, split) for split in manifest.splits)
    counts = rows.group_by("source_sha256").aggregate([([], "count_all")])
    repeated = counts.filter(pc.field("count_all") > 1).column("source_sha256")
    names = dict(enumerate(manifest.class_names))
    by_digest: dict[str, list[SimilarImage]] = {}
    for row in rows.filter(pc.is_in(rows.column("source_sha256"), repeated)).to_pylist():
        image = SimilarImage(row["source"], row["split"], names.get(row["label"]))
        by_digest.setdefault(row["source_sha256"], []).append(image)
    groups = [SimilarImages(tuple(sorted(each, key=lambda image: image.source))) for each in by_digest.values()]
    return sorted(groups, key=lambda each: (not each.crosses_splits, not each.has_conflict, each.images[0].source))


def _rows_of_split(dataset: Dataset, split: str) -> pa.Table:
    index = dataset.index(split)
    shards = map(index.shard, range(index.num_shards))
    rows = pa.concat_tables(read_rows(dataset.store, each, dataset.manifest.row_schema, _COLUMNS) for each in shards)
    return rows.append_column("split", pa.array([split] * rows.num_rows, pa.string()))
