"""The commands as functions: `shardmill.run`, `drift` and the others. Each is a declaration; what it does is the
command of its name, in a process of its own. What is found is returned whatever it is: `ok` says what the exit code
says.
"""

# Type checkers take `...` for the body of a declaration, which returns nothing itself.
# ruff: noqa: PIE790

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from shardmill.calls.calling import Folder, Location, command
from shardmill.calls.predictions import Predictions
from shardmill.calls.results import Diagnosis, Garbage, GateDecision, Lineage, PromotionResult, TrainingEstimate
from shardmill.calls.run_result import RunResult, run_result, version_of
from shardmill.data_quality.drift import DriftResult
from shardmill.data_quality.findings import QualityFindings
from shardmill.data_quality.mislabels import Mislabels
from shardmill.data_quality.near_duplicates import NearDuplicates
from shardmill.dataset.inspection import Difference, Rejections, SourceFindings, Versions
from shardmill.dataset.tar_export import TarExport
from shardmill.jobs.run_files import DEFAULT_WORKDIR
from shardmill.result import Result
from shardmill.storage import join_uri

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from shardmill.loader.dataset import LoadableDataset

    Spark = SparkSession | Mapping[str, Any] | None

Arguments = Mapping[str, Any]
Found = TypeVar("Found", bound=Result)


def _found(kind: type[Found]) -> Callable[[Any, Arguments], Found]:
    """The document is the result."""
    return lambda document, _: kind.of(document)


def _of_run(document: Any, given: Arguments) -> RunResult:
    return run_result(given["workdir"], document["run_id"])


def _version(document: Any, _: Arguments) -> LoadableDataset:
    return version_of({"dataset": document})


def _predicted(document: Any, _: Arguments) -> Predictions:
    section, is_new = document["sections"]["predictions"], document["status"] != "skipped"
    version = version_of({"dataset": section})
    return Predictions(document["run_id"], version, section["num_predicted"], section["images_per_second"], is_new)


def _with_folder(given: Arguments) -> Arguments:
    return {**given, "out": os.fspath(given["out"]) or join_uri(os.fspath(given["workdir"]), "predictions")}


def _estimated(document: Any, _: Arguments) -> TrainingEstimate:
    return TrainingEstimate.of({**document, "document": document})


Inspected = QualityFindings | NearDuplicates | Rejections | Versions | Difference


def _inspected(document: Any, given: Arguments) -> Inspected | LoadableDataset:
    kinds: dict[str, type[Inspected]] = {
        "quality": QualityFindings, "near_duplicates": NearDuplicates, "rejects": Rejections, "versions": Versions,
        "diff": Difference,
    }  # fmt: skip
    # 0 bits are asked for, too.
    chosen = [kind for name, kind in kinds.items() if given[name] is not None and given[name] is not False]
    return chosen[0].of(document) if chosen else _version(document, given)


@command(_of_run)
def run(
    source_or_config: Location, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "",
    replace_source: bool = False, fresh: bool = False, allow_change: Sequence[str] = (), quiet: bool = False,
    spark: Spark = None, **settings: Any,
) -> RunResult:  # fmt: skip
    """The whole pipeline, as the command `shardmill run`: ETL, verify, train, export, evaluate, promote, report.

    `source_or_config`: images of any source, or a TOML file. `settings`: config keys by section,
    `train={"epochs": 3}`, or by full name, `**{"train.epochs": 3}`. The other arguments are the options of the command;
    `quiet` shows no progress. The work happens in a process of its own; Ctrl-C, or the stop button of a notebook, ends
    it in order, and the same call resumes it.

    `spark`: a session of this process, of a cluster or of Spark Connect. Its tasks do the ETL's work, and are the ranks
    with `train={"launcher": "spark_barrier"}`; it is not stopped. Also the section `spark` of the config.

    Raises the ShardmillError with which the command ends: UsageError for a wrong setting, RejectLimitExceeded, ...
    """
    ...


