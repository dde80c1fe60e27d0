"""Mixup and cutmix: each image and its label are mixed with those of another row of its stream in the same step.

A step has the same rows of each stream at any world size, and a rank owns whole streams: so the mixtures do not depend
on how many ranks there are. Padding takes no part. Shape legend: N rows, K classes, H height, W width, C channels.
"""

from __future__ import annotations

from functools import cache

import cv2
import numpy as np

from shardmill.augment.draws import BOX_COLUMN_DRAW, BOX_ROW_DRAW, MIX_DRAW, PARTNER_DRAW, SHARE_DRAW, Draws
from shardmill.augment.options import AugmentOptions
from shardmill.errors import UsageError
from shardmill.values import LabelKind

_PARTS = 256
"""Shares are whole 256ths: so pixels and labels are mixed by the same number, exactly."""
_NODES = 1 << 16


def check_mixing(options: AugmentOptions, kind: LabelKind, num_classes: int) -> None:
    """Raises UsageError if rows are to be mixed whose labels have no mean."""
    if options.mixes and (kind not in ("class", "multi_label") or not num_classes):
        given = f"labels of kind {kind!r}" if num_classes or kind != "class" else "no labels"
        raise UsageError(
            f"augment {_named(options)}, but the dataset has {given}",
            "expected one or several classes per image, whose shares can be mixed",
            "set mixup_alpha and cutmix_alpha to 0",
        )


def check_streams(options: AugmentOptions, rows_per_stream: int) -> None:
    """Raises UsageError if a row has no other one in its stream."""
    if options.mixes and rows_per_stream < 2:
        raise UsageError(
            f"augment {_named(options)}, but a step has {rows_per_stream} row of each stream",
            "expected at least 2, because a row is mixed with another one of its stream",
            "raise global_batch_size, or lower num_streams",
        )


def _named(options: AugmentOptions) -> str:
    given = {"mixup_alpha": options.mixup_alpha, "cutmix_alpha": options.cutmix_alpha}
    return " and ".join(f"{name} = {alpha:g}" for name, alpha in given.items() if alpha)


def soft_labels(classes_N: np.ndarray, is_real_N: np.ndarray, num_classes: int) -> np.ndarray:
    """float32 (N, K): 1 for the class of each row; zeros for padding."""
    labels_NK = np.zeros((len(classes_N), num_classes), np.float32)
    real_N = np.flatnonzero(is_real_N)
    labels_NK[real_N, classes_N[real_N]] = 1
    return labels_NK


def mix_batch(
    images_NHWC: np.ndarray, labels: np.ndarray, is_real_N: np.ndarray, draws: Draws, options: AugmentOptions,
    *, num_classes: int, rows_per_stream: int,
) -> np.ndarray:  # fmt: skip
    """Mix the images of a batch in place, if that is asked for. -> the labels: then shares of classes, (N, K)."""
    if not options.mixes:
        return labels
    labels_NK = soft_labels(labels, is_real_N, num_classes) if labels.ndim == 1 else labels.copy()
    mix_rows(images_NHWC, labels_NK, is_real_N, draws, options, rows_per_stream=rows_per_stream)
    return labels_NK


