"""Resumable training state: the checkpoint format, which checkpoints are complete, which are kept, and who may publish.

<training_dir>/checkpoints/step-00000120-a00000002/      of attempt 2
    weights.npz  optimizer.npz      written by rank 0
    rank-00000.npz ...              each rank's non-trainable state (moving statistics, seed states)
    MARKER.json                     size and SHA-256 of every file, and where the training stands; published last
<training_dir>/attempts/00000002.json     who claimed number 2; `put_if_absent` gives each number to one attempt

Only files that the marker names are used. Ranks that share a model write its weights in shards: see shards.py.

Only the newest attempt may publish, however long an older one keeps running: a scheduler that lost sight of an attempt
starts another, and the older one may wake up again; what it would publish then is refused to it. Between its look at
the numbers and its write a newer one may still begin: such a checkpoint is whole and of the same training, and counts
less than any of the newer attempt; a result is published once.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from pydantic import ValidationError

from shardmill.checksummed import ChecksummedFile, check_relative_path, read_checksummed, verified_body, verify_file
from shardmill.errors import CommitConflict, IntegrityError, UsageError
from shardmill.jobs.process import start_of_process
from shardmill.section import Section
from shardmill.storage import Store, join_uri
from shardmill.values import DatasetPin
from train.checkpoints.arrays import MARKER
from train.contracts.values import ModelIdentity, Progress, from_json
from train.records import put_record, read_record, record_numbers, record_path

_DAMAGED = "restore it from a backup, or train again: a training resumes from its newest complete checkpoint"


@dataclass(frozen=True, slots=True)
class TrainingIdentity:
    """The training that a checkpoint belongs to: only the same training may resume it."""

    dataset: DatasetPin
    plan_fingerprint: str
    model: ModelIdentity
    settings: dict[str, str]
    """Every setting of `train.*` that decides the outcome, as JSON."""

    def differences(self, now: TrainingIdentity, allowed: Collection[str] = ()) -> list[str]:
        """One phrase for each thing that differs in `now`, but for the `allowed` settings."""
        found = []
        if self.dataset.manifest_sha256 != now.dataset.manifest_sha256:
            found.append(f"dataset: then version {self.dataset.version}, now version {now.dataset.version}")
        for name in sorted(self.settings.keys() | now.settings.keys()):
            then_value, now_value = self.settings.get(name, "absent"), now.settings.get(name, "absent")
            if then_value != now_value and name not in allowed:
                found.append(f"train.{name}: then {then_value}, now {now_value}")
        # Other settings build another model: a difference of the model is reported only if they do not explain it.
        if not found:
            found += self.model.differences(now.model)
        if not found and self.plan_fingerprint != now.plan_fingerprint:
            found.append(f"epoch plan: then {self.plan_fingerprint}, now {now.plan_fingerprint}")
        return found


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """The content of MARKER.json."""

    identity: TrainingIdentity
    world_size: int
    global_step: int
    """Steps done since the training began, over all epochs."""
    progress: Progress
    files: tuple[ChecksummedFile, ...]
    """Their paths are relative to the checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class SavedFiles:
    """The files of a checkpoint, for who decides by them what it needs."""

    world_size: int
    """Number of ranks that wrote it."""
    names: frozenset[str]
    read: Callable[[str], bytes]
    """-> one of its files, verified. Raises IntegrityError if it is damaged."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint that is complete by marker and sizes: its folder relative to the models' root, and its marker."""

    path: str
    marker: CheckpointMarker

    def read(self, store: Store, name: str) -> bytes:
        """One verified file. Raises IntegrityError if it is missing or not what the marker says."""
        listed = next((file for file in self.marker.files if file.path == name), None)
        if listed is None:
            raise IntegrityError(f"checkpoint {self.path} has no {name}", "expected it in its marker", _DAMAGED)
        return read_checksummed(store, listed, self.path)

    def verify(self, store: Store, names: Collection[str]) -> None:
        """Read these files for their digests alone, in bounded memory. Raises IntegrityError."""
        for file in self.marker.files:
            if file.path in names:
                verify_file(store, file, self.path, fix=_DAMAGED)

    def files(self, store: Store) -> SavedFiles:
        """Its files, each verified when it is read."""
        names = frozenset(file.path for file in self.marker.files)
        return SavedFiles(self.marker.world_size, names, partial(self.read, store))


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The checkpoint folder of one attempt at a training."""

    attempt: Attempt
    """Equal on all ranks."""
    keep_checkpoints: int

    @property
    def store(self) -> Store:
        return self.attempt.store

    @property
    def training_dir(self) -> str:
        return self.attempt.training_dir

    def path_of(self, global_step: int) -> str:
        return f"{self.training_dir}/checkpoints/step-{global_step:08d}-{self.attempt.name}"


def complete_checkpoints(
    store: Store, training_dir: str, on_discarded: Callable[[str, str], None] | None = None
) -> Iterator[FoundCheckpoint]:
    """The checkpoints of a training that are complete by marker and sizes, newest first: a newer attempt's before an
    older one's, which may have continued to later steps unnoticed.

    Their bytes are verified when they are read: a checkpoint can be large, and most of these are never read.

    With `on_discarded` (path, reason), incomplete and damaged ones are reported, and the damaged ones deleted, so that
    they do not count among those to keep. Incomplete ones stay, because another attempt that is still alive may be
    writing them; they are deleted when the training has come past them. Without it nothing is changed.
    """
    sizes_of = _list_checkpoints(store, training_dir)
    for folder in sorted(sizes_of, key=_place_of, reverse=True):
        sizes = sizes_of[folder]
        try:
            yield _checked_by_sizes(FoundCheckpoint(folder, _read_marker(store, folder)), sizes)
        except IntegrityError as error:
            if on_discarded is not None:
                on_discarded(folder, str(error))
                if MARKER in sizes:
                    _delete_checkpoint(store, folder, sizes)


def open_checkpoint(store: Store, path: str) -> FoundCheckpoint:
    """The checkpoint at `path`. Raises IntegrityError if it is not complete by marker and sizes."""
    check_relative_path(path)
    sizes = {file.path.rpartition("/")[2]: file.size_bytes for file in store.list(path)}
    return _checked_by_sizes(FoundCheckpoint(path, _read_marker(store, path)), sizes)


def delete_checkpoint(store: Store, path: str) -> None:
    """Delete a checkpoint of which a file turned out to be damaged when it was read."""
    _delete_checkpoint(store, path, [file.path.rpartition("/")[2] for file in store.list(path)])


def check_resumable(found: FoundCheckpoint, now: TrainingIdentity, allowed: Collection[str] = ()) -> None:
    """Raises UsageError that lists each difference between the checkpoint's training and this one."""
    differences = found.marker.identity.differences(now, allowed)
    if differences:
        raise UsageError(
            f"the checkpoint {found.path} belongs to another training: {'; '.join(differences)}",
            "expected equal data, plan, model and optimizer",
            "restore these settings, or train again (`shardmill train --fresh`)",
        )


