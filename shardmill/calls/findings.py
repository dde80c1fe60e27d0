"""`shardmill.check_source`, `drift`, `mislabels`, `inspect`, `lineage`, `plan`, `doctor`: commands that find something
out, as functions. They return it whatever it is: `ok` says what the command's exit code says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from shardmill.calls.calling import Folder, Place, call, flags, named, value_of, without_settings
from shardmill.calls.data_findings import (
    Difference,
    DriftResult,
    MislabelsResult,
    NearDuplicates,
    QualityFindings,
    Rejections,
    SourceFindings,
    Versions,
)
from shardmill.calls.model_findings import Diagnosis, Lineage, TrainingEstimate
from shardmill.jobs.workdir import DEFAULT_WORKDIR

if TYPE_CHECKING:
    from shardmill.loader.dataset import LoadableDataset


def check_source(
    source_or_config: Place, /, *, workdir: Folder = DEFAULT_WORKDIR, quiet: bool = False, **settings: Any,
) -> SourceFindings:  # fmt: skip
    """Which images a build would reject, and why, as the command `shardmill check-source`. Nothing is written."""
    options = named(workdir=workdir)
    return value_of(SourceFindings, call("check-source", [source_or_config], options, settings, quiet=quiet))


def drift(
    dataset_or_config: Place, /, *, against: Place | int = "", max_drift: float | None = None,
    workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False, **settings: Any,
) -> DriftResult:  # fmt: skip
    """How far `DATASET[@N]` has drifted from an older version, as the command `shardmill drift`.

    `against`: a version's number, or another `DATASET[@M]`; without it the version before, or `etl.drift_baseline`.
    """
    options = named(workdir=workdir, run_id=run_id, against=against, max_drift=max_drift)
    return value_of(DriftResult, call("drift", [dataset_or_config], options, settings, quiet=quiet))


@without_settings
def mislabels(
    predictions: Place, /, *, csv: Folder = "", html: Folder = "", limit: int = 0, quiet: bool = False
) -> MislabelsResult:
    """Labels that are likely wrong, from predictions with embeddings, as the command `shardmill mislabels`.

    `csv`: a file to write, whose column `label` is filled in for `etl.corrections`. `html`: a page with the images.
    `limit`: number of suspect labels; 0 for those that are likely wrong.
    """
    options = named(csv=csv, html=html, limit=limit)
    return value_of(MislabelsResult, call("mislabels", [predictions], options, quiet=quiet))


@overload
def inspect(dataset_or_config: Place, /, *, quality: Literal[True], quiet: bool = False) -> QualityFindings: ...
@overload
def inspect(dataset_or_config: Place, /, *, near_duplicates: int, quiet: bool = False) -> NearDuplicates: ...
@overload
def inspect(dataset_or_config: Place, /, *, rejects: Literal[True], quiet: bool = False) -> Rejections: ...
@overload
def inspect(dataset_or_config: Place, /, *, versions: Literal[True], quiet: bool = False) -> Versions: ...
@overload
def inspect(dataset_or_config: Place, /, *, diff: int, quiet: bool = False) -> Difference: ...
@overload
def inspect(dataset_or_config: Place, /, *, quiet: bool = False) -> LoadableDataset: ...
@without_settings
def inspect(
    dataset_or_config: Place, /, *, rejects: bool = False, versions: bool = False, diff: int | None = None,
    near_duplicates: int | None = None, quality: bool = False, quiet: bool = False,
) -> QualityFindings | NearDuplicates | Rejections | Versions | Difference | LoadableDataset:  # fmt: skip
    """What `DATASET[@N]` holds, as the command `shardmill inspect`: the version itself, or one of its lists.

    `quality`: images that are dark, blurred, uniform or of odd size, and copies. `near_duplicates`: images that look
    alike, of whose 64 bits this many may differ. `rejects`: also of `DATASET/rejects/X`, of a build that failed.
    `diff`: the rows that differ from this version.
    """
    from shardmill.calls.result import version_of

    options = named(diff=diff, near_duplicates=near_duplicates)
    options += flags(rejects=rejects, versions=versions, quality=quality)
    found = call("inspect", [dataset_or_config], options, quiet=quiet)
    if quality:
        suspects = [image for images in found["faults"].values() for image in images]
        return value_of(QualityFindings, {**found, "suspects": suspects})
    if near_duplicates is not None:
        return value_of(NearDuplicates, found)
    if rejects:
        return value_of(Rejections, {"rejections": found})
    if versions:
        return value_of(Versions, {"versions": found})
    return version_of({"dataset": found}) if diff is None else value_of(Difference, found)


@without_settings
def lineage(model: Place, /, *, quiet: bool = False) -> Lineage:
    """Where a model is, and what it was made of, as the command `shardmill lineage`.

    `model`: a models folder (its current model), `MODELS@N`, or `models:/NAME@ALIAS`.
    """
    return value_of(Lineage, call("lineage", [model], [], quiet=quiet))


def plan(
    dataset_or_config: Place, /, *, world_size: int | None = None, workdir: Folder = DEFAULT_WORKDIR,
    quiet: bool = False, **settings: Any,
) -> TrainingEstimate:  # fmt: skip
    """What `train` would do and cost, as the command `shardmill plan`: the choices of `auto`, memory, and the speed
    measured here.
    """
    options = named(workdir=workdir, world_size=world_size)
    document = call("plan", [dataset_or_config], options, settings, quiet=quiet)
    return value_of(TrainingEstimate, {**document, "document": document})


def doctor(
    config: Place = "", /, *, rehearse: bool = False, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "",
    quiet: bool = False, **settings: Any,
) -> Diagnosis:  # fmt: skip
    """What would stop a run on this machine, and how to fix it, as the command `shardmill doctor`."""
    options = [*named(workdir=workdir, run_id=run_id), *flags(rehearse=rehearse)]
    places = [config] if config else []
    return value_of(Diagnosis, {"findings": call("doctor", places, options, settings, quiet=quiet)})
