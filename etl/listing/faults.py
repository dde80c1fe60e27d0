"""Fails a build after its source was listed: no image at all, or no labels although the source has some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.printable import printable
from shardmill.values import Rejection, RejectReason

if TYPE_CHECKING:
    from etl.listing.listing import Listing
    from shardmill.dataset.rejection_log import RejectionLog

_NUM_REASONS = 3
_UNLABELLED_ON_PURPOSE = 'set source.label_kind = "none" for a dataset without labels'


def check_has_images(listing: Listing, uri: str) -> None:
    """Raise UsageError if no image is left, with the reasons for which the inputs were refused."""
    if listing.num_images:
        return
    refused = listing.rejections
    if set(refused.by_reason) <= {RejectReason.NOT_AN_IMAGE_NAME}:
        raise UsageError(
            f"no images below {uri} ({len(refused)} other files)",
            "expected image files, preferably in one folder per class",
            "check source.uri",
        )
    raise UsageError(
        f"no images below {uri}: all {len(refused)} inputs were rejected ({_reasons(refused)})",
        "expected at least one input that can be used",
        "fix the causes (docs/rejects.md explains the reasons), or correct the keys of the section source",
    )


def _reasons(refused: RejectionLog) -> str:
    """The most frequent reasons, each with its first input."""
    reasons = [reason for reason, _ in refused.by_reason.most_common(_NUM_REASONS)]
    first: dict[RejectReason, Rejection] = {}
    for rejection in refused:
        first.setdefault(rejection.reason, rejection)
        if len(first) == len(refused.by_reason):
            break
    return "; ".join(
        f"{refused.by_reason[reason]} {reason}, such as {printable(first[reason].key)}: {first[reason].detail}"
        for reason in reasons
    )


def check_labels(listing: Listing, label_signs: Sequence[str], uri: str) -> None:
    """Raise UsageError if no image has a label although the source has labels, or if only some images have one.

    `label_signs`: where the source seems to hold labels that it does not take, a phrase each.
    """
    by_label = listing.images_by_label
    num_unlabelled = sum(times for (_, label), times in by_label.items() if label is None)
    if num_unlabelled and num_unlabelled == listing.num_images and label_signs:
        others = f" (and {len(label_signs) - 1} more)" if len(label_signs) > 1 else ""
        raise UsageError(
            f"the dataset would have no labels, and {uri} seems to have some: {label_signs[0]}{others}",
            "expected labels under source.label_field or a usual name (docs/sources.md)",
            "name them with source.label_field (those of boxes: source.boxes.field and source.boxes.labels_field), or "
            f"{_UNLABELLED_ON_PURPOSE}",
        )
    if 0 < num_unlabelled < listing.num_images:
        signs = f": {label_signs[0]}" if label_signs else ""
        splits = sorted({str(split) for (split, label), times in by_label.items() if label is None and split and times})
        of_splits = f", those of {', '.join(splits)}" if splits else ""
        raise UsageError(
            f"{num_unlabelled} of {listing.num_images} images of {uri} have no label{of_splits}{signs}",
            "expected a label for each image, or for none",
            f"exclude the files without labels with a pattern in source.uri, or {_UNLABELLED_ON_PURPOSE}",
        )
