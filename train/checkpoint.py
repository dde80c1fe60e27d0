"""Resumable training state: files first, one marker last, and nothing is believed that the marker does not vouch for.

<training_dir>/checkpoints/step-00000120-<attempt>/
    weights.npz  optimizer.npz      written by rank 0
    rank-00000.npz ...              each rank's non-trainable state (moving statistics, seed states)
    MARKER.json                     size and SHA-256 of every file, and where the training stands; published last
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from shardmill.dataset.pin import DatasetPin
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import Store
from train.config import TrainConfig
from train.progress import Progress
from train.strategies.strategy import Collective
from train.values import from_json, to_json

MARKER = "MARKER.json"
WEIGHTS = "weights.npz"
OPTIMIZER = "optimizer.npz"
_MARKER_HEAD = b'{"sha256":"'
_MARKER_NECK = b'","marker":'

# What may differ between two attempts at one training. Everything else of the config decides the numbers that come out.
FREE_SETTINGS = frozenset(
    {
        "num_workers",
        "strategy",
        "launcher",
        "format",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "record_samples",
        "prefetch_bytes",
        "reader_threads",
        "silent_seconds",
        "progress_timeout_seconds",
        "start_timeout_seconds",
        "nics",
    }
)


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One file of a checkpoint, as its marker vouches for it."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TrainingIdentity:
    """What a checkpoint belongs to: it may be resumed only by the same training."""

    dataset: DatasetPin
    plan_fingerprint: str
    settings: dict[str, str]
    """Every setting of `train.*` that decides the outcome, as JSON."""

    def differences(self, now: TrainingIdentity) -> list[str]:
        """One phrase for each thing that `now` has otherwise."""
        found = []
        if self.dataset.manifest_sha256 != now.dataset.manifest_sha256:
            found.append(f"dataset: then version {self.dataset.version}, now version {now.dataset.version}")
        for name in sorted(self.settings.keys() | now.settings.keys()):
            then_value, now_value = self.settings.get(name, "absent"), now.settings.get(name, "absent")
            if then_value != now_value:
                found.append(f"train.{name}: then {then_value}, now {now_value}")
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
    files: tuple[CheckpointFile, ...]


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A complete checkpoint: its folder relative to the models' root, and its marker."""

    path: str
    marker: CheckpointMarker

    def read(self, store: Store, name: str) -> bytes:
        """One verified file. Raises IntegrityError where it is missing or not what the marker says."""
        listed = next((file for file in self.marker.files if file.name == name), None)
        if listed is None:
            raise IntegrityError(f"checkpoint {self.path} has no {name}", "expected it in its marker")
        try:
            data = store.read(f"{self.path}/{name}")
        except FileNotFoundError:
            raise IntegrityError(f"{self.path}/{name} is missing", f"expected {listed.size_bytes} bytes") from None
        if (len(data), hashlib.sha256(data).hexdigest()) != (listed.size_bytes, listed.sha256):
            raise IntegrityError(
                f"{self.path}/{name} was altered", f"expected {listed.size_bytes} bytes, SHA-256 {listed.sha256}"
            )
        return data


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """Where one attempt at a training keeps its checkpoints."""

    store: Store
    training_dir: str
    attempt: str
    """Unique to this attempt, equal on all ranks: no attempt ever writes over another one's files."""
    keep_checkpoints: int

    def path_of(self, global_step: int) -> str:
        return f"{self.training_dir}/checkpoints/step-{global_step:08d}-{self.attempt}"


def settings_that_matter(config: TrainConfig) -> dict[str, str]:
    """The settings that decide a training's outcome, name -> JSON."""
    values = config.model_dump(mode="json")
    return {name: json.dumps(value, sort_keys=True) for name, value in values.items() if name not in FREE_SETTINGS}


def find_checkpoint(
    store: Store, training_dir: str, on_discarded: Callable[[str, str], None] | None = None
) -> FoundCheckpoint | None:
    """The newest complete checkpoint of which every byte is as it was written; None where there is none.

    With `on_discarded` (path, reason), incomplete and damaged ones that are newer are reported, and the damaged ones
    deleted, so that they do not count among those to keep. Incomplete ones stay, because another attempt that is still
    alive may be writing them; they go when the training has come past them. Without it nothing is changed.
    """
    for folder, names in sorted(_list_checkpoints(store, training_dir).items(), reverse=True):
        try:
            return read_checkpoint(store, folder)
        except IntegrityError as error:
            if on_discarded is not None:
                on_discarded(folder, str(error))
                if MARKER in names:
                    _delete_checkpoint(store, folder, names)
    return None


