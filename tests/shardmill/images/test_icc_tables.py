"""The native kernel converts colours as LittleCMS does: every bit of every colour, or LittleCMS does it itself."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from shardmill.images.icc import ONE, by_littlecms, read_profile
from shardmill.kernel import shardmill_native
from tests.shardmill.images.make import ADOBE_RGB_XYZ, OPTIONS, SRGB_XYZ, decode, jpeg, photo, rgb_profile, with_profile

pytest.importorskip("shardmill_native", reason="the native kernel is not installed")
if shardmill_native is None:
    pytest.skip("this build of the native kernel is of another version", allow_module_level=True)
convert_colours = shardmill_native.convert_colours

DISPLAY_P3_XYZ = ((0.51512, 0.29198, 0.1571), (0.2412, 0.69225, 0.06657), (-0.00105, 0.04189, 0.78407))
GAMMA_OF_ADOBE = b"curv" + bytes(4) + struct.pack(">IH", 1, 563)


def formula(*parameters: float, kind: int = 3) -> bytes:
    return (
        b"para" + bytes(4) + struct.pack(">HH", kind, 0) + struct.pack(">5i", *(round(65536 * x) for x in parameters))
    )


SRGB_FORMULA = formula(2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)


def with_curves(profile: bytes, curve: bytes) -> bytes:
    """All three curves replaced; they lie in the order of the table of tags."""
    count = int.from_bytes(profile[128:132])
    entries = [profile[132 + 12 * place :][:12] for place in range(count)]
    start = len(profile)
    table = b"".join(
        entry[:4] + struct.pack(">II", start, len(curve)) if entry[1:4] == b"TRC" else entry for entry in entries
    )
    return struct.pack(">I", start + len(curve)) + profile[4:132] + table + profile[132 + 12 * count :] + curve


def planes(step: int) -> Iterator[np.ndarray]:
    """All colours with every `step`-th red."""
    levels = np.arange(256, dtype=np.uint8)
    for red in range(0, 256, step):
        plane_HWC = np.empty((256, 256, 3), np.uint8)
        plane_HWC[..., 0], plane_HWC[..., 1], plane_HWC[..., 2] = red, levels[:, np.newaxis], levels
        yield plane_HWC


def check(profile: bytes, step: int) -> None:
    conversion = read_profile(profile)
    assert conversion is not None and not conversion.is_srgb and conversion.tables is not None
    for plane_HWC in planes(step):
        expected_HWC = by_littlecms(conversion.transform, plane_HWC, "RGB")
        assert np.array_equal(conversion.apply(plane_HWC), expected_HWC), plane_HWC[0, 0, 0]


def test_every_colour_of_adobe_rgb_is_that_of_littlecms():
    check(rgb_profile(), 1)


@pytest.mark.parametrize("curve", [GAMMA_OF_ADOBE, SRGB_FORMULA, formula(1.0, 1.0, 0.0, 0.5, 0.25)])
def test_profiles_of_phones_and_monitors_are_converted_as_by_littlecms(curve: bytes):
    check(with_curves(rgb_profile(DISPLAY_P3_XYZ), curve), 15)


def test_any_gamma_and_primaries_are_converted_as_by_littlecms():
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(12):
        share = rng.random()
        columns = [[share * a + (1 - share) * b for a, b in zip(*rows, strict=True)]
                   for rows in zip(ADOBE_RGB_XYZ, SRGB_XYZ, strict=True)]  # fmt: skip
        check(rgb_profile(columns, gamma=rng.uniform(1.0, 2.15)), 51)


def test_what_is_no_gamma_and_matrix_is_left_to_littlecms():
    table = b"curv" + bytes(4) + struct.pack(">I", 4) + struct.pack(">4H", 0, 9000, 30000, 65535)
    for profile in (with_curves(rgb_profile(), table), with_curves(rgb_profile(), formula(2.2, 1, 0, 0, 0, kind=0))):
        conversion = read_profile(profile)
        assert conversion is not None and conversion.tables is None
        data = with_profile(jpeg(photo(60, 44)), profile)
        decoded = decode(data, OPTIONS.model_copy(update={"image_size": 20, "kernel": "native"}))
        assert (decoded.notes, decoded.pixels_HWC.shape) == (("icc_converted",), (44, 44, 3))


@pytest.mark.parametrize("parameters", [(32767, 32767, 0, 0, 0), (-32767, 0.0001, 0, 0, 0), (2, 32767, 32767, 0, 0)])
def test_a_formula_beyond_all_numbers_is_left_to_littlecms(parameters: tuple[float, ...]):
    conversion = read_profile(with_curves(rgb_profile(), formula(*parameters)))
    assert conversion is None or conversion.tables is None


def test_damaged_profiles_give_what_littlecms_makes_of_them():
    """Whatever is read of one by us and not by LittleCMS, or otherwise, must not show in a pixel."""
    rng = random.Random(7)
    num_converted = num_with_tables = 0
    for _ in range(400):
        damaged = bytearray(rng.choice([rgb_profile(), with_curves(rgb_profile(DISPLAY_P3_XYZ), SRGB_FORMULA)]))
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(100, len(damaged))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        conversion = read_profile(bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])]))
        if conversion is not None and conversion.mode == "RGB":
            num_converted += 1
            num_with_tables += conversion.tables is not None
            expected_HWC = by_littlecms(conversion.transform, photo(), "RGB")
            assert np.array_equal(conversion.apply(photo()), expected_HWC)
    assert num_converted > num_with_tables > 20


@pytest.mark.parametrize(
    ("pixels", "linear", "matrix", "levels"),
    [
        ((4, 4), (3, 256), (3, 3), ONE + 1),
        ((4, 4, 4), (3, 256), (3, 3), ONE + 1),
        ((4, 4, 3), (3, 255), (3, 3), ONE + 1),
        ((4, 4, 3), (3, 256), (2, 3), ONE + 1),
        ((4, 4, 3), (3, 256), (3, 3), ONE),
    ],
)
def test_arrays_of_other_shapes_are_refused(
    pixels: tuple[int, ...], linear: tuple[int, int], matrix: tuple[int, int], levels: int
):
    arrays = np.zeros(linear, np.int32), np.zeros(matrix, np.int32), np.zeros(levels, np.uint8)
    with pytest.raises(ValueError, match="pixels|tables"):
        convert_colours(np.zeros(pixels, np.uint8), *arrays)


@pytest.mark.parametrize("value", [-1, ONE + 1, 2**31 - 1, -(2**31)])
def test_tables_that_lead_out_of_bounds_are_refused(value: int):
    levels = np.zeros(ONE + 1, np.uint8)
    matrix = np.eye(3, dtype=np.int32) * ONE
    linear = np.zeros((3, 256), np.int32)
    linear[2, 255] = value
    with pytest.raises(ValueError, match="light"):
        convert_colours(np.zeros((4, 4, 3), np.uint8), linear, matrix, levels)
    matrix[1] = 1 << 15, 1 << 14, -(1 << 14)
    with pytest.raises(ValueError, match="matrix"):
        convert_colours(np.zeros((4, 4, 3), np.uint8), np.zeros((3, 256), np.int32), matrix, levels)
    with pytest.raises((ValueError, BufferError)):
        convert_colours(np.zeros((4, 8, 3), np.uint8)[:, ::2], np.zeros((3, 256), np.int32), matrix, levels)
