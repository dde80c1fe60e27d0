"""What is stored, to the bit: equal decoder ids promise it, and both environments of uv.lock have one id."""

from __future__ import annotations

import hashlib

import cv2
import numpy as np
import pytest

from shardmill.images.decoder_id import DECODER_ID
from shardmill.images.process import process_image
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, SourceImage
from tests.shardmill.images.make import one_of_each_format, photo

# If one changes, so do datasets: raise RULES_VERSION, or find the library that has moved it and let the id name that.
GOLDEN = {
    "raw": "95d8ae1f13366073",
    "jpeg": "c5ac7ecf3a4263e5",
    "png": "aecfa7c82d6b186b",
    "webp": "48e1575cf61b7c05",
}


def pictures() -> list[np.ndarray]:
    """Smooth, rough and in between; larger and smaller than what is stored of them."""
    rng = np.random.RandomState(3)
    coarse = rng.randint(0, 256, (20, 20, 3)).astype(np.uint8)
    return [
        photo(), photo(61, 83), rng.randint(0, 256, (97, 131, 3)).astype(np.uint8),
        cv2.resize(coarse, (300, 211), interpolation=cv2.INTER_LINEAR_EXACT),
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", GOLDEN)
def test_every_format_is_stored_with_the_same_bytes_as_ever(encoding: str) -> None:
    stored = hashlib.sha256()
    for picture_HWC in pictures():
        for name, data in one_of_each_format(picture_HWC).items():
            for size, mode, color in ((24, "crop", "rgb"), (97, "pad", "gray"), (224, "stretch", "rgb")):
                options = NormalizeOptions.model_validate(
                    {"image_size": size, "resize_mode": mode, "color": color, "encoding": encoding, "kernel": "wheels"}
                )
                sample = process_image(SourceImage(name, len(data)), data, options)
                assert isinstance(sample, ImageSample), (name, sample)
                stored.update(sample.image)
    assert stored.hexdigest()[:16] == GOLDEN[encoding]


def test_the_id_names_the_first_opencv_with_these_pixels() -> None:
    assert "+opencv-4.11.0+" in DECODER_ID
