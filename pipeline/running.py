"""A run in progress: its config, its record, and the terminal output of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.config import load_pipeline, without_secrets
from pipeline.config_file import to_toml
from pipeline.output.printing import outcome_words
from pipeline.output.progress import RunProgress
from shardmill.dataset.versions import split_version
from shardmill.errors import ShardmillError
from shardmill.jobs.json_log import logs_json
from shardmill.jobs.run_files import RUNNING, StageRecord, dataset_section, failed_stage, read_stage_record
from shardmill.jobs.run_record import RunRecord, recording

if TYPE_CHECKING:
    from pipeline.cli_options import Common
    from pipeline.tree import PipelineTree
    from shardmill.dataset.verify import VerifyReport
    from shardmill.result import Result

SUMMARY_SECTIONS = ("dataset", "etl", "train", "evaluation", "export", "promotion")
"""Sections that the summary of a run always has, null if no stage has decided them."""

WHOLE_PIPELINE = frozenset({"etl", "verify", "train", "export", "evaluate", "promote"})
"""A run is `ok` once all of these have ended well, in one process or in several; before that it is `partial`."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Run:
    """One run under way: its config, its record, and its terminal output."""

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
        # As JSON, the record's event has said so.
        if not logs_json():
            self.progress.finish(f"{name}: {outcome_words(ended)} ({ended.seconds:.1f} s)")
        return value


@contextmanager
def open_run(
    source_or_config: str,
    common: Common,
    *,
    load: Callable[[str, tuple[str, ...], str], PipelineTree] = load_pipeline,
    builder: str = "etl",
) -> Iterator[Run]:
    """A run record around the work inside; an error is recorded before it is raised on. `builder`: whose name the lines
    of a build begin with.

    One of the config is recorded only if the run was named: a scheduler looks there for the reason. A mistyped command
    leaves nothing.
    """

    def resolve() -> PipelineTree:
        return load(source_or_config, common.overrides, common.workdir)

    resolved = None if common.is_run_named else resolve()
    record = RunRecord(
        common.workdir, common.run_id, command=common.command, sections=SUMMARY_SECTIONS, whole=WHOLE_PIPELINE
    )
    with recording(record):
        tree = resolved or resolve()
        record.name_dataset(tree.dataset.uri)
        record.store.put(f"{record.folder}/config.toml", to_toml(without_secrets(tree)).encode())
        record.summarize(RUNNING)
        with RunProgress(record, tree.train.epochs, builder) as progress:
            yield Run(tree, record, progress)


def verify_record(report: VerifyReport) -> StageRecord:
    """Return the record of a version's check."""
    return checked_record("verify", report, {"dataset": dataset_section(report.pin, report.manifest)})


def checked_record(stage: str, found: Result, sections: dict[str, Any]) -> StageRecord:
    """What was found to be wrong fails the stage without raising: a table is printed first."""
    try:
        found.raise_if_failed()
    except ShardmillError as error:
        return failed_stage(stage, error)
    return StageRecord(stage=stage, sections=sections)


def dataset_of_run(run: Run, stages: Sequence[str] = ("etl", "verify")) -> str:
    """DATASET@N as it was asked for, or as the last of `stages` in this run committed or checked it; without either,
    what the config names."""
    if split_version(run.tree.dataset.uri)[1] is not None:
        return run.tree.dataset.uri
    records = [read_stage_record(run.record.workdir, run.id, stage) for stage in stages]
    ended = [each for each in records if each is not None and each.status != "failed"]
    if not ended:
        return run.tree.dataset.uri
    dataset = max(ended, key=lambda each: each.started).sections["dataset"]
    return f"{dataset['uri']}@{dataset['version']}"
