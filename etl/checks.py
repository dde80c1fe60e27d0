"""What a person should know of a build before it is committed: inferred facts, and warnings."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from etl.listed import SPLITS
from shardmill.dataset.duplicates import DuplicateExamples, find_examples
from shardmill.dataset.index import has_all_files, read_shards
from shardmill.dataset.manifest import Manifest
from shardmill.errors import ShardmillError, UsageError
from shardmill.jobs.observer import FieldValue
from shardmill.options import IMAGE_SIZES
from shardmill.printable import printable
from shardmill.storage import Store
from shardmill.values import TRANSIENT_REASONS, RejectReason

if TYPE_CHECKING:
    from etl.plan import BuildPlan
    from shardmill.dataset.build import Build

_NUM_EXAMPLES = 3
# Fewer images than this say little about a model, whatever their accuracy is: one of 30 is more than 3 %.
_FEW_IN_SPLIT, _FEW_IN_CLASS = 30, 3
_NUM_NAMED = 5
# Of the section `etl`: rows that were accepted under other ones may not stand, or not in their split.
_EQUAL_SETTINGS = ("split_fractions", "duplicates")
_NO_CLASSES = "no classes: the images lie in no folders"


def is_up_to_date(plan: BuildPlan, parent: Manifest) -> bool:
    """Whether building again would give the latest version again: equal inputs and config, no file of it lost."""
    build = plan.build
    same = (parent.config_fingerprint, parent.source.listing_fingerprint, parent.source.kind) == (
        build.config_fingerprint, build.source.listing_fingerprint, build.source.kind
    )  # fmt: skip
    # Equal facts of a listing are equal files if it is the same source, or at least says how large they are.
    has_moved = not build.source.is_same_place(parent.source)
    compares_content = plan.task.config.detect_changes == "content"
    if (has_moved and plan.is_append) or ((has_moved or compares_content) and not plan.listing.has_all_sizes):
        return False
    # Inputs with transient faults are read again: they may be fine now.
    return same and not TRANSIENT_REASONS & set(parent.counts.by_reason) and has_all_files(plan.store, parent)


def check_same_source(plan: BuildPlan, *, replace_source: bool) -> None:
    """Raise UsageError if the build would drop another source's images: to overwrite follows one source."""
    if replace_source or plan.parent is None or plan.is_append:
        return
    before, now = plan.parent.source, plan.build.source
    places = (*plan.parent.other_sources, before)
    dropped = ", ".join(each.described for each in places if not now.continues(each))
    if len(places) > 1 and dropped:
        raise UsageError(
            f"dataset {plan.store.uri}@{plan.parent.version} holds images of {dropped} beside those of {now.described}",
            'expected etl.write_mode = "append": the new version would hold those of one source alone',
            "give each source its own dataset.uri (or --workdir), or give --replace-source",
        )
    # If the very same files are listed, the source has moved, or is named in another way.
    has_moved = before.listing_fingerprint == now.listing_fingerprint and plan.listing.has_all_sizes
    if not now.continues(before) and not has_moved:
        raise UsageError(
            f"dataset {plan.store.uri}@{plan.parent.version} was made from {before.described}, "
            f"not from {now.described}",
            "expected the same source: the new version would replace the old images, and its models would be compared",
            "give each source its own dataset.uri (or --workdir), or give --replace-source",
        )


def check_appendable(parent: Manifest, build: Build, *, is_labelled: bool) -> None:
    """Raise UsageError unless rows of `build` may stand beside those of `parent`; `is_labelled`: they have classes."""
    was_labelled = any(times for split in parent.splits.values() for times in split.class_counts)
    facts = (
        ("formats", sorted(parent.formats), sorted(build.formats)),
        ("pixels", parent.normalization_fingerprint, build.normalization_fingerprint),
        ("columns", parent.columns, build.columns),
        *((name.replace("_", " "), parent.config.get(name), build.config.get(name)) for name in _EQUAL_SETTINGS),
        ("labels", was_labelled, is_labelled),
    )
    other = [name for name, before, now in facts if before != now]
    if other:
        raise UsageError(
            f"the images to append would have other {', '.join(other)} than those of version {parent.version}",
            'expected the same ones: etl.write_mode = "append" adds rows beside the old ones',
            f"use the config of version {parent.version} (`shardmill inspect DATASET@{parent.version} --json`), or "
            "another dataset.uri",
        )


def inferred_facts(plan: BuildPlan) -> dict[str, FieldValue]:
    """The fields of the event `etl.inferred`."""
    config, by_split = plan.task.config, images_by_split(plan)
    where = _how_split(plan)
    shape = " x ".join(map(str, config.one_shape_HWC)) if config.one_shape_HWC else f"different sizes, {config.color}"
    shape += f" ({plan.size.reason})" if plan.size.reason else ""
    return {
        "images": plan.num_images,
        "num_classes": len(plan.build.class_names),
        "classes": _named(plan.build.class_names) or _no_classes(plan),
        "splits": f"{where} " + ", ".join(f"{split} {by_split[split]:,}" for split in SPLITS if by_split[split]),
        "image": f"{shape}, {config.encoding}, resized by {config.resize_mode}",
        "formats": ", ".join(config.formats),
        "dataset": plan.store.uri,
    }


