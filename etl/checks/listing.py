"""Judges a plan between the listing and the work: where it may build, what was inferred, and what looks wrong."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from etl.checks.version import FEW_IN_SPLIT
from etl.listing.labels import undone
from etl.sources.listed import SPLITS
from shardmill.dataset.index import has_all_files
from shardmill.dataset.manifest import Manifest
from shardmill.errors import UsageError
from shardmill.jobs.observer import FieldValue
from shardmill.values import ANNOTATION_REASONS, TRANSIENT_REASONS, RejectReason
from shardmill.words import name_some, printable

if TYPE_CHECKING:
    from etl.plan import BuildPlan


_NUM_EXAMPLES = 3
_FEW_IN_CLASS = 3
_NO_CLASSES = "no classes: the dataset has no labels"


def current_version(plan: BuildPlan) -> Manifest | None:
    """The latest version if building again would give it again: equal inputs and config, no file of it lost."""
    parent, build = plan.parent, plan.build
    if parent is None or (parent.config_fingerprint, parent.source.listing_fingerprint, parent.source.kind) != (
        build.config_fingerprint, build.source.listing_fingerprint, build.source.kind
    ):  # fmt: skip
        return None
    # Equal facts of a listing are equal files if it is the same source, or at least says how large they are.
    has_moved = not build.source.is_same_source(parent.source)
    compares_content = plan.task.config.detect_changes == "content"
    if (has_moved and plan.is_append) or ((has_moved or compares_content) and not plan.listing.has_all_sizes):
        return None
    # Inputs with faults that no listing shows are read again: they may be fine now.
    asked_again = (TRANSIENT_REASONS | ANNOTATION_REASONS) & set(parent.counts.by_reason)
    return parent if not asked_again and has_all_files(plan.store, parent) else None


def check_same_source(plan: BuildPlan, *, replace_source: bool) -> None:
    """Raise UsageError if the build would drop another source's images: to overwrite follows one source."""
    if plan.parent is None:
        return
    place = "--out" if plan.task.mapping is not None else "dataset.uri (or --workdir)"
    if (plan.parent.predicted_by is None) != (plan.task.mapping is None):
        kinds = ("images", "predictions")
        held, made = kinds if plan.task.mapping is not None else kinds[::-1]
        raise UsageError(
            f"{plan.store.uri}@{plan.parent.version} holds {held}",
            f"expected a folder for {made} alone",
            f"name another {place}",
        )
    if replace_source or plan.is_append:
        return
    before, now = plan.parent.source, plan.build.source
    places = (*plan.parent.other_sources, before)
    dropped = ", ".join(each.described for each in places if not now.continues(each))
    if len(places) > 1 and dropped:
        raise UsageError(
            f"dataset {plan.store.uri}@{plan.parent.version} also holds images of {dropped}",
            f'expected etl.write_mode = "append": otherwise the new version would only hold those of {now.described}',
            f"give each source its own {place}, or give --replace-source",
        )
    # If the very same files are listed, the source has moved, or is named in another way.
    has_moved = before.listing_fingerprint == now.listing_fingerprint and plan.listing.has_all_sizes
    if not now.continues(before) and not has_moved:
        raise UsageError(
            f"dataset {plan.store.uri}@{plan.parent.version} was built from {before.described}, not from "
            f"{now.described}",
            "expected the same source: the new version would replace the old images, and its models would be compared"
            if plan.task.mapping is None
            else "expected the same source: the new version would replace the predictions of the old images",
            f"give each source its own {place}, or give --replace-source",
        )


def inferred_facts(plan: BuildPlan) -> dict[str, FieldValue]:
    """The fields of the event `etl.inferred`."""
    config, by_split = plan.task.config, images_by_split(plan)
    listing, no_classes = plan.listing, _NO_CLASSES
    if not plan.row_schema.has_class:
        no_classes = f"none: labels are {plan.row_schema.label_type}"
    in_part = ", by content hash otherwise, about" if listing.has_unnamed_splits else ""
    where = f"as the source names them{in_part}"
    if not listing.has_splits:
        where = "by content hash, about"
    elif config.stratified_splits:
        where = "stratified"
    elif plan.task.source.kind == "folders" and not in_part:
        where = "by folder"
    shape = " x ".join(map(str, config.one_shape_HWC)) if config.one_shape_HWC else f"different sizes, {config.color}"
    shape += f" ({plan.size.reason})" if plan.size.reason else ""
    return {
        "images": plan.num_images,
        "num_classes": len(plan.build.class_names),
        "classes": name_some(plan.build.class_names) or no_classes,
        "splits": f"{where} " + ", ".join(f"{split} {by_split[split]:,}" for split in SPLITS if by_split[split]),
        "image": f"{shape}, {config.encoding}, resized by {config.resize_mode}",
        **({} if plan.build.predicted_by is None else {"model": str(plan.build.predicted_by)}),
        "formats": ", ".join(config.formats),
        "dataset": plan.store.uri,
    }


