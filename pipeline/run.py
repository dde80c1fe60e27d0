"""The story: a folder of images becomes a dataset version, a trained model, an export, a decision and a report.

Every stage finds out by itself whether its result is there already for the same inputs, so that the same command after
any failure goes on where it stopped. Stages hand each other values; what each did is in the run's record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config import PipelineTree, load_pipeline, require, to_toml, without_secrets
from pipeline.progress import RunProgress
from pipeline.record import RunRecord
from shardmill.events import (
    StageRecord,
    failed_stage,
    how_run_ended,
    read_stage_record,
    write_stage_record,
    write_summary,
)

if TYPE_CHECKING:
    from pipeline.cli_options import Common
    from shardmill.dataset.pin import DatasetPin
    from shardmill.dataset.verify import VerifyReport
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


def run_pipeline(source_or_config: str, common: Common) -> dict[str, Any]:
    """The whole pipeline; returns the summary. Raises the ShardmillError of the stage that could not go on."""
    from pipeline.report import write_report
    from train.job import export_model, promote_model, promotion_record

    with open_run(source_or_config, common, is_single_stage=False) as run:
        require(run.tree, "source", "dataset")
        train_tree = run.tree.train_tree()

        # Images to a committed dataset version, and a look at whether it keeps every rule.
        pin = build(run)
        report = verify(run, f"{pin.uri}@{pin.version}", deep=False)
        report.raise_if_failed()

        # Train on it, and turn the final weights into a model that others can load.
        trained = train(run, pin)
        exported = run_export(run, lambda: export_model(train_tree, trained, run.id))

        # How good is it, and is it good enough to become the current model?
        run.stage("evaluate", lambda: evaluation_record(run, exported))
        run.stage("promote", lambda: promotion_record(promote_model(train_tree, exported, run.id)))

        # One page to look at.
        run.stage("report", lambda: report_record(run, write_report))
    return write_summary(common.workdir, run.id, 0)


def run_one_stage(name: str, source_or_config: str, common: Common, **choices: bool) -> StageRecord:
    """One stage by itself, as a command or an Airflow task; takes what earlier stages of the same run id have left."""
    with open_run(source_or_config, common) as run:
        return STAGE_COMMANDS[name](run, **choices)


def verify_stage(dataset_or_config: str, common: Common, *, deep: bool) -> VerifyReport:
    """Check a dataset. With a config file, the check is a stage of the run; a bare dataset leaves no run record."""
    from shardmill.dataset import open_dataset, verify_dataset

    if not dataset_or_config.endswith(".toml"):
        return verify_dataset(open_dataset(dataset_or_config), deep=deep)
    with open_run(dataset_or_config, common) as run:
        require(run.tree, "dataset")
        return verify(run, _dataset_of_run(run), deep=deep)


@contextmanager
def open_run(source_or_config: str, common: Common, *, is_single_stage: bool = True) -> Iterator[Run]:
    """A run record around whatever happens inside; an error is written into it before it is raised on."""
    record = RunRecord(common.workdir, common.run_id, is_single_stage=is_single_stage)
    try:
        tree = load_pipeline(source_or_config, common.overrides, common.workdir)
        record.open(to_toml(without_secrets(tree)))
        with RunProgress(record) as progress:
            yield Run(tree, record, progress)
    except BaseException as error:  # recorded and raised on: also Ctrl-C and SIGTERM belong into the summary
        record.close(error)
        raise
    record.close()


def build(run: Run) -> DatasetPin:
    """The ETL; returns the version that the rest of this run works on, whoever commits another one meanwhile."""
    from etl.job import BuildOutcome, build_dataset, stage_record

    tree = run.tree.etl_tree()
    outcomes: list[BuildOutcome] = []

    def work() -> StageRecord:
        outcomes.append(build_dataset(tree, run_id=run.id, observer=run.progress))
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


def train(run: Run, latest: DatasetPin) -> TrainOutcome:
    """Train on `latest`, or go on with a training that was cut off, or find that it was done."""
    from train.job import train_model, train_record
    from train.steps_log import RunLog, StepsLog

    tree = run.tree.train_tree()
    steps = StepsLog(run.record.store, f"{run.record.folder}/steps.jsonl") if tree.train.record_samples else None
    outcomes: list[TrainOutcome] = []

    def work() -> StageRecord:
        with closing(RunLog(run.progress, steps)) as log:
            outcomes.append(train_model(tree, log, latest))
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
    from shardmill.storage import open_store
    from train.job import evaluation_section
    from train.promote import evaluate_export
    from train.trainings import read_result
    from train.values import Evaluation

    record = exported.export.record
    version = split_version(run.tree.dataset.uri)[1] or record.dataset.version
    result = read_result(open_store(exported.models_uri), record.training_dir)
    if result is not None and version == result.dataset.version:
        evaluation, status = result.evaluation, "skipped"
    else:
        dataset = open_dataset(f"{split_version(run.tree.dataset.uri)[0]}@{version}")
        split = "test" if "test" in dataset.manifest.splits else "validation"
        evaluation, status = evaluate_export(exported.models_uri, exported.export.number, dataset, split), "done"
    plain = TypeAdapter(Evaluation | None).dump_python(evaluation, mode="json")
    sections = {"evaluation": evaluation_section(plain)}
    return StageRecord(stage="evaluate", status=status, sections=sections, detail={"evaluation": plain})


def gate_record(run: Run, exported: ExportOutcome) -> StageRecord:
    """What `promote` would decide now."""
    from train.promote import judge

    decision, pointer = judge(exported.models_uri, exported.export, run.tree.gate)
    section = {
        "decision": decision.decision,
        "reason": decision.reason,
        "current": pointer.export if pointer is not None else None,
        "candidate": exported.export.number,
    }
    return StageRecord(stage="gate", sections={"gate": section})


def report_record(run: Run, write: Callable[[str, str, dict[str, Any]], str]) -> StageRecord:
    """The report of what this run has recorded so far."""
    summary = write_summary(run.record.workdir, run.id, 0)
    path = write(run.record.workdir, run.id, summary)
    return StageRecord(stage="report", sections={"report": {"path": path}})


def report_again(common: Common) -> StageRecord:
    """Write report.html of an earlier run; how that run ended is not touched."""
    from pipeline.report import write_report

    ended = how_run_ended(common.workdir, common.run_id)
    path = write_report(common.workdir, common.run_id, write_summary(common.workdir, common.run_id, *ended))
    record = StageRecord(stage="report", sections={"report": {"path": path}})
    write_stage_record(common.workdir, common.run_id, "report", record, is_last=False)
    write_summary(common.workdir, common.run_id, *ended)
    return record


def _export_of_run(run: Run) -> ExportOutcome:
    """The export that an earlier stage of this run made; without one, that of the finished training of this config."""
    from shardmill.storage import open_store
    from train.export import read_export
    from train.job import ExportOutcome, export_model, finished_training

    earlier = read_stage_record(run.record.workdir, run.id, "export")
    if earlier is not None and earlier.status != "failed":
        models_uri = open_store(run.tree.models.uri).uri
        return ExportOutcome(read_export(models_uri, earlier.sections["export"]["number"]), models_uri, True, 0.0)
    tree = run.tree.train_tree()
    return export_model(tree, finished_training(tree), run.id)


def _dataset_of_run(run: Run) -> str:
    """DATASET@N as this run's ETL committed it; without one, what the config names."""
    earlier = read_stage_record(run.record.workdir, run.id, "etl")
    if earlier is None or earlier.status == "failed":
        return run.tree.dataset.uri
    dataset = earlier.sections["dataset"]
    return f"{dataset['uri']}@{dataset['version']}"


