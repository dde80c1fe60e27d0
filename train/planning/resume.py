"""Checks a resume with changed settings: rejected with each difference, or continued if the changes are safe.

Changed settings start a new training in its own folder, which is usually intended: one line names the unfinished
training that it leaves. A retry of the same run and `--allow-change` are the exceptions: they compare its settings and
continue it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.jobs.observer import WARNING
from shardmill.storage import Store
from shardmill.values import DatasetPin
from train.checkpoints.checkpoint import FoundCheckpoint, TrainingIdentity, complete_checkpoints
from train.config import TrainConfig
from train.contracts.values import RESULT, ModelIdentity
from train.identity import fields_of_settings, settings_of, settings_that_matter
from train.planning.trainings import TRAININGS, TrainingChoice
from train.settings import DURATION, RESUMABLE

if TYPE_CHECKING:
    from train.planning.memory import Memory
    from train.planning.setup import Setup
    from train.reporting.observer import TrainObserver

# Of a folder's name; see trainings.py.
_LENGTH = re.compile(r"/epochs-(\d+)-(\w+)(?:/fresh-\d+)?$")


@dataclass(frozen=True, slots=True)
class BegunTraining:
    """The training that a run has begun: a JSON file of the run. Its name does not end in `.json`, as those of stage
    records do.
    """

    store: Store
    path: str

    def read(self, models_uri: str) -> str:
        """Read its folder below this models folder; empty if the run has begun none there."""
        try:
            begun = json.loads(self.store.read(self.path))
        except (FileNotFoundError, ValueError):
            return ""
        return str(begun["training_dir"]) if begun.get("models_uri") == models_uri else ""

    def write(self, models_uri: str, training_dir: str) -> None:
        self.store.put(self.path, json.dumps({"models_uri": models_uri, "training_dir": training_dir}).encode())


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """The possible fates of an existing training."""

    fresh: bool = False
    """Train from step 0 even if a result exists."""
    allow_change: tuple[str, ...] = ()
    """Settings in which an unfinished training may differ if it is resumed."""
    begun: BegunTraining | None = None

    def begin(self, models_uri: str, training_dir: str) -> None:
        """Keep in the run which training it does."""
        if self.begun is not None:
            self.begun.write(models_uri, training_dir)


DEFAULT_RESUME = ResumePolicy()


@dataclass(frozen=True, slots=True)
class Changed:
    """An unfinished training, and how it differs from the one that is asked for."""

    found: FoundCheckpoint
    differences: tuple[str, ...]
    refused: tuple[str, ...]
    """Names of the differences that were not allowed."""

    def is_on(self, dataset: DatasetPin) -> bool:
        return self.found.marker.identity.dataset.manifest_sha256 == dataset.manifest_sha256


def check_allowed(names: Sequence[str]) -> tuple[str, ...]:
    """The settings that `--allow-change` names, without `train.`. Raises UsageError for one that is not safe."""
    safe = sorted(settings_of(RESUMABLE) | settings_of(DURATION))
    allowed = tuple(part.strip().removeprefix("train.") for name in names for part in name.split(","))
    for name in allowed:
        if name not in safe:
            known = "is not a key of [train]" if name not in fields_of_settings() else "is not safe to change"
            raise UsageError(
                f"--allow-change {name}: it {known}",
                f"expected one of {', '.join(safe)}",
                "changing it starts a new run: remove --allow-change",
            )
    return allowed


def resolve_resume(
    store: Store, choice: TrainingChoice, setup: Setup, memory: Memory, again: ResumePolicy, observer: TrainObserver
) -> tuple[TrainingChoice, Setup]:
    """`choice`, resuming another unfinished training if that is requested and safe; and the setup for it, which keeps
    the streams of that one.

    Raises UsageError that lists each difference.
    """
    allowed = check_allowed(again.allow_change)
    if again.fresh or next(complete_checkpoints(store, choice.training_dir), None) is not None:
        return choice, setup

    def compared(folder: str) -> Changed | None:
        return _compared(store, folder, choice, setup, memory, allowed)

    begun = again.begun.read(store.uri) if again.begun else ""
    if begun and begun != choice.training_dir and (mine := compared(begun)) is not None:
        if mine.refused:
            raise UsageError(
                f"this run already began a training with other settings, {begun}: {'; '.join(mine.differences)}",
                "expected equal data, seed, batch, model and optimizer",
                (
                    f"restore these settings; {_way_to_allow(mine)}start another run (--run-id), or train from the "
                    "beginning (--fresh)"
                ),
            )
        return _continued(choice, setup, mine, allowed)
    if not allowed:
        if choice.continues is None:
            _warn_of_unfinished(store, choice, compared, observer)
        return choice, setup
    others = [each for folder in _unfinished(store) if (each := compared(folder)) is not None]
    fitting = [each for each in others if not each.refused]
    if not fitting:
        nearest = min(others, key=lambda each: len(each.refused), default=None)
        raise UsageError(
            f"--allow-change {','.join(allowed)}: no unfinished training differs only in these settings"
            + (f"; the nearest, {nearest.found.path}: {'; '.join(nearest.differences)}" if nearest else ""),
            "expected equal data, seed, batch, model and optimizer",
            (_way_to_allow(nearest) if nearest else "") + "restore these settings, or remove --allow-change",
        )
    return _continued(choice, setup, max(fitting, key=lambda each: each.found.marker.global_step), allowed)


def _warn_of_unfinished(
    store: Store, choice: TrainingChoice, compared: Callable[[str], Changed | None], observer: TrainObserver
) -> None:
    """Name the nearest unfinished training of this dataset version, which the one that now begins leaves as it is."""
    others: list[Changed] = []
    for folder in _unfinished(store):
        # One of another layout, say, is no reason not to begin.
        with suppress(UsageError):
            others += [each for each in [compared(folder)] if each and each.is_on(choice.dataset) and each.differences]
    if not others:
        return
    nearest = min(others, key=lambda each: len(each.differences))
    at = nearest.found.marker.progress.cursor
    unfinished = (
        f"an unfinished training of this dataset, at epoch {at.epoch + 1}, step {at.step + 1}, stays as it is, because "
        f"this one differs in {'; '.join(nearest.differences)}; to continue that one, {_way_to_allow(nearest)}restore "
        "these settings"
    )
    observer.event("other_unfinished", {"rank": 0, "path": nearest.found.path, WARNING: unfinished})


def _compared(
    store: Store, folder: str, choice: TrainingChoice, setup: Setup, memory: Memory, allowed: tuple[str, ...]
) -> Changed | None:
    """The newest checkpoint of an unfinished training on this dataset's root, compared; None if there is none."""
    found = None if store.stat(f"{folder}/{RESULT}") else next(complete_checkpoints(store, folder), None)
    if found is None or found.marker.identity.dataset.uri != choice.dataset.uri:
        return None
    then = found.marker.identity
    # What is built from the source is compared by the ranks, which build it.
    model = ModelIdentity(choice.model_source_sha256, then.model.config_sha256)
    config = memory.fitted(_as_it_was(setup, then)).config
    fingerprint = config.plan_spec(setup.of_dataset).fingerprint
    now = TrainingIdentity(choice.dataset, fingerprint, model, settings_that_matter(config))
    lengths = _length_differences(folder, config)
    return Changed(
        found,
        differences=(*then.differences(now), *lengths.values()),
        refused=(*then.differences(now, allowed), *(text for name, text in lengths.items() if name not in allowed)),
    )


