"""The output of `shardmill inspect --quality` and `--near-duplicates`: what in a version a person should look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.output.printing import Rows, plain
from shardmill.data_faults.quality import DEFAULT_LIMITS, Fault, SuspectImage, Telltale
from shardmill.words import counted

if TYPE_CHECKING:
    from shardmill.data_faults.near_duplicates import Copies, SimilarImages
    from shardmill.data_faults.quality import Quality
    from shardmill.dataset.manifest import Counts

_NUM_GROUPS_SHOWN = 20
_NUM_SUSPECTS_SHOWN = 4
_NUM_MEMBERS_SHOWN = 4
QUALITY_BITS = 3
"""What is most likely a copy: fewer bits miss some, more find others."""


def near_duplicates_document(copies: Copies) -> dict[str, Any]:
    """Every group of images that look alike."""
    return {"groups": _groups_document(copies.groups), "num_left_out": copies.num_left_out}


def _groups_document(groups: Iterable[SimilarImages]) -> list[dict[str, Any]]:
    return [
        {
            "crosses_splits": group.crosses_splits,
            "conflicting_label": group.has_conflict,
            "images": [plain(image) for image in group.images],
        }
        for group in groups
    ]


def quality_document(
    quality: Quality, counts: Counts, equal: Sequence[SimilarImages], copies: Copies
) -> dict[str, Any]:
    """Suspect images by fault, properties that tell classes apart, and copies: equal bytes and near duplicates."""
    return {
        "num_images": quality.num_images,
        "limits": plain(DEFAULT_LIMITS),
        "measures": {str(fault): fault.measure for fault in Fault},
        "faults": {str(fault): [plain(each) for each in quality.of(fault)] for fault in Fault},
        "telltales": [plain(each) for each in quality.telltales],
        "equal_bytes": {
            "num_groups": len(equal),
            "num_images": sum(len(group.images) for group in equal),
            "conflicting_label": counts.conflicting_label,
            "leaked_content": counts.leaked_content,
            "groups": _groups_document(equal),
        },
        "near_duplicates": _groups_document(copies.groups),
        "near_duplicates_left_out": copies.num_left_out,
    }


def quality_rows(found: dict[str, Any]) -> Rows:
    """A row for each fault with the number of images, the worst of them, then warnings and copies."""
    rows: Rows = []
    for fault, images in found["faults"].items():
        rows.append((fault, f"{len(images):,} of {found['num_images']:,} images" if images else "none"))
        rows += [("", _suspect(each)) for each in images[:_NUM_SUSPECTS_SHOWN]]
        if len(images) > _NUM_SUSPECTS_SHOWN:
            rows.append(("", f"and {len(images) - _NUM_SUSPECTS_SHOWN:,} more: --json lists all"))
    rows += [("WARNING", Telltale(**each).words) for each in found["telltales"]]
    near = found["near_duplicates"]
    rows += _copy_rows("equal bytes", found["equal_bytes"]["groups"]) + _copy_rows("near duplicates", near)
    if near:
        rows.append(("", f"at most {QUALITY_BITS} of 64 bits differ: inspect DATASET --near-duplicates {QUALITY_BITS}"))
    return rows + _left_out_rows(found["near_duplicates_left_out"])


def _copy_rows(kind: str, groups: list[dict[str, Any]]) -> Rows:
    """How many groups and images, then the first groups; those in several splits come first."""
    if not groups:
        return [(kind, "none")]
    num_images = sum(len(group["images"]) for group in groups)
    num_leaks = sum(group["crosses_splits"] for group in groups)
    num_conflicts = sum(group["conflicting_label"] for group in groups)
    counts = f"{counted(len(groups), 'group')} with {num_images:,} images"
    first = f"{counts}; {counted(num_leaks, 'group')} in several splits, {num_conflicts:,} of several classes"
    return [(kind, first), *(("", _members(group)) for group in groups[:_NUM_SUSPECTS_SHOWN])]


def _members(group: dict[str, Any]) -> str:
    images = [f"{each['source']} ({each['split']}, {each['class_name'] or 'no class'})" for each in group["images"]]
    return "; ".join(images[:_NUM_MEMBERS_SHOWN]) + (" ..." if len(images) > _NUM_MEMBERS_SHOWN else "")


def _left_out_rows(num_images: int) -> Rows:
    if not num_images:
        return []
    return [("WARNING", f"{counted(num_images, 'image')} look too alike to compare all: their groups are incomplete")]


def _suspect(image: dict[str, Any]) -> str:
    of_class = image["class_name"] or "no class"
    measured = SuspectImage(**{**image, "fault": Fault(image["fault"])}).words
    return f"{image['source']} ({image['split']}, {of_class}): {measured}"


def near_duplicate_rows(found: dict[str, Any]) -> Rows:
    """Rows with the number of groups, then the first groups; leaks between splits come first."""
    groups, left_out = found["groups"], _left_out_rows(found["num_left_out"])
    if not groups:
        return left_out or [("none", "no two images look alike")]
    num_leaks = sum(group["crosses_splits"] for group in groups)
    num_conflicts = sum(group["conflicting_label"] for group in groups)
    rows = [
        ("groups", f"{len(groups):,} of images that look alike"),
        ("leaks", f"{num_leaks:,} with images in several splits"),
        ("labels", f"{num_conflicts:,} with images of several classes"),
    ]
    for group in groups[:_NUM_GROUPS_SHOWN]:
        facts = [*(["leak"] if group["crosses_splits"] else []), *(["labels"] if group["conflicting_label"] else [])]
        rows.append((", ".join(facts) or "alike", _members(group)))
    left = len(groups) - _NUM_GROUPS_SHOWN
    return [*rows, *([("", f"and {left:,} more: --json lists all")] if left > 0 else []), *left_out]
