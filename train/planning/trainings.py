"""Finds the training that a job begins or continues, by its folder below the models' root, and how it was begun.

trainings/<training id>/v00000003-<first 8 digits of the manifest's SHA-256>/
    epochs-00010-best/                plan.json, attempts/..., checkpoints/..., result.json
    epochs-00010-best/fresh-00000001/     the same, of a training that was asked for although there was one already
    epochs-00010-best/fresh/00000001.json     which run asked for it
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pydantic import ValidationError

from shardmill.checksummed import verified_body
from shardmill.dataset.dataset import first_alike, open_dataset, open_pinned
from shardmill.epoch_plan import num_streams_for
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.config import require_uri
from shardmill.section import Section
from shardmill.storage import Store, join_uri
from shardmill.stores import open_store
from shardmill.values import DatasetPin, Nonce
from shardmill.words import counted
from train.checkpoints.arrays import MARKER
from train.checkpoints.checkpoint import complete_checkpoints
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import RESULT, TrainResult
from train.identity import settings_that_matter
from train.initialization.initial import check_initial, pinned
from train.models.user import source_sha256
from train.planning.checks import check
from train.planning.memory_fit import MemoryRecord
from train.planning.setup import AUTO, Setup, resolve
from train.records import put_record, read_record, record_numbers
from train.reporting.observer import TrainObserver
from train.results import read_result
from train.schedules import SCHEDULES
from train.strategies.options import MirroredOptions

if TYPE_CHECKING:
    from train.tree import TrainTree

TRAININGS = "trainings"
FRESH = "fresh"
PLAN = "plan.json"
"""The `PlanRecord` of a training, in its folder."""
_ADVICE = "delete it: `auto` is then resolved again, and numbers may differ by rounding"
_AS_BEGUN = "as when this training began ({})"


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing that the config leaves open, or that follows from it."""

    name: str
    """The setting, or what it decides."""
    value: str
    reason: str


class PlanRecord(Section):
    """The plan of the newest attempt at a training, and the settings that it was based on."""

    ranks_reason: str = ""
    """Empty if the number was configured."""
    strategy: str
    strategy_reason: str
    launcher: str
    launcher_reason: str
    num_workers: int
    num_streams: int
    window_chunks: int
    """Chunks of a shuffle window, on however many ranks the training is resumed."""
    local_devices: int
    devices: str
    spark_master: str
    memory: MemoryRecord | None = None
    """The memory measurement; None if there is none."""
    decisions: tuple[Decision, ...] = ()
    """All of them, for people."""


def read_plan(store: Store, folders: Sequence[str]) -> PlanRecord | None:
    """The record in the first of these folders that has one; None if none has: the training begins now.

    Raises IntegrityError for a record that was altered or has another layout.
    """
    for path in (f"{folder}/{PLAN}" for folder in folders):
        where = join_uri(store.uri, path)
        try:
            return PlanRecord.model_validate_json(verified_body(store.read(path), where, fix=_ADVICE))
        except FileNotFoundError:
            continue
        except ValidationError:
            expected = "expected what this version writes"
            raise IntegrityError(f"{where} has a different layout", expected, _ADVICE) from None
    return None


@dataclass(frozen=True, slots=True)
class FoundTraining:
    """The training that a config names on a dataset version, whether or not it has begun."""

    setup: Setup
    """As if it began now."""
    models: Store
    choice: TrainingChoice
    begun: PlanRecord | None
    """How its newest attempt was planned; None if there was none."""
    has_steps: bool
    """Whether there is a checkpoint to resume from: its own, or that of a shorter training."""

    @property
    def is_new(self) -> bool:
        """Whether no earlier attempt has decided how it trains."""
        return self.begun is None and not self.has_steps


