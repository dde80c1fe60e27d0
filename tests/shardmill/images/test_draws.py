"""The random numbers of augmentation are those of earlier releases: a training that resumes sees the same images."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest

from shardmill.augment.draws import Draws
from shardmill.augment.mixing import mix_rows
from shardmill.augment.options import AugmentOptions
from shardmill.augment.pixels import change_pixels
from shardmill.augment.windows import draw_windows

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
