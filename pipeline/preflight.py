"""Checks before any work starts: `run`, `etl` and `train` fail on them, `doctor` shows them one by one."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from pipeline.choices import chosen_entries
from pipeline.spark_applications import applications_on_spark
from shardmill.dataset.versions import split_version
from shardmill.errors import ShardmillError, StorageError, UsageError
from shardmill.images.decoder_id import more_decoders_id
from shardmill.jobs.config import check_master
from shardmill.jobs.reach import REACH, clear_stale
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.words import counted

if TYPE_CHECKING:
    from etl.config import SourceConfig
    from pipeline.tree import PipelineTree
    from train.planning.setup import Setup

APPLICATIONS = ("etl", "train")
_FRAMEWORKS = {"keras": "Keras", "torch": "PyTorch"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at: `look` says what it found, or raises the ShardmillError that a run would end with."""

    subject: str
    look: Callable[[], str]


class FirstSetup:
    """The setup of a training as long as nobody knows its dataset: made once, when it is first needed."""

    def __init__(self, tree: PipelineTree) -> None:
        self._tree = tree

    @cached_property
    def setup(self) -> Setup:
        """Raises UsageError for what cannot run, each time."""
        from train.planning.checks import check
        from train.planning.setup import resolve

        return check(resolve(self._tree.train, self._tree.spark))


def checks(
    tree: PipelineTree, workdir: str, applications: Sequence[str] = APPLICATIONS, first: FirstSetup | None = None
) -> list[Check]:
    """All checks of the ETL, training or both, in execution order. Write checks are cleaned up."""
    first = first or FirstSetup(tree)
    found = [Check("--workdir", partial(check_store, workdir))]
    if "etl" in applications:
        found += [
            *(Check(key, partial(_look_at_source, key, kind, uri)) for key, kind, uri in _sources(tree.source)),
            Check("dataset.uri", partial(check_store, tree.dataset.uri)),
            Check("etl", partial(_look_at_etl, tree)),
        ]
    if {"etl", "train"} <= set(applications):
        found.append(Check("etl.resize_mode", partial(_look_at_shape, tree)))
    if "train" in applications:
        from train.reporting.mlflow_client import check_registry
        from train.reporting.tracking import check_trackers

        found += [
            Check("models.uri", partial(check_store, tree.models.uri)),
            Check("train.model", partial(_look_at_model, tree)),
            Check("train.num_workers", partial(_look_at_launch, first)),
            Check("train.log.trackers", partial(check_trackers, tree.train)),
            Check("gate.registry", partial(check_registry, tree.gate.registry)),
        ]
        if tree.train.init_from or tree.train.freeze or tree.train.unfreeze_epoch:
            found.append(Check("train.init_from", partial(_look_at_initial, first)))
    if tree.spark.master == "yarn" and applications_on_spark(tree).keys() & set(applications):
        found.append(Check("spark.master", partial(_look_at_master, tree)))
    return found


def refuse_what_cannot_work(tree: PipelineTree, workdir: str, applications: Sequence[str] = APPLICATIONS) -> FirstSetup:
    """Raise all at once what is wrong already, as one error: UsageError if the user must change something.

    Returns the setup that was checked.
    """
    errors: list[ShardmillError] = []
    first = FirstSetup(tree)
    for check in checks(tree, workdir, applications, first):
        try:
            check.look()
        except ShardmillError as error:
            # A model that is not there is found twice: it also decides about the backend.
            if str(error) not in map(str, errors):
                errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        kind = next((type(error) for error in errors if isinstance(error, UsageError)), type(errors[0]))
        numbered = "; ".join(f"({number}) {error}" for number, error in enumerate(errors, start=1))
        raise kind(f"{len(errors)} problems would stop this run: {numbered}")
    return first


def check_one_process(tree: PipelineTree) -> None:
    """Raises UsageError for a whole run in processes that others have started."""
    from train.launching import launcher_of

    launcher = launcher_of(tree.train)
    if launcher is not None and launcher.started_by_others:
        raise UsageError(
            f"train.launcher = {tree.train.launcher!r} with `shardmill run`",
            "expected one process, because each process would build the dataset",
            "run `shardmill etl` in one process, then start `shardmill train` in all",
        )


def _sources(source: SourceConfig) -> list[tuple[str, str, str]]:
    """Config key, kind and URI of each."""
    kinds = [part.kind for part in source.parts.values()] or [source.kind]
    return [(key, kind, uri) for (key, uri), kind in zip(source.uris().items(), kinds, strict=True)]


