"""Augmentation: its draws, windows and mixes, and how a sheet of them looks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import cv2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmill.augment.draws import COLUMN_DRAW, FLIP_DRAW, ROW_DRAW, Draws
from shardmill.augment.mixing import _limits_of_beta, mix_rows, soft_labels
from shardmill.augment.options import PRESETS, AugmentOptions, augment_options
from shardmill.augment.pixels import augment, change_pixels
from shardmill.augment.windows import Windows, cut_window, draw_windows
from shardmill.errors import UsageError
from shardmill.images import look
from shardmill.images.look import difference_hash, laplacian_square_sum, luma
from shardmill.kernel import shardmill_native
from shardmill.mix import mix64
from tests.shardmill.images.make import photo

KEYS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63),
        "epoch": st.integers(0, 10_000),
        "sample_id": st.integers(-(2**63), 2**63 - 1),
        "occurrence": st.integers(0, 5),
    }
)


def every_change(image_HWC: np.ndarray, padding: int, *, with_flips: bool) -> set[bytes]:
    """All images that the options allow, worked out with NumPy's own padding."""
    height, width = image_HWC.shape[:2]
    padded_HWC = np.pad(image_HWC, ((padding, padding), (padding, padding), (0, 0)), mode="edge")
    offsets = range(2 * padding + 1)
    crops = [padded_HWC[top : top + height, left : left + width] for top in offsets for left in offsets]
    return {crop.tobytes() for crop in crops} | {crop[:, ::-1].tobytes() for crop in crops if with_flips}


@given(key=KEYS, padding=st.integers(0, 3), random_flip=st.booleans(), num_channels=st.sampled_from([1, 3]))
def test_the_result_is_one_of_the_allowed_ones_and_repeats(
    key: dict[str, int], padding: int, random_flip: bool, num_channels: int
) -> None:
    options = AugmentOptions(random_crop_padding=padding, random_flip=random_flip)
    image_HWC = photo(7, 9)[:, :, :num_channels]
    changed_HWC = augment(image_HWC, options, **key)
    assert (changed_HWC.shape, changed_HWC.dtype) == (image_HWC.shape, np.uint8)
    assert changed_HWC.flags.c_contiguous
    assert changed_HWC.tobytes() in every_change(image_HWC, padding, with_flips=random_flip)
    assert np.array_equal(changed_HWC, augment(image_HWC.copy(), options, **key))


@pytest.mark.parametrize("part", ["seed", "epoch", "sample_id", "occurrence"])
def test_every_part_of_the_key_matters(part: str) -> None:
    key = {"seed": 1, "epoch": 2, "sample_id": 3, "occurrence": 0}
    results = {augment(photo(), AugmentOptions(), **{**key, part: value}).tobytes() for value in range(30)}
    assert len(results) > 10


def test_all_offsets_and_both_directions_come_up_about_equally_often() -> None:
    image_HWC = photo(7, 9)
    options = AugmentOptions(random_crop_padding=1, random_flip=True)
    counts: dict[bytes, int] = {}
    for sample_id in range(1800):
        result = augment(image_HWC, options, seed=0, epoch=0, sample_id=sample_id).tobytes()
        counts[result] = counts.get(result, 0) + 1
    assert counts.keys() == every_change(image_HWC, 1, with_flips=True)
    assert len(counts) == 18
    assert min(counts.values()) > 60  # 100 expected
    assert max(counts.values()) < 150


def test_switched_off_it_is_a_copy() -> None:
    image_HWC = photo()
    options = AugmentOptions(random_crop_padding=0, random_flip=False)
    copy_HWC = augment(image_HWC, options, seed=0, epoch=0, sample_id=0)
    assert np.array_equal(copy_HWC, image_HWC)
    assert not np.shares_memory(copy_HWC, image_HWC)


def test_the_draws_never_change() -> None:
    """Recorded once: a change here would change the batches of every run that resumes."""
    positions_HWC = np.arange(81, dtype=np.uint8).reshape(9, 9, 1)
    centres = [
        int(augment(positions_HWC, AugmentOptions(), seed=5, epoch=1, sample_id=sample_id)[4, 4, 0])
        for sample_id in (-1, 0, 1, 2**62)
    ]
    assert centres == [28, 52, 61, 47]


def test_a_run_says_what_it_changes() -> None:
    for chosen, words in (
        ({}, "shift by up to 4 pixels, no mirroring"),
        ({"preset": "cifar", "cutmix_alpha": 1}, "shift by up to 4 pixels, mirroring, cutmix_alpha"),
        ({"preset": "imagenet", "hue": 0.1, "brightness": 0.4}, "random resized crop, mirroring, brightness, hue"),
        ({"preset": "none"}, "no crop, no mirroring"),
    ):
        assert AugmentOptions(**chosen).in_words == words


