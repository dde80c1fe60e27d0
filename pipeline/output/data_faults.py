"""The output of `shardmill inspect --quality` and `--near-duplicates`: what in a version a person should look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pipeline.output.printing import Rows, plain
from shardmill.data_faults.quality import DEFAULT_LIMITS, Fault, Telltale
from shardmill.words import counted

if TYPE_CHECKING:
    from shardmill.data_faults.near_duplicates import SimilarImages
    from shardmill.data_faults.quality import Quality
    from shardmill.dataset.manifest import Counts

_NUM_GROUPS_SHOWN = 20
_NUM_SUSPECTS_SHOWN = 4
QUALITY_BITS = 3
"""What is most likely a copy: fewer bits miss some, more find others."""


def near_duplicates_document(groups: Iterable[SimilarImages]) -> list[dict[str, Any]]:
    """Every group of images that look alike."""
    return [
        {
            "crosses_splits": group.crosses_splits,
            "conflicting_label": group.has_conflict,
            "images": [plain(image) for image in group.images],
        }
        for group in groups
    ]


def quality_document(quality: Quality, counts: Counts, groups: Iterable[SimilarImages]) -> dict[str, Any]:
    """Suspect images by fault, properties that tell classes apart, and copies: equal bytes and near duplicates."""
    return {
        "num_images": quality.num_images,
        "limits": plain(DEFAULT_LIMITS),
        "faults": {str(fault): [plain(each) for each in quality.of(fault)] for fault in Fault},
        "telltales": [plain(each) for each in quality.telltales],
        "equal_bytes": {
            "num_images": counts.duplicate_content,
            "conflicting_label": counts.conflicting_label,
            "leaked_content": counts.leaked_content,
        },
        "near_duplicates": near_duplicates_document(groups),
    }


def quality_rows(found: dict[str, Any]) -> Rows:
    """A row for each fault with the number of images, the worst of them, then warnings and copies."""
    rows: Rows = []
    for fault, images in found["faults"].items():
        rows.append((fault, f"{len(images):,} of {found['num_images']:,} images" if images else "none"))
        rows += [("", _suspect(each)) for each in images[:_NUM_SUSPECTS_SHOWN]]
        if len(images) > _NUM_SUSPECTS_SHOWN:
            rows.append(("", f"and {len(images) - _NUM_SUSPECTS_SHOWN:,} more: --json lists all"))
    rows += [("WARNING", telltale_words(Telltale(**each))) for each in found["telltales"]]
    equal, near = found["equal_bytes"], found["near_duplicates"]
    leaked, num_leaks = equal["leaked_content"] or 0, sum(group["crosses_splits"] for group in near)
    conflicts, num_conflicts = equal["conflicting_label"], sum(group["conflicting_label"] for group in near)
    return [
        *rows,
        (
            "equal bytes",
            f"{counted(equal['num_images'], 'image')}; {leaked:,} in several splits, {conflicts:,} of several classes",
        ),
        (
            "near duplicates",
            f"{counted(len(near), 'group')}; {num_leaks:,} in several splits, {num_conflicts:,} of several classes "
            f"(--near-duplicates {QUALITY_BITS})",
        ),
    ]


def _suspect(image: dict[str, Any]) -> str:
    of_class = image["class_name"] or "no class"
    return f"{image['source']} ({image['split']}, {of_class}): {image['value']:.3g}, usually {image['usual']:.3g}"


def telltale_words(found: Telltale) -> str:
    """A telltale as a sentence."""
    return (
        f"{found.feature} alone tells the class of {found.accuracy:.0%} of the images (the largest class has "
        f"{found.majority:.0%}): a model may learn it in place of what the images show"
    )


def near_duplicate_rows(groups: list[dict[str, Any]]) -> Rows:
    """Rows with the number of groups, then the first groups; leaks between splits come first."""
    if not groups:
        return [("none", "no two images look alike")]
    num_leaks = sum(group["crosses_splits"] for group in groups)
    num_conflicts = sum(group["conflicting_label"] for group in groups)
    rows = [
        ("groups", f"{len(groups):,} of images that look alike"),
        ("leaks", f"{num_leaks:,} with images in several splits"),
        ("labels", f"{num_conflicts:,} with images of several classes"),
    ]
    for group in groups[:_NUM_GROUPS_SHOWN]:
        facts = [*(["leak"] if group["crosses_splits"] else []), *(["labels"] if group["conflicting_label"] else [])]
        images = [f"{each['source']} ({each['split']}, {each['class_name'] or 'no class'})" for each in group["images"]]
        rows.append((", ".join(facts) or "alike", "; ".join(images[:4]) + (" ..." if len(images) > 4 else "")))
    left = len(groups) - _NUM_GROUPS_SHOWN
    return [*rows, *([("", f"and {left:,} more: --json lists all")] if left > 0 else [])]