def check_classes(plan: BuildPlan) -> None:
    """Raises UsageError if the listing, with what it is appended to, has too few classes to train on."""
    class_names = plan.row_schema.class_names if plan.is_append else plan.listing.class_names
    # An image that may have several classes can be judged by one; numbers have none.
    num_needed = {"class": 2, "multi_label": 1}.get(plan.row_schema.label_kind, 0)
    if len(class_names) < num_needed:
        raise UsageError(
            f"the source has {len(class_names)} classes ({name_some(class_names) or _NO_CLASSES})",
            f"expected at least {num_needed} to train a classifier: one folder per class",
            "sort the images into class folders; `shardmill etl` makes a dataset without training",
        )


def inferred_warnings(plan: BuildPlan, current: Manifest | None = None) -> Iterator[str]:
    """One sentence for each thing in the listing that looks wrong, before any work is done. `current`: the version that
    holds all of it already, so that nothing has to be estimated.
    """
    # What is appended says little of the splits and classes of the whole, and predictions are no training data.
    if plan.task.mapping is None and (not plan.is_append or plan.parent is None):
        yield from _thin_parts(plan, current)
    yield from plan.listing.warnings
    if plan.replaced is not None:
        earlier = str(plan.replaced.config.get("corrections", ""))
        yield from undone(plan.replaced.version, earlier, plan.task.config.corrections)
    if plan.listing.rejections.by_reason[RejectReason.DAMAGED_CONTAINER]:
        refused = plan.listing.rejections
        damaged = tuple(each.key for each in refused if each.reason is RejectReason.DAMAGED_CONTAINER)
        yield (
            f"damaged, and read partly or not at all: {name_some(tuple(map(printable, damaged)))}; the number of lost "
            "images is unknown, so no limit counts them"
        )


def _thin_parts(plan: BuildPlan, current: Manifest | None) -> Iterator[str]:
    """Splits and classes with few images, or none; and classes that look alike to people."""
    names_splits, class_names = plan.listing.has_splits, plan.build.class_names
    has, is_empty, about = "will have", "will be empty", "" if names_splits else "about "
    by_split, by_class = images_by_split(plan), _images_by_class(plan)
    of_split = {split: _images_by_class(plan, split) for split in SPLITS}
    if current is not None:
        has, is_empty, about = "has", "is empty", ""
        by_split = Counter({split: found.num_rows for split, found in current.splits.items()})
        counts = {split: found.class_counts for split, found in current.splits.items()}
        of_split = {
            split: Counter(dict(zip(current.class_names, counts.get(split, ()), strict=False))) for split in SPLITS
        }
        by_class = Counter[str]()
        for each in of_split.values():
            by_class.update(each)
    for split in SPLITS:
        if by_split[split] == 0 and (names_splits or getattr(plan.task.config.split_fractions, split) > 0):
            yield f"the split {split} {is_empty}"
        elif 0 < by_split[split] < FEW_IN_SPLIT:
            yield (
                f"the split {split} {has} {about}{by_split[split]} images, fewer than {FEW_IN_SPLIT}: metrics on "
                "it are not reliable"
            )
        elif split != "train" and by_split[split]:
            here = of_split[split]
            # A class with few images in all has a warning of its own.
            thin = [name for name in by_class if by_class[name] >= _FEW_IN_CLASS > here[name]]
            if thin:
                named = name_some(tuple(f"{name}: {about}{here[name]}" for name in sorted(thin)))
                yield (
                    f"the split {split} {has} fewer than {_FEW_IN_CLASS} images of {len(thin)} of {len(by_class)} "
                    f"classes ({named})"
                )
    num_classes = len(class_names)
    few = tuple(f"{name}: {by_class[name]}" for name in class_names if by_class[name] < _FEW_IN_CLASS)
    if few:
        yield f"{len(few)} of {num_classes} classes have fewer than {_FEW_IN_CLASS} images ({name_some(few)})"
    by_look: defaultdict[str, list[str]] = defaultdict(list)
    for name in class_names:
        look = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        by_look[" ".join(look.split())].append(name)
    # Names that look equal when printed are distinguished by their escapes.
    twins = tuple(" and ".join(map(ascii, names)) for names in by_look.values() if len(names) > 1)
    if twins:
        yield (
            f"classes that differ only in case, in spaces or in how Unicode writes them: {name_some(twins)}; if they "
            "are one class, give them one name"
        )
    if names_splits:
        untrained = tuple(name for name in class_names if not of_split["train"][name])
        if untrained:
            yield f"{len(untrained)} of {num_classes} classes have no image in train/ ({name_some(untrained)})"


def images_by_split(plan: BuildPlan) -> Counter[str]:
    """Exact if the source names the splits; estimated from the shares as far as content hashes decide."""
    listing, fractions = plan.listing, plan.task.config.split_fractions
    counts: Counter[str | None] = Counter()
    for (split, _), times in listing.images_by_label.items():
        counts[split] += times
    return Counter({split: counts[split] + round(getattr(fractions, split) * counts[None]) for split in SPLITS})


def emptied_splits(plan: BuildPlan, manifest: Manifest) -> Iterator[str]:
    """A warning for each split that should have images and has none, by the content hashes or because of rejects."""
    for split, num_images in images_by_split(plan).items():
        if num_images and not (split in manifest.splits and manifest.splits[split].num_rows):
            yield (
                f"the split {split} is empty; {num_images} of {plan.num_images} images were expected in it: add "
                "images, or set etl.stratified_splits = true"
            )


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
