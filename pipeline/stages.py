"""A run under way and its stages: each does its work, or finds it done, and leaves its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config import PipelineTree, load_pipeline, without_secrets
from pipeline.config_file import to_toml
from pipeline.preflight import TrainableListing
from pipeline.progress import RunProgress
from pipeline.record import RunRecord
from shardmill.jobs.events import StageRecord, failed_stage, write_summary
from shardmill.jobs.spark_jvm import spark_log

if TYPE_CHECKING:
    from pipeline.cli_options import Common
    from shardmill.dataset.verify import VerifyReport
    from shardmill.values import DatasetPin
    from train.job import ExportOutcome, TrainOutcome

OUTCOMES = {"done": "done", "skipped": "skipped, its result is there already", "failed": "failed"}


@dataclass(frozen=True, slots=True)
class Run:
    """One run under way: what it was told, where it is recorded, and who watches it."""

    tree: PipelineTree
    record: RunRecord
    progress: RunProgress

    @property
    def id(self) -> str:
        return self.record.run_id

    def stage(self, name: str, work: Callable[[], StageRecord]) -> StageRecord:
        """Do a stage, record it, and say how it went."""
        started = time.monotonic()
        done = self.record.stage(name, work)
        self.progress.finish(f"{name}: {OUTCOMES[done.status]} ({time.monotonic() - started:.1f} s)")
        return done


@contextmanager
def open_run(
    source_or_config: str,
    common: Common,
    *,
    load: Callable[[str, tuple[str, ...], str], PipelineTree] = load_pipeline,
    is_single_stage: bool = True,
) -> Iterator[Run]:
    """A run record around whatever happens inside; an error is written into it before it is raised on."""
    record = RunRecord(common.workdir, common.run_id, is_single_stage=is_single_stage)
    try:
        tree = load(source_or_config, common.overrides, common.workdir)
        record.open(to_toml(without_secrets(tree)))
        with RunProgress(record, tree.train.epochs) as progress, spark_log(record.store, f"{record.folder}/spark.log"):
            yield Run(tree, record, progress)
    except BaseException as error:  # recorded and raised on: also Ctrl-C and SIGTERM belong into the summary
        record.close(error)
        raise
    record.close()


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
def reported_if_it_fails(run: Run) -> Iterator[None]:
    """A run that fails gets its report too: what was refused, and how far it came, is what one wants to see then."""
    try:
        yield
    except Exception as error:
        run.record.report_failure(error, run.progress.say)
        raise


def build(run: Run, *, replace_source: bool, will_train: bool = False) -> DatasetPin:
    """The ETL; returns the version that the rest of this run works on, whoever commits another one meanwhile.

    `will_train`: a source that nothing can be trained on is refused once it is listed.
    """
    from etl.job import BuildOutcome, build_dataset, stage_record

    tree = run.tree.etl_tree()
    observer = TrainableListing(run.progress) if will_train else run.progress
    outcomes: list[BuildOutcome] = []

    def work() -> StageRecord:
        outcomes.append(build_dataset(tree, run_id=run.id, observer=observer, replace_source=replace_source))
        return stage_record(outcomes[0], tree)

    run.stage("etl", work)
    return outcomes[0].pin


def verify(run: Run, dataset: str, *, deep: bool) -> VerifyReport:
    """Check the version; never skipped, because what it looks for is what changed behind our back."""
    from shardmill.dataset import open_dataset, verify_dataset

    found: list[VerifyReport] = []

    def on_shard(num_done: int, num_shards: int) -> None:
        run.progress.event("verify.progress", {"num_done": num_done, "num_shards": num_shards})

    def check() -> StageRecord:
        found.append(verify_dataset(open_dataset(dataset), deep=deep, on_shard=on_shard))
        try:
            found[0].raise_if_failed()
        except Exception as error:  # the caller prints the whole table before it raises this
            return failed_stage("verify", error)
        return StageRecord(stage="verify")

    run.stage("verify", check)
    return found[0]


def train(run: Run, version: DatasetPin, *, fresh: bool = False) -> TrainOutcome:
    """Train on `version`, or go on with a training that was cut off, or find that it was done; unless `fresh`."""
    from train.job import train_model, train_record
    from train.steps_log import RunLog, StepsLog

    tree = run.tree.train_tree()
    steps = StepsLog(run.record.store, f"{run.record.folder}/steps.jsonl") if tree.train.record_samples else None
    outcomes: list[TrainOutcome] = []

    def work() -> StageRecord:
        with closing(RunLog(run.progress, steps)) as log:
            outcomes.append(train_model(tree, log, version, fresh_for=run.id if fresh else ""))
        return train_record(outcomes[0], tree)

    run.stage("train", work)
    return outcomes[0]


def run_export(run: Run, export: Callable[[], ExportOutcome]) -> ExportOutcome:
    """Export, or find that it was done."""
    from train.job import export_record

    outcomes: list[ExportOutcome] = []

    def work() -> StageRecord:
        outcomes.append(export())
        return export_record(outcomes[0])

    run.stage("export", work)
    return outcomes[0]


def evaluation_record(run: Run, exported: ExportOutcome) -> StageRecord:
    """Exact figures of the export. Training has them for its own dataset version; for another one they are computed."""
    from pydantic import TypeAdapter

    from shardmill.dataset import open_dataset
    from shardmill.dataset.dataset import split_version
    from shardmill.stores import open_store
    from train.job import evaluation_section
    from train.published.exported import load_exported
    from train.published.gate import evaluate_export
    from train.trainings import read_result
    from train.values import Evaluation

    record = exported.export.record
    version = split_version(run.tree.dataset.uri)[1] or record.dataset.version
    result = read_result(open_store(exported.models_uri), record.training_dir)
    if result is not None and version == result.dataset.version:
        # A training that was skipped has nothing new to tell; one of this run has, though it measured them itself.
        evaluation, status = result.evaluation, "skipped" if exported.skipped else "done"
    else:
        dataset = open_dataset(f"{split_version(run.tree.dataset.uri)[0]}@{version}")
        split = "test" if "test" in dataset.manifest.splits else "validation"
        model = load_exported(exported.models_uri, exported.export.number)
        evaluation, status = evaluate_export(model, dataset, split), "done"
    plain = TypeAdapter(Evaluation | None).dump_python(evaluation, mode="json")
    sections = {"evaluation": evaluation_section(plain)}
    return StageRecord(stage="evaluate", status=status, sections=sections, detail={"evaluation": plain})


def gate_record(run: Run, exported: ExportOutcome) -> StageRecord:
    """What `promote` would decide now."""
    from train.published.gate import judge

    judgement = judge(exported.models_uri, exported.export, run.tree.gate)
    current = judgement.history.current
    section = {
        "decision": judgement.gate.decision,
        "reason": judgement.gate.reason,
        "current": current.export if current is not None else None,
        "candidate": exported.export.number,
    }
    return StageRecord(stage="gate", sections={"gate": section})


def report_record(run: Run, write: Callable[[str, str, dict[str, Any]], str]) -> StageRecord:
    """The report of what this run has recorded so far."""
    summary = write_summary(run.record.workdir, run.id, 0)
    path = write(run.record.workdir, run.id, summary)
    return StageRecord(stage="report", sections={"report": {"path": path}})
