"""JPEGs that libjpeg warns of: those whose pixels are all whole are accepted with a note, damage stays a rejection."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from sklearn.datasets import load_sample_images

from shardmill.images.jpeg_repair import MAX_BYTES
from shardmill.images.pixels import Refused
from shardmill.images.process import process_image
from shardmill.images.sandbox import DecodeSandbox
from shardmill.kernel import NATIVE_ID
from shardmill.values import ImageSample, RejectReason, SourceImage
from tests.shardmill.images.make import OPTIONS, decode, gray_jpeg, gray_photo, jpeg, photo, refusal, with_segment

pytestmark = pytest.mark.starts("decoder")

EXACT = OPTIONS.model_copy(update={"image_size": 18, "encoding": "raw"})
ExpectTheSamePixels = Callable[[bytes, bytes, str], None]
"""Of an odd file and its clean twin, and the one note that the odd one must have more."""
KINDS = ("baseline", "gray", "full_colour", "optimized", "restarts", "progressive", "progressive_restarts", "cmyk")


def by_pillow(mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(photo(83, 97)).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def one_of_each_kind(kind: str) -> bytes:
    match kind:
        case "gray":
            return by_pillow("L")
        case "full_colour":
            return by_pillow(subsampling=0, quality=95)
        case "optimized":
            return by_pillow(optimize=True)
        case "restarts":
            return by_pillow(restart_marker_blocks=5)
        case "progressive":
            return by_pillow(progressive=True)
        case "progressive_restarts":
            return by_pillow(progressive=True, restart_marker_rows=1)
        case "cmyk":
            return by_pillow("CMYK")
        case _:
            return by_pillow()


def some_bytes(count: int) -> bytes:
    """Without 0xFF."""
    return bytes(random.Random(count).choices(range(255), k=count))


def with_revision(data: bytes, revision: bytes) -> bytes:
    place = data.index(b"JFIF\0") + 5
    return data[:place] + revision + data[place + 2 :]


def with_scan_parameters(data: bytes, parameters: bytes) -> bytes:
    """In the header of each scan."""
    out = data
    for found in re.finditer(rb"\xff\xda\0", data):
        place = found.end() + 2 + 2 * data[found.end() + 1]
        out = out[:place] + parameters + out[place + 3 :]
    return out


@pytest.fixture(scope="module")
def sandbox() -> Iterator[DecodeSandbox]:
    with DecodeSandbox() as sandbox:
        yield sandbox


@pytest.fixture
def expect_the_same_pixels(sandbox: DecodeSandbox) -> ExpectTheSamePixels:
    """With every kernel, in this process and in the sandbox, and however large the result is."""
    kernels = ("wheels", "native") if NATIVE_ID else ("wheels",)
    others = ({"image_size": 400}, {"resize_mode": "none", "encoding": "jpeg"})
    all_options = [EXACT.model_copy(update=update) for update in (*({"kernel": name} for name in kernels), *others)]

    def expect(odd: bytes, clean: bytes, note: str) -> None:
        source, source_of_clean = SourceImage("odd.jpg", len(odd)), SourceImage("clean.jpg", len(clean))
        for options in all_options:
            found, expected = process_image(source, odd, options), process_image(source_of_clean, clean, options)
            assert isinstance(found, ImageSample), found
            assert isinstance(expected, ImageSample)
            assert (found.image, found.channel_sums) == (expected.image, expected.channel_sums)
            assert found.notes == (note, *expected.notes)
            assert sandbox.process(source, odd, options) == found

    return expect


@pytest.mark.parametrize("revision", [b"\0\0", b"\2\1", b"\xff\xff"])
@pytest.mark.parametrize("kind", ["baseline", "gray", "progressive"])
def test_an_unknown_jfif_revision_is_a_note(expect_the_same_pixels: ExpectTheSamePixels, kind: str, revision: bytes):
    clean = one_of_each_kind(kind)
    expect_the_same_pixels(with_revision(clean, revision), clean, "jfif_revision")


@pytest.mark.parametrize("parameters", [b"\0\0\0", b"\1\x3f\0", b"\0\x3f\x11"])
@pytest.mark.parametrize("kind", ["baseline", "gray", "restarts", "cmyk"])
def test_scan_parameters_that_a_sequential_jpeg_ignores_are_a_note(
    expect_the_same_pixels: ExpectTheSamePixels, kind: str, parameters: bytes
) -> None:
    clean = one_of_each_kind(kind)
    expect_the_same_pixels(with_scan_parameters(clean, parameters), clean, "scan_parameters")


def test_scan_parameters_of_a_progressive_jpeg_count() -> None:
    damaged = with_scan_parameters(one_of_each_kind("progressive"), b"\0\0\0")
    assert refusal(damaged)[0] in (RejectReason.CORRUPT_SCAN, RejectReason.BAD_HEADER)


PADDINGS = (bytes(12), bytes(2000), b"\xaa" * 64)
OTHER_BYTES = (some_bytes(40), some_bytes(2226), b"Copyright: somebody", some_bytes(30) + b"\xff\0")
SEQUENTIAL = ("baseline", "gray", "full_colour", "optimized", "restarts", "cmyk")


@pytest.mark.parametrize(("kind", "added"), [*product(KINDS, PADDINGS), *product(SEQUENTIAL, OTHER_BYTES)])
def test_bytes_before_the_end_marker_are_a_note(expect_the_same_pixels: ExpectTheSamePixels, kind: str, added: bytes):
    clean = one_of_each_kind(kind)
    expect_the_same_pixels(clean[:-2] + added + clean[-2:], clean, "extraneous_bytes")


@pytest.mark.parametrize(
    ("kind", "marker"),
    [("restarts", 0xD2), ("progressive", 0xC4), ("progressive", 0xDA), ("progressive_restarts", 0xD0)],
)
def test_padding_before_other_markers_is_a_note(expect_the_same_pixels: ExpectTheSamePixels, kind: str, marker: int):
    clean = one_of_each_kind(kind)
    place = clean.rindex(bytes((0xFF, marker)))
    expect_the_same_pixels(clean[:place] + bytes(40) + clean[place:], clean, "extraneous_bytes")


@pytest.mark.parametrize("marker", [0xE0, 0xDB, 0xC0, 0xC4, 0xDA])
def test_bytes_between_two_segments_are_a_note(expect_the_same_pixels: ExpectTheSamePixels, marker: int) -> None:
    clean = one_of_each_kind("baseline")
    place = clean.index(bytes((0xFF, marker)))
    for added in (bytes(1), some_bytes(33)):
        expect_the_same_pixels(clean[:place] + added + clean[place:], clean, "extraneous_bytes")
    assert refusal(clean[:place] + b"\0\xff\0" + clean[place:])[0] is RejectReason.BAD_HEADER


def test_an_unknown_colour_transform_is_taken_for_ycc_and_of_four_inks_refused(
    expect_the_same_pixels: ExpectTheSamePixels,
) -> None:
    # Without JFIF's segment, whose colours are known.
    clean = simplejpeg.encode_jpeg(photo(), 95, colorsubsampling="444")
    start = clean.index(b"\xff\xe0")
    bare = clean[:start] + clean[start + 18 :]
    adobe = b"Adobe\0\x64\0\0\0\0"
    expect_the_same_pixels(
        with_segment(bare, 0xEE, adobe + b"\2"), with_segment(bare, 0xEE, adobe + b"\1"), "adobe_transform"
    )
    inks = one_of_each_kind("cmyk")
    place = inks.index(b"Adobe") + 11
    assert refusal(inks[:place] + b"\7" + inks[place + 1 :])[0] is RejectReason.CORRUPT_SCAN


def test_several_oddities_and_what_follows_the_image_have_a_note_each() -> None:
    clean = one_of_each_kind("baseline")
    odd = with_scan_parameters(with_revision(clean, b"\0\0"), b"\0\0\0")
    odd = odd[:-2] + bytes(12) + odd[-2:] + b"tail"
    decoded = decode(odd)
    assert set(decoded.notes) == {"jfif_revision", "scan_parameters", "extraneous_bytes", "trailing_bytes"}
    assert np.array_equal(decoded.pixels_HWC, decode(clean).pixels_HWC)


def test_a_kept_file_is_one_that_libjpeg_does_not_warn_of() -> None:
    clean = one_of_each_kind("baseline")
    place = clean.index(b"\xff\xdb")
    odd = with_revision(clean[:place] + bytes(5) + clean[place:-2] + bytes(12) + clean[-2:], b"\0\0")
    options = OPTIONS.model_copy(update={"resize_mode": "none", "keep_bytes": True})
    sample = process_image(SourceImage("odd.jpg", len(odd)), odd, options)
    assert isinstance(sample, ImageSample)
    assert set(sample.notes) == {"jfif_revision", "extraneous_bytes"}
    simplejpeg.decode_jpeg(sample.image, strict=True)
    assert decode(sample.image).notes == ()


def test_large_files_are_not_walked_bit_by_bit() -> None:
    clean = one_of_each_kind("baseline")
    comments = (b"\xff\xfe\xff\xff" + bytes(65533)) * (MAX_BYTES // 65533 + 1)
    reason, detail = refusal(clean[:2] + comments + clean[2:-2] + bytes(12) + clean[-2:])
    assert reason is RejectReason.CORRUPT_SCAN
    assert f"in a file of more than {MAX_BYTES} bytes" in detail


def damaged_scan(rng: random.Random, data: bytes) -> bytes:
    """With bits flipped, or bytes lost, added, overwritten or zeroed behind the first scan's header."""
    place = rng.randrange(data.index(b"\xff\xda") + 14, len(data) - 40)
    count = rng.randint(1, 30)
    match rng.choice(("flip", "lose", "add", "overwrite", "zero", "zero_the_end")):
        case "flip":
            return data[:place] + bytes((data[place] ^ 1 << rng.randrange(8),)) + data[place + 1 :]
        case "lose":
            return data[:place] + data[place + count :]
        case "add":
            return data[:place] + rng.randbytes(count) + data[place:]
        case "overwrite":
            return data[:place] + rng.randbytes(count) + data[place + count :]
        case "zero":
            return data[:place] + bytes(count) + data[place + count :]
        case _:
            return data[:place] + bytes(len(data) - 2 - place) + data[-2:]


