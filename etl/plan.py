"""Plans an ETL run before any unit runs: the listing, the work units, and the version that it builds on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import pyarrow as pa

from etl.config import EtlTree, SourceConfig
from etl.later_runs.carry import check_appendable
from etl.later_runs.changes import Changes, Compared, OlderRows, row_ids
from etl.listing.first_look import ImageSize, check_no_masks, choose_image_size
from etl.listing.grouping import Group, GroupBy, group_here
from etl.listing.labels import (
    corrections_of,
    grown_label_map,
    read_label_map,
    with_corrections,
    with_judged_boxes,
    with_known_classes,
)
from etl.listing.list_source import Listed, list_source
from etl.listing.listing import Listing
from etl.listing.splits import KnownSplits, with_group_splits, with_stratified_splits
from etl.sources import COMMITTED, SOURCES, HasParts, Source
from etl.sources.listed import ListingBatch
from etl.units.units import ListingLocation, UnitTask, WorkUnit, fingerprint_config, plan_units
from etl.user_code import with_users_line
from shardmill.dataset.build import Build
from shardmill.dataset.index import check_files, files_of, in_all_formats, intact_shards, read_shards
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.manifest import Manifest, SourceRef
from shardmill.dataset.row_segments import RowReader
from shardmill.dataset.versions import latest_version, read_manifest, split_version
from shardmill.errors import UsageError
from shardmill.formats.parquet import column_types
from shardmill.formats.rows import NO_IMAGES, VECTOR, RowSchema
from shardmill.images.decoder_id import (
    BEFORE_COLOURS,
    EQUAL_SUFFIXES,
    NOT_OF_JPEG,
    decoder_id,
    normalization_fingerprint,
    rules_of,
)
from shardmill.images.icc import CONVERTED_NOTE
from shardmill.jobs.config import require_uri
from shardmill.jobs.observer import Observer, SilentObserver
from shardmill.jobs.redact import redacted
from shardmill.kernel import resolve_kernel
from shardmill.options import NormalizeOptions
from shardmill.row_mapping import RowMapping
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.typed_columns import LABEL, LABEL_TYPES, ExtraColumn, parse_extra
from shardmill.values import SourceLabelKind


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """All facts of a build before a unit runs."""

    build: Build
    listing: Listing
    """Listing of the whole source."""
    work: Listing
    """Listing of the images that units read: all, or those that changed since the parent."""
    units: tuple[WorkUnit, ...]
    task: UnitTask
    rows: RowReader
    """Reads the row segments of the version that this run begins with, and of the one that it makes."""
    parent: Manifest | None
    """The latest version, if there is one."""
    replaced: Manifest | None
    """The same, if it is of this source and nothing is appended to it: images that it has alone are lost."""
    extends_parent: bool
    """Whether rows of the latest version may be reused, as far as settings and decoders tell."""
    equal_suffixes: frozenset[str] | None
    """What the names of files end with of which the parent has the pixels that they would have now; None for all."""
    size: ImageSize
    """Size of stored images, as in `task.config`."""
    behind: Callable[[Manifest | None], BuildPlan]
    """Plans the same listing on another latest version."""

    @property
    def store(self) -> Store:
        """The dataset's."""
        return self.rows.store

    @property
    def parent_version(self) -> int:
        """0 if there is none."""
        return self.parent.version if self.parent is not None else 0

    @property
    def row_schema(self) -> RowSchema:
        """The schema that all rows of the version share."""
        return self.task.row_schema

    @property
    def is_append(self) -> bool:
        """Whether the next version holds what the parent holds, whatever its source."""
        return self.task.config.write_mode == "append"

    @property
    def num_images(self) -> int:
        """Sources that units will read; what the listing refused is not among them."""
        return self.work.num_images

    @property
    def digest(self) -> str:
        """Equal plans (listing, config and units) have equal digests, on any machine."""
        parts = [self.build.source.listing_fingerprint, self.build.config_fingerprint, self.build.source.key_sum]
        return hashlib.sha256("\0".join([*parts, *(unit.fingerprint for unit in self.units)]).encode()).hexdigest()