NUM_ROWS = 64


@dataclass(frozen=True, eq=False)
class RecordedDraws(Draws):
    """Remembers what is drawn: (kind, number of the draw, values)."""

    drawn: set[tuple[str, int, bytes]] = field(default_factory=set)

    def _record(self, kind: str, draw: int, values_N: np.ndarray) -> np.ndarray:
        # `math.log` may differ in the last bit between C libraries.
        rounded_N = values_N.round(9) if values_N.dtype == np.float64 else values_N
        self.drawn.add((kind, draw, rounded_N.tobytes()))
        return values_N

    def bits(self, draw: int) -> np.ndarray:
        return self._record("bits", draw, super().bits(draw))

    def below(self, draw: int, limits: np.ndarray | int) -> np.ndarray:
        return self._record("below", draw, super().below(draw, limits))

    def uniform(self, draw: int, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        return self._record("uniform", draw, super().uniform(draw, low, high))

    def log_uniform(self, draw: int, limit: float) -> np.ndarray:
        return self._record("log_uniform", draw, super().log_uniform(draw, limit))

    def coins(self, draw: int) -> np.ndarray:
        return self._record("coins", draw, super().coins(draw))


def key(seed: int = 5, epoch: int = 1) -> tuple[int, int, np.ndarray, np.ndarray]:
    return seed, epoch, np.array([-1, 2**62, *range(NUM_ROWS - 2)]), np.arange(NUM_ROWS) % 3


def augmented(draws: Draws, options: AugmentOptions) -> np.ndarray:
    """The images of a batch: steps of levels in rows, columns and channels."""
    rows_H11, columns_W1, channels_C = np.arange(16)[:, None, None], np.arange(12)[:, None], np.arange(3)
    image_HWC = (40 + 9 * rows_H11 + 3 * columns_W1 + 20 * channels_C).astype(np.uint8)
    images_NHWC = np.repeat(image_HWC[None], NUM_ROWS, axis=0)
    draw_windows(draws, options, (16, 12))
    change_pixels(images_NHWC, draws, options)
    if options.mixes:
        labels_NK = np.eye(NUM_ROWS, dtype=np.float32)
        mix_rows(images_NHWC, labels_NK, np.ones(NUM_ROWS, bool), draws, options, rows_per_stream=8)
    return images_NHWC


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"preset": "cifar"}, "1ec5ab7860c9af18"),
        ({"preset": "cifar", "size": 8}, "b07e8427a4322420"),
        ({"preset": "imagenet"}, "7831e0f2e1957bd0"),
        ({"preset": "none", "random_vertical_flip": True}, "0547305a7a1a2308"),
        ({"preset": "none", "brightness": 0.4}, "1d7ffe6e60623558"),
        ({"preset": "none", "contrast": 0.4}, "b20aba643279c769"),
        ({"preset": "none", "saturation": 0.4}, "2e07aef9fc4a657a"),
        ({"preset": "none", "hue": 0.1}, "8f6c9970219c93bb"),
        ({"preset": "none", "rand_augment_operations": 2}, "724980ea0d467a0c"),
        ({"preset": "none", "random_erasing": 0.5}, "02a66f0d7d827690"),
        ({"preset": "none", "mixup_alpha": 0.4}, "5ba44ef41e61a84e"),
        ({"preset": "none", "cutmix_alpha": 1.0}, "5ba44ef41e61a84e"),
        ({"preset": "none", "mixup_alpha": 0.4, "cutmix_alpha": 1.0}, "072d21037aec77d7"),
    ],
)  # fmt: skip
def test_what_an_option_draws_never_changes(options: dict, expected: str) -> None:
    draws = RecordedDraws(*key())
    augmented(draws, AugmentOptions(**options))
    digest = hashlib.sha256()
    for kind, draw, values in sorted(draws.drawn):
        digest.update(f"{kind} {draw} ".encode() + values)
    assert digest.hexdigest()[:16] == expected


def test_what_is_made_of_the_draws_never_changes() -> None:
    """Pixels where they are exact on every processor; where a rotation is interpolated, the mean of each image."""
    jittered = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4}
    images_NHWC = augmented(Draws(*key()), AugmentOptions(**jittered, random_erasing=0.5, random_vertical_flip=True))
    assert hashlib.sha256(images_NHWC.tobytes()).hexdigest()[:16] == "6481b79ef86dcdf2"
    options = AugmentOptions(preset="none", rand_augment_operations=2, rand_augment_magnitude=20)
    means_N = augmented(Draws(*key()), options).mean(axis=(1, 2, 3))
    assert means_N[:12] == pytest.approx(
        [129.3, 144.9, 142.5, 141.9, 140.6, 133.3, 200.9, 207.2, 127.6, 132.5, 132.3, 131.2], abs=0.5
    )


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


