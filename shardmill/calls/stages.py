"""`shardmill.export`, `evaluate`, `gate`, `report`, `compact`, `rollback`, `gc`, `export_tar`: single stages, and what
is done with a dataset or with models, as functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardmill.calls.calling import Folder, Place, call, flags, named, value_of, without_settings
from shardmill.calls.model_findings import Garbage, GateDecision, TarFiles
from shardmill.calls.result import RunResult, run_result, version_of
from shardmill.jobs.run_files import DEFAULT_WORKDIR

if TYPE_CHECKING:
    from shardmill.loader.dataset import LoadableDataset


def export(
    dataset_or_config: Place, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
    **settings: Any,
) -> RunResult:  # fmt: skip
    """The trained model in a form that others can load, as the command `shardmill export`: `result.export` is its
    folder. Arguments and errors are those of `shardmill.run`.
    """
    options = named(workdir=workdir, run_id=run_id)
    return run_result(workdir, call("export", [dataset_or_config], options, settings, quiet=quiet)["run_id"])


def evaluate(
    dataset_or_config: Place, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
    **settings: Any,
) -> RunResult:  # fmt: skip
    """Exact figures of the exported model on the test split, as the command `shardmill evaluate`."""
    options = named(workdir=workdir, run_id=run_id)
    return run_result(workdir, call("evaluate", [dataset_or_config], options, settings, quiet=quiet)["run_id"])


def gate(
    dataset_or_config: Place, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
    **settings: Any,
) -> GateDecision:  # fmt: skip
    """What `promote` would decide, without promoting, as the command `shardmill gate`."""
    options = named(workdir=workdir, run_id=run_id)
    document = call("gate", [dataset_or_config], options, settings, quiet=quiet)
    return value_of(GateDecision, document["sections"]["gate"])


@without_settings
def report(
    source_or_config: Place = "", /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
) -> RunResult:  # fmt: skip
    """The result of an earlier run, the latest one by default, whose report is written again, as by the command
    `shardmill report`.
    """
    places = [source_or_config] if source_or_config else []
    document = call("report", places, named(workdir=workdir, run_id=run_id), quiet=quiet)
    return run_result(workdir, document["run_id"])


def compact(
    dataset_or_config: Place, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
    **settings: Any,
) -> LoadableDataset:  # fmt: skip
    """Small shards become full ones, as by the command `shardmill compact`: the version that has them, or the latest
    one if there was nothing to merge.
    """
    options = named(workdir=workdir, run_id=run_id)
    return version_of({"dataset": call("compact", [dataset_or_config], options, settings, quiet=quiet)})


def rollback(
    dataset_or_config: Place, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
    **settings: Any,
) -> LoadableDataset:  # fmt: skip
    """`DATASET@N` becomes the latest version again, as by the command `shardmill rollback`: the version that has its
    content.
    """
    options = named(workdir=workdir, run_id=run_id)
    return version_of({"dataset": call("rollback", [dataset_or_config], options, settings, quiet=quiet)})


def gc(
    dataset_or_models: Place, /, *, keep: int | None = None, older_than: str = "7d", delete: bool = False,
    workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False, **settings: Any,
) -> Garbage:  # fmt: skip
    """Old versions, trainings and exports, and files that nothing refers to, as by the command `shardmill gc`: only
    listed without `delete`.
    """
    options = named(workdir=workdir, run_id=run_id, keep=keep, older_than=older_than)
    options += flags(delete=delete)
    return value_of(Garbage, call("gc", [dataset_or_models], options, settings, quiet=quiet))


def export_tar(
    dataset_or_config: Place, target: Folder, /, *, max_bytes: int = 500_000_000, workdir: Folder = DEFAULT_WORKDIR,
    quiet: bool = False, **settings: Any,
) -> TarFiles:  # fmt: skip
    """A dataset version as WebDataset shards in an empty folder, as by the command `shardmill export-tar`."""
    options = named(workdir=workdir, max_bytes=max_bytes)
    return value_of(TarFiles, call("export-tar", [dataset_or_config, target], options, settings, quiet=quiet))