def _look_at_source(key: str, kind: str, uri: str) -> str:
    """A folder that can be listed; what lies in a bucket, or in files of other kinds, is seen by the ETL alone."""
    if kind == "folders" and "://" not in uri and not os.path.isdir(uri):
        raise UsageError(f"source {uri} is not a folder", "expected one folder per class below it", f"correct {key}")
    return uri


def check_store(uri: str) -> str:
    """Whether the one primitive that commits rely on works here: the second writer must learn that it lost."""
    with _probe(uri) as (store, path):
        first, second = store.put_if_absent(path, b"first"), store.put_if_absent(path, b"second")
        kept = store.read(path)
    if (first, second, kept) != (True, False, b"first"):
        raise StorageError(
            f"{uri} let a second writer replace a file",
            "nothing can be committed to it",
            "use a store with conditional writes (If-None-Match)",
        )
    return f"{store.uri}: writable; a second writer is refused"


def clock_difference_seconds(uri: str) -> float:
    """Return the minimum difference between a store's clock, which dates its files, and this process's clock."""
    with _probe(uri) as (store, path):
        earliest_seconds = time.time()
        store.put(path, b"now")
        file, latest_seconds = store.stat(path), time.time()
    stored_seconds = file.mtime_ns / 1e9 if file is not None else latest_seconds
    # S3 dates its objects in whole seconds.
    return max(0.0, earliest_seconds - 1 - stored_seconds, stored_seconds - latest_seconds)


@contextmanager
def _probe(uri: str) -> Iterator[tuple[Store, str]]:
    """A store and the path of a file to try it with, which is removed."""
    store = open_store(split_version(uri)[0])
    was_absent = not os.path.lexists(store.uri)
    # In the folder whose files are removed a day later, in case this process is killed before it removes its own.
    path = f"{REACH}/preflight-{secrets.token_hex(6)}"
    try:
        yield store, path
    finally:
        store.delete(path)
        clear_stale(store)
        if was_absent and "://" not in store.uri:
            with suppress(OSError):
                os.rmdir(store.uri)


def _look_at_etl(tree: PipelineTree) -> str:
    for chosen in chosen_entries(tree):
        if chosen.key.startswith(("source.", "etl.")):
            chosen.load()
    more_decoders_id(tree.etl.more_formats)
    return f"{tree.etl.engine}, {tree.etl.described_size}, {', '.join(tree.etl.formats)}"


def _look_at_shape(tree: PipelineTree) -> str:
    num_channels = tree.etl.image_shape_HWC[2]
    return f"{tree.etl.described_size}, {num_channels} channel{'s' * (num_channels > 1)}, for every image"


def _look_at_model(tree: PipelineTree) -> str:
    from train.models.user import find_model, models_of

    models_of(tree.train).usable(tree.train.model)
    return f"{tree.train.model}: {find_model(tree.train.model)}"


def _look_at_master(tree: PipelineTree) -> str:
    check_master(tree.spark.master)
    return f"{tree.spark.master}, whose settings were found"


def _look_at_launch(first: FirstSetup) -> str:
    train = first.setup.config
    return (
        f"{counted(train.num_workers, 'rank')} by {train.launcher}, strategy {train.strategy}, backend {train.backend}"
    )


def _look_at_initial(first: FirstSetup) -> str:
    from train.backends.rules import never_unfrozen
    from train.initialization.initial import check_initial

    config = first.setup.config
    check_initial(config)
    return (
        never_unfrozen(config) or f"{config.init_from or 'fresh weights'}, frozen: {', '.join(config.freeze) or 'none'}"
    )


def setting(tree: PipelineTree, first: FirstSetup, workdir: str) -> str:
    """Describe the values inferred before anything is listed: sizes, model, ranks, device, and output locations."""
    train = first.setup.config
    ranks = "1 process" if train.launcher == "inline" else f"{counted(train.num_workers, 'rank')} by {train.launcher}"
    augment = train.augmentation
    photographs = "" if augment.flips else " (photographs? --set train.augment.images=photographs)"
    return (
        f"run: images at {tree.etl.described_size}; {train.model} ({_FRAMEWORKS.get(train.backend, train.backend)}), "
        f"{counted(train.epochs, 'epoch')}, {ranks}, {_devices(first.setup)}; "
        f"augmentation: {augment.in_words}{photographs}; "
        f"dataset {tree.dataset.uri}, models {tree.models.uri}, records {workdir}"
    )


def _devices(setup: Setup) -> str:
    """CPU or GPU, as far as this machine knows; no framework is imported."""
    from train.launching.devices import check_devices_here

    if setup.launcher.assigns_devices(setup.spark) or not setup.num_ranks_here:
        return "devices of the executors"
    return check_devices_here(setup.config, setup.num_ranks_here)