ROWS = st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 5)), min_size=1, max_size=9)


def drawn(rows: list[tuple[int, int]], seed: int = 0, epoch: int = 0) -> Draws:
    sample_ids, occurrences = zip(*rows, strict=True)
    return Draws(seed, epoch, np.array(sample_ids, np.int64), np.array(occurrences, np.int64))


def many(count: int = 4000) -> Draws:
    return drawn([(sample_id, 0) for sample_id in range(count)])


def as_before(image_HWC: np.ndarray, padding: int, key: tuple[int, ...], *, flips: bool) -> np.ndarray:
    """What `shardmill.augment.augment` did to an image before batches were drawn at once."""
    height, width = image_HWC.shape[:2]
    top, left = mix64(*key, ROW_DRAW) % (2 * padding + 1), mix64(*key, COLUMN_DRAW) % (2 * padding + 1)
    padded_HWC = np.pad(image_HWC, ((padding, padding), (padding, padding), (0, 0)), mode="edge")
    cut_HWC = padded_HWC[top : top + height, left : left + width]
    return cut_HWC[:, ::-1] if flips and mix64(*key, FLIP_DRAW) >> 63 else cut_HWC


@given(rows=ROWS, seed=st.integers(0, 2**63), epoch=st.integers(0, 9999), draw=st.integers(0, 255))
def test_draws_of_a_batch_are_those_of_mix64(rows: list[tuple[int, int]], seed: int, epoch: int, draw: int) -> None:
    draws = drawn(rows, seed, epoch)
    expected = [mix64(seed, epoch, sample_id, occurrence, draw) for sample_id, occurrence in rows]
    assert draws.bits(draw).tolist() == expected
    assert draws.below(draw, 7).tolist() == [bits % 7 for bits in expected]
    assert draws.coins(draw).tolist() == [bool(bits >> 63) for bits in expected]
    assert draws.uniform(draw, 2, 4).tolist() == [2 + 2 * ((bits >> 11) / 2**53) for bits in expected]


@given(rows=ROWS, seed=st.integers(0, 2**63), padding=st.integers(0, 5), flips=st.booleans())
def test_padded_crops_and_flips_are_those_of_older_runs(
    rows: list[tuple[int, int]], seed: int, padding: int, flips: bool
) -> None:
    image_HWC = photo(7, 9)
    options = AugmentOptions(random_crop_padding=padding, random_flip=flips)
    windows = draw_windows(drawn(rows, seed, 3), options, (7, 9))
    for row, (sample_id, occurrence) in enumerate(rows):
        expected_HWC = as_before(image_HWC, padding, (seed, 3, sample_id, occurrence), flips=flips)
        assert np.array_equal(cut_window(image_HWC, windows, row), expected_HWC)


@given(stored_HW=st.tuples(st.integers(1, 400), st.integers(1, 400)), min_area=st.floats(0.001, 1))
def test_random_rectangles_lie_in_the_image(stored_HW: tuple[int, int], min_area: float) -> None:
    options = AugmentOptions(random_resized_crop=True, min_crop_area=min_area)
    windows = draw_windows(many(50), options, stored_HW)
    assert windows.size_HW == stored_HW
    assert (windows.top_N >= 0).all() and (windows.left_N >= 0).all()
    assert (windows.height_N >= 1).all() and (windows.width_N >= 1).all()
    assert (windows.top_N + windows.height_N <= stored_HW[0]).all()
    assert (windows.left_N + windows.width_N <= stored_HW[1]).all()


def test_random_rectangles_have_every_area_and_place_about_equally_often() -> None:
    windows = draw_windows(many(), AugmentOptions(preset="imagenet", size=100), (200, 200))
    assert windows.size_HW == (100, 100)
    area_N = windows.height_N * windows.width_N / 200**2
    assert 0.07 < area_N.min() < 0.09
    assert area_N.max() > 0.95
    # Large ones fit less often, so the mean is below that of 0.08 to 1.
    assert 0.46 < area_N.mean() < 0.50
    aspect_N = windows.width_N / windows.height_N
    assert 0.73 < aspect_N.min() < 0.77
    assert 1.30 < aspect_N.max() < 1.37
    assert abs(np.log(aspect_N).mean()) < 0.01
    for first_N, side_N in ((windows.top_N, windows.height_N), (windows.left_N, windows.width_N)):
        free_N = first_N[side_N < 190] / (200 - side_N[side_N < 190])
        assert np.histogram(free_N, 4, (0, 1))[0].min() > 0.22 * len(free_N)
    assert 0.47 < windows.is_flipped_N.mean() < 0.53


