"""The optional native kernel alone: to the bit what its integers promise, on the pixels that the wheels decode."""

from __future__ import annotations

import itertools
import threading

import cv2
import numpy as np
import pytest
import simplejpeg

from shardmill.images.geometry import reduced_length
from shardmill.images.icc import Conversion, by_littlecms, read_profile
from tests.shardmill.images.make import (
    gray_jpeg,
    gray_photo,
    gray_profile,
    jpeg,
    one_of_each_format,
    photo,
    rgb_profile,
)
from tests.shardmill.images.reference import LEAST_PSNR_DB, LEAST_SSIM, MOST_LEVELS, noise, psnr, resize_reference, ssim

native = pytest.importorskip("shardmill_native", reason="the native kernel is not built (scripts/setup.sh says why)")

Box = tuple[int, int, int, int]
ONE = 65535


def shrink(data: bytes, shape: tuple[int, int], box: Box, scale: int = 1) -> np.ndarray | None:
    """The kept `box` (top, left, height, width) of the image at 1 / `scale`, as `shape`; None if declined."""
    height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    pixels_HWC = np.empty((*shape, 1 if colorspace == "Gray" else 3), np.uint8)
    return pixels_HWC if native.shrink_jpeg(data, pixels_HWC, (height, width), scale, box) else None


def expected(
    data: bytes, shape: tuple[int, int], box: Box, scale: int = 1, conversion: Conversion | None = None
) -> np.ndarray:
    """The same arithmetic in NumPy, on pixels that simplejpeg decoded and LittleCMS converted."""
    height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    decoded_HWC = simplejpeg.decode_jpeg(
        data,
        "GRAY" if colorspace == "Gray" else "RGB",
        min_height=reduced_length(height, scale),
        min_width=reduced_length(width, scale),
        min_factor=1,
        strict=True,
    )
    if conversion is not None:
        decoded_HWC = by_littlecms(conversion.transform, decoded_HWC, conversion.mode)[:, :, : decoded_HWC.shape[2]]
    top, left, kept_height, kept_width = box
    kept_HWC = decoded_HWC[top : top + kept_height, left : left + kept_width].astype(np.uint32) << 8
    by_rows_HWC = _shrink_rows(kept_HWC, shape[0])
    sums_HWC = _shrink_rows(by_rows_HWC.transpose(1, 0, 2), shape[1]).transpose(1, 0, 2)
    return ((sums_HWC + 128) >> 8).astype(np.uint8)