def find_training(tree: TrainTree, version: DatasetPin | None = None, fresh_for: str = "") -> FoundTraining:
    """On the latest version, or the one that `dataset.uri` names; `version`: what a run has resolved, because one
    committed meanwhile must not split it between two datasets. `fresh_for`: a run that wants a new training.

    Raises UsageError for what cannot work on any dataset.
    """
    version = version or open_dataset(require_uri("dataset.uri", tree.dataset.uri)).pin
    # An expiry or a rollback makes a version and changes no row: what was trained on those rows is not trained again.
    dataset = open_pinned(first_alike(version))
    setup = resolve(tree.train, tree.spark, dataset, tree.gate)
    # A wish for a new training leaves a record.
    check(replace(setup, dataset=None))
    check_initial(setup.config)
    setup = setup.changed(init_from=pinned(setup.config).init_from)
    models = open_store(require_uri("models.uri", tree.models.uri))
    choice = choose_training(models, setup.identity_config, dataset.pin, fresh_for)
    own = next(complete_checkpoints(models, choice.training_dir), None)
    has_steps = own is not None or choice.continues is not None
    return FoundTraining(setup, models, choice, read_plan(models, choice.folders), has_steps)


def training_to_plan(tree: TrainTree) -> FoundTraining:
    """The training that would begin now, or resume; one that has ended, as if it began again. Raises UsageError for
    what cannot work on any dataset."""
    found = find_training(tree)
    return found if found.choice.result is None else replace(found, begun=None, has_steps=False)


def as_begun(now: Setup, begun: PlanRecord | None) -> Setup:
    """`now`, but what `asked` leaves open is as an earlier attempt had it, if that can run now.

    Other workers or devices that are set, or another Spark master, are a new question, and get a new answer. Raises
    UsageError for what cannot run, and for more ranks than streams of `begun`.
    """
    if begun is None:
        return check(now)
    asked = now.asked
    if not asked.num_streams:
        if (num_ranks := asked.num_ranks_asked) > begun.num_streams:
            other = num_streams_for(asked.global_batch_size, num_ranks)
            raise UsageError(
                f"{num_ranks} ranks for a training that began with train.num_streams = {begun.num_streams}",
                "each rank owns at least one stream, and a resumed training keeps its streams",
                f"set train.num_workers = {begun.num_streams} or less; or train from the beginning with --fresh or "
                f"train.num_streams = {other}",
            )
        if begun.num_streams != now.config.num_streams:
            # The number of ranks follows from it, too.
            kept = asked.model_copy(update={"num_streams": begun.num_streams})
            again = resolve(kept, now.spark, now.dataset, now.gate)
            now = replace(again, asked=asked).changed(init_from=now.config.init_from)
        now = replace(now, streams_reason=_AS_BEGUN.format(begun.num_streams))
    now = now.with_window(begun.window_chunks)
    is_same_master = begun.spark_master == now.spark.master
    devices = (now.config.options(MirroredOptions).num_devices, now.config.devices)
    is_same_question = (begun.local_devices, begun.devices) == devices and (
        (is_same_master and not asked.num_workers) or begun.num_workers == now.config.num_workers
    )
    # Setting -> whether it may be as then, and the reason that it had.
    answers = {
        "num_workers": (is_same_question, "ranks_reason", begun.ranks_reason or "as set"),
        "strategy": (is_same_question and asked.strategy == AUTO, "strategy_reason", begun.strategy_reason),
        "launcher": (
            is_same_question and is_same_master and asked.launcher == AUTO,
            "launcher_reason",
            begun.launcher_reason,
        ),
    }
    then = {name: getattr(begun, name) for name, (is_open, *_) in answers.items() if is_open}
    kept = {name: value for name, value in then.items() if value != getattr(now.config, name)}
    because = {answers[name][1]: _AS_BEGUN.format(answers[name][2]) for name in kept}
    try:
        return check(now.changed(because, **kept))
    except UsageError as error:
        if not kept:
            raise
        how = f"{counted(begun.num_workers, 'rank')}, {begun.strategy} ({begun.launcher})"
        was = f"this training began with {how}, which cannot run now: {error}"
        return check(replace(now, chosen_anew=was))