def test_random_rectangles_never_change() -> None:
    """Recorded once: a change here would change the batches of every run that resumes."""
    windows = draw_windows(
        drawn([(-1, 0), (0, 0), (1, 0), (2**62, 0)], 5, 1), AugmentOptions(preset="imagenet"), (256, 192)
    )
    columns = (windows.top_N, windows.left_N, windows.height_N, windows.width_N, windows.is_flipped_N)
    assert np.stack(columns, axis=1).tolist() == [
        [54, 1, 171, 191, 0], [100, 4, 124, 150, 1], [105, 7, 140, 175, 1], [17, 8, 160, 172, 0]
    ]  # fmt: skip


def test_without_a_random_crop_a_smaller_size_is_the_centre() -> None:
    image_HWC = photo(12, 15)
    for options in (AugmentOptions(preset="none", size=6), AugmentOptions(preset="imagenet", size=6).unchanged):
        windows = draw_windows(many(3), options, (12, 15))
        assert np.array_equal(cut_window(image_HWC, windows, 2), image_HWC[3:9, 4:10])


def test_the_padded_crop_of_a_smaller_size_reaches_all_of_the_padded_image() -> None:
    windows = draw_windows(many(), AugmentOptions(random_crop_padding=2, size=6), (12, 9))
    assert set(windows.top_N.tolist()) == set(range(-2, 9))
    assert set(windows.left_N.tolist()) == set(range(-2, 6))


def test_a_window_is_cut_resized_and_mirrored() -> None:
    image_HWC = photo(20, 24)
    ones = np.ones(2, np.int64)
    windows = Windows(-3 * ones, 20 * ones, 10 * ones, 9 * ones, np.array([False, True]), (5, 6))
    padded_HWC = np.pad(image_HWC, ((3, 0), (0, 5), (0, 0)), mode="edge")[:10, 20:]
    expected_HWC = cv2.resize(padded_HWC, (6, 5), interpolation=cv2.INTER_AREA)
    assert np.array_equal(cut_window(image_HWC, windows, 0), expected_HWC)
    assert np.array_equal(cut_window(image_HWC, windows, 1), expected_HWC[:, ::-1])
    grey_HWC = cut_window(image_HWC[:, :, :1], windows, 1)
    assert (grey_HWC.shape, grey_HWC.flags.c_contiguous) == ((5, 6, 1), True)


@pytest.mark.parametrize(
    ("height", "width", "filter"),
    [(8, 8, cv2.INTER_LINEAR), (17, 17, cv2.INTER_LINEAR), (18, 13, cv2.INTER_AREA), (12, 20, cv2.INTER_AREA)],
)
def test_a_window_is_averaged_if_a_side_shrinks_to_two_thirds_and_interpolated_otherwise(height, width, filter) -> None:
    image_HWC = photo(20, 20)
    number = np.ones(1, np.int64)
    windows = Windows(0 * number, 0 * number, height * number, width * number, np.zeros(1, bool), (12, 12))
    expected_HWC = cv2.resize(image_HWC[:height, :width], (12, 12), interpolation=filter)
    assert np.array_equal(cut_window(image_HWC, windows, 0), expected_HWC)


@pytest.mark.parametrize("name", ["default", "imagenet", "cifar", "none"])
def test_only_declared_photographs_are_mirrored(name: str) -> None:
    options = augment_options(name)
    assert options.flips == (name in ("imagenet", "cifar"))
    assert options == AugmentOptions(**options.model_dump())
    windows = draw_windows(many(40), options, (8, 8))
    assert windows.is_flipped_N.any() == options.flips
    assert (len(set(windows.top_N.tolist())) > 1) == (name != "none")


def test_options_beside_a_preset_replace_its_own() -> None:
    assert AugmentOptions(preset="imagenet", random_flip=False).flips is False
    assert AugmentOptions(preset="cifar", random_crop_padding=2).random_crop_padding == 2
    assert AugmentOptions() == AugmentOptions(preset="default")
    # What differs from the defaults is all of it, so a config without the rest means the same.
    for options in (AugmentOptions(preset="cifar", images="any"), AugmentOptions(preset="imagenet", size=8)):
        assert AugmentOptions(**options.model_dump(exclude_defaults=True)) == options
    assert set(PRESETS) == {"default", "imagenet", "cifar", "none"}