def delete_older(folder: CheckpointFolder, keep: str) -> None:
    """Delete older checkpoints. The newest complete ones, the best epochs' ones that they name, and `keep` stay."""
    names_of = _list_checkpoints(folder.store, folder.training_dir)
    complete = sorted((path for path, names in names_of.items() if MARKER in names), key=_place_of)
    # Nothing of a newer attempt is older than this one's. What an older one is still writing will be refused to it.
    oldest_kept = _place_of(complete[-folder.keep_checkpoints :][0])
    old = {path for path in names_of if _place_of(path) < oldest_kept}
    best = {_best_of(folder.store, path) for path, names in names_of.items() if path not in old and MARKER in names}
    # `keep`: with a newer attempt beside it, which it is about to find, this one still names its own.
    for path in old - best - {keep}:
        _delete_checkpoint(folder.store, path, names_of[path])


def _read_marker(store: Store, path: str) -> CheckpointMarker:
    where = join_uri(store.uri, f"{path}/{MARKER}")
    try:
        body = verified_body(store.read(f"{path}/{MARKER}"), where)
    except FileNotFoundError:
        raise IntegrityError(
            f"{path} has no {MARKER}",
            "its writer was interrupted before the checkpoint was complete",
            "a training resumes from its newest complete checkpoint; restore this one if it was complete before",
        ) from None
    try:
        return from_json(CheckpointMarker, body)
    except ValidationError as error:
        # Intact, but written by another version of this program: not damage, and not to be deleted.
        raise UsageError(
            f"{where} has a different layout: {error.errors()[0]['msg']}",
            "expected one written by this version",
            "resume with the version that wrote it, or train under another models.uri",
        ) from None


def _checked_by_sizes(found: FoundCheckpoint, sizes: dict[str, int]) -> FoundCheckpoint:
    """`found` itself. Raises IntegrityError if a file that its marker names is missing or has another size."""
    for file in found.marker.files:
        check_relative_path(file.path)
        size_bytes = sizes.get(file.path)
        if size_bytes != file.size_bytes:
            has = "is missing" if size_bytes is None else f"was altered: it has {size_bytes} bytes"
            raise IntegrityError(f"{found.path}/{file.path} {has}", f"expected {file.size_bytes} bytes", _DAMAGED)
    return found


