"""The native kernel, and every kernel against the reference."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg

from shardmill.errors import UsageError
from shardmill.images.decoder_id import DECODER_ID, decoder_id, normalization_fingerprint
from shardmill.images.icc import Conversion, by_littlecms, read_profile
from shardmill.images.jpeg import MAX_SEGMENTS, TABLES, decode_jpeg, plan_shrink, search_scan_or_end, segments
from shardmill.images.normalize import choose_reduction, normalize, reduced_length
from shardmill.images.pixels import Refused
from shardmill.images.process import process_image
from shardmill.kernel import KERNEL_VERSION, NATIVE_ID, resolve_kernel
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, RejectReason, SourceImage
from tests.lab.scale import usually
from tests.shardmill.images.make import (
    STORED_FOR_ORIENTATION,
    gray_jpeg,
    gray_photo,
    gray_profile,
    jpeg,
    one_of_each_format,
    photo,
    refusal,
    rgb_profile,
    with_orientation,
    with_profile,
    with_segment,
)
from tests.shardmill.images.reference import (
    LEAST_PSNR_DB,
    LEAST_REDUCED_PSNR_DB,
    LEAST_REDUCED_SSIM,
    LEAST_SSIM,
    MOST_LEVELS,
    encoded,
    noise,
    normalize_reference,
    photographs,
    psnr,
    resize_reference,
    ssim,
    whole,
)

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
        data, "GRAY" if colorspace == "Gray" else "RGB", min_height=reduced_length(height, scale),
        min_width=reduced_length(width, scale), min_factor=1, strict=True,
    )  # fmt: skip
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
def test_a_region_that_cannot_be_is_an_error(shape: tuple[int, ...], size: tuple[int, int], scale: int, box: Box):
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


def test_scans_and_ends_are_found_where_the_wheels_find_them() -> None:
    rng = np.random.RandomState(5)
    alphabet = np.frombuffer(b"\xff\xff\xd9\xda\x00\x07", np.uint8)
    for length in (0, 1, 2, 3, 7, 40, 300):
        for _ in range(50):
            data = rng.choice(alphabet, length, p=[0.1, 0.1, 0.05, 0.05, 0.35, 0.35]).tobytes()
            for start in range(0, length + 2, max(1, length // 20)):
                assert native.find_scan_or_end(data, start) == search_scan_or_end(data, start), (data, start)
    with pytest.raises(ValueError, match="at least 0"):
        native.find_scan_or_end(b"", -1)


def walked(data: bytes) -> list[tuple[int, int, int]] | None:
    """What the wheels' walk tells of, None if it refuses the file."""
    try:
        return [segment for segment in segments(data) if segment[0] not in TABLES]
    except Refused:
        return None


def test_segments_are_found_as_the_wheels_find_them_or_left_to_them() -> None:
    rng = np.random.RandomState(6)
    files = [jpeg(photo()), gray_jpeg(gray_photo()), b"\xff\xd8" + b"\xff\xfe\0\x05abc" * 3 + jpeg(photo())[2:]]
    num_found = num_damaged = 0
    for data in files:
        assert native.find_segments(data, MAX_SEGMENTS) == walked(data)
        assert native.find_segments(data, 3) is None
        header_bytes = walked(data)[-1][2]  # pyright: ignore[reportOptionalSubscript]
        for _ in range(3_000):
            damaged = bytearray(data)
            damaged[rng.randint(header_bytes)] = rng.choice([0, 1, 2, 0xC0, 0xD0, 0xD9, 0xDA, 0xFF, rng.randint(256)])
            damaged = bytes(damaged[: rng.choice([len(data), header_bytes, rng.randint(header_bytes)])])
            found = native.find_segments(damaged, MAX_SEGMENTS)
            # Fill bytes and markers without a length are beyond it, and so is what is refused.
            assert found is None or found == walked(damaged), damaged.hex()
            num_found += found is not None
            num_damaged += walked(damaged) is None
    assert num_found > 1_000 and num_damaged > 1_000