@command(lambda document, _: version_of(document["sections"]))
def etl(
    source_or_config: Location, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "",
    replace_source: bool = False, quiet: bool = False, spark: Spark = None, **settings: Any,
) -> LoadableDataset:  # fmt: skip
    """Only the dataset, as the command `shardmill etl`: the version that it committed, or the latest one if nothing has
    changed. Arguments and errors are those of `run`.
    """
    ...


@command(_of_run)
def train(
    dataset_or_config: Location, /, *, workdir: Folder = DEFAULT_WORKDIR,
    run_id: str = "", fresh: bool = False, allow_change: Sequence[str] = (), quiet: bool = False,
    spark: Spark = None, **settings: Any,
) -> RunResult:  # fmt: skip
    """Only the training, as the command `shardmill train`: on `DATASET[@N]`, or on the dataset of a TOML file.

    Nothing is exported or promoted. A training that exists with these settings is returned without being repeated.
    """
    ...


@command(_of_run)
def export(
    dataset_or_config: Location, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
    **settings: Any,
) -> RunResult:  # fmt: skip
    """The trained model in a form that others can load, as the command `shardmill export`: `result.export` is its
    folder. Arguments and errors are those of `shardmill.run`.
    """
    ...


@command(_of_run)
def evaluate(
    dataset_or_config: Location, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
    **settings: Any,
) -> RunResult:  # fmt: skip
    """Exact metrics of the exported model on the test split, as the command `shardmill evaluate`."""
    ...


@command(lambda document, _: GateDecision.of(document["sections"]["gate"]))
def gate(
    dataset_or_config: Location, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
    **settings: Any,
) -> GateDecision:  # fmt: skip
    """What `promote` would decide, without promoting, as the command `shardmill gate`."""
    ...


@command(
    lambda document, _: PromotionResult.of({"run_id": document["run_id"], **document["sections"]["promotion"]}),
    require_promotion="require",
)
def promote(
    models_or_config: Location, /, *, rollback: bool = False, require_promotion: bool = False,
    replace_current: bool = False, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "",
    quiet: bool = False, **settings: Any,
) -> PromotionResult:  # fmt: skip
    """An export becomes the current model, as by the command `shardmill promote`: the newest of `MODELS` if it passes
    the gate, `MODELS@N` without the gate, or with `rollback` the previous one.

    Raises GateNotPassed with `require_promotion` if the gate is not passed.
    """
    ...


@command(_of_run)
def report(
    source_or_config: Location = "", /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
) -> RunResult:  # fmt: skip
    """The result of an earlier run, the latest one by default, whose report is written again, as by the command
    `shardmill report`.
    """
    ...


@command(_predicted, _with_folder)
def predict(
    models: Location, source_or_config: Location, /, *, out: Folder = "",
    top: int = 1, layer: str = "", engine: str = "", replace_source: bool = False,
    workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False, **settings: Any,
) -> Predictions:  # fmt: skip
    """A model over every image of a source or of `DATASET[@N]`, as the command `shardmill predict --out`.

    `models`: a models folder (its current model), `MODELS@N`, or `models:/NAME@ALIAS`. `out`: where the version of
    predictions is committed; `predictions` in `workdir` if it is left out. Only new or changed images are predicted.
    """
    ...


@command(_found(SourceFindings))
def check_source(
    source_or_config: Location, /, *, workdir: Folder = DEFAULT_WORKDIR, quiet: bool = False, **settings: Any,
) -> SourceFindings:  # fmt: skip
    """Which images a build would reject, and why, as the command `shardmill check-source`. Nothing is written."""
    ...


@command(_found(DriftResult))
def drift(
    dataset_or_config: Location, /, *, against: Location | int = "", max_drift: float | None = None,
    workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False, **settings: Any,
) -> DriftResult:  # fmt: skip
    """How far `DATASET[@N]` has drifted from an older version, as the command `shardmill drift`.

    `against`: a version's number, or another `DATASET[@M]`; without it the version before, or `etl.drift_baseline`.
    """
    ...


