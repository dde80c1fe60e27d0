"""What calls find out about models, folders and this machine, as values with the figures of the command's `--json`,
which show themselves as tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardmill.dataset.tar_export import TarShard
from shardmill.shown import Shown, ShownList, as_list


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """The dataset version of a model."""

    uri: str
    """`URI@N`."""
    manifest_sha256: str
    content_digest: str
    layout_digest: str
    source: str | None = None
    """What follows is None if the version is not there any more."""
    operation: str | None = None
    created_at: str | None = None
    run_id: str | None = None
    num_images: int | None = None
    num_rejected: int | None = None
    problem: str = ""
    """Why the version cannot be read; empty if it can."""


@dataclass(frozen=True, slots=True, repr=False)
class Lineage(Shown):
    """Where a model is, and what it was made of (`shardmill.lineage`)."""

    model: str
    """`MODELS@N`."""
    artifacts: str
    """URI of its files."""
    weights_sha256: str
    is_current: bool | None
    """None if the record of what is current is damaged; `damage` says how."""
    decisions: tuple[str, ...]
    """About this export, with their reasons."""
    architecture: str
    evaluation: Mapping[str, Any] | None
    training: str
    checkpoint: str
    run_id: str
    """The run that exported it."""
    dataset: TrainedOn
    damage: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class GateDecision(Shown):
    """What `promote` would decide (`shardmill.gate`)."""

    decision: str
    reason: str
    candidate: int
    """Number of the export that was judged."""
    current: int | None
    """Number of the current one."""


@dataclass(frozen=True, slots=True, repr=False)
class TrainingEstimate(Shown):
    """The choices and cost of a training (`shardmill.plan`)."""

    dataset: str
    strategy: str
    launcher: str
    backend: str
    reason: str
    """Why these were chosen."""
    num_workers: int
    global_batch_size: int
    local_batch_size: int
    steps_per_epoch: int
    needed_bytes: int
    """Memory on the device of a rank."""
    images_per_second: float
    host: str
    """Where seconds and bytes were measured."""
    document: Mapping[str, Any]
    """The whole document of `shardmill plan --json`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    status: Literal["ok", "warn", "fail"]
    subject: str
    found: str
    fix: str
    is_transient: bool
    """A store, a host or a port fails, not the config: the next try may succeed."""


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Shown):
    """What would stop a run on this machine (`shardmill.doctor`)."""

    findings: tuple[Finding, ...]

    def shown_lists(self) -> list[ShownList]:
        return [as_list("problems", self.problems) if self.problems else as_list("findings", self.findings)]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The checks that have failed, or warn."""
        return tuple(each for each in self.findings if each.status != "ok")

    @property
    def ok(self) -> bool:
        """Whether a run can start."""
        return all(each.status != "fail" for each in self.findings)


@dataclass(frozen=True, slots=True)
class GarbageFile:
    """A file that nothing needs."""

    kind: str
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Garbage(Shown):
    """What `shardmill.gc` has found: of a dataset versions, of models exports and trainings."""

    uri: str
    deleted: bool
    """Whether it has deleted them."""
    num_files: int
    size_bytes: int
    files: tuple[GarbageFile, ...]
    expired_versions: tuple[int, ...] = ()
    retained_versions: tuple[int, ...] = ()
    expired_exports: tuple[int, ...] = ()
    retained_exports: tuple[int, ...] = ()
    expired_trainings: tuple[str, ...] = ()
    retained_trainings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class TarFiles(Shown):
    """What `shardmill.export_tar` has written."""

    dataset: str
    """`URI@N`."""
    target: str
    class_names: tuple[str, ...]
    num_rows: int
    shards: tuple[TarShard, ...]
