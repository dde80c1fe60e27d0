"""The output of `shardmill inspect --quality` and `--near-duplicates`: what in a version a person should look at."""

from __future__ import annotations

from functools import partial
from typing import Any

from pipeline.output.printing import Rows, plain
from pipeline.output.progress import RunProgress
from shardmill.data_faults.looks import RowLooks, read_looks
from shardmill.data_faults.near_duplicates import find_near_duplicates
from shardmill.data_faults.quality import DEFAULT_LIMITS, Fault, Telltale, find_faults
from shardmill.dataset.dataset import Dataset
from shardmill.jobs.observer import SilentObserver

_NUM_GROUPS_SHOWN = 20
_NUM_SUSPECTS_SHOWN = 4
# What is most likely a copy: fewer bits miss some, more find others.
_QUALITY_BITS = 3


def list_near_duplicates(dataset: Dataset, max_bits: int) -> list[dict[str, Any]]:
    """Every group of images that look alike."""
    return _near_duplicates(_read_looks(dataset), max_bits)


def _read_looks(dataset: Dataset) -> RowLooks:
    """With a progress bar: what an older shardmill wrote is decoded."""
    with RunProgress(SilentObserver(), num_epochs=0) as progress:
        return read_looks(dataset, partial(progress.images_read, "inspect"))


def _near_duplicates(looks: RowLooks, max_bits: int) -> list[dict[str, Any]]:
    return [
        {
            "crosses_splits": group.crosses_splits,
            "conflicting_label": group.has_conflict,
            "images": [plain(image) for image in group.images],
        }
        for group in find_near_duplicates(looks, max_bits)
    ]


def describe_quality(dataset: Dataset) -> dict[str, Any]:
    """Suspect images by fault, properties that tell classes apart, and copies: equal bytes and near duplicates."""
    looks, counts = _read_looks(dataset), dataset.manifest.counts
    quality = find_faults(looks)
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
        "near_duplicates": _near_duplicates(looks, _QUALITY_BITS),
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
    return [
        *rows,
        ("equal bytes", f"{equal['num_images']:,} images; {leaked:,} in several splits"),
        (
            "near duplicates",
            f"{len(near):,} groups; {num_leaks:,} in several splits (--near-duplicates {_QUALITY_BITS})",
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
