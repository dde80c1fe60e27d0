"""The results of commands about models, trainings, folders and this machine, and of single stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardmill.result import Result, Rows, ShownList, as_list, flat_rows, plain
from shardmill.words import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedOn:
    """The dataset version of a model."""

    uri: str
    """`URI@N`."""
    manifest_sha256: str
    problem: str = ""
    """Why the version cannot be read; empty if it can. The fields below that it leaves open are None."""
    operation: str | None = None
    created_at: str | None = None
    run_id: str | None = None
    source: str | None = None
    num_images: int | None = None
    num_rejected: int | None = None
    content_digest: str
    layout_digest: str


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Lineage(Result):
    """Where a model is, and what it was made of (`shardmill.lineage`)."""

    model: str
    """`MODELS@N`."""
    artifacts: str
    """URI of its files."""
    weights_sha256: str
    is_current: bool | None
    """None if the record of what is current is damaged; `damage` says how."""
    damage: str = ""
    decisions: tuple[str, ...]
    """About this export, with their reasons."""
    architecture: str
    evaluation: Mapping[str, Any] | None
    training: str
    checkpoint: str
    run_id: str
    """The run that exported it."""
    dataset: TrainedOn

    def document(self) -> dict[str, Any]:
        found = plain(self)
        found["dataset"] = {name: value for name, value in found["dataset"].items() if value not in (None, "")}
        return {name: value for name, value in found.items() if name != "damage" or value}

    def table(self) -> Rows:
        decisions = "; ".join(self.decisions) or "none: it was never current"
        return flat_rows({**self.document(), "decisions": decisions})


@dataclass(frozen=True, slots=True, repr=False)
class GateDecision(Result):
    """What `promote` would decide (`shardmill.gate`)."""

    decision: str
    reason: str
    candidate: int
    """Number of the export that was judged."""
    current: int | None
    """Number of the current one."""


@dataclass(frozen=True, slots=True)
class PromotionResult(Result):
    """What `shardmill.promote` decided: which export is current now, and why."""

    run_id: str
    models: str
    """URI of the models."""
    decision: str
    """`promoted`, `kept`, `already_current`, `chosen` or `rolled_back`."""
    reason: str
    current: int | None
    """Number of the export that is current now."""
    previous: int | None
    """Number of the one that was current before."""
    registered: str | None
    """`models:/NAME/VERSION` at MLflow; empty if that failed, None without a registry."""

    def shown_rows(self) -> Rows:
        rows: Rows = [("models", self.models), ("model", f"{self.decision}: {self.reason}")]
        rows.append(("current", "none" if self.current is None else f"export {self.current}"))
        return [*rows, *([("registered", self.registered)] if self.registered else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTraining:
    """The choices and cost of a training."""

    dataset: str
    strategy: str
    launcher: str
    backend: str
    reason: str
    """Why these were chosen."""
    num_workers: int
    global_batch_size: int
    local_batch_size: int
    """Of the rank with most streams."""
    steps_per_epoch: int
    needed_bytes: int
    """Memory on the device of a rank."""
    images_per_second: float
    host: str
    """Where seconds and bytes were measured."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class TrainingEstimate(Result, PlannedTraining):
    """A training before it begins (`shardmill.plan`)."""

    document: Mapping[str, Any]
    """The whole document of `shardmill plan --json`."""


Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    status: Status
    subject: str
    found: str
    fix: str = ""
    is_transient: bool = False
    """A store, a host or a port fails, not the config: the next try may succeed."""


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Result):
    """What would stop a run on this machine (`shardmill.doctor`)."""

    findings: tuple[Finding, ...]
    in_document = "findings"

    def table(self) -> Rows:
        return [(each.status, each.subject, each.found, each.fix) for each in self.findings]

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


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Garbage(Result):
    """What `shardmill.gc` has found: of a dataset versions, of models exports and trainings, of a workdir runs."""

    uri: str
    deleted: bool
    """Whether it has deleted them."""
    expired_versions: tuple[int, ...] = ()
    retained_versions: tuple[int, ...] = ()
    """At least the latest one of a dataset; none of models."""
    expired_exports: tuple[int, ...] = ()
    retained_exports: tuple[int, ...] = ()
    expired_trainings: tuple[str, ...] = ()
    retained_trainings: tuple[str, ...] = ()
    expired_runs: tuple[str, ...] = ()
    retained_runs: tuple[str, ...] = ()
    num_files: int
    size_bytes: int
    files: tuple[GarbageFile, ...]

    @property
    def _kinds(self) -> tuple[str, ...]:
        """What the place holds."""
        if self.retained_versions:
            return ("versions",)
        return ("runs",) if self.expired_runs or self.retained_runs else ("exports", "trainings")

    def document(self) -> dict[str, Any]:
        others = {"versions", "exports", "trainings", "runs"}.difference(self._kinds)
        return {name: value for name, value in plain(self).items() if name.rpartition("_")[2] not in others}

    def table(self) -> Rows:
        """Versions, exports and trainings, or runs, then files by kind."""
        if self.retained_versions:
            rows: Rows = [
                ("expired" if self.deleted else "would expire", _numbers(self.expired_versions)),
                ("retained", _numbers(self.retained_versions)),
            ]
        elif self._kinds == ("runs",):
            rows = [
                ("deleted runs" if self.deleted else "runs to delete", f"{len(self.expired_runs)}"),
                ("runs retained", f"{len(self.retained_runs)}"),
            ]
        else:
            rows = [
                ("exports that went" if self.deleted else "exports to delete", _numbers(self.expired_exports)),
                ("exports retained", _numbers(self.retained_exports)),
                ("deleted trainings" if self.deleted else "trainings to delete", f"{len(self.expired_trainings)}"),
                ("trainings retained", f"{len(self.retained_trainings)}"),
            ]
        for kind in sorted({each.kind for each in self.files}):
            rows.append((kind, _amount([each for each in self.files if each.kind == kind])))
        rows.append(("deleted" if self.deleted else "would be deleted", _amount(self.files)))
        return rows if self.deleted else [*rows, ("", "nothing was changed; run again with --delete")]


def _numbers(versions: Sequence[int]) -> str:
    return ", ".join(map(str, versions)) or "none"


def _amount(files: Sequence[GarbageFile]) -> str:
    return f"{counted(len(files), 'file')}, {sum(each.size_bytes for each in files) / 1e6:.1f} MB"
