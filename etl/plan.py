"""Plans an ETL run before any unit runs: the listing, the work units, and the version that it builds on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import pyarrow as pa

from etl.checks.drift import check_baseline
from etl.checks.mask_folders import check_no_masks
from etl.checks.places import check_places
from etl.config import EtlTree, SourceConfig
from etl.later_runs.appendable import check_appendable
from etl.later_runs.changes import Changes, Compared
from etl.later_runs.older_rows import OlderRows
from etl.listing.corrections import corrected
from etl.listing.grouping import Group, GroupBy, group_here
from etl.listing.judged_boxes import WithJudgedBoxes
from etl.listing.label_map import WithKnownClasses, grown_label_map, read_label_map
from etl.listing.list_source import list_source
from etl.listing.listing import Listing
from etl.listing.splits import WithGroupSplits
from etl.listing.stratify import KnownSplits, WithStratifiedSplits
from etl.sources import COMMITTED, SOURCES, HasParts, Source
from etl.units.image_size import ImageSize, choose_image_size
from etl.units.map_rows import deciding, mapped_schema
from etl.units.units import ListingPlace, UnitTask, WorkUnit, fingerprint_config, plan_units
from etl.user_code import with_users_line
from shardmill.dataset.build import Build
from shardmill.dataset.index import check_files, files_of, in_all_formats, intact_shards, read_shards, stored_sizes
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.manifest import Manifest, SourceRef
from shardmill.dataset.row_segments import RowReader, rows_file
from shardmill.dataset.versions import latest_version, read_manifest, split_version
from shardmill.errors import UsageError
from shardmill.formats.parquet import column_types
from shardmill.formats.rows import RowSchema
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
    label_map: tuple[str, ...]
    """What the config gives; empty for none."""
    size: ImageSize
    """Size of stored images, as in `task.config`."""

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
    def extends_parent(self) -> bool:
        """Whether rows of the latest version may be reused, as far as settings and decoders tell."""
        return self.parent is not None and _extends(self, self.parent)

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
    require_uri("dataset.uri", tree.dataset.uri)
    # `auto` is decided here: executors must not choose anew.
    etl = tree.etl.model_copy(update={"kernel": resolve_kernel(tree.etl.kernel)})
    for name, uri in tree.source.uris().items():
        check_places(name, require_uri(name, uri), "dataset.uri" if mapping is None else "--out", tree.dataset.uri)
    check_baseline(tree)
    source = SOURCES[tree.source.kind](tree.source)
    # From here on: an executor has a working directory of its own.
    section = with_absolute_uris(tree.source, source)
    label_map = read_label_map(tree.etl.label_map)
    # Asked once, as late as possible: splits that count the images of one version must not come to stand on another.
    latest = cache(lambda: _latest(open_store(tree.dataset.uri)))
    listing = _list(source, tree, label_map, latest, observer or SilentObserver(), group)
    check_no_masks(listing, section, source, etl.max_source_bytes)
    decided = tree.model_copy(update={"source": section, "etl": etl})
    return _plan_behind(latest(), decided, run_id, listing, label_map, mapping)


def plan_again(plan: BuildPlan, tree: EtlTree) -> BuildPlan:
    """The same listing, on what is the latest version by now."""
    # A size that was chosen for want of a version gives way to that of the version.
    etl = plan.task.config.model_copy(update={"image_size": tree.etl.image_size})
    decided, latest = tree.model_copy(update={"source": plan.task.source, "etl": etl}), _latest(plan.store)
    return _plan_behind(latest, decided, plan.build.run_id, plan.listing, plan.label_map, plan.task.mapping)


def _latest(store: Store) -> Manifest | None:
    return read_manifest(store, latest) if (latest := latest_version(store)) else None


def _plan_behind(
    parent: Manifest | None,
    tree: EtlTree,
    run_id: str,
    listing: Listing,
    label_map: tuple[str, ...],
    mapping: RowMapping | None,
) -> BuildPlan:
    source, store = tree.source, open_store(tree.dataset.uri)
    listed = {"listing_fingerprint": listing.fingerprint, "key_sum": listing.key_sum}
    found = place_of(source).model_copy(update={**listed, "names_splits": listing.has_splits})
    is_continued = parent is not None and (tree.etl.write_mode == "append" or found.continues(parent.source))
    size = choose_image_size(listing, source, tree.etl, parent if is_continued else None)
    config = tree.etl.model_copy(update={"image_size": size.pixels})
    normalize = config.normalize_options()
    fingerprint = normalization_fingerprint(normalize)
    class_names = grown_label_map(parent if is_continued else None, label_map, listing.class_names)
    extra = extra_columns(source.extra_entries(), listing.extra_types, found.uri)
    label_type = label_type_of(source.label_kinds(), listing.extra_types, found.uri)
    stored = RowSchema(config.encoding, config.one_shape_HWC, class_names, extra, label_type)
    schema = mapped_schema(stored, mapping)
    config_fingerprint = fingerprint_config(config, schema, deciding(fingerprint, mapping), source.image_fields())
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
        decoder_id=decoder_id(normalize),
        config=redacted(config.model_dump(mode="json")),
        config_fingerprint=config_fingerprint,
        predicted_by=None if mapping is None else mapping.predicted_by,
    )
    task = UnitTask(
        source=source,
        dataset_uri=store.uri,
        config=config,
        row_schema=schema,
        decoder_id=decoder_id(normalize),
        listing=ListingPlace(str(listing.folder), listing.segments),
        probes=listing.probes,
        mapping=mapping,
    )
    units = tuple(plan_units(listing, config, _unit_settings(build)))
    return BuildPlan(build, listing, listing, units, task, RowReader(store, schema), parent, label_map, size)


def _list(
    source: Source,
    tree: EtlTree,
    label_map: tuple[str, ...],
    latest: Callable[[], Manifest | None],
    observer: Observer,
    group: Group,
) -> Listing:
    """The whole source, without the classes that a given label map does not have.

    Asks for the latest version if the splits depend on it.
    """
    config, dataset_uri = tree.etl, open_store(tree.dataset.uri).uri

    def group_listed(asked: GroupBy) -> Iterator[pa.Table]:
        return group(replace(asked, dataset_uri=dataset_uri, scratch_dir=config.scratch_dir))

    grouped = WithGroupSplits(WithJudgedBoxes(corrected(source, tree, label_map, observer)), config.split_fractions)
    listed = WithKnownClasses(grouped, label_map, config.unknown_class)
    if config.stratified_splits:
        known = _known_splits(open_store(tree.dataset.uri), latest(), tree.source, source)
        listed = WithStratifiedSplits(listed, config.split_fractions, known, observer)
    return list_source(
        listed, seed=config.seed, max_source_bytes=config.max_source_bytes, observer=observer, group=group_listed
    )


def _known_splits(store: Store, parent: Manifest | None, section: SourceConfig, source: Source) -> KnownSplits:
    """Of the latest version's images, those of lost shards included, if it is of this source."""
    if parent is None or not place_of(with_absolute_uris(section, source)).continues(parent.source):
        return KnownSplits.of(store, ())
    shards = read_shards(store, parent)
    sizes = stored_sizes(store, [rows_file(shard) for shard in shards])
    rows = (next((shard for shard in group if shard.rows_path in sizes), None) for group in in_all_formats(shards))
    return KnownSplits.of(store, (shard for shard in rows if shard is not None))


