"""Enforces `etl.max_drift`: a version that differs too much from an older one is not committed."""

from __future__ import annotations

from contextlib import suppress

from etl.config import EtlConfig, EtlTree
from shardmill.data_faults.drift import Drift, amount_words, baseline_of, measure_drift
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.versions import read_manifest
from shardmill.errors import DriftLimitExceeded, ShardmillError, UsageError
from shardmill.storage import Store
from shardmill.stores import open_store

NO_LIMIT = 1.0
"""No drift is larger."""


def check_baseline(tree: EtlTree) -> None:
    """Raise UsageError, before any work, if there is no version to compare the next one with."""
    version = tree.etl.drift_baseline
    try:
        if version:
            read_manifest(open_store(tree.dataset.uri), version)
    except UsageError as error:
        raise UsageError(
            f"etl.drift_baseline = {version}: {error.what}", error.expected, "set it to 0 for the latest version"
        ) from None


def check_drift(store: Store, config: EtlConfig, draft: Manifest) -> None:
    """Raise DriftLimitExceeded (7) if the version that is about to be committed has drifted beyond the limit."""
    if config.max_drift >= NO_LIMIT:
        return
    drift = drift_of(store, config, draft)
    if drift is None or drift.amount <= config.max_drift:
        return
    next_baseline = ", then set etl.drift_baseline to the new version" if config.drift_baseline else ""
    raise DriftLimitExceeded(
        f"the new version of {store.uri} has drifted by {amount_words(drift.amount)} from @{drift.against_version}: "
        f"{drift.words_above(config.max_drift)}",
        f"etl.max_drift allows {config.max_drift:g}; nothing was published",
        "restore what the source has lost or changed; if the change is meant, run it once with --set etl.max_drift=1"
        f"{next_baseline} (finished work units are kept)",
        detail={"drift": drift.model_dump(mode="json")},
    )


def drift_of(store: Store, config: EtlConfig, manifest: Manifest) -> Drift | None:
    """From the baseline of the config, or the version before; None for the first version."""
    before = baseline_of(store, manifest, config.drift_baseline)
    return None if before is None else measure_drift(before, manifest)


def recorded_drift(store: Store, config: EtlConfig, manifest: Manifest) -> Drift | None:
    """The same of a committed version, which a damaged older manifest must not fail; `verify` reports that."""
    with suppress(ShardmillError):
        return drift_of(store, config, manifest)
    return None