def _shrink_rows(sums_HWC: np.ndarray, new_length: int) -> np.ndarray:
    """In units of 1/256 level: products are rounded down, and half a unit is given back for each."""
    length = sums_HWC.shape[0]

    def weight_up_to(covered: int) -> int:
        return (covered * ONE + length // 2) // length

    spans = [range(i * length // new_length, -(-(i + 1) * length // new_length)) for i in range(new_length)]
    bias = max(map(len, spans)) // 2
    rows = []
    for i, covered in enumerate(spans):
        start = i * length
        edges = [(max(k * new_length, start), min((k + 1) * new_length, start + length)) for k in covered]
        weights = [weight_up_to(end - start) - weight_up_to(begin - start) for begin, end in edges]
        assert sum(weights) == ONE
        row = sum((sums_HWC[k] * np.uint32(weight)) >> 16 for k, weight in zip(covered, weights, strict=True))
        rows.append(row + bias)
    return np.stack(rows)


def sampled(pixels_HWC: np.ndarray, subsampling: str, *parameters: int) -> bytes:
    """With OpenCV's flags for progression and restart markers."""
    if subsampling == "gray":
        return gray_jpeg(np.ascontiguousarray(pixels_HWC[:, :, 0]))
    factors = getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{subsampling}")
    flags = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factors, cv2.IMWRITE_JPEG_QUALITY, 90, *parameters]
    done, encoded = cv2.imencode(".jpg", pixels_HWC, flags)
    assert done
    return encoded.tobytes()


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411", "gray"])
def test_every_subsampling_crop_and_scale_gives_the_promised_bits(subsampling: str) -> None:
    for height, width in [(97, 250), (64, 64), (133, 71)]:
        data = sampled(noise(height, width), subsampling)
        for scale in (1, 2, 4):
            full = reduced_length(height, scale), reduced_length(width, scale)
            side = min(full)
            centre = (full[0] - side) // 2, (full[1] - side) // 2, side, side
            corner = full[0] // 2, full[1] // 2, full[0] - full[0] // 2, full[1] - full[1] // 2
            for box in ((0, 0, *full), centre, corner):
                shape = -(-box[2] * 2 // 3), max(1, box[3] // 3)
                case = (height, width, scale, box)
                assert np.array_equal(shrink(data, shape, box, scale), expected(data, shape, box, scale)), case


@pytest.mark.parametrize(
    ("subsampling", "profile"), [("444", rgb_profile()), ("420", rgb_profile(gamma=1.0)), ("gray", gray_profile(1.8))]
)
def test_colours_are_converted_before_they_are_averaged(subsampling: str, profile: bytes) -> None:
    data, conversion = sampled(noise(97, 120), subsampling), read_profile(profile)
    assert conversion is not None and conversion.tables is not None
    tables = conversion.tables.linear, conversion.tables.matrix, conversion.tables.levels
    for scale, box in ((1, (0, 0, 97, 120)), (1, (20, 31, 71, 70)), (2, (3, 0, 41, 60))):
        image_HWC = np.empty((33, 29, 1 if subsampling == "gray" else 3), np.uint8)
        assert native.shrink_jpeg(data, image_HWC, (97, 120), scale, box, *tables)
        assert np.array_equal(image_HWC, expected(data, (33, 29), box, scale, conversion)), (scale, box)
        assert not np.array_equal(image_HWC, expected(data, (33, 29), box, scale)), (scale, box)
    for wrong in (tables[:2], tables[::-1]):
        with pytest.raises((TypeError, ValueError)):
            native.shrink_jpeg(data, image_HWC, (97, 120), 1, (0, 0, 97, 120), *wrong)


@pytest.mark.parametrize("parameters", [(cv2.IMWRITE_JPEG_PROGRESSIVE, 1), (cv2.IMWRITE_JPEG_RST_INTERVAL, 3)])
@pytest.mark.parametrize("subsampling", ["444", "420"])
def test_progressive_files_and_restart_markers(subsampling: str, parameters: tuple[int, int]) -> None:
    data = sampled(noise(120, 90), subsampling, *parameters)
    assert (b"\xff\xc2" if parameters[0] == cv2.IMWRITE_JPEG_PROGRESSIVE else b"\xff\xdd") in data
    for box in ((0, 0, 120, 90), (15, 0, 90, 90), (51, 33, 20, 20)):
        assert np.array_equal(shrink(data, (16, 13), box), expected(data, (16, 13), box))


def test_odd_sizes() -> None:
    for height, width in [(1, 1), (1, 70), (70, 1), (2, 500), (500, 3), (9, 640), (2048, 40)]:
        data = jpeg(noise(height, width))
        for shape in itertools.product({1, height, -(-height // 64), -(-height // 2)}, {1, width, -(-width // 64)}):
            if 64 * shape[0] >= height and 64 * shape[1] >= width:
                box = (0, 0, height, width)
                assert np.array_equal(shrink(data, shape, box), expected(data, shape, box)), (height, width, shape)


@pytest.mark.parametrize("shape", [(16, 16), (64, 50), (100, 99), (251, 300), (5, 300)])
def test_the_area_kernel_is_the_reference_within_the_bounds_of_the_wheels(shape: tuple[int, int]) -> None:
    data = jpeg(noise(251, 300))
    exact_HWC = resize_reference(simplejpeg.decode_jpeg(data, "RGB"), *shape)
    image_HWC = shrink(data, shape, (0, 0, 251, 300))
    assert image_HWC is not None
    assert np.abs(image_HWC - exact_HWC).max() <= MOST_LEVELS
    assert psnr(image_HWC, exact_HWC) >= LEAST_PSNR_DB
    assert ssim(image_HWC, exact_HWC) >= LEAST_SSIM


@pytest.mark.parametrize("level", [0, 1, 128, 254, 255])
def test_a_constant_image_stays_constant(level: int) -> None:
    data = gray_jpeg(np.full((640, 200), level, np.uint8))
    decoded = int(simplejpeg.decode_jpeg(data, "GRAY")[0, 0, 0])
    for shape in ((10, 100), (640, 199), (300, 7), (640, 200)):
        image_HWC = shrink(data, shape, (0, 0, 640, 200))
        assert image_HWC is not None
        assert (image_HWC == decoded).all(), shape


@pytest.mark.parametrize("restart_interval", [0, 3])
def test_every_cut_and_flipped_bit_that_libjpeg_minds_is_declined(restart_interval: int) -> None:
    """Wherever the region lies: the rest of the file is checked too. What libjpeg passes over has its pixels."""
    subsampling = "420" if restart_interval else "444"
    data = sampled(noise(80, 64), subsampling, cv2.IMWRITE_JPEG_RST_INTERVAL, restart_interval)
    rng = np.random.RandomState(3)
    boxes = [(0, 0, 80, 64), (0, 0, 16, 64), (60, 0, 20, 64), (30, 20, 20, 20)]
    damaged = [data[:length] for length in rng.randint(len(data) // 2, len(data) - 2, 20)]
    for place in rng.randint(700, len(data) - 2, 200):
        damaged.append(data[:place] + bytes([data[place] ^ (1 << rng.randint(8))]) + data[place + 1 :])
    num_declined = 0
    for number, file in enumerate(damaged):
        is_intact = is_decoded_strictly(file)
        for box in boxes:
            image_HWC = np.empty((10, 9, 3), np.uint8)
            done = native.shrink_jpeg(file, image_HWC, (80, 64), 1, box)
            assert done == is_intact, (number, box)
            assert not done or np.array_equal(image_HWC, expected(file, (10, 9), box)), (number, box)
            num_declined += not done
    assert 100 < num_declined < 4 * len(damaged)


def is_decoded_strictly(data: bytes) -> bool:
    try:
        simplejpeg.decode_jpeg(data, "RGB", strict=True)
    except ValueError:
        return False
    return True


def test_what_lies_before_markers_is_libjpegs_to_judge() -> None:
    """Fill bytes, bytes that belong to nothing, and restart markers that are lost or come in another order."""
    data = sampled(noise(80, 64), "420", cv2.IMWRITE_JPEG_RST_INTERVAL, 3)
    first, second = data.index(b"\xff\xd0"), data.index(b"\xff\xd1")
    files = [data[:place] + some + data[place:] for place in (first, len(data) - 2) for some in (b"\xff", b"\xff\xff")]
    files += [data[:place] + bytes(length) + data[place:] for place in (first, -2) for length in (1, 6, 12)]
    files += [data[:first] + data[first + 2 :], data[:first] + data[second:], data[: first + 1] + data[second + 1 :]]
    verdicts = set()
    for number, file in enumerate(files):
        verdicts.add(is_decoded_strictly(file))
        assert (shrink(file, (10, 9), (0, 0, 80, 64)) is not None) == is_decoded_strictly(file), number
        if is_decoded_strictly(file):
            wanted_HWC = expected(file, (10, 9), (0, 0, 80, 64))
            assert np.array_equal(shrink(file, (10, 9), (0, 0, 80, 64)), wanted_HWC), number
    assert verdicts == {True, False}


@pytest.mark.parametrize("quality", [1, 30, 100])
def test_codes_of_every_length_and_coefficients_of_every_size(quality: int) -> None:
    """Tables made for one file have the longest codes, black and white noise the largest coefficients."""
    pixels_HWC = np.where(noise(200, 264) > 127, 255, 0).astype(np.uint8)
    pixels_HWC[:100] = photo(100, 264)
    for optimize in (0, 1):
        flags = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_OPTIMIZE, optimize]
        done, encoded = cv2.imencode(".jpg", pixels_HWC, flags)
        assert done
        data, box = encoded.tobytes(), (0, 0, 200, 264)
        assert np.array_equal(shrink(data, (150, 190), box), expected(data, (150, 190), box))


def test_other_colours_and_other_sizes_than_declared_are_declined() -> None:
    pixels_HWC, box = np.empty((8, 8, 3), np.uint8), (0, 0, 20, 20)
    assert native.shrink_jpeg(jpeg(photo()), pixels_HWC, (24, 32), 1, box)
    assert not native.shrink_jpeg(one_of_each_format()["cmyk"], pixels_HWC, (24, 32), 1, box)
    assert not native.shrink_jpeg(gray_jpeg(gray_photo()), pixels_HWC, (24, 32), 1, box)
    assert not native.shrink_jpeg(jpeg(photo()), np.empty((8, 8, 1), np.uint8), (24, 32), 1, box)
    assert not native.shrink_jpeg(jpeg(photo()), pixels_HWC, (32, 24), 1, box)
    for data in (b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"not a JPEG"):
        assert not native.shrink_jpeg(data, pixels_HWC, (24, 32), 1, box)


@pytest.mark.parametrize(
    ("shape", "size", "scale", "box"),
    [
        ((8, 8, 3), (24, 32), 1, (0, 0, 25, 32)),
        ((8, 8, 3), (24, 32), 1, (5, 0, 20, 32)),
        ((8, 8, 3), (24, 32), 2, (0, 0, 13, 16)),
        ((8, 8, 3), (24, 32), 1, (0, -1, 20, 20)),
        ((8, 8, 3), (24, 32), 1, (0, 2**62, 20, 20)),
        ((25, 8, 3), (24, 32), 1, (0, 0, 24, 32)),
        ((8, 8, 2), (24, 32), 1, (0, 0, 24, 32)),
        ((8, 8), (24, 32), 1, (0, 0, 24, 32)),
        ((8, 8, 3), (24, 32), 3, (0, 0, 8, 8)),
        ((0, 8, 3), (24, 32), 1, (0, 0, 24, 32)),
        ((1, 8, 3), (650, 32), 1, (0, 0, 650, 32)),
        ((8, 8, 3), (2**62, 32), 1, (0, 0, 24, 32)),
    ],
)
def test_a_region_that_cannot_be_is_an_error(
    shape: tuple[int, ...], size: tuple[int, int], scale: int, box: Box
) -> None:
    with pytest.raises(ValueError, match="pixels|region"):
        native.shrink_jpeg(jpeg(photo()), np.empty(shape, np.uint8), size, scale, box)


def test_only_whole_writable_bytes_are_written_to() -> None:
    arguments = (24, 32), 1, (0, 0, 20, 20)
    with pytest.raises(ValueError, match="uint8"):
        native.shrink_jpeg(jpeg(photo()), np.empty((8, 8, 3), np.uint16), *arguments)
    for pixels in (np.empty((8, 16, 3), np.uint8)[:, ::2], np.frombuffer(bytes(192), np.uint8).reshape(8, 8, 3)):
        with pytest.raises((ValueError, BufferError)):
            native.shrink_jpeg(jpeg(photo()), pixels, *arguments)


def test_threads_do_not_disturb_each_other() -> None:
    data, box = jpeg(noise(150, 200)), (0, 0, 150, 200)
    wanted_HWC = expected(data, (50, 60), box)
    found: list[bool] = []

    def work() -> None:
        found.extend(np.array_equal(shrink(data, (50, 60), box), wanted_HWC) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 80


@pytest.mark.parametrize("shape", [(1, 1, 3), (3, 5, 1), (7, 9, 3), (64, 48, 3), (1100, 2900, 1), (1300, 2500, 3)])
def test_channel_sums_are_exact(shape: tuple[int, int, int]) -> None:
    """The largest are nearly white: more than 65,536 squares for each lane of a register."""
    generator = np.random.default_rng(3)
    pixels_HWC = generator.integers(250 if shape[0] > 1000 else 0, 256, shape, np.uint8)
    values = pixels_HWC.reshape(-1, shape[2]).astype(np.uint64)
    expected_sums = tuple(map(int, values.sum(axis=0))), tuple(map(int, (values**2).sum(axis=0)))
    assert native.channel_sums(pixels_HWC) == expected_sums


def test_channel_sums_refuse_what_they_would_misread() -> None:
    for wrong in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3), np.uint16)):
        with pytest.raises(ValueError, match="uint8"):
            native.channel_sums(wrong)
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        native.channel_sums(np.zeros((4, 8, 3), np.uint8)[:, ::2])
