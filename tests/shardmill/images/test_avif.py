"""AVIF: the first frame, upright and on white, within the limits that its header declares; damage by its name."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from shardmill.images.exif import ROTATED_NOTE
from shardmill.images.icc import CONVERTED_NOTE
from shardmill.values import RejectReason
from tests.shardmill.images.make import (
    OPTIONS,
    avif,
    decode,
    mean_error,
    over_white,
    photo,
    ramp_alpha,
    refusal,
    rgb_profile,
)


def test_pixels_are_those_of_the_picture_but_for_the_loss_of_the_codec() -> None:
    decoded = decode(avif(photo(), quality=100))
    assert mean_error(decoded.pixels_HWC, photo()) < 1.5 and decoded.notes == ()


def test_alpha_lies_on_white_and_of_an_animation_the_first_frame_is_taken() -> None:
    flattened = decode(avif(np.dstack([photo(), ramp_alpha()]), quality=100))
    assert mean_error(flattened.pixels_HWC, over_white(photo(), ramp_alpha())) < 2.5
    assert flattened.notes == ("alpha_flattened",)
    file = io.BytesIO()
    others = [Image.fromarray(255 - photo())] * 2
    Image.fromarray(photo()).save(file, "AVIF", save_all=True, append_images=others, quality=100)
    animated = decode(file.getvalue())
    assert mean_error(animated.pixels_HWC, photo()) < 3 and animated.notes == ("first_frame_of_3",)


@pytest.mark.parametrize(("orientation", "upright"), [(6, np.rot90(photo(), -1)), (4, photo()[::-1])])
def test_the_turn_of_the_container_is_applied_once(orientation: int, upright: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode(avif(photo(), quality=100, exif=exif))
    assert mean_error(decoded.pixels_HWC, upright) < 1.5 and decoded.notes == (ROTATED_NOTE,)


def test_a_profile_is_converted() -> None:
    assert decode(avif(photo(), icc_profile=rgb_profile())).notes == (CONVERTED_NOTE,)


def test_damage_and_sizes_beyond_the_limits_are_refused() -> None:
    data = avif(photo())
    assert refusal(data[:-40])[0] in (RejectReason.TRUNCATED, RejectReason.CORRUPT_SCAN)
    assert refusal(data[:60])[0] in (RejectReason.TRUNCATED, RejectReason.BAD_HEADER)
    # The size that the container declares is looked at before anything is decoded.
    sized = data.replace(struct.pack(">II", 32, 24), struct.pack(">II", 30_001, 24))
    assert sized != data and refusal(sized)[0] is RejectReason.TOO_MANY_PIXELS
    small = OPTIONS.model_copy(update={"min_source_side_pixels": 25})
    assert refusal(data, small)[0] is RejectReason.TOO_SMALL


@pytest.mark.parametrize(
    ("brands", "expected"),
    [(b"mif1\0\0\0\0avifmif1", RejectReason.TRUNCATED), (b"mif1\0\0\0\0heicmif1", RejectReason.UNSUPPORTED_FORMAT)],
)
def test_a_container_of_any_codec_is_told_by_its_compatible_brands(brands: bytes, expected: RejectReason) -> None:
    assert refusal(struct.pack(">I", 8 + len(brands)) + b"ftyp" + brands)[0] is expected