def _list_checkpoints(store: Store, training_dir: str) -> dict[str, dict[str, int]]:
    """Folder -> name of each of its files -> size in bytes."""
    root = f"{training_dir}/checkpoints"
    sizes_of: dict[str, dict[str, int]] = {}
    for file in store.list(root):
        folder, _, name = file.path.rpartition("/")
        sizes_of.setdefault(folder, {})[name] = file.size_bytes
    return sizes_of


def _best_of(store: Store, path: str) -> str:
    """The checkpoint of the best epoch so far that the one at `path` names; empty for none."""
    try:
        best = _read_marker(store, path).progress.best
    except IntegrityError:
        # Skipped when a training resumes; files that only this checkpoint names are not needed then.
        return ""
    return best.checkpoint if best else ""


def _place_of(path: str) -> tuple[int, int]:
    """Attempt and global step in a checkpoint's path, by which checkpoints sort; attempt 0 for another naming."""
    step, _, attempt = path.rpartition("/step-")[2].partition("-")
    return (int(attempt[1:]) if re.fullmatch(r"a\d{8}", attempt) else 0, int(step))


def _delete_checkpoint(store: Store, path: str, names: Iterable[str]) -> None:
    # The marker goes first: half a checkpoint must never look whole.
    for name in sorted(names, key=lambda name: name != MARKER):
        store.delete(f"{path}/{name}")


ATTEMPTS = "attempts"


class AttemptRecord(Section):
    """The process that claimed an attempt number."""

    host: str
    process: int
    started: str = ""
    """When that process was started, as `start_of_process` has it."""
    world_size: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One of the attempts at the training in `training_dir`, relative to the store's root."""

    store: Store
    training_dir: str
    number: int

    @property
    def name(self) -> str:
        """Part of the names of the attempt's files: no attempt ever overwrites another one's files."""
        return f"a{self.number:08d}"

    def check(self) -> None:
        """Raise CommitConflict (exit 6) if a newer attempt has begun."""
        folder = f"{self.training_dir}/{ATTEMPTS}"
        # Numbers have no gaps, so one question is enough; this is asked at every checkpoint.
        if self.store.stat(record_path(folder, self.number + 1)) is None:
            return
        newest = max(record_numbers(self.store, folder))
        by = read_record(self.store, folder, newest, AttemptRecord)
        raise CommitConflict(
            f"attempt {self.number} at {join_uri(self.store.uri, self.training_dir)} is no longer the newest: "
            f"attempt {newest} began on host {by.host}, process {by.process}",
            "an older attempt may not publish anything",
            "let the newer attempt continue; if it has ended, run the same command again",
        )

    def publish(self, path: str, data: bytes) -> None:
        """Publish a file that no attempt has published yet. Raises CommitConflict if one has, or if this one is old."""
        self.check()
        if not self.store.put_if_absent(path, data) and self.store.read(path) != data:
            raise CommitConflict(
                f"another attempt has published {join_uri(self.store.uri, path)} before attempt {self.number}",
                "expected no such file; nothing was replaced",
                "run the same command again: it finds the published file",
            )


def claim_attempt(store: Store, training_dir: str, world_size: int) -> Attempt:
    """The next number, which is nobody else's."""
    folder = f"{training_dir}/{ATTEMPTS}"
    host, process = socket.gethostname(), os.getpid()
    started = start_of_process(process)
    record = AttemptRecord(host=host, process=process, started=started, world_size=world_size)
    number = max(record_numbers(store, folder), default=0) + 1
    while not put_record(store, folder, number, record):
        number += 1
    return Attempt(store, training_dir, number)


def refuse_beside_living(store: Store, training_dir: str, patience_seconds: float = 2.0) -> None:
    """Raises CommitConflict (exit 6) if another process of this host is at work on the training.

    Whether one of another host lives cannot be known: the newer attempt takes the training over. So it does from one
    that ends within `patience_seconds`, as ranks whose driver was killed do.
    """
    folder = f"{training_dir}/{ATTEMPTS}"
    newest = max(record_numbers(store, folder), default=0)
    if not newest:
        return
    by, gives_up = read_record(store, folder, newest, AttemptRecord), time.monotonic() + patience_seconds
    while by.host == socket.gethostname() and by.process != os.getpid() and _lives(by):
        if time.monotonic() > gives_up:
            claimed = store.stat(record_path(folder, newest))
            began = time.localtime(claimed.mtime_ns / 1e9) if claimed else None
            since = time.strftime(", since %Y-%m-%d %H:%M:%S", began) if began else ""
            raise CommitConflict(
                f"process {by.process} of this host trains in {join_uri(store.uri, training_dir)}{since}",
                "expected one process at a time for a training; nothing was changed",
                "wait for it; or end its command (Ctrl-C) and run this one again, which resumes the training",
            )
        time.sleep(0.1)


def _lives(by: AttemptRecord) -> bool:
    return bool(by.started) and by.started == start_of_process(by.process)