def as_carried_out(now: Setup, record: PlanRecord | None) -> Setup:
    """In words how a finished training was carried out, by its record: what it needed then need not be here. Without a
    record, as it would be planned now."""
    if record is None:
        return now
    kept = {name: getattr(record, name) for name in ("num_workers", "strategy", "launcher")}
    if all(getattr(now.config, name) == value for name, value in kept.items()):
        return now
    return replace(
        now,
        config=now.config.model_copy(update=kept),
        ranks_reason=record.ranks_reason,
        strategy_reason=record.strategy_reason,
        launcher_reason=record.launcher_reason,
        # They are not recorded, and those of now decided nothing.
        numbers=(),
    )


class FreshTraining(Section):
    """A training that starts anew although there is one with the same settings."""

    run_id: str
    """The run that requested it; if that run is retried, it continues instead of starting over again."""


@dataclass(frozen=True, slots=True)
class Discarded:
    """A shorter training that could have been continued, if its result could be read."""

    training_dir: str
    reason: str


@dataclass(frozen=True, slots=True)
class TrainingChoice:
    """The training of a job: its version, its folder, and its existing state."""

    dataset: DatasetPin
    training_dir: str
    """Relative to the models' root."""
    model_source_sha256: str
    result: TrainResult | None
    """Result of a finished training: nothing is left to do."""
    continues: TrainResult | None
    """The finished shorter training from whose last checkpoint this one continues, if it has none of its own yet."""
    discarded: tuple[Discarded, ...]
    unfinished_versions: tuple[int, ...]
    """Older dataset versions on which the same training was begun and not finished."""

    resumes: str = ""
    """The checkpoint of an unfinished training with other settings, from which this one continues."""
    changes: tuple[str, ...] = ()
    """The differences of that training."""
    allowed: tuple[str, ...] = ()
    """The settings in which it may."""

    @property
    def folders(self) -> list[str]:
        """The folders that may contain its records: its own, then that of the shorter training that it continues."""
        return [self.training_dir, *([self.continues.training_dir] if self.continues else [])]

    def report(self, config: TrainConfig, observer: TrainObserver) -> None:
        """Report facts about other trainings before this one starts or is skipped."""
        for version in self.unfinished_versions:
            dataset = f"{self.dataset.uri}@{version}"
            fields = {"rank": 0, "version": version, "dataset": dataset, "trains": self.dataset.version}
            observer.event("unfinished", fields)
        for each in self.discarded:
            fields = {"rank": 0, "path": each.training_dir, "reason": each.reason}
            observer.event("training_discarded", fields)
        if self.continues is not None:
            shorter = self.continues.num_epochs
            # A cosine of the shorter length has brought the learning rate near 0; the longer one raises it again, so
            # this is not what one long training gives. Most other schedules do not know how long they are.
            is_same = not SCHEDULES[config.schedule].knows_length or shorter == config.epochs
            changed = f"the {config.schedule} schedule is computed for the new length"
            note = "the same as one long training" if is_same else changed
            fields = {"rank": 0, "training_dir": self.continues.training_dir, "epochs_done": shorter}
            observer.event("continues", {**fields, "epochs": config.epochs, "note": note})

        if self.result is not None and config.num_workers not in (0, self.result.world_size):
            sizes = {"world_size": self.result.world_size, "num_workers": config.num_workers}
            observer.event("other_world_size", {"rank": 0, **sizes})
        if self.result is not None and config.strategy not in ("auto", self.result.strategy):
            names = {"trained_by": self.result.strategy, "strategy": config.strategy}
            observer.event("other_strategy", {"rank": 0, **names})

    def task(self, config: TrainConfig, reach: Nonce) -> WorkerTask:
        """Build the task for the ranks, after they have read back the driver's nonce from the models' root."""
        return WorkerTask(
            config=config,
            dataset=self.dataset,
            models_uri=reach.uri,
            training_dir=self.training_dir,
            model_source_sha256=self.model_source_sha256,
            continues=self.resumes or (self.continues.last_checkpoint if self.continues else ""),
            allowed=self.allowed,
            reach=reach,
        )


