"""Listings of names without files."""

from __future__ import annotations

from collections.abc import Iterator

from etl.config import EtlConfig
from etl.listing.grouping import Group, group_here
from etl.listing.list_source import list_source
from etl.listing.listing import Listing
from etl.sources.listed import ListingBatch, listed_table
from etl.units.units import plan_units
from shardmill.jobs.observer import SilentObserver
from shardmill.values import SourceImage


class Batches:
    """A source that lists what it is given."""

    uri = "nowhere"

    def __init__(self, batches: list[list[SourceImage]]) -> None:
        self._batches = batches

    def list(self) -> Iterator[ListingBatch]:
        return (ListingBatch(listed_table(batch)) for batch in self._batches)


def listed(*batches: list[SourceImage], group: Group = group_here) -> Listing:
    return list_source(Batches(list(batches)), seed=0, max_source_bytes=1_000, observer=SilentObserver(), group=group)


def images(num_images: int) -> list[SourceImage]:
    return [SourceImage(f"c{n % 7}/{n}.jpg", n % 900, mtime_ns=n, label=f"c{n % 7}") for n in range(num_images)]


def facts(listing: Listing) -> tuple[object, ...]:
    units = plan_units(listing, EtlConfig(unit_min_images=50), "config")
    return (listing.fingerprint, listing.key_sum, listing.probes, listing.class_names, listing.num_listed, units)