def test_refusals_name_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"augment\.size = 9, but the stored images have 8 x 12 pixels.*at most 8"):
        AugmentOptions(size=9).size_of((8, 12))
    with pytest.raises(UsageError, match="augment = 'imagnet'.*imagenet, cifar, none"):
        augment_options("imagnet")


HAS_NATIVE = hasattr(shardmill_native, "average_blocks")
FUNCTIONS = {
    "opencv": (None, None),
    "native": tuple(getattr(shardmill_native, name, None) for name in ("laplacian_square_sum", "average_blocks")),
}
# One block is 1, 2, 3 or more pixels high and wide; a row has more pixels than the kernel adds up in 32 bits.
SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 150)) | st.sampled_from([(1, 1), (1, 9), (2, 2), (3, 4500)])


@pytest.fixture(params=["opencv", pytest.param("native", marks=pytest.mark.skipif(not HAS_NATIVE, reason="not built"))])
def kernel(request, monkeypatch):
    for name, function in zip(("_native_square_sum", "_native_average"), FUNCTIONS[request.param], strict=True):
        monkeypatch.setattr(look, name, function)


def defined_square_sum(luma_HW: np.ndarray) -> int:
    """Beyond an edge is the pixel before it, or the only one."""
    values = luma_HW.astype(np.int64)
    for axis in (0, 1):
        mode = "reflect" if values.shape[axis] > 1 else "edge"
        values = np.pad(values, [(1, 1) if each == axis else (0, 0) for each in (0, 1)], mode=mode)
    around = values[:-2, 1:-1] + values[2:, 1:-1] + values[1:-1, :-2] + values[1:-1, 2:]
    return int(((around - 4 * values[1:-1, 1:-1]) ** 2).sum())


@pytest.mark.usefixtures("kernel")
@given(SHAPES, st.sampled_from([1, 3]), st.sampled_from([0, 120, 250]), st.integers(0, 2**32))
@example((3, 4500), 1, -1, 0)
def test_sharpness_is_exact(shape, channels, least, seed):
    if least < 0:  # a chessboard has the largest Laplacian
        image_HWC = (np.indices((*shape, channels)).sum(0) % 2 * 255).astype(np.uint8)
    else:
        image_HWC = np.random.default_rng(seed).integers(least, 256, (*shape, channels)).astype(np.uint8)
    luma_HW = luma(image_HWC)
    assert laplacian_square_sum(luma_HW) == defined_square_sum(luma_HW)
    # A view, as of a channel.
    assert laplacian_square_sum(luma_HW[:, ::-1]) == defined_square_sum(luma_HW)


@pytest.mark.skipif(not HAS_NATIVE, reason="the native kernel is not built, or an old one")
@given(SHAPES, st.sampled_from([2, 256]), st.integers(0, 2**32))
@example((9000, 40), 256, 0)  # blocks of more rows than the kernel adds up in 16 bits
def test_thumbnails_of_the_kernel_are_those_of_opencv(shape, num_values, seed):
    luma_HW = np.random.default_rng(seed).integers(256 - num_values, 256, shape).astype(np.uint8)
    by_kernel, hash_by_kernel = look._shrunk(luma_HW), difference_hash(luma_HW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look, "_native_average", None)
        np.testing.assert_array_equal(by_kernel, look._shrunk(luma_HW))
        assert hash_by_kernel == difference_hash(luma_HW)


@pytest.mark.skipif(not HAS_NATIVE, reason="the native kernel is not built, or an old one")
def test_the_kernel_refuses_what_it_would_misread():
    luma_HW, means_HW = np.zeros((4, 6), np.uint8), np.zeros((2, 3), np.uint8)
    for wrong in (np.zeros((4, 4, 1), np.uint8), np.zeros((4, 4), np.uint16), np.zeros((0, 4), np.uint8)):
        with pytest.raises(ValueError, match="uint8"):
            shardmill_native.laplacian_square_sum(wrong)
        with pytest.raises(ValueError, match="uint8"):
            shardmill_native.average_blocks(wrong, means_HW, (1, 1))
        with pytest.raises(ValueError, match="uint8"):
            shardmill_native.average_blocks(luma_HW, wrong, (1, 1))
    for block in ((3, 2), (2, 3), (0, 1), (1, -1), (2**62, 1)):
        with pytest.raises(ValueError, match="inside"):
            shardmill_native.average_blocks(luma_HW, means_HW, block)
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        shardmill_native.laplacian_square_sum(luma_HW[:, ::2])