def _etl_command(run: Run) -> StageRecord:
    require(run.tree, "source", "dataset")
    build(run)
    return _recorded(run, "etl")


def _train_command(run: Run) -> StageRecord:
    from shardmill.dataset import open_dataset

    require(run.tree, "dataset")
    train(run, open_dataset(_dataset_of_run(run)).pin)
    return _recorded(run, "train")


def _export_command(run: Run) -> StageRecord:
    require(run.tree, "dataset")
    run_export(run, lambda: _export_of_run(run))
    return _recorded(run, "export")


def _evaluate_command(run: Run) -> StageRecord:
    require(run.tree, "dataset")
    return run.stage("evaluate", lambda: evaluation_record(run, _export_of_run(run)))


def _gate_command(run: Run) -> StageRecord:
    require(run.tree, "dataset")
    return run.stage("gate", lambda: gate_record(run, _export_of_run(run)))


def _promote_command(run: Run, *, rollback: bool, require: bool) -> StageRecord:
    from train.job import promote_model, promotion_record
    from train.promote import roll_back

    tree = run.tree.train_tree()

    def work() -> StageRecord:
        if rollback:
            return promotion_record(roll_back(tree.models.uri, run.id))
        return promotion_record(promote_model(tree, _export_of_run(run), run.id, require=require))

    return run.stage("promote", work)


def _recorded(run: Run, stage: str) -> StageRecord:
    record = read_stage_record(run.record.workdir, run.id, stage)
    assert record is not None
    return record


STAGE_COMMANDS: dict[str, Callable[..., StageRecord]] = {
    "etl": _etl_command,
    "train": _train_command,
    "export": _export_command,
    "evaluate": _evaluate_command,
    "gate": _gate_command,
    "promote": _promote_command,
}