def _how_split(plan: BuildPlan) -> str:
    """What decided the splits, to stand before their numbers."""
    if not plan.listing.has_splits:
        return "by content hash, about"
    if plan.task.config.stratified_splits:
        return "stratified"
    in_part = ", by content hash where it does not, about" if plan.listing.has_unnamed_splits else ""
    return "by folder" if plan.task.source.kind == "folders" and not in_part else f"as the source names them{in_part}"


def _no_classes(plan: BuildPlan) -> str:
    return _NO_CLASSES if plan.row_schema.has_class else f"none: labels are {plan.row_schema.label_type}"


def check_classes(plan: BuildPlan) -> None:
    """Raises UsageError if the listing, with what it is appended to, has too few classes to train on."""
    class_names = plan.row_schema.class_names if plan.is_append else plan.listing.class_names
    # An image that may have several classes can be judged by one; numbers have none.
    num_needed = {"class": 2, "multi_label": 1}.get(plan.row_schema.label_kind, 0)
    if len(class_names) < num_needed:
        raise UsageError(
            f"the source has {len(class_names)} classes ({_named(class_names) or _NO_CLASSES})",
            f"expected at least {num_needed} to train a classifier: one folder per class",
            "sort the images into class folders; `shardmill etl` makes a dataset without training",
        )


def inferred_warnings(plan: BuildPlan) -> Iterator[str]:
    """One sentence for each thing in the listing that looks wrong, before any work is done."""
    # What is appended says little of the splits and classes of the whole.
    if not plan.is_append or plan.parent is None:
        yield from _thin_parts(plan)
    yield from plan.listing.warnings
    if plan.listing.rejections.by_reason[RejectReason.DAMAGED_CONTAINER]:
        refused = plan.listing.rejections
        damaged = tuple(each.key for each in refused if each.reason is RejectReason.DAMAGED_CONTAINER)
        yield (
            f"damaged, and read in part or not at all: {_named(tuple(map(printable, damaged)))}; nothing tells how "
            "many images are lost, so no limit counts them"
        )


def _thin_parts(plan: BuildPlan) -> Iterator[str]:
    """Splits and classes with few images, or none."""
    by_split, about = images_by_split(plan), "" if plan.listing.has_splits else "about "
    fractions = plan.task.config.split_fractions
    by_class = _images_by_class(plan)
    for split in SPLITS:
        if by_split[split] == 0 and (plan.listing.has_splits or getattr(fractions, split) > 0):
            yield f"the split {split} will be empty"
        elif 0 < by_split[split] < _FEW_IN_SPLIT:
            yield (
                f"the split {split} will have {about}{by_split[split]} images, fewer than {_FEW_IN_SPLIT}: figures on "
                "it mean little"
            )
        elif split != "train" and by_split[split]:
            planned = _images_by_class(plan, split)
            # A class with few images in all has a warning of its own.
            thin = [name for name in by_class if by_class[name] >= _FEW_IN_CLASS > planned[name]]
            if thin:
                named = _named(tuple(f"{name}: {about}{planned[name]}" for name in sorted(thin)))
                yield (
                    f"the split {split} will have fewer than {_FEW_IN_CLASS} images of {len(thin)} of {len(by_class)} "
                    f"classes ({named})"
                )
    num_classes = len(plan.build.class_names)
    few = tuple(f"{name}: {by_class[name]}" for name in plan.build.class_names if by_class[name] < _FEW_IN_CLASS)
    if few:
        yield f"{len(few)} of {num_classes} classes have fewer than {_FEW_IN_CLASS} images ({_named(few)})"
    yield from _class_twins(plan.build.class_names)
    if plan.listing.has_splits:
        trained = _images_by_class(plan, "train")
        untrained = tuple(name for name in plan.build.class_names if not trained[name])
        if untrained:
            yield f"{len(untrained)} of {num_classes} classes have no image in train/ ({_named(untrained)})"


def _class_twins(class_names: Iterable[str]) -> Iterator[str]:
    """Classes that look alike to a person, and are different names."""
    by_look: defaultdict[str, list[str]] = defaultdict(list)
    for name in class_names:
        look = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        by_look[" ".join(look.split())].append(name)
    # Names that are printed alike are told apart by their escapes.
    twins = tuple(" and ".join(map(ascii, names)) for names in by_look.values() if len(names) > 1)
    if twins:
        yield (
            f"classes that differ only in case, in spaces or in how Unicode writes them: {_named(twins)}; if they are "
            "one class, give them one name"
        )