@pytest.mark.parametrize("options", [{}, {"optimize": True}, {"subsampling": 0}, {"progressive": True}])
def test_what_damage_leaves_over_of_a_scan_is_not_taken_for_added_bytes(options: dict[str, object]) -> None:
    rng = random.Random(3)
    num_left_over = num_taken = 0
    for picture in load_sample_images().images:
        file = io.BytesIO()
        Image.fromarray(picture[100:196, 200:328]).save(file, "JPEG", quality=90, **options)
        expected = decode(file.getvalue()).pixels_HWC
        for _ in range(250):
            try:
                decoded = decode(damaged_scan(rng, file.getvalue()))
            except Refused as refused:
                num_left_over += "extraneous bytes" in refused.detail
            else:
                is_noted = "extraneous_bytes" in decoded.notes
                num_taken += is_noted and not np.array_equal(decoded.pixels_HWC, expected)
    assert num_left_over > 50
    assert num_taken <= num_left_over // 100


def test_gray_and_small_files_without_jfif_are_walked_too() -> None:
    for clean in (gray_jpeg(gray_photo(1, 1)), jpeg(photo(9, 7))):
        decoded = decode(clean[:-2] + bytes(30) + clean[-2:])
        assert np.array_equal(decoded.pixels_HWC, decode(clean).pixels_HWC)


@pytest.mark.parametrize("factors", [0x00, 0x01, 0x10])
def test_a_frame_whose_components_have_no_samples_is_damage(factors: int) -> None:
    clean = gray_jpeg(photo(9, 7)[:, :, 0])
    frame = clean.index(b"\xff\xc0")
    odd = clean[:frame] + b"\x00" + clean[frame : frame + 11] + bytes((factors,)) + clean[frame + 12 :]
    assert refusal(odd)[0] is RejectReason.CORRUPT_SCAN