def mix_rows(
    images_NHWC: np.ndarray, labels_NK: np.ndarray, is_real_N: np.ndarray, draws: Draws, options: AugmentOptions,
    *, rows_per_stream: int,
) -> None:  # fmt: skip
    """Mix images and labels in place. The only real row of a stream stays as it is."""
    partners_N = _partners(draws, is_real_N, rows_per_stream)
    pastes_N = _pastes(draws, options)
    alphas = (options.mixup_alpha, options.cutmix_alpha)
    parts_N = np.zeros(len(draws), np.int64)
    for alpha, is_chosen_N in zip(alphas, (~pastes_N, pastes_N), strict=True):
        if alpha:
            drawn_N = np.searchsorted(_limits_of_beta(alpha), draws.bits(SHARE_DRAW), side="right")
            parts_N[is_chosen_N] = drawn_N[is_chosen_N]
    boxes_N4 = _boxes(draws, 1 - parts_N / _PARTS, images_NHWC.shape[1], images_NHWC.shape[2])
    unmixed_NK = labels_NK.copy()
    for first in range(0, len(draws), rows_per_stream):
        unmixed_NHWC = images_NHWC[first : first + rows_per_stream].copy()
        for row in range(first, min(first + rows_per_stream, len(draws))):
            partner = int(partners_N[row])
            if partner == row:
                continue
            other_HWC = unmixed_NHWC[partner - first]
            if pastes_N[row]:
                top, bottom, left, right = boxes_N4[row].tolist()
                images_NHWC[row, top:bottom, left:right] = other_HWC[top:bottom, left:right]
                share = 1 - (bottom - top) * (right - left) / (other_HWC.shape[0] * other_HWC.shape[1])
            else:
                share = int(parts_N[row]) / _PARTS
                own_HWC = unmixed_NHWC[row - first]
                images_NHWC[row] = cv2.addWeighted(own_HWC, share, other_HWC, 1 - share, 0).reshape(own_HWC.shape)
            labels_NK[row] = np.float32(share) * unmixed_NK[row] + np.float32(1 - share) * unmixed_NK[partner]


def _partners(draws: Draws, is_real_N: np.ndarray, rows_per_stream: int) -> np.ndarray:
    """The row with which each one is mixed: the real rows of a stream are one circle, in the order of their draws."""
    partners_N = np.arange(len(draws))
    bits_N = draws.bits(PARTNER_DRAW)
    for first in range(0, len(draws), rows_per_stream):
        real = first + np.flatnonzero(is_real_N[first : first + rows_per_stream])
        circle = real[np.argsort(bits_N[real], kind="stable")]
        partners_N[circle] = np.roll(circle, -1)
    return partners_N


def _pastes(draws: Draws, options: AugmentOptions) -> np.ndarray:
    """Which rows get cutmix: all, none, or half of them."""
    if options.mixup_alpha and options.cutmix_alpha:
        return draws.coins(MIX_DRAW)
    return np.full(len(draws), options.cutmix_alpha > 0)


def _boxes(draws: Draws, shares_N: np.ndarray, height: int, width: int) -> np.ndarray:
    """Top, bottom, left and right of a rectangle of such a share, cut off where it leaves the image."""
    scale_N = np.sqrt(shares_N)
    sides = []
    for draw, length in ((BOX_ROW_DRAW, height), (BOX_COLUMN_DRAW, width)):
        sizes_N = np.rint(scale_N * length).astype(np.int64)
        starts_N = draws.below(draw, length) - sizes_N // 2
        sides += [np.clip(starts_N, 0, length), np.clip(starts_N + sizes_N, 0, length)]
    return np.stack(sides, axis=1)


@cache
def _limits_of_beta(alpha: float) -> np.ndarray:
    """Where uniform 64-bit numbers pass from one share of 256ths to the next, for shares of Beta(alpha, alpha).

    The density t^(alpha-1) (1-t)^(alpha-1) has a pole at 0 for small alpha, which s = t^alpha removes; the upper half
    is the lower one's mirror image.
    """
    ends = ((np.arange(_PARTS // 2) + 0.5) / _PARTS) ** alpha
    nodes = (np.arange(_NODES) + 0.5) / _NODES * 0.5**alpha
    mass = np.concatenate([[0.0], np.cumsum((1 - nodes ** (1 / alpha)) ** (alpha - 1))])
    lower = 0.5 * np.interp(ends, np.arange(_NODES + 1) / _NODES * 0.5**alpha, mass) / mass[-1]
    limits = np.concatenate([lower, 1 - lower[::-1]])
    return np.array([min(int(limit * 2.0**64), 2**64 - 1) for limit in limits], np.uint64)
