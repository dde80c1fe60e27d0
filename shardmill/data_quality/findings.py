"""What in a version a person should look at, for `shardmill inspect --quality`: suspect images, properties that tell
classes apart, and copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from shardmill.data_quality.near_duplicates import (
    SimilarImages,
    find_equal_bytes,
    find_near_duplicates,
    left_out_rows,
)
from shardmill.data_quality.quality import LIMITS, Fault, Quality, by_fault, find_faults
from shardmill.data_quality.row_looks import read_looks
from shardmill.dataset.dataset import Dataset
from shardmill.result import Result, Rows, plain
from shardmill.words import counted

QUALITY_BITS = 3
"""What is most likely a copy: fewer bits miss some, more find others."""
_NUM_SHOWN = 4


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
class QualityFindings(Result, Quality):
    """What in a version a person should look at (`shardmill.inspect` with `quality`)."""

    equal_bytes: EqualBytes
    near_duplicates: tuple[SimilarImages, ...]
    near_duplicates_left_out: int
    """Images that look too alike to be compared with each other: of those, groups may be missing."""

    @classmethod
    def of(cls, document: Any) -> Self:
        suspects = [image for images in document["faults"].values() for image in images]
        # `super()` without arguments finds no class with slots.
        return super(QualityFindings, cls).of({**document, "suspects": suspects})

    def document(self) -> dict[str, Any]:
        """Suspect images by fault."""
        return {
            "num_images": self.num_images,
            "limits": plain(LIMITS),
            "measures": {str(fault): fault.measure for fault in Fault},
            "faults": {str(fault): list(map(plain, images)) for fault, images in by_fault(self.suspects).items()},
            "telltales": [plain(each) for each in self.telltales],
            "equal_bytes": {
                **plain(self.equal_bytes), "groups": [group.document() for group in self.equal_bytes.groups]
            },
            "near_duplicates": [group.document() for group in self.near_duplicates],
            "near_duplicates_left_out": self.near_duplicates_left_out,
        }  # fmt: skip

    def table(self) -> Rows:
        """A row for each fault with the number of images, the worst of them, then warnings and copies."""
        rows: Rows = []
        for fault, images in by_fault(self.suspects).items():
            rows.append((fault, f"{len(images):,} of {self.num_images:,} images" if images else "none"))
            for image in images[:_NUM_SHOWN]:
                rows.append(("", f"{image.source} ({image.split}, {image.class_name or 'no class'}): {image.words}"))
            rows += _more_rows(len(images))
        rows += [("WARNING", each.words) for each in self.telltales]
        rows += _copy_rows("equal bytes", self.equal_bytes.groups)
        rows += _copy_rows("near duplicates", self.near_duplicates)
        if self.near_duplicates:
            command = f"inspect DATASET --near-duplicates {QUALITY_BITS}"
            rows.append(("", f"at most {QUALITY_BITS} of 64 bits differ: {command}"))
        return rows + left_out_rows(self.near_duplicates_left_out)


def _copy_rows(kind: str, groups: Sequence[SimilarImages]) -> Rows:
    """How many groups and images, then the first groups; those in several splits come first."""
    if not groups:
        return [(kind, "none")]
    num_images = sum(len(group.images) for group in groups)
    num_leaks = sum(group.crosses_splits for group in groups)
    num_conflicts = sum(group.has_conflict for group in groups)
    counts = f"{counted(len(groups), 'group')} with {num_images:,} images"
    first = f"{counts}; {counted(num_leaks, 'group')} in several splits, {num_conflicts:,} of several classes"
    return [(kind, first), *(("", group.words) for group in groups[:_NUM_SHOWN]), *_more_rows(len(groups))]


def _more_rows(num_found: int) -> Rows:
    """How many are not shown."""
    return [("", f"and {num_found - _NUM_SHOWN:,} more: --json lists all")] if num_found > _NUM_SHOWN else []


def inspect_quality(dataset: Dataset) -> QualityFindings:
    """Read all row segments. Raises IntegrityError for an altered one."""
    looks, counts = read_looks(dataset), dataset.manifest.counts
    quality, copies, equal = find_faults(looks), find_near_duplicates(looks, QUALITY_BITS), find_equal_bytes(dataset)
    return QualityFindings(
        num_images=quality.num_images,
        suspects=quality.suspects,
        telltales=quality.telltales,
        equal_bytes=EqualBytes(
            num_groups=len(equal),
            num_images=sum(len(group.images) for group in equal),
            conflicting_label=counts.conflicting_label,
            leaked_content=counts.leaked_content,
            groups=tuple(equal),
        ),
        near_duplicates=copies.groups,
        near_duplicates_left_out=copies.num_left_out,
    )