@with_users_line("the source")
def plan_build(
    tree: EtlTree,
    *,
    run_id: str,
    observer: Observer | None = None,
    group: Group = group_here,
    mapping: RowMapping | None = None,
) -> BuildPlan:
    """List the source and do all planning. The observer gets the number of inputs listed so far.

    Reads no image, or a few if neither the config nor the latest version says how large stored ones become.

    `group` finds what is listed twice; one of Spark's may leave copies below the dataset while it does. `mapping`: what
    is stored in place of images.
    """
    dataset, key = require_uri("dataset.uri", tree.dataset.uri), "dataset.uri" if mapping is None else "--out"
    if split_version(dataset)[1] is not None:
        raise UsageError(
            f"{key} = {dataset} names one version", "expected the dataset: a build creates a version",
            f"set {key} to {split_version(dataset)[0]}",
        )  # fmt: skip
    # `auto` is decided here: executors must not choose anew.
    store, etl = open_store(dataset), tree.etl.model_copy(update={"kernel": resolve_kernel(tree.etl.kernel)})
    for name, uri in tree.source.uris().items():
        require_uri(name, uri)
    try:
        if etl.drift_baseline:
            read_manifest(store, etl.drift_baseline)
    except UsageError as error:
        what = f"etl.drift_baseline = {etl.drift_baseline}: {error.what}"
        raise UsageError(what, error.expected, "set it to 0 for the latest version") from None

    # From here on absolute: an executor has a working directory of its own.
    source = SOURCES[tree.source.kind](tree.source)
    tree = tree.model_copy(update={"source": with_absolute_uris(tree.source, source), "etl": etl})
    placed = source_ref_of(tree.source)
    for name, uri in zip(tree.source.uris(), placed.parts.values() or (placed.uri,), strict=True):
        _check_apart(name, uri, key, store.uri)
    label_map = read_label_map(etl.label_map)
    # Asked once, as late as possible: splits that count the images of one version must not come to stand on another.
    latest = cache(lambda: latest_manifest(store))
    listing = _list(source, tree, store, label_map, latest, observer or SilentObserver(), group)
    check_no_masks(listing, tree.source, source, etl.max_source_bytes)
    return _plan_behind(tree, store, run_id, listing, label_map, mapping, latest())


def _check_apart(source_key: str, source: str, dataset_key: str, dataset: str) -> None:
    """A dataset inside its own source would be listed by the next run."""
    if f"{dataset}/".startswith(f"{source}/"):
        # A dataset that no setting names is in the working directory.
        moved = "dataset.uri or --workdir" if dataset_key == "dataset.uri" else dataset_key
        raise UsageError(
            f"{dataset_key} {dataset} is inside {source_key} {source}",
            "expected separate folders, because the next run would list the shards as inputs",
            f"set {moved} to a folder outside the source",
        )


def latest_manifest(store: Store) -> Manifest | None:
    """The latest version; None if there is none."""
    return read_manifest(store, latest) if (latest := latest_version(store)) else None


def _plan_behind(
    tree: EtlTree,
    store: Store,
    run_id: str,
    listing: Listing,
    label_map: tuple[str, ...],
    mapping: RowMapping | None,
    parent: Manifest | None,
) -> BuildPlan:
    source = tree.source
    listed = {"listing_fingerprint": listing.fingerprint, "key_sum": listing.key_sum}
    found = source_ref_of(source).model_copy(update={**listed, "names_splits": listing.has_splits})
    continued = parent if parent is not None and found.continues(parent.source) else None
    is_append = tree.etl.write_mode == "append"
    kept = parent if is_append else continued

    # The rows: their size, their columns, and what decides their pixels.
    size = choose_image_size(listing, source, tree.etl, kept)
    config = tree.etl.model_copy(update={"image_size": size.pixels})
    normalize = config.normalize_options()
    decoder, fingerprint = decoder_id(normalize), normalization_fingerprint(normalize)
    class_names = grown_label_map(kept, label_map, listing.class_names)
    extra = extra_columns(source.extra_entries(), listing.extra_types, found.uri)
    label_type = label_type_of(source.label_kinds(), listing.extra_types, found.uri)
    schema = RowSchema(config.encoding, config.one_shape_HWC, class_names, extra, label_type)
    schema = schema if mapping is None else mapped_schema(schema, mapping)

    def fingerprint_with(pixels: str, schema: RowSchema) -> str:
        made_by = pixels if mapping is None else f"{pixels}\0{mapping.fingerprint}"
        return fingerprint_config(config, schema, made_by, source.image_fields())

    # Rows of the parent may be reused: same source, and config but for the label map; by the decoders of this machine,
    # and rules since which the pixels of some files are equal. Splits that are named no more are decided by content:
    # that of every image may be another one.
    equal_suffixes, extends_parent = None, False
    if parent is not None:
        if parent.normalization_fingerprint != fingerprint:
            equal_suffixes = _equal_suffixes(parent, normalize, source, is_mapped=mapping is not None)
        before = fingerprint_with(parent.normalization_fingerprint, replace(schema, class_names=parent.class_names))
        is_made_alike = parent.formats == config.formats and parent.config_fingerprint == before
        names_splits = found.names_splits or not parent.source.names_splits
        extends_parent = continued is not None and names_splits and is_made_alike and equal_suffixes != frozenset()

    build = Build(
        run_id=run_id,
        source=found,
        num_listed=listing.num_listed,
        list_rejections=listing.rejections,
        class_names=class_names,
        columns=column_types(schema),
        formats=config.formats,
        normalize=normalize,
        normalization_fingerprint=fingerprint,
        decoder_id=decoder,
        config=redacted(config.model_dump(mode="json")),
        config_fingerprint=fingerprint_with(fingerprint, schema),
        predicted_by=None if mapping is None else mapping.predicted_by,
    )
    task = UnitTask(
        source=source,
        dataset_uri=store.uri,
        config=config,
        row_schema=schema,
        decoder_id=decoder,
        listing=ListingLocation(str(listing.folder), listing.segments),
        probes=listing.probes,
        mapping=mapping,
    )
    return BuildPlan(
        build=build,
        listing=listing,
        work=listing,
        units=tuple(plan_units(listing, config, _unit_settings(build))),
        task=task,
        rows=RowReader(store, schema),
        parent=parent,
        replaced=None if is_append else continued,
        extends_parent=extends_parent,
        equal_suffixes=equal_suffixes,
        size=size,
        behind=partial(_plan_behind, tree, store, run_id, listing, label_map, mapping),
    )


