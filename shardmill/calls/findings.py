"""`shardmill.check_source`, `drift`, `mislabels`, `inspect`, `lineage`, `plan`, `doctor`: commands that find something
out, as functions. They return it whatever it is: `ok` says what the command's exit code says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from shardmill.calls.calling import Folder, Place, call, flags, named, value_of, without_settings
from shardmill.calls.model_findings import Diagnosis, Lineage, TrainingEstimate
from shardmill.data_faults.drift import AspectDrift, amount_words
from shardmill.data_faults.mislabels import ClassFaults, ConfidentMistake, SuspectLabel
from shardmill.data_faults.near_duplicates import SimilarImages
from shardmill.data_faults.quality import SuspectImage, Telltale
from shardmill.dataset.diff import ChangeKind, RowPlace
from shardmill.errors import ShardmillError, UsageError
from shardmill.html import picture, text
from shardmill.jobs.run_files import DEFAULT_WORKDIR
from shardmill.shown import Shown, ShownList
from shardmill.values import DatasetPin

if TYPE_CHECKING:
    from PIL.Image import Image

    from shardmill.loader.dataset import LoadableDataset


_PICTURES = 12


@dataclass(frozen=True, slots=True, repr=False)
class DriftResult(Shown):
    """How far a version has drifted from an older one (`shardmill.drift`)."""

    uri: str
    version: int
    against_uri: str | None
    against_version: int | None
    """None for a first version, which has nothing to be compared with."""
    amount: float | None
    """From 0 to 1, the largest of the aspects."""
    max_drift: float
    ok: bool
    """Whether the amount is within `max_drift`."""
    aspects: tuple[AspectDrift, ...]

    def shown_lists(self) -> list[ShownList]:
        rows = [
            (each.aspect.words, "" if each.amount is None else amount_words(each.amount), each.why_not or each.moves)
            for each in self.aspects
        ]
        return [ShownList("aspects", ("aspect", "amount", "moved"), rows, len(rows))] if rows else []


@dataclass(frozen=True, slots=True, repr=False)
class MislabelsResult(Shown):
    """Labels that are likely wrong, and what the model gets wrong with confidence (`shardmill.mislabels`)."""

    predictions: DatasetPin
    dataset: DatasetPin | None
    """The predicted version; None for another source."""
    model: str
    num_images: int
    num_judged: int
    """Images whose labels were judged: those of classes with enough images."""
    accuracy: float
    """Share of these in which classifiers that have not seen them agree with the label."""
    num_likely: int
    suspects: tuple[SuspectLabel, ...]
    """Likely wrong labels first, then the others, by falling score."""
    num_tested: int
    num_mistaken: int
    mistakes: tuple[ConfidentMistake, ...]
    """By falling probability."""
    classes: tuple[ClassFaults, ...]
    """Those with the most likely wrong labels and mistakes first."""

    def show(self, num_images: int = _PICTURES) -> Image:
        """A contact sheet of the first suspects with the labels that they have, as a PIL image.

        Raises UsageError if there are none, or if a source was predicted, whose images are not stored.
        """
        from shardmill.dataset.dataset import open_pinned
        from shardmill.loader.pictures import contact_sheet
        from shardmill.loader.samples import samples_by_id

        shown = self.suspects[:num_images]
        if self.dataset is None or not shown:
            why = "no label is suspect" if self.dataset is not None else "the predictions are those of a source"
            raise UsageError(f"no images to show: {why}", "expected suspect labels of a predicted dataset")
        version = open_pinned(self.dataset)
        samples = samples_by_id(version, shown)
        return contact_sheet([samples[each.sample_id] for each in shown], version.manifest.class_names)

    def _repr_html_(self) -> str:
        # `super()` without arguments finds no class with slots.
        tables = Shown._repr_html_(self)
        try:
            return f"<div>{tables}{picture(self.show(), 'the first suspects, with the labels that they have')}</div>"
        except (ShardmillError, OSError) as error:
            return f"<div>{tables}<p>{text(error)}</p></div>"


@dataclass(frozen=True, slots=True)
class RejectedInput:
    """An input that is no row."""

    source: str
    reason: str
    """One of docs/rejects.md."""
    detail: str
    size_bytes: int
    source_sha256: str
    stage: str
    """`list`, `read` or `decode`."""


@dataclass(frozen=True, slots=True, repr=False)
class Rejections(Shown):
    """The rejects of a version (`shardmill.inspect` with `rejects`)."""

    rejections: tuple[RejectedInput, ...]


@dataclass(frozen=True, slots=True, repr=False)
class SourceFindings(Shown):
    """What a build of a source would reject (`shardmill.check_source`)."""

    num_listed: int
    num_accepted: int
    num_rejected: int
    by_class: Mapping[str, int]
    by_split: Mapping[str, int]
    by_reason: Mapping[str, int]
    by_note: Mapping[str, int]
    warnings: tuple[str, ...]
    broken_limit: str | None
    """The setting that would end the build, such as `etl.max_reject_fraction`."""
    rejections: tuple[RejectedInput, ...]

    @property
    def ok(self) -> bool:
        """Whether a build would publish a version."""
        return self.broken_limit is None


@dataclass(frozen=True, slots=True)
class EqualBytes:
    """Copies of the same file in a version."""

    num_groups: int
    """Different files of which there are several copies."""
    num_images: int
    """Images in these groups."""
    conflicting_label: int
    """Those of them in groups of several classes."""
    leaked_content: int
    """Those of them in groups in several splits."""
    groups: tuple[SimilarImages, ...]
    """Those in several splits first."""


@dataclass(frozen=True, slots=True, repr=False)
class QualityFindings(Shown):
    """What in a version a person should look at (`shardmill.inspect` with `quality`)."""

    num_images: int
    suspects: tuple[SuspectImage, ...]
    """By fault, the worst of each first."""
    telltales: tuple[Telltale, ...]
    equal_bytes: EqualBytes
    near_duplicates: tuple[SimilarImages, ...]
    near_duplicates_left_out: int
    """Images that look too alike to be compared with each other: of those, groups may be missing."""


@dataclass(frozen=True, slots=True, repr=False)
class NearDuplicates(Shown):
    """Groups of images that look alike (`shardmill.inspect` with `near_duplicates`)."""

    groups: tuple[SimilarImages, ...]
    num_left_out: int
    """Images that look too alike to be compared with each other: of those, groups may be missing."""


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """One version of a dataset."""

    version: int
    operation: str
    parent_version: int | None
    restored_version: int | None
    is_expired: bool
    created_at: str
    run_id: str
    num_accepted: int
    num_rejected: int
    num_shards: int
    image_bytes: int
    content_digest: str


@dataclass(frozen=True, slots=True, repr=False)
class Versions(Shown):
    """All versions of a dataset, the newest first (`shardmill.inspect` with `versions`)."""

    versions: tuple[VersionFacts, ...]


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """A source image that two versions do not hold alike."""

    change: ChangeKind
    source: str
    before: RowPlace | None
    after: RowPlace | None


@dataclass(frozen=True, slots=True, repr=False)
class Difference(Shown):
    """What a version has changed of an older one (`shardmill.inspect` with `diff`)."""

    uri: str
    older_version: int
    newer_version: int
    rows: tuple[ChangedRow, ...]


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