def _length_differences(folder: str, config: TrainConfig) -> dict[str, str]:
    match = _LENGTH.search(folder)
    if match is None:
        return {}
    then = {"epochs": int(match[1]), "export": match[2]}
    return {
        name: f"train.{name}: then {value}, now {getattr(config, name)}"
        for name, value in then.items()
        if value != getattr(config, name)
    }


def _as_it_was(setup: Setup, then: TrainingIdentity) -> Setup:
    """Streams and a window that were left open are what the training had, provided that each rank gets a stream."""
    num_streams, window_chunks = int(then.settings["num_streams"]), int(then.settings.get("reading.window_chunks", 0))
    is_other = num_streams not in (0, setup.config.num_streams)
    if is_other and not setup.asked.num_streams and num_streams >= setup.config.num_workers:
        why = {"streams_reason": f"as in the resumed training ({num_streams})"}
        setup = setup.changed(why, num_streams=num_streams)
    return setup if setup.asked.reading.window_chunks or not window_chunks else setup.with_window(window_chunks)


def _continued(
    choice: TrainingChoice, setup: Setup, changed: Changed, allowed: tuple[str, ...]
) -> tuple[TrainingChoice, Setup]:
    resumed = replace(choice, resumes=changed.found.path, changes=changed.differences, allowed=allowed)
    return resumed, _as_it_was(setup, changed.found.marker.identity)


def _way_to_allow(changed: Changed) -> str:
    """Describe how to resume it, if every difference is safe."""
    safe = settings_of(RESUMABLE) | settings_of(DURATION)
    named = [re.match(r"train\.([\w.]+):", each) for each in changed.differences]
    names = [match[1] for match in named if match]
    if len(names) < len(changed.differences) or not set(names) <= safe:
        return ""
    return f"resume from its last checkpoint with --allow-change {','.join(names)}; or "


def _unfinished(store: Store) -> Iterator[str]:
    """Folders of trainings that have a checkpoint and no result."""
    paths = {file.path for file in store.list(TRAININGS)}
    begun = {path.partition("/checkpoints/")[0] for path in paths if "/checkpoints/" in path}
    yield from sorted(folder for folder in begun if f"{folder}/{RESULT}" not in paths)