def _list(
    source: Source,
    tree: EtlTree,
    store: Store,
    label_map: tuple[str, ...],
    latest: Callable[[], Manifest | None],
    observer: Observer,
    group: Group,
) -> Listing:
    """The whole source, without the classes that a given label map does not have.

    Asks for the latest version if the splits depend on it.
    """
    config, corrections = tree.etl, corrections_of(tree)

    def labelled() -> Iterator[ListingBatch]:
        given = with_corrections(source, corrections, label_map, observer) if corrections else source.list()
        batches = with_group_splits(with_judged_boxes(given, source.uri), config.split_fractions)
        return with_known_classes(batches, label_map, config.unknown_class) if label_map else batches

    def group_listed(asked: GroupBy) -> Iterator[pa.Table]:
        return group(replace(asked, dataset_uri=store.uri, scratch_dir=config.scratch_dir))

    listed = labelled
    if config.stratified_splits:
        # Of the latest version's images, those of lost shards included, if it is of this source.
        parent, place = latest(), source_ref_of(tree.source)
        rows = row_ids(store, parent) if parent is not None and place.continues(parent.source) else ()
        known = KnownSplits.of(rows)
        listed = partial(with_stratified_splits, labelled, config.split_fractions, known, observer)
    return list_source(
        Listed(source.uri, listed), seed=config.seed, max_source_bytes=config.max_source_bytes, observer=observer,
        group=group_listed,
    )  # fmt: skip


def plan_changes(plan: BuildPlan, observer: Observer) -> tuple[BuildPlan, Changes | None]:
    """The plan of only what has changed since the parent, or is to be appended to it; all of it, and None, if all must
    be done.

    It must be if the parent is of another source or config, or nothing is left of it. Rows of lost shards count as
    changed. Raises UsageError, or IntegrityError for a lost shard, if the parent is none to append to.
    """
    parent, build = plan.parent, plan.build
    if parent is None:
        return plan, None
    if plan.is_append:
        check_appendable(parent, build, is_labelled=bool(plan.listing.class_names))
        groups = in_all_formats(read_shards(plan.store, parent))
        # But for the row segments that are read below.
        files = (file for group in groups for file in files_of(group) if file.path != group[0].rows_path)
        check_files(plan.store, [*files])
    elif plan.extends_parent:
        groups = intact_shards(plan.store, parent)
    else:
        return plan, None
    # Older rules may have refused what is accepted now.
    is_same_rules = parent.normalization_fingerprint == build.normalization_fingerprint
    refused = partial(read_rejections, plan.store, parent) if is_same_rules else tuple
    # Equal facts at another place may be other files; an append compares what it reads of them.
    places = (parent.source, *parent.other_sources)
    is_same_source = not plan.is_append or any(build.source.continues(each) for each in places)
    config = plan.task.config
    rows = OlderRows(plan.rows, groups, parent.row_schema, plan.listing, plan.task)
    compared = Compared(
        groups, rows, refused, plan.listing, is_same_source=is_same_source, equal_suffixes=plan.equal_suffixes
    )
    work = list_source(
        compared, seed=config.seed, max_source_bytes=config.max_source_bytes, observer=SilentObserver(),
        may_be_empty=True,
    )  # fmt: skip
    changes = compared.changes()
    if not changes.num_unchanged and changes.rows is None and not plan.is_append:
        return plan, None
    observer.event(
        "etl.changes",
        {
            "unchanged": changes.num_unchanged,
            "to_process": work.num_images,
            "removed": 0 if plan.is_append else changes.num_removed - changes.num_to_compare,
        },
    )
    if changes.num_to_compare:
        observer.event("etl.comparing", {"inputs": changes.num_to_compare})
    task = replace(
        plan.task, listing=ListingLocation(str(work.folder), work.segments), probes=work.probes or plan.task.probes
    )
    units = tuple(plan_units(work, config, _unit_settings(build))) if work.num_images else ()
    return replace(plan, build=replace(build, operation="incremental"), work=work, units=units, task=task), changes