def training_id(config: TrainConfig, dataset_uri: str, model_source_sha256: str) -> str:
    """16 hex digits over the dataset's root, the model's source and all settings that decide what a step does."""
    content = json.dumps([dataset_uri, model_source_sha256, settings_that_matter(config)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def training_dir(config: TrainConfig, dataset: DatasetPin, model_source_sha256: str) -> str:
    """The folder of the training with these settings on this dataset version."""
    version = f"v{dataset.version:08d}-{dataset.manifest_sha256[:8]}"
    length = f"epochs-{config.epochs:05d}-{config.export}"
    return f"{TRAININGS}/{training_id(config, dataset.uri, model_source_sha256)}/{version}/{length}"


def choose_training(store: Store, config: TrainConfig, dataset: DatasetPin, fresh_for: str = "") -> TrainingChoice:
    """Choose what to do on exactly this version: nothing, resume, or start. `fresh_for`: a run that wants a new
    training.

    The newest of several trainings that were asked for counts.
    """
    source = source_sha256(config.model)
    first = training_dir(config, dataset, source)
    folder = _newest_attempt(store, first, fresh_for)
    result = read_result(store, folder)
    paths = [file.path for file in store.list(first.rsplit("/", 2)[0])]
    is_new = result is None and folder == first
    continues, discarded = _shorter_training(store, config, first, paths) if is_new else (None, ())
    return TrainingChoice(
        dataset=dataset,
        training_dir=folder,
        model_source_sha256=source,
        result=result,
        continues=continues,
        discarded=discarded,
        unfinished_versions=_unfinished_versions(first, paths),
    )


def _newest_attempt(store: Store, first: str, fresh_for: str) -> str:
    """The folder of the newest training with these settings; a new one if `fresh_for` has not asked for it before."""
    number = max(record_numbers(store, f"{first}/{FRESH}"), default=0)
    if fresh_for:
        while True:
            if number and read_record(store, f"{first}/{FRESH}", number, FreshTraining).run_id == fresh_for:
                break
            number += 1
            # A number that another run takes meanwhile is that run's; this one takes the next.
            put_record(store, f"{first}/{FRESH}", number, FreshTraining(run_id=fresh_for))
    return f"{first}/{FRESH}-{number:08d}" if number else first


def _shorter_training(
    store: Store, config: TrainConfig, first: str, paths: list[str]
) -> tuple[TrainResult | None, tuple[Discarded, ...]]:
    """The longest finished training that differs in nothing but its length (`DURATION`), and is not longer than this
    one; and those of which the result cannot be read.

    One that stopped early would stop again: it is continued only for another choice of weights (`train.export`).
    """
    version = first.rpartition("/")[0]
    pattern = re.compile(rf"({re.escape(version)}/epochs-(\d+)-\w+(?:/{FRESH}-\d+)?)/{RESULT}")
    finished = [match for path in paths if (match := pattern.fullmatch(path)) and int(match[2]) <= config.epochs]
    discarded: list[Discarded] = []
    for match in sorted(finished, key=lambda match: (int(match[2]), match[1]), reverse=True):
        try:
            result = read_result(store, match[1])
        except IntegrityError as error:
            discarded.append(Discarded(match[1], str(error)))
            continue
        if result is not None and (int(match[2]) == config.epochs or not result.stopped_early):
            return result, tuple(discarded)
    return None, tuple(discarded)


def _unfinished_versions(first: str, paths: list[str]) -> tuple[int, ...]:
    """Older versions on which the training of this length has a checkpoint and no result."""
    parent, version, length = first.rsplit("/", 2)
    head = rf"({re.escape(parent)}/v(\d{{8}})-[0-9a-f]{{8}}/{length}(?:/{FRESH}-\d+)?)"
    begun = {match[1]: int(match[2]) for path in paths if (match := re.match(rf"{head}/checkpoints/.*{MARKER}$", path))}
    finished = {match[1] for path in paths if (match := re.fullmatch(rf"{head}/{RESULT}", path))}
    older = {number for folder, number in begun.items() if folder not in finished and number < int(version[1:9])}
    return tuple(sorted(older))