def plan_changes(plan: BuildPlan, observer: Observer) -> tuple[BuildPlan, Changes] | None:
    """The plan of only what has changed since the parent, or is to be appended to it; None if all must be done.

    It must be if the parent is of another source or config, or nothing is left of it. Rows of lost shards count as
    changed. Raises UsageError, or IntegrityError for a lost shard, if the parent is none to append to.
    """
    parent, build = plan.parent, plan.build
    if parent is None:
        return None
    if plan.is_append:
        check_appendable(parent, build, is_labelled=bool(plan.listing.class_names))
        groups = in_all_formats(read_shards(plan.store, parent))
        # But for the row segments that are read below.
        files = (file for group in groups for file in files_of(group) if file.path != group[0].rows_path)
        check_files(plan.store, [*files])
    elif plan.extends_parent:
        groups = intact_shards(plan.store, parent)
    else:
        return None
    refused, equal_suffixes = partial(read_rejections, plan.store, parent), None
    if parent.normalization_fingerprint != build.normalization_fingerprint:
        # By older rules, which may have refused what is accepted now.
        refused, equal_suffixes = tuple, _equal_suffixes(plan, parent)
    # Equal facts at another place may be other files; an append compares what it reads of them.
    places = (parent.source, *parent.other_sources)
    is_same_source = not plan.is_append or any(build.source.continues(each) for each in places)
    config = plan.task.config
    rows = OlderRows(plan.rows, groups, parent.row_schema, plan.listing, plan.task)
    compared = Compared(
        groups, rows, refused, plan.listing, is_same_source=is_same_source, equal_suffixes=equal_suffixes
    )
    work = list_source(
        compared, seed=config.seed, max_source_bytes=config.max_source_bytes, observer=SilentObserver(),
        may_be_empty=True,
    )  # fmt: skip
    changes = compared.changes()
    if not changes.may_keep_rows and not plan.is_append:
        return None
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
        plan.task, listing=ListingPlace(str(work.folder), work.segments), probes=work.probes or plan.task.probes
    )
    units = tuple(plan_units(work, config, _unit_settings(build))) if work.num_images else ()
    return replace(plan, build=replace(build, operation="incremental"), work=work, units=units, task=task), changes