@command(_found(Mislabels))
def mislabels(
    predictions: Location, /, *, csv: Folder = "", html: Folder = "", limit: int = 0, quiet: bool = False
) -> Mislabels:
    """Labels that are likely wrong, from predictions with embeddings, as the command `shardmill mislabels`.

    `csv`: a file to write, whose column `label` is filled in for `etl.corrections`. `html`: a page with the images.
    `limit`: number of suspect labels; 0 for those that are likely wrong.
    """
    ...


@overload
def inspect(dataset_or_config: Location, /, *, quality: Literal[True], quiet: bool = False) -> QualityFindings: ...
@overload
def inspect(dataset_or_config: Location, /, *, near_duplicates: int, quiet: bool = False) -> NearDuplicates: ...
@overload
def inspect(dataset_or_config: Location, /, *, rejects: Literal[True], quiet: bool = False) -> Rejections: ...
@overload
def inspect(dataset_or_config: Location, /, *, versions: Literal[True], quiet: bool = False) -> Versions: ...
@overload
def inspect(dataset_or_config: Location, /, *, diff: int, quiet: bool = False) -> Difference: ...
@overload
def inspect(dataset_or_config: Location, /, *, quiet: bool = False) -> LoadableDataset: ...
@command(_inspected)
def inspect(
    dataset_or_config: Location, /, *, rejects: bool = False, versions: bool = False, diff: int | None = None,
    near_duplicates: int | None = None, quality: bool = False, quiet: bool = False,
) -> Inspected | LoadableDataset:  # fmt: skip
    """What `DATASET[@N]` holds, as the command `shardmill inspect`: the version itself, or one of its lists.

    `quality`: images that are dark, blurred, uniform or of odd size, and copies. `near_duplicates`: images that look
    alike, of whose 64 bits this many may differ. `rejects`: also of `DATASET/rejects/X`, of a build that failed.
    `diff`: the rows that differ from this version.
    """
    ...


@command(_found(Lineage))
def lineage(model: Location, /, *, quiet: bool = False) -> Lineage:
    """Where a model is, and what it was made of, as the command `shardmill lineage`.

    `model`: a models folder (its current model), `MODELS@N`, or `models:/NAME@ALIAS`.
    """
    ...


@command(_estimated)
def plan(
    dataset_or_config: Location, /, *, world_size: int | None = None, workdir: Folder = DEFAULT_WORKDIR,
    quiet: bool = False, **settings: Any,
) -> TrainingEstimate:  # fmt: skip
    """What `train` would do and cost, as the command `shardmill plan`: the choices of `auto`, memory, and the speed
    measured here.
    """
    ...


@command(_found(Diagnosis))
def doctor(
    config: Location = "", /, *, rehearse: bool = False, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "",
    quiet: bool = False, **settings: Any,
) -> Diagnosis:  # fmt: skip
    """What would stop a run on this machine, and how to fix it, as the command `shardmill doctor`."""
    ...


@command(_version)
def compact(
    dataset_or_config: Location, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
    **settings: Any,
) -> LoadableDataset:  # fmt: skip
    """Small shards become full ones, as by the command `shardmill compact`: the version that has them, or the latest
    one if there was nothing to merge.
    """
    ...


@command(_version)
def rollback(
    dataset_or_config: Location, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False,
    **settings: Any,
) -> LoadableDataset:  # fmt: skip
    """`DATASET@N` becomes the latest version again, as by the command `shardmill rollback`: the version that has its
    content.
    """
    ...


@command(_found(Garbage))
def gc(
    dataset_models_or_workdir: Location, /, *, keep: int | None = None, older_than: str = "7d", delete: bool = False,
    workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False, **settings: Any,
) -> Garbage:  # fmt: skip
    """Old versions, trainings and exports, or runs, and files that nothing refers to, as by the command `shardmill gc`:
    only listed without `delete`.
    """
    ...


@command(_found(TarExport))
def export_tar(
    dataset_or_config: Location, target: Folder, /, *, max_bytes: int = 500_000_000, workdir: Folder = DEFAULT_WORKDIR,
    quiet: bool = False, **settings: Any,
) -> TarExport:  # fmt: skip
    """A dataset version as WebDataset shards in an empty folder, as by the command `shardmill export-tar`."""
    ...
