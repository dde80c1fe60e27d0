"""A run under way and its stages: each does its work, or finds it done, and returns its value to the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pipeline.config import PipelineTree, load_pipeline, without_secrets
from pipeline.config_file import to_toml
from pipeline.progress import RunProgress
from shardmill.errors import ShardmillError, UsageError
from shardmill.jobs.observer import WARNING
from shardmill.jobs.run_files import RUNNING, RunState, StageRecord, failed_stage, write_stage_record
from shardmill.jobs.run_record import RunRecord, recording

if TYPE_CHECKING:
    from etl.job import BuildOutcome
    from pipeline.cli_options import Common
    from shardmill.dataset.verify import VerifyReport
    from shardmill.values import DatasetPin
    from train.job import ExportOutcome, TrainOutcome
    from train.published.gate import Judgement
    from train.published.promote import Promotion
    from train.values import Evaluation

SUMMARY_SECTIONS = ("dataset", "etl", "train", "evaluation", "export", "promotion")
"""Sections that the summary of a run always has, null if no stage has decided them."""

WHOLE_PIPELINE = frozenset({"etl", "verify", "train", "export", "evaluate", "promote"})
"""A run is `ok` once all of these have ended well, in one process or in several; before that it is `partial`."""

OUTCOMES = {"done": "done", "skipped": "skipped, its result is there already", "failed": "failed"}

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Run:
    """One run under way: its config, its record, and what a person sees of it."""

    tree: PipelineTree
    record: RunRecord
    progress: RunProgress

    @property
    def id(self) -> str:
        return self.record.run_id

    def stage(self, name: str, work: Callable[[], Value], record_of: Callable[[Value], StageRecord]) -> Value:
        """Do a stage, record it, and say how it went; returns what `work` returned."""
        value = self.record.stage(name, work, record_of)
        ended = self.record.ended[-1]
        self.progress.finish(f"{name}: {OUTCOMES[ended.status]} ({ended.seconds:.1f} s)")
        return value


@contextmanager
def open_run(
    source_or_config: str,
    common: Common,
    *,
    load: Callable[[str, tuple[str, ...], str], PipelineTree] = load_pipeline,
) -> Iterator[Run]:
    """A run record around the work inside; an error is recorded before it is raised on.

    One of the config is recorded only if the run was named: a scheduler looks there for the reason. A mistyped command
    leaves nothing.
    """

    def resolve() -> PipelineTree:
        return load(source_or_config, common.overrides, common.workdir)

    resolved = None if common.is_run_named else resolve()
    record = RunRecord(common.workdir, common.run_id, sections=SUMMARY_SECTIONS, whole=WHOLE_PIPELINE)
    with recording(record):
        tree = resolved or resolve()
        record.store.put(f"{record.folder}/config.toml", to_toml(without_secrets(tree)).encode())
        record.summarize(RUNNING)
        with RunProgress(record, tree.train.epochs) as progress:
            yield Run(tree, record, progress)


def setting(tree: PipelineTree, workdir: str) -> str:
    """What was inferred before anything is listed: sizes, model, ranks, device, and where results go."""
    train = tree.train
    ranks = f"{train.num_workers} rank{'s' * (train.num_workers > 1)} by {train.launcher}"
    return (
        f"run: images at {tree.etl.image_size} pixels; {train.model}, {train.epochs} epochs on {ranks}, "
        f"{_device()}; dataset {tree.dataset.uri}, models {tree.models.uri}, records {workdir}"
    )


def _device() -> str:
    """CPU or GPU, without importing TensorFlow."""
    from importlib import metadata
    from pathlib import Path

    has_gpu = Path("/dev/nvidia0").exists()
    try:
        metadata.version("tensorflow-cpu")
    except metadata.PackageNotFoundError:
        return "GPU" if has_gpu else "CPU"
    return "CPU (a GPU is here; tensorflow-cpu does not use it)" if has_gpu else "CPU"


@contextmanager
def report_if_failed(run: Run) -> Iterator[None]:
    """Write the report of a run that fails, too: it shows what was refused, and how far the run came."""
    try:
        yield
    except Exception as error:
        failed = failed_stage("run", error)
        try:
            path = _write_report(run.record, RunState("failed", failed.exit_code, failed.error))
            write_stage_record(run.record.workdir, run.id, report_record(path))
        except Exception as problem:  # the run's own error is the one that counts
            run.record.event("report.warning", {WARNING: f"no report could be written: {problem}"})
        else:
            run.progress.say(f"report: {path}")
        raise


def build(run: Run, *, replace_source: bool, will_train: bool = False) -> BuildOutcome:
    """The ETL; its value names the version that the rest of this run works on, even if another one is committed.

    `will_train`: a source that nothing can be trained on is refused once it is listed.
    """
    from etl.job import build_dataset, stage_record

    tree = run.tree.etl_tree()
    return run.stage(
        "etl",
        lambda: build_dataset(
            tree, run_id=run.id, observer=run.progress, replace_source=replace_source, will_train=will_train
        ),
        lambda outcome: stage_record(outcome, tree),
    )


def verify(run: Run, dataset: str, *, deep: bool) -> VerifyReport:
    """Check the version; never skipped, because it looks for what changed without a commit.

    It does not raise for a broken rule: the stage and the run fail, and the caller prints the whole table first.
    """
    from shardmill.dataset.open import open_dataset
    from shardmill.dataset.verify import verify_dataset

    def on_shard(num_done: int, num_shards: int) -> None:
        run.progress.event("verify.progress", {"num_done": num_done, "num_shards": num_shards})

    return run.stage(
        "verify", lambda: verify_dataset(open_dataset(dataset), deep=deep, on_shard=on_shard), _verify_record
    )


def _verify_record(report: VerifyReport) -> StageRecord:
    try:
        report.raise_if_failed()
    except ShardmillError as error:
        return failed_stage("verify", error)
    return StageRecord(stage="verify")


def train(run: Run, version: DatasetPin, *, fresh: bool = False) -> TrainOutcome:
    """Train on `version`, or go on with a training that was cut off, or find that it was done; unless `fresh`."""
    from train.job import train_in_run, train_record

    tree = run.tree.train_tree()
    return run.stage(
        "train",
        lambda: train_in_run(tree, run.record, run.progress, version, fresh=fresh),
        lambda outcome: train_record(outcome, tree),
    )


def export(run: Run, trained: TrainOutcome) -> ExportOutcome:
    """Export a training, or find that it was done."""
    from train.job import export_model, export_record

    return run.stage("export", lambda: export_model(run.tree.train_tree(), trained, run.id), export_record)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Exact figures of an export; None if the dataset has no split to evaluate on."""

    evaluation: Evaluation | None
    skipped: bool