def _equal_suffixes(
    parent: Manifest, normalize: NormalizeOptions, source: SourceConfig, *, is_mapped: bool
) -> frozenset[str] | None:
    """What the names of files end with of which `parent` has the pixels that they would have now; None for all."""
    rules = None if is_mapped else rules_of(normalize, parent.normalization_fingerprint)
    suffixes = frozenset[str]() if rules is None else EQUAL_SUFFIXES[rules]
    if BEFORE_COLOURS in parent.decoder_id and parent.counts.by_note.get(CONVERTED_NOTE):
        suffixes = NOT_OF_JPEG if suffixes is None else suffixes & NOT_OF_JPEG
    names_tell = not parent.counts.by_note.get("extension_mismatch") and not source.has_key_fields()
    return suffixes if suffixes is None or names_tell else frozenset()


def mapped_schema(schema: RowSchema, mapping: RowMapping) -> RowSchema:
    """With the mapping's columns beside the source's, and no images. Raises UsageError if names clash."""
    if schema.has_annotations:
        raise UsageError(
            "the source lists boxes or masks, and predictions no images that they could lie in",
            "expected images alone",
            "leave boxes and masks out of what your source lists if source.label_kind = 'none'",
        )
    ours = {column.name for column in mapping.columns} | ({VECTOR} if mapping.vector_size else set())
    clash = next((column.name for column in schema.extra if column.name in ours), None)
    if clash is not None:
        raise UsageError(
            f"the source's column {clash!r} is also one of the predictions",
            "expected other names",
            "leave it out of source.extra_columns",
        )
    extra = tuple(sorted((*schema.extra, *mapping.columns)))
    return replace(schema, encoding=NO_IMAGES, extra=extra, vector_size=mapping.vector_size)


def _unit_settings(build: Build) -> str:
    """Return what determines a unit's output in addition to the listed facts: the config, and the source's location.

    Two tables of one name in two folders may list equal facts for different files.
    """
    return f"{build.config_fingerprint}\0{build.source.kind}\0{build.source.described}"


def source_ref_of(section: SourceConfig) -> SourceRef:
    """Return the location of a source, before it is listed."""
    parts = {name: _without_version(part) for name, part in section.parts.items()}
    uri = _without_version(section) or ", ".join(parts)
    nothing = {"listing_fingerprint": "", "key_sum": "0" * 64, "names_splits": False}
    return SourceRef(uri=uri, kind=section.kind, parts=parts, **nothing)


def _without_version(section: SourceConfig) -> str:
    """All versions of a dataset, or of a table, are one source."""
    entry = SOURCES.entries.get(section.kind)
    has_versions = section.kind == COMMITTED or (entry is not None and entry.version_log != "")
    return split_version(section.uri)[0] if has_versions else section.uri


def with_absolute_uris(section: SourceConfig, source: Source) -> SourceConfig:
    if isinstance(source, HasParts):
        return section.at({f"source.parts.{name}.uri": uri for name, uri in source.part_uris.items()})
    return section.at({"source.uri": source.uri})


def extra_columns(configured: Iterable[str], types: Mapping[str, str], source: str) -> tuple[ExtraColumn, ...]:
    """The columns of the dataset. Raises UsageError if one that the config names has no value, and so no type."""
    for name, _ in map(parse_extra, configured):
        if name not in types:
            raise UsageError(
                f"source.extra_columns names {name!r}, but no input of {source} has a value for it",
                "expected a column, a field or a feature of the source (docs/sources.md)",
                f'correct source.extra_columns, or give its type: "{name}:string"',
            )
    return tuple(sorted(ExtraColumn(name, kind) for name, kind in types.items() if name != LABEL))


def label_type_of(kinds: Collection[SourceLabelKind], types: Mapping[str, str], source: str) -> str:
    """The type of the dataset's labels. Raises UsageError if the source has none of the kind that the config names."""
    if len(kinds) > 1:
        raise UsageError(
            f"source.parts have labels of the kinds {', '.join(sorted(kinds))}", "expected one kind in all parts",
            "give each part the same label_kind",
        )  # fmt: skip
    [kind] = kinds
    if kind in ("class", "none"):
        return LABEL_TYPES["class"]
    if not types.get(LABEL):
        raise UsageError(
            f"source.label_kind = {kind!r}, but no input of {source} has such a label",
            "expected a column of them in a table, a Parquet or TFRecord file, or a field in a tar archive",
            "name it with source.label_field, or remove source.label_kind",
        )
    return LABEL_TYPES[kind] if kind == "multi_label" else types[LABEL]
