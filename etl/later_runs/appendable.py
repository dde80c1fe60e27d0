"""Checks that the images of a build may be appended to a version, so that old and new rows are consistent."""

from __future__ import annotations

from etl.config import etl_settings_of
from etl.setting_kinds import EQUAL_IN_APPENDS
from shardmill.dataset.build import Build
from shardmill.dataset.manifest import Manifest
from shardmill.errors import UsageError


def check_appendable(parent: Manifest, build: Build, *, is_labelled: bool) -> None:
    """Raise UsageError unless rows of `build` may be added to those of `parent`; `is_labelled`: they have classes."""
    was_labelled = any(times for split in parent.splits.values() for times in split.class_counts)
    # Rows that were accepted under other ones may not stand, or not in their split.
    settings = etl_settings_of(EQUAL_IN_APPENDS)
    facts = (
        ("formats", sorted(parent.formats), sorted(build.formats)),
        ("pixels", parent.normalization_fingerprint, build.normalization_fingerprint),
        ("columns", parent.columns, build.columns),
        *((name.replace("_", " "), parent.config.get(name), build.config.get(name)) for name in settings),
        ("labels", was_labelled, is_labelled),
    )
    other = [name for name, before, now in facts if before != now]
    if other:
        raise UsageError(
            f"the images to append would have other {', '.join(other)} than those of version {parent.version}",
            'expected the same ones, because etl.write_mode = "append" adds rows to the old ones',
            f"use the config of version {parent.version} (`shardmill inspect DATASET@{parent.version} --json`), or "
            "another dataset.uri",
        )
