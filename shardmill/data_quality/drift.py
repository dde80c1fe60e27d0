"""Measures how far a version has drifted from another one: classes, sizes and pixels, from the two manifests alone.

Every amount is 1 minus the overlap of two distributions: 0 if they are equal, 1 if they have nothing in common, and the
share that has moved in between. docs/drift.md explains the choice.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist
from typing import TYPE_CHECKING

from shardmill.dataset.manifest import Manifest
from shardmill.dataset.statistics import ASPECT_NAMES, SIDE_NAMES, ChannelSums
from shardmill.dataset.versions import latest_version, read_manifest, split_version
from shardmill.errors import DriftLimitExceeded, UsageError
from shardmill.result import Result, Rows, ShownList
from shardmill.section import Section
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.words import printable

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset

_NUM_MOVED = 5
# Of the distance of the figure that has moved most; what has moved less explains nothing.
_LEAST_MOVED = 0.1
_CHANNEL_NAMES = {1: ("grey",), 3: ("red", "green", "blue")}


def amount_words(amount: float) -> str:
    """Three decimals; of an amount that would be 0 with these, its first digit."""
    text = f"{amount:.3f}"
    return text if float(text) or not amount else f"{amount:.1g}"


class Aspect(StrEnum):
    """What is compared of two versions."""

    CLASS_SHARES = "class_shares"
    SOURCE_SIZES = "source_sizes"
    ASPECT_RATIOS = "aspect_ratios"
    PIXELS = "pixels"

    @property
    def words(self) -> str:
        return self.replace("_", " ")


class Moved(Section):
    """One figure that both versions have."""

    name: str
    """A class, a bucket of sizes, or the mean or the deviation of a channel."""
    before: float
    """A share, or a value from 0 to 255."""
    after: float


class AspectDrift(Section):
    """How far one aspect has drifted."""

    aspect: Aspect
    amount: float | None
    """From 0 to 1; None if the versions cannot be compared in this."""
    why_not: str = ""
    """Why they cannot."""
    figures: tuple[Moved, ...] = ()
    """Up to 5 figures that differ most, the largest difference first, none below a tenth of it; of pixels, those of the
    channel that differs most.
    """

    @property
    def words(self) -> str:
        """`class shares 0.31 (cat 33.3 % -> 0.0 %, ...)`."""
        if self.amount is None:
            return f"{self.aspect.words}: not compared, {self.why_not}"
        return f"{self.aspect.words} {amount_words(self.amount)}" + (f" ({self.moves})" if self.figures else "")

    @property
    def moves(self) -> str:
        """The figures, before and after."""
        return ", ".join(self.each_move)

    @property
    def each_move(self) -> tuple[str, ...]:
        """`cat 33.3% -> 0.0%`, one text for each figure."""
        form = "{:.1f}" if self.aspect is Aspect.PIXELS else "{:.1%}"
        return tuple(
            f"{printable(each.name)} {form.format(each.before)} -> {form.format(each.after)}" for each in self.figures
        )


class Drift(Section):
    """How far a version has drifted from another one."""

    version: int
    against_version: int
    amount: float
    """The largest of the aspects."""
    aspects: tuple[AspectDrift, ...]

    def above(self, limit: float) -> list[AspectDrift]:
        """The aspects beyond a limit, the largest first."""
        beyond = [each for each in self.aspects if each.amount is not None and each.amount > limit]
        return sorted(beyond, key=lambda each: each.amount or 0.0, reverse=True)

    def words_above(self, limit: float) -> str:
        """What has moved beyond a limit, in one line."""
        return "; ".join(each.words for each in self.above(limit))


@dataclass(frozen=True, slots=True, repr=False)
class DriftResult(Result):
    """How far a version has drifted from an older one (`shardmill.drift`)."""

    uri: str
    version: int
    against_uri: str | None
    against_version: int | None
    """None for a first version, which has nothing to be compared with."""
    amount: float | None
    """From 0 to 1, the largest of the aspects."""
    max_drift: float
    ok: bool
    """Whether the amount is within `max_drift`."""
    aspects: tuple[AspectDrift, ...]

    @property
    def drift(self) -> Drift | None:
        if self.against_version is None or self.amount is None:
            return None
        return Drift(
            version=self.version, against_version=self.against_version, amount=self.amount, aspects=self.aspects
        )

    @property
    def title(self) -> str:
        return f"{self.uri}@{self.version}" + ("" if self.against_version is None else f" against {self._against}")

    @property
    def _against(self) -> str:
        return f"{'' if self.against_uri == self.uri else self.against_uri}@{self.against_version}"

    def table(self) -> Rows:
        """One row for each aspect: how far it has drifted, and what has moved."""
        if self.amount is None:
            return [("nothing to compare", f"version {self.version} is the first", "")]
        amounts = ("not compared" if each.amount is None else amount_words(each.amount) for each in self.aspects)
        return [
            (each.aspect.words, amount, each.why_not or each.moves)
            for each, amount in zip(self.aspects, amounts, strict=True)
        ]

    def shown_lists(self) -> list[ShownList]:
        head = ("aspect", "amount", "moved")
        return [ShownList("aspects", head, self.table(), len(self.aspects))] if self.aspects else []

    def raise_if_failed(self) -> None:
        """Raise DriftLimitExceeded (7) for a drift beyond the limit."""
        if self.ok or self.drift is None:
            return
        named = f"{self.uri}@{self.version}"
        rows = f"`shardmill inspect {shlex.quote(named)} --diff {self.against_version}` lists the rows; "
        raise DriftLimitExceeded(
            f"{named} has drifted by {amount_words(self.drift.amount)} from {self._against}: "
            f"{self.drift.words_above(self.max_drift)}",
            f"the limit (etl.max_drift, --max-drift) is {self.max_drift:g}",
            f"{rows if self.against_uri == self.uri else ''}use another version, or a higher limit if the change is "
            "meant",
            detail={"drift": self.drift.model_dump(mode="json")},
        )


def compare(dataset: Dataset, against: str, baseline: int, limit: float) -> DriftResult:
    """A version beside an older one, or beside nothing if it is the first.

    `against`: a version of the same dataset, `DATASET[@M]`, or empty for `baseline_of`. Raises UsageError for versions
    of predictions.
    """
    uri, version = dataset.pin.uri, dataset.pin.version
    if against:
        root, number = split_version(f"{uri}@{against}" if against.isdecimal() else against)
        # Its manifest is enough, so it may have expired.
        store = open_store(root)
        before = read_manifest(store, (latest_version(store) or 1) if number is None else number)
    else:
        store, before = dataset.store, baseline_of(dataset.store, dataset.manifest, baseline)
    for compared, manifest in ((uri, dataset.manifest), (store.uri, before)):
        if manifest is not None and manifest.predicted_by is not None:
            raise UsageError(
                f"{compared}@{manifest.version} holds predictions",
                "expected versions of images: predictions have neither pixels nor labels to compare",
                "compare the datasets that were predicted",
            )
    if before is None:
        return DriftResult(uri, version, None, None, None, limit, ok=True, aspects=())
    found = measure_drift(before, dataset.manifest)
    return DriftResult(
        uri, version, store.uri, before.version, found.amount, limit, found.amount <= limit, found.aspects
    )


def measure_drift(older: Manifest, newer: Manifest) -> Drift:
    """How far `newer` has drifted from `older`, which may be a version of another dataset."""
    aspects = (
        _of_counts(Aspect.CLASS_SHARES, _class_counts(older), _class_counts(newer), "labels are no classes"),
        *_of_sizes(older, newer),
        _of_pixels(older.channel_sums, newer.channel_sums),
    )
    amount = max((each.amount for each in aspects if each.amount is not None), default=0.0)
    return Drift(version=newer.version, against_version=older.version, amount=amount, aspects=aspects)


def previous_content(store: Store, manifest: Manifest) -> Manifest | None:
    """The version that the rows of `manifest` followed, or None for the first one.

    A compaction, a rollback and an expiry make no rows: they are as far from their past as the version that they hold.
    """
    while manifest.origin_version is not None:
        manifest = read_manifest(store, manifest.origin_version)
    return None if manifest.parent_version is None else read_manifest(store, manifest.parent_version)


def baseline_of(store: Store, manifest: Manifest, version: int) -> Manifest | None:
    """What a version is compared with: a version of the same dataset, or with 0 the one that its rows followed."""
    return read_manifest(store, version) if version else previous_content(store, manifest)


def _class_counts(manifest: Manifest) -> Mapping[str, int]:
    """Images of each class, in all splits."""
    counts: Counter[str] = Counter()
    for split in manifest.splits.values():
        counts.update(dict(zip(manifest.class_names, split.class_counts, strict=True)))
    return counts


def _of_sizes(older: Manifest, newer: Manifest) -> tuple[AspectDrift, AspectDrift]:
    """As the sources were, upright and before any resizing."""
    before, after = older.sizes.source, newer.sizes.source
    why_not = "a version has no recorded sizes"

    def of(aspect: Aspect, names: Sequence[str], *counts: Sequence[int]) -> AspectDrift:
        old, new = (dict(zip(names, each, strict=True)) for each in counts)
        return _of_counts(aspect, old, new, why_not)

    return (
        of(Aspect.SOURCE_SIZES, SIDE_NAMES, before.by_longer_side, after.by_longer_side),
        of(Aspect.ASPECT_RATIOS, ASPECT_NAMES, before.by_aspect_ratio, after.by_aspect_ratio),
    )


def _of_counts(aspect: Aspect, before: Mapping[str, int], after: Mapping[str, int], why_not: str) -> AspectDrift:
    """The total variation distance of two histograms."""
    num_before, num_after = sum(before.values()), sum(after.values())
    if not num_before or not num_after:
        return AspectDrift(aspect=aspect, amount=None, why_not=why_not)
    shares = [
        Moved(name=name, before=before.get(name, 0) / num_before, after=after.get(name, 0) / num_after)
        for name in dict.fromkeys((*before, *after))
    ]
    amount = math.fsum(map(_distance, shares)) / 2
    least = _LEAST_MOVED * max(map(_distance, shares))
    moved = sorted(
        (each for each in shares if _distance(each) and _distance(each) >= least), key=_distance, reverse=True
    )
    return AspectDrift(aspect=aspect, amount=min(amount, 1.0), figures=tuple(moved[:_NUM_MOVED]))


def _distance(share: Moved) -> float:
    return abs(share.after - share.before)


def _of_pixels(before: ChannelSums, after: ChannelSums) -> AspectDrift:
    """The channel that has moved most, as the distance of normal distributions with its means and deviations."""
    if not before.num_pixels or not after.num_pixels:
        return AspectDrift(aspect=Aspect.PIXELS, amount=None, why_not="a version has no pixels of train")
    num_channels = {len(before.sums), len(after.sums)}
    if len(num_channels) > 1:
        return AspectDrift(aspect=Aspect.PIXELS, amount=None, why_not="one version is in colour, the other is grey")
    names = _CHANNEL_NAMES.get(len(before.sums)) or tuple(map(str, range(len(before.sums))))
    old, new = ([NormalDist(*each) for each in zip(sums.mean(), sums.std(), strict=True)] for sums in (before, after))
    channels = [_of_channel(*each) for each in zip(names, old, new, strict=True)]
    return max(channels, key=lambda each: each.amount or 0.0)


def _of_channel(name: str, old: NormalDist, new: NormalDist) -> AspectDrift:
    moved = (
        Moved(name=f"{name} mean", before=old.mean, after=new.mean),
        Moved(name=f"{name} deviation", before=old.stdev, after=new.stdev),
    )
    # Rounding of the overlap may leave a last bit outside.
    amount = min(max(1 - old.overlap(new), 0.0), 1.0)
    return AspectDrift(aspect=Aspect.PIXELS, amount=amount, figures=moved if amount else ())