def evaluate(run: Run, exported: ExportOutcome) -> Evaluated:
    """Exact figures of the export. Training has them for its own dataset version; for another one they are computed."""
    return run.stage("evaluate", lambda: _figures(run, exported), _evaluation_record)


def _figures(run: Run, exported: ExportOutcome) -> Evaluated:
    from shardmill.dataset.open import open_dataset
    from shardmill.dataset.versions import split_version
    from shardmill.stores import open_store
    from train.published.exported import load_exported
    from train.published.gate import evaluate_export
    from train.trainings import read_result

    record = exported.export.record
    uri, version = split_version(run.tree.dataset.uri)
    version = version or record.dataset.version
    result = read_result(open_store(exported.models_uri), record.training_dir)
    if result is not None and version == result.dataset.version:
        # The figures of a skipped export were recorded by an earlier run; those of a new one are news of this run.
        return Evaluated(result.evaluation, skipped=exported.skipped)
    dataset = open_dataset(f"{uri}@{version}")
    split = dataset.manifest.evaluation_split
    if split is None:
        raise UsageError(
            f"{uri}@{version} has neither a test nor a validation split",
            "expected one to evaluate on",
            "raise etl.split_fractions.test and run the ETL again",
        )
    model = load_exported(exported.models_uri, exported.export.number)
    return Evaluated(evaluate_export(model, dataset, split), skipped=False)


def _evaluation_record(found: Evaluated) -> StageRecord:
    from pydantic import TypeAdapter

    from train.job import evaluation_section
    from train.values import Evaluation

    plain = TypeAdapter(Evaluation | None).dump_python(found.evaluation, mode="json")
    return StageRecord(
        stage="evaluate",
        status="skipped" if found.skipped else "done",
        sections={"evaluation": evaluation_section(plain)},
        detail={"evaluation": plain},
    )


def gate(run: Run, exported: ExportOutcome) -> Judgement:
    """Find out what `promote` would decide now; nothing is promoted."""
    from train.published.gate import judge

    def record_of(judgement: Judgement) -> StageRecord:
        current = judgement.history.current
        section = {
            "decision": judgement.gate.decision,
            "reason": judgement.gate.reason,
            "current": current.export if current is not None else None,
            "candidate": exported.export.number,
        }
        return StageRecord(stage="gate", sections={"gate": section})

    return run.stage("gate", lambda: judge(exported.models_uri, exported.export, run.tree.gate), record_of)


def promote(run: Run, exported: ExportOutcome) -> Promotion:
    """Make the export the current model if the gate lets it."""
    from train.job import promote_model, promotion_record

    return run.stage("promote", lambda: promote_model(run.tree.train_tree(), exported, run.id), promotion_record)


def report(run: Run) -> str:
    """Write the report of what this run has recorded so far; returns its URI."""
    return run.stage("report", lambda: _write_report(run.record, run.record.state_so_far()), report_record)


def _write_report(record: RunRecord, state: RunState) -> str:
    from pipeline.report import write_report

    return write_report(record.workdir, record.run_id, record.summarize(state))


def report_record(path: str) -> StageRecord:
    """The record of a report that was written just now."""
    return StageRecord(stage="report", started=time.time(), sections={"report": {"path": path}})