def read_checkpoint(store: Store, path: str) -> FoundCheckpoint:
    """The checkpoint at `path`. Raises IntegrityError where it is not complete, or a byte is not as it was written."""
    try:
        data = store.read(f"{path}/{MARKER}")
    except FileNotFoundError:
        raise IntegrityError(f"{path} has no {MARKER}", "it was never completed") from None
    found = FoundCheckpoint(path, _parse_marker(data, path))
    for file in found.marker.files:
        found.read(store, file.name)
    return found


def check_resumable(found: FoundCheckpoint, now: TrainingIdentity) -> None:
    """Raises UsageError that lists each difference between the checkpoint's training and this one."""
    differences = found.marker.identity.differences(now)
    if differences:
        raise UsageError(
            f"the checkpoint {found.path} belongs to another training: {'; '.join(differences)}",
            "expected equal data, plan, model and optimizer",
            "restore these settings, or train under another models.uri",
        )


def save_checkpoint(
    folder: CheckpointFolder,
    collective: Collective,
    files: dict[str, bytes],
    identity: TrainingIdentity,
    progress: Progress,
    global_step: int,
) -> str:
    """Every rank calls it with its own `files`; rank 0 publishes the marker when all files are there. -> its path.

    Afterwards the complete ones of the newest `keep_checkpoints` steps stay, and whatever is older than those is
    deleted, marker first.
    """
    path = folder.path_of(global_step)
    written = []
    for name, data in files.items():
        folder.store.put(f"{path}/{name}", data)
        written.append(CheckpointFile(name, len(data), hashlib.sha256(data).hexdigest()))
    kind = TypeAdapter(tuple[CheckpointFile, ...])
    of_all_ranks = [kind.validate_json(part) for part in collective.gather_bytes(kind.dump_json(tuple(written)))]
    if collective.rank == 0:
        all_files = tuple(file for of_rank in of_all_ranks for file in of_rank)
        marker = CheckpointMarker(identity, collective.num_ranks, global_step, progress, all_files)
        body = to_json(marker)
        digest = hashlib.sha256(body).hexdigest().encode()
        folder.store.put(f"{path}/{MARKER}", _MARKER_HEAD + digest + _MARKER_NECK + body + b"}")
        _delete_older(folder)
    return path


def rank_file(rank: int) -> str:
    """The name of a rank's own file."""
    return f"rank-{rank:05d}.npz"


def _parse_marker(data: bytes, folder: str) -> CheckpointMarker:
    start = len(_MARKER_HEAD) + 64 + len(_MARKER_NECK)
    body = data[start:-1]
    digest = hashlib.sha256(body).hexdigest().encode()
    if data != _MARKER_HEAD + digest + _MARKER_NECK + body + b"}":
        raise IntegrityError(f"{folder}/{MARKER} was altered", "its own SHA-256 does not fit")
    try:
        return from_json(CheckpointMarker, body)
    except ValidationError as error:
        # Intact, but written by another version of this program: not damage, and not to be deleted.
        raise UsageError(
            f"{folder}/{MARKER} has another layout: {error.errors()[0]['msg']}",
            "expected one that this version wrote",
            "resume with the version that wrote it, or train under another models.uri",
        ) from None


def _list_checkpoints(store: Store, training_dir: str) -> dict[str, set[str]]:
    """Folder -> names of its files. Names sort by step, then by attempt."""
    root = f"{training_dir}/checkpoints"
    names_of: dict[str, set[str]] = {}
    for file in store.list(root):
        folder, _, name = file.path.rpartition("/")
        names_of.setdefault(folder, set()).add(name)
    return names_of


def _delete_older(folder: CheckpointFolder) -> None:
    # By steps, not by folders: one without a marker, or of the same step, may belong to another attempt that is alive
    # (a scheduler's retry beside a driver that it lost sight of).
    names_of = _list_checkpoints(folder.store, folder.training_dir)
    complete_steps = sorted({_step_of(path) for path, names in names_of.items() if MARKER in names})
    oldest_kept = complete_steps[-folder.keep_checkpoints :][0]
    for path, names in names_of.items():
        if _step_of(path) < oldest_kept:
            _delete_checkpoint(folder.store, path, names)


def _step_of(path: str) -> int:
    """The global step in a checkpoint's path."""
    return int(path.rpartition("/step-")[2].partition("-")[0])


def _delete_checkpoint(store: Store, path: str, names: set[str]) -> None:
    # The marker goes first: half a checkpoint must never look whole.
    for name in sorted(names, key=lambda name: name != MARKER):
        store.delete(f"{path}/{name}")