def _extends(plan: BuildPlan, parent: Manifest) -> bool:
    """Whether rows of the parent may be reused in the new version: same source, and config but for the label map; by
    the decoders of this machine, and rules since which the pixels of some files are equal.
    """
    build, before = plan.build, parent.normalization_fingerprint
    has_equal_pixels = before == build.normalization_fingerprint or _equal_suffixes(plan, parent) != frozenset()
    with_its_names = fingerprint_config(
        plan.task.config,
        replace(plan.row_schema, class_names=parent.class_names),
        deciding(before, plan.task.mapping),
        plan.task.source.image_fields(),
    )
    made_alike = parent.formats == build.formats and has_equal_pixels
    # Splits that are named no more are decided by content: that of every image may be another one.
    names_splits = build.source.names_splits or not parent.source.names_splits
    is_same_source = build.source.continues(parent.source) and names_splits
    return is_same_source and made_alike and parent.config_fingerprint == with_its_names


def _equal_suffixes(plan: BuildPlan, parent: Manifest) -> frozenset[str] | None:
    """What the names of files end with of which `parent` has the pixels that they would have now; None for all."""
    rules = rules_of(plan.build.normalize, parent.normalization_fingerprint) if plan.task.mapping is None else None
    suffixes = frozenset[str]() if rules is None else EQUAL_SUFFIXES[rules]
    if BEFORE_COLOURS in parent.decoder_id and parent.counts.by_note.get(CONVERTED_NOTE):
        suffixes = NOT_OF_JPEG if suffixes is None else suffixes & NOT_OF_JPEG
    names_tell = not parent.counts.by_note.get("extension_mismatch") and not plan.task.source.has_key_fields()
    return suffixes if suffixes is None or names_tell else frozenset()


def _unit_settings(build: Build) -> str:
    """Return what determines a unit's output in addition to the listed facts: the config, and the source's location.

    Two tables of one name in two folders may list equal facts for different files.
    """
    return f"{build.config_fingerprint}\0{build.source.kind}\0{build.source.described}"


def place_of(section: SourceConfig) -> SourceRef:
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