pytest.importorskip("shardmill_native", reason="the native kernel is not built (scripts/setup.sh says why)")
_NATIVE = Path(__file__).parents[3] / "native"
_SANITIZE = "-fsanitize=address,undefined"


@pytest.mark.drill
def test_damaged_input_breaks_no_rule_of_c(tmp_path: Path):
    compiler = shutil.which("gcc")
    libraries = [_library(compiler, name) for name in ("asan", "ubsan")] if compiler else []
    if not all(Path(library).is_absolute() for library in libraries) or not libraries:
        pytest.skip("gcc with libasan and libubsan is needed")
    shutil.copytree(_NATIVE, tmp_path / "native", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    flags = {"CC": str(compiler), "CFLAGS": f"{_SANITIZE} -fno-sanitize-recover=all -g -O1", "LDFLAGS": _SANITIZE}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "built")]
    subprocess.run(build, cwd=tmp_path / "native", env={**os.environ, **flags}, check=True)
    seed, count = random.SystemRandom().randrange(1 << 32), usually(100_000, 1_000_000)
    print(f"seed {seed}")
    # The sanitizers' libraries must come before Python's; what Python keeps until its end is no leak.
    environment = {**os.environ, "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
    script = Path(__file__).parent / "fuzz_native.py"
    ended = subprocess.run(
        [sys.executable, script, tmp_path / "built", str(seed), str(count)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert f"{count} damaged inputs" in ended.stdout and " 0 decoded" not in ended.stdout


def _library(compiler: str, name: str) -> str:
    found = subprocess.run([compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


NEEDS_NATIVE = pytest.mark.skipif(not NATIVE_ID, reason="the native kernel is not built (scripts/setup.sh says why)")
KERNELS = ("wheels", pytest.param("native", marks=NEEDS_NATIVE))
MODES = ("crop", "pad", "stretch", "shorter", "longer", "none")
# Each kernel is within half a level of the exact box, and a little: together they may round to different sides.
MOST_LEVELS_APART = 1


def options_of(kernel: str = "native", size: int = 20, mode: str = "crop", **other: Any) -> NormalizeOptions:
    return NormalizeOptions.model_validate({"kernel": kernel, "image_size": size, "resize_mode": mode, **other})


def sample(data: bytes, options: NormalizeOptions) -> ImageSample:
    outcome = process_image(SourceImage("x.jpg", len(data)), data, options)
    assert isinstance(outcome, ImageSample)
    return outcome


def both(data: bytes, **other: Any) -> tuple[ImageSample, ImageSample]:
    """As raw pixels, by the wheels and by the native kernel."""
    wheels, native = (sample(data, options_of(kernel, encoding="raw", **other)) for kernel in ("wheels", "native"))
    return wheels, native


def apart(first: ImageSample, second: ImageSample) -> int:
    levels = (np.frombuffer(each.image, np.uint8).astype(int) for each in (first, second))
    return int(np.abs(next(levels) - next(levels)).max())


@NEEDS_NATIVE
@pytest.mark.parametrize("mode", MODES[:-1])
def test_every_mode_is_the_reference_within_the_bounds_of_the_wheels(mode: str) -> None:
    for (height, width), size, upscale in itertools.product(
        [(33, 91), (64, 64), (97, 64), (150, 91)], (16, 50), ("always", "never")
    ):
        data = jpeg(noise(height, width))
        options = options_of("native", size, mode, upscale=upscale)
        decoded_HWC = decode_jpeg(data, options_of("wheels", size, mode, upscale=upscale)).pixels_HWC
        expected_HWC = normalize_reference(decoded_HWC, size, mode, upscale=upscale == "always")
        image_HWC = normalize(decode_jpeg(data, options).pixels_HWC, options)
        case = f"{width}x{height} to {size}"
        assert np.abs(image_HWC - expected_HWC).max() <= MOST_LEVELS, case
        assert psnr(image_HWC, expected_HWC) >= LEAST_PSNR_DB, case
        assert ssim(image_HWC, expected_HWC) >= LEAST_SSIM, case


@NEEDS_NATIVE
@pytest.mark.parametrize("mode", ["crop", "pad", "stretch"])
def test_big_photos_are_those_of_the_whole_image_within_the_bounds_of_the_wheels(mode: str) -> None:
    scales = set()
    for pixels_HWC, size in itertools.product(photographs()[1:], (24, 32, 64, 100)):
        options, data = options_of("native", size, mode), encoded(pixels_HWC)
        scale = choose_reduction(pixels_HWC.shape[0], pixels_HWC.shape[1], options)
        image_HWC, exact_HWC = normalize(decode_jpeg(data, options).pixels_HWC, options), whole(data, options)
        scales.add(scale)
        assert psnr(image_HWC, exact_HWC) >= (LEAST_REDUCED_PSNR_DB if scale > 1 else LEAST_PSNR_DB - 3), size
        assert ssim(image_HWC, exact_HWC) >= (LEAST_REDUCED_SSIM if scale > 1 else LEAST_SSIM), size
    assert scales >= {1, 2, 4}


@NEEDS_NATIVE
@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_keeps_the_same_part_upright(orientation: int) -> None:
    upright_HWC = noise(51, 80)  # odd differences: a centre has two sides
    stored_HWC = np.ascontiguousarray(STORED_FOR_ORIENTATION.get(orientation, lambda same: same)(upright_HWC))
    data = with_orientation(jpeg(stored_HWC), orientation)
    for mode in MODES:
        wheels, native = both(data, mode=mode) if mode in MODES[:3] else both_as_png(data, mode)
        assert apart(wheels, native) <= MOST_LEVELS_APART
        assert wheels.notes == native.notes
        assert (wheels.height, wheels.width) == (native.height, native.width)


def both_as_png(data: bytes, mode: str) -> tuple[ImageSample, ImageSample]:
    """Of sizes that raw cannot store; the pixels in place of the file."""
    samples = [sample(data, options_of(kernel, mode=mode, encoding="png")) for kernel in ("wheels", "native")]
    decoded = [cv2.imdecode(np.frombuffer(each.image, np.uint8), cv2.IMREAD_UNCHANGED) for each in samples]
    first, second = (dataclasses.replace(each, image=p.tobytes()) for each, p in zip(samples, decoded, strict=True))
    return first, second


@NEEDS_NATIVE
@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("mode", ["crop", "pad", "stretch"])
def test_files_of_every_kind_have_the_same_notes_and_nearly_the_same_pixels(mode: str, color: str) -> None:
    small, tall = jpeg(photo(6, 40)), jpeg(photo(300, 40))
    files = {
        **one_of_each_format(photo(60, 44)), "gray": gray_jpeg(gray_photo(61, 45)), "small": small, "tall": tall,
        "constant": jpeg(np.full((60, 60, 3), 77, np.uint8)), "trailing": jpeg(photo(60, 44)) + b"tail",
        "profile": with_profile(jpeg(photo(60, 44)), rgb_profile()),
        "gray profile on colours": with_profile(jpeg(photo(60, 44)), gray_profile(1.8)),
        "profile without a part": with_segment(jpeg(photo(60, 44)), 0xE2, b"ICC_PROFILE\0\1\2half"),
        "exif without sense": with_segment(jpeg(photo(60, 44)), 0xE1, b"Exif\0\0II*\0"),
    }  # fmt: skip
    for name, data in files.items():
        for size in (5, 20, 41):
            wheels, native = both(data, size=size, mode=mode, color=color)
            assert native.notes == wheels.notes, (name, size)
            assert apart(wheels, native) <= MOST_LEVELS_APART, (name, size)
            if native.image == wheels.image:
                assert native == wheels


@NEEDS_NATIVE
def test_what_the_kernel_cannot_do_is_the_wheels_to_the_bit() -> None:
    for data in (
        one_of_each_format(photo(60, 44))["cmyk"],
        one_of_each_format(photo(60, 44))["png"],
        jpeg(photo(20, 30)),
        jpeg(photo(12, 12)),
    ):
        wheels, native = both(data)
        assert native == wheels


@NEEDS_NATIVE
@pytest.mark.parametrize("profile", [b"", rgb_profile()], ids=["plain", "profile"])
def test_the_kernel_is_at_work_at_all(profile: bytes) -> None:
    data = with_profile(jpeg(noise(90, 120)), profile)
    assert decode_jpeg(data, options_of("wheels")).pixels_HWC.shape[0] == 90
    assert decode_jpeg(data, options_of("native")).pixels_HWC.shape == (20, 20, 3)
    wheels, native = both(data)
    assert 0 < apart(wheels, native) <= MOST_LEVELS_APART


@NEEDS_NATIVE
def test_kept_bytes_are_those_of_the_wheels() -> None:
    for size, is_kept in ((20, False), (60, True)):
        data = jpeg(photo(60, 60))
        wheels, native = (sample(data, options_of(kernel, size, keep_bytes=True)) for kernel in ("wheels", "native"))
        assert (native.image == wheels.image == data) == is_kept


@pytest.mark.parametrize("kernel", KERNELS)
def test_damage_is_refused_for_the_same_reason(kernel: str) -> None:
    data = encoded(photographs()[0])
    damaged = data[: len(data) // 2] + b"\x55\xaa" * 10 + data[len(data) // 2 + 20 :]
    for size in (32, 100, 400):
        assert refusal(damaged, options_of(kernel, size))[0] is RejectReason.CORRUPT_SCAN
        assert refusal(data[: len(data) // 2], options_of(kernel, size))[0] is RejectReason.TRUNCATED


def test_normalizing_what_was_shrunk_changes_nothing() -> None:
    """So a decoder may shrink: `normalize` makes the same of its pixels."""
    num_shrunk = 0
    for mode, upscale, height, width in itertools.product(MODES, ("always", "never"), (33, 200), (20, 57, 190)):
        options = options_of("wheels", 20, mode, upscale=upscale)
        shrink = plan_shrink(height, width, 1, options)
        if shrink is not None:
            shrunk_HWC = noise(shrink.height, shrink.width)
            image_HWC = normalize(shrunk_HWC, options)
            assert image_HWC.shape == normalize(noise(height, width), options).shape
            assert image_HWC.astype(int).sum() == shrunk_HWC.astype(int).sum()
            num_shrunk += 1
    assert num_shrunk > 20


def test_the_id_names_the_kernel_and_a_missing_one_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decoder_id(options_of("wheels")) == DECODER_ID
    monkeypatch.setattr("shardmill.kernel.NATIVE_ID", "native-7")
    monkeypatch.setattr("shardmill.images.decoder_id.NATIVE_ID", "native-7")
    assert resolve_kernel("auto") == "native"
    assert decoder_id(options_of("native")) == f"{DECODER_ID}+native-7"
    assert normalization_fingerprint(options_of("native")) != normalization_fingerprint(options_of("wheels"))
    monkeypatch.setattr("shardmill.kernel.NATIVE_ID", "")
    assert resolve_kernel("auto") == "wheels"
    with pytest.raises(UsageError, match=r"etl.kernel.*pip install \./native.*etl.kernel = wheels"):
        decoder_id(options_of("native"))


@NEEDS_NATIVE
def test_the_id_names_libjpeg() -> None:
    assert NATIVE_ID.startswith(f"native-{KERNEL_VERSION}+libjpeg-turbo-")
    assert simplejpeg.__version__ in DECODER_ID