def version_warnings(store: Store, manifest: Manifest) -> Iterator[str]:
    """One sentence for each thing that looks wrong once the images have been read."""
    yield from _untested_classes(manifest)
    counts = manifest.counts
    yield from _lost_by_decoding(counts.by_note)
    yield from _enlarged(manifest)
    if not counts.conflicting_label and not counts.leaked_content:
        return
    examples = _examples(store, manifest)
    if counts.conflicting_label:
        yield (
            f"{counts.conflicting_label} accepted images have the same bytes as one of another class"
            f"{_such_as(map(printable, examples.conflicting))}; a model cannot learn both: remove them from one of the "
            "classes"
        )
    if counts.leaked_content:
        named = (f"{printable(source)} ({split})" for source, split in examples.leaked)
        yield (
            f"{counts.leaked_content} accepted images have the same bytes as one in another split{_such_as(named)}; a "
            "model is tested on what it was trained on: remove them from one of the splits, or set etl.duplicates = "
            '"drop"'
        )


def _untested_classes(manifest: Manifest) -> Iterator[str]:
    """Of splits that are too small for the warnings before the build, which estimate."""
    empty = set(manifest.empty_classes)
    for name, split in manifest.splits.items():
        pairs = zip(manifest.class_names, split.class_counts, strict=True)
        absent = tuple(class_name for class_name, here in pairs if not here and class_name not in empty)
        if absent and name != "train" and split.num_rows < _FEW_IN_SPLIT:
            yield (
                f"the split {name} has no image of {len(absent)} of {len(manifest.class_names)} classes "
                f"({_named(absent)}): more images, or etl.stratified_splits = true, would give them some"
            )


def _lost_by_decoding(by_note: Mapping[str, int]) -> Iterator[str]:
    """What notes say of images that are worth less than they could be."""
    num_16_bit = sum(times for note, times in by_note.items() if note.startswith("scaled_"))
    if num_dark := by_note.get("low_range_16_bit", 0):
        yield (
            f"{num_dark} of {num_16_bit} accepted 16-bit images use at most 14 of their bits, and are dark: if they "
            "come from 10, 12 or 14 bits, set etl.significant_bits to that"
        )
    if num_cut := by_note.get("extra_bands_dropped", 0):
        yield f"{num_cut} accepted TIFF images have more bands than their colours; the others were left out"
    if num_previews := by_note.get("preview_only", 0):
        yield f"{num_previews} accepted TIFF images are previews, by their own account, of photos that are not there"


def _enlarged(manifest: Manifest) -> Iterator[str]:
    """Most images, by their longer sides, which are counted between powers of two."""
    options, sizes = manifest.normalize, manifest.sizes
    if sizes is None or options.resize_mode == "none" or not options.enlarges or options.image_size <= IMAGE_SIZES[-1]:
        return
    num_sides = options.image_size.bit_length() - 1
    num_smaller, num_known = sum(sizes.source.by_longer_side[:num_sides]), sum(sizes.source.by_longer_side)
    if 2 * num_smaller > num_known:
        yield (
            f"{num_smaller} of {num_known} images have a longer side of less than {1 << num_sides} pixels, and were "
            f"enlarged to etl.image_size = {options.image_size}: training takes longer for it, and they show no more"
        )


def _such_as(names: Iterable[str]) -> str:
    listed = ", ".join(names)
    return f", such as {listed}" if listed else ""


def _examples(store: Store, manifest: Manifest) -> DuplicateExamples:
    try:
        shards = [shard for shard in read_shards(store, manifest) if shard.format == manifest.formats[0]]
        return find_examples(store, shards)
    except (ShardmillError, FileNotFoundError):
        # The version is committed: a warning without names is better than a failed build; `verify` reports damage.
        return DuplicateExamples()


def images_by_split(plan: BuildPlan) -> Counter[str]:
    """Exact if the source names the splits; estimated from the shares as far as content hashes decide."""
    listing, fractions = plan.listing, plan.task.config.split_fractions
    counts: Counter[str | None] = Counter()
    for (split, _), times in listing.images_by_label.items():
        counts[split] += times
    return Counter({split: counts[split] + round(getattr(fractions, split) * counts[None]) for split in SPLITS})


def _images_by_class(plan: BuildPlan, split: str | None = None) -> Counter[str]:
    """Of one split (exact or estimated like `images_by_split`), or of all."""
    listing = plan.listing
    by_source = listing.has_splits and split is not None
    counts: Counter[str] = Counter()
    for (in_split, label), times in listing.images_by_class.items():
        if label is not None and (not by_source or in_split == split):
            counts[label] += times
    if split is None or by_source:
        return counts
    fraction = getattr(plan.task.config.split_fractions, split)
    return Counter({name: round(fraction * count) for name, count in counts.items()})


def _named(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_NUM_NAMED]) + (f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else "")
