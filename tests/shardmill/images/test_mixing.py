"""Mixup and cutmix: partners come from the same stream, padding takes no part, and labels follow the pixels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.augment.draws import Draws
from shardmill.augment.mixing import _limits_of_beta, mix_rows, soft_labels
from shardmill.augment.options import AugmentOptions

OPTIONS = {
    "mixup": AugmentOptions(mixup_alpha=0.4),
    "cutmix": AugmentOptions(cutmix_alpha=1.0),
    "both": AugmentOptions(mixup_alpha=1.0, cutmix_alpha=1.0),
}


def mixed(
    levels_N: np.ndarray, is_real_N: np.ndarray, options: AugmentOptions, rows_per_stream: int
) -> tuple[np.ndarray, np.ndarray]:
    """Images of one level each, which is also their class and sample id, and their labels after mixing."""
    images_NHWC = np.repeat(levels_N.astype(np.uint8), 64).reshape(-1, 8, 8, 1)
    labels_NK = soft_labels(levels_N, is_real_N, 256)
    draws = Draws(3, 1, levels_N, np.zeros_like(levels_N))
    mix_rows(images_NHWC, labels_NK, is_real_N, draws, options, rows_per_stream=rows_per_stream)
    return images_NHWC, labels_NK


@pytest.mark.parametrize("name", OPTIONS)
@given(data=st.data(), rows_per_stream=st.integers(1, 6), num_streams=st.integers(1, 5))
def test_rows_mix_inside_their_stream_and_padding_stays_out(name, data, rows_per_stream, num_streams) -> None:
    num_rows = rows_per_stream * num_streams
    levels_N = np.array(data.draw(st.permutations(range(256)))[:num_rows])
    is_real_N = np.array(data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)))
    images_NHWC, labels_NK = mixed(levels_N, is_real_N, OPTIONS[name], rows_per_stream)
    for row in range(num_rows):
        stream = slice(row // rows_per_stream * rows_per_stream, (row // rows_per_stream + 1) * rows_per_stream)
        partners = set(levels_N[stream][is_real_N[stream]].tolist())
        if not is_real_N[row] or len(partners) == 1:
            assert (images_NHWC[row] == levels_N[row]).all()
            assert labels_NK[row].sum() == is_real_N[row]
            continue
        assert set(np.flatnonzero(labels_NK[row]).tolist()) <= partners
        assert abs(labels_NK[row].sum() - 1) < 1e-6
        # The mean level is the labels' mean level, but for the rounding of pixels.
        assert abs(images_NHWC[row].mean() - labels_NK[row] @ np.arange(256)) <= 0.51
    # A rank that reads only some of the streams gets the same rows.
    some = slice(rows_per_stream * (num_streams // 2), num_rows)
    some_NHWC, some_NK = mixed(levels_N[some], is_real_N[some], OPTIONS[name], rows_per_stream)
    assert np.array_equal(some_NHWC, images_NHWC[some])
    assert np.array_equal(some_NK, labels_NK[some])


def test_every_row_is_the_partner_of_one_other() -> None:
    levels_N = np.arange(40)
    _, labels_NK = mixed(levels_N, np.ones(40, bool), AugmentOptions(mixup_alpha=10), 8)
    assert ((labels_NK > 0).sum(axis=1) == 2).all()
    assert ((labels_NK > 0).sum(axis=0)[:40] == 2).all()


def test_cutmix_pastes_one_rectangle() -> None:
    images_NHWC, labels_NK = mixed(np.arange(1, 9), np.ones(8, bool), OPTIONS["cutmix"], 4)
    for row, image_HWC in enumerate(images_NHWC):
        is_pasted_HW = image_HWC[:, :, 0] != row + 1
        assert is_pasted_HW.mean() == pytest.approx(1 - labels_NK[row, row + 1])
        assert np.array_equal(is_pasted_HW, np.outer(is_pasted_HW.any(axis=1), is_pasted_HW.any(axis=0)))
    assert len({round(float(share), 3) for share in labels_NK.max(axis=1)}) > 3


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.4, 1.0, 2.0, 5.0, 10.0])
def test_shares_have_the_beta_distribution(alpha: float) -> None:
    limits = _limits_of_beta(alpha)
    assert (np.diff(limits.astype(object)) >= 0).all()
    probabilities = np.diff(np.concatenate([[0.0], limits / 2.0**64, [1.0]]))
    shares = np.arange(257) / 256
    assert probabilities @ shares == pytest.approx(0.5, abs=1e-9)
    # That of the rounded shares is larger by the variance of their rounding.
    variance = probabilities @ (shares - 0.5) ** 2
    assert variance == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.01)
    if alpha == 1:
        assert probabilities[1:-1] == pytest.approx(np.full(255, 1 / 256))
        assert probabilities[0] == pytest.approx(1 / 512)


def test_with_both_half_of_the_rows_get_each() -> None:
    images_NHWC, _ = mixed(np.arange(0, 256, 2), np.ones(128, bool), OPTIONS["both"], 16)
    is_pasted_N = np.array([len(np.unique(image_HWC)) == 2 for image_HWC in images_NHWC])
    assert 40 < is_pasted_N.sum() < 80


def test_partners_and_shares_never_change() -> None:
    """Recorded once: a change here would change the batches of every run that resumes."""
    images_NHWC, is_real_N = np.zeros((4, 8, 8, 1), np.uint8), np.ones(4, bool)
    labels_NK = soft_labels(np.arange(4), is_real_N, 4)
    draws = Draws(5, 1, np.array([-1, 0, 1, 2**62]), np.zeros(4, np.int64))
    options = AugmentOptions(mixup_alpha=0.4, cutmix_alpha=1.0)
    mix_rows(images_NHWC, labels_NK, is_real_N, draws, options, rows_per_stream=4)
    assert (labels_NK * 256).tolist() == [[160, 0, 96, 0], [196, 60, 0, 0], [0, 0, 0, 256], [0, 103, 0, 153]]
