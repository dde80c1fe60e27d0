"""One image through the chain: each reason, damaged images, and decoding in a process."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import multiprocessing
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_sample_images

from shardmill.formats.encodings import decode_stored
from shardmill.images import sandbox
from shardmill.images.decode import DECODERS
from shardmill.images.process import process_image
from shardmill.images.sandbox import DecodeSandbox, OwnProcessDecoder
from shardmill.options import DecodeLimits, NormalizeOptions
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from tests.lab.scale import usually
from tests.shardmill.images.make import (
    OPTIONS,
    gray_photo,
    gray_profile,
    jpeg,
    one_of_each_format,
    photo,
    png,
    rgb_profile,
    with_orientation,
    with_profile,
)

# Small enough that a header which a mutation blew up costs nothing to decode.
FUZZ_OPTIONS = OPTIONS.model_copy(update={"max_source_pixels": 1_000_000})
INTACT_FILES = one_of_each_format()
SIGNATURES = sorted({data[:12] for data in INTACT_FILES.values()})


def run(data: bytes, key: str = "a/b", options: NormalizeOptions = OPTIONS) -> ImageSample | Rejection:
    return process_image(SourceImage(key=key, size_bytes=len(data), mtime_ns=5, etag="e"), data, options)


def check_total_and_repeatable(data: bytes) -> None:
    first, second = (run(data, options=FUZZ_OPTIONS) for _ in range(2))
    assert first == second
    assert first.source_sha256 == hashlib.sha256(data).hexdigest()
    if isinstance(first, Rejection):
        assert first.reason in RejectReason
        # This reason means that one of our own decoders raised: a bug to fix, although no job ends over it.
        assert first.reason is not RejectReason.DECODER_ERROR, first.detail
        assert (first.key, first.size_bytes, first.mtime_ns, first.etag) == ("a/b", len(data), 5, "e")
        assert first.stage == "decode"
        assert first.detail.isprintable()
    else:
        shape_HWC = (first.height, first.width, first.channels)
        assert shape_HWC == FUZZ_OPTIONS.image_shape_HWC
        assert decode_stored(first.image, FUZZ_OPTIONS.encoding, shape_HWC).shape == shape_HWC


@given(st.builds(bytes.__add__, st.sampled_from([b"", *SIGNATURES]), st.binary(max_size=300)))
def test_any_bytes_have_one_disposition(data: bytes) -> None:
    check_total_and_repeatable(data)


@pytest.mark.parametrize("name", sorted(INTACT_FILES))
def test_intact_files_are_accepted(name: str) -> None:
    sample = run(INTACT_FILES[name])
    assert isinstance(sample, ImageSample), sample


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("encoding", ["png", "raw"])
def test_channel_sums_are_exact(encoding: str, color: str) -> None:
    options = NormalizeOptions.model_validate({"image_size": 19, "encoding": encoding, "color": color})
    sample = run(png(photo(41, 37)), options=options)
    assert isinstance(sample, ImageSample)
    stored_HWC = decode_stored(sample.image, encoding, options.image_shape_HWC).astype(np.int64)
    assert sample.channel_sums == tuple(stored_HWC.sum(axis=(0, 1)))
    assert sample.channel_square_sums == tuple((stored_HWC**2).sum(axis=(0, 1)))


def test_notes_come_from_name_size_and_content() -> None:
    accepted = {
        "x.jpg": (png(photo()), ("extension_mismatch",)),
        "x.PNG": (png(photo()), ()),
        "x.unknown": (png(photo()), ()),
        "png": (png(photo()), ()),
        "d.jpg/x": (png(photo()), ()),
        "tiny.png": (png(photo(7, 7)), ("tiny",)),
        "narrow.png": (png(photo(40, 7)), ("tiny",)),
        "small.png": (png(photo(8, 8)), ()),
        "one.png": (png(photo(1, 1)), ("tiny", "constant")),
        "black.png": (png(np.zeros((9, 9), np.uint8)), ("constant",)),
        "nearly.png": (png(np.eye(9, dtype=np.uint8)), ()),
    }
    for key, (data, notes) in accepted.items():
        sample = run(data, key)
        assert isinstance(sample, ImageSample), (key, sample)
        assert sample.notes == notes, key


def test_a_source_over_the_byte_limit_is_refused_unread() -> None:
    options = OPTIONS.model_copy(update={"max_source_bytes": 100})
    rejection = run(bytes(101), options=options)
    assert isinstance(rejection, Rejection)
    assert rejection.reason is RejectReason.TOO_LARGE_BYTES
    assert "max_source_bytes is 100" in rejection.detail
    data = png(photo())
    assert isinstance(run(data, options=OPTIONS.model_copy(update={"max_source_bytes": len(data)})), ImageSample)


def test_height_and_width_are_those_of_what_is_stored_and_of_the_source() -> None:
    options = OPTIONS.model_copy(update={"resize_mode": "shorter", "encoding": "png"})
    sample = run(png(photo(30, 60)), options=options)
    assert isinstance(sample, ImageSample)
    assert (sample.height, sample.width, sample.channels) == (24, 48, 3)
    assert (sample.source_height, sample.source_width) == (30, 60)
    assert decode_stored(sample.image, "png", (24, 48, 3)).shape == (24, 48, 3)


def test_only_a_file_of_the_stored_encoding_and_size_is_kept() -> None:
    options = NormalizeOptions(image_size=24, encoding="jpeg", keep_bytes=True)
    for data, is_kept in (
        (jpeg(photo(24, 24)), True),
        (png(photo(24, 24)), False),
        (jpeg(photo(24, 32)), False),
    ):
        sample = run(data, options=options)
        assert isinstance(sample, ImageSample) and sample.image.startswith(b"\xff\xd8")
        assert (sample.image == data) == is_kept


def test_a_source_of_fewer_bytes_than_asked_for_is_left_out() -> None:
    data = jpeg(photo())
    for least, reason in ((len(data), None), (len(data) + 1, RejectReason.TOO_SMALL)):
        options = OPTIONS.model_copy(update={"min_source_bytes": least})
        found = run(data, options=options)
        assert (found.reason if isinstance(found, Rejection) else None) is reason
        assert reason is None or found.detail == f"{len(data)} bytes; min_source_bytes is {least}"
        empty = run(b"", options=options)
        assert isinstance(empty, Rejection) and empty.reason is RejectReason.EMPTY_FILE


def test_the_answer_ignores_everything_about_the_source_but_its_name() -> None:
    data = jpeg(photo())
    source = SourceImage(key="x.jpg", size_bytes=len(data))
    others = [
        dataclasses.replace(source, mtime_ns=1, label="cat", split="test", sample_id=9),
        dataclasses.replace(source, key="other/y.jpeg"),
    ]
    assert all(process_image(other, data, OPTIONS) == process_image(source, data, OPTIONS) for other in others)


def test_nothing_of_the_metadata_reaches_the_stored_image() -> None:
    secret = b"GPS 52.5200 N 13.4050 E"
    data = jpeg(photo())
    segments = b"".join(
        bytes((0xFF, marker)) + (len(secret) + 8).to_bytes(2) + b"Exif\0\0" + secret for marker in (0xE1, 0xED, 0xFE)
    )
    sample = run(data[:2] + segments + data[2:])
    assert isinstance(sample, ImageSample)
    assert secret[:8] not in sample.image
    assert b"Exif" not in sample.image


def test_a_bug_in_a_decoder_becomes_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes, options: NormalizeOptions) -> None:
        raise ZeroDivisionError("on\nthis file")

    monkeypatch.setitem(DECODERS, "png", broken)
    rejection = run(png(photo()))
    assert isinstance(rejection, Rejection)
    assert (rejection.reason, rejection.detail) == (RejectReason.DECODER_ERROR, "ZeroDivisionError: on\\nthis file")


def test_running_out_of_memory_is_not_the_images_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(data: bytes, options: NormalizeOptions) -> None:
        raise MemoryError

    monkeypatch.setitem(DECODERS, "png", starved)
    with pytest.raises(MemoryError):
        run(png(photo()))


def test_gray_sources_become_three_equal_channels_and_back() -> None:
    data = png(gray_photo())
    raw = NormalizeOptions(image_size=24, encoding="raw")
    rgb, gray = run(data, options=raw), run(data, options=raw.model_copy(update={"color": "gray"}))
    assert isinstance(rgb, ImageSample)
    assert isinstance(gray, ImageSample)
    rgb_HWC, gray_HWC = decode_stored(rgb.image, "raw", (24, 24, 3)), decode_stored(gray.image, "raw", (24, 24, 1))
    assert np.array_equal(rgb_HWC, np.repeat(gray_HWC, 3, axis=2))


@pytest.mark.parametrize("name", sorted(INTACT_FILES))
def test_an_image_smaller_than_asked_for_is_left_out_in_every_format(name: str) -> None:
    sample = run(INTACT_FILES[name], options=OPTIONS.model_copy(update={"min_source_side_pixels": 24}))
    assert isinstance(sample, ImageSample), sample
    rejection = run(INTACT_FILES[name], options=OPTIONS.model_copy(update={"min_source_side_pixels": 25}))
    assert isinstance(rejection, Rejection)
    assert rejection.reason is RejectReason.TOO_SMALL
    assert rejection.detail == "declares 32x24; min_source_side_pixels is 25"


NUM_MUTANTS = usually(300, 10_000)
# Small enough that a header which a mutation blew up costs nothing to decode.
OPTIONS_OF_MUTANTS = OPTIONS.model_copy(update={"max_source_pixels": 1_000_000})
KINDS = ("flip", "flip", "cut", "splice", "overwrite", "size")
# Where the formats keep their widths and heights: PNG, GIF, WebP, BMP; a JPEG's frame is looked for.
SIZE_PLACES = (16, 20, 6, 8, 26, 28, 18, 22)


@functools.cache
def intact_files() -> list[bytes]:
    """Pieces of two photographs in every format, and with what else decoders look at."""
    pictures = [np.ascontiguousarray(each[200:224, 300:332]) for each in load_sample_images().images]
    files = [data for picture in pictures for data in one_of_each_format(picture).values()]
    tagged = with_profile(with_orientation(jpeg(pictures[0]), 6), rgb_profile())
    large = jpeg(np.ascontiguousarray(load_sample_images().images[0][:160, :160]), 60)  # decoded at 1/2
    return [*files, tagged, with_profile(jpeg(pictures[1]), gray_profile(1.8)), png(pictures[0][:, :, 0]), large]


def mutant(number: int) -> bytes:
    """One of the intact files after one to four changes; a function of its number alone."""
    rng = random.Random(number)
    data = bytearray(rng.choice(intact_files()))
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        match rng.choice(KINDS):
            case "flip":
                data[place] ^= 1 << rng.randrange(8)
            case "cut":
                del data[max(1, place) :]
            case "splice":
                other = rng.choice(intact_files())
                start = rng.randrange(len(other))
                data[place:place] = other[start : start + rng.randint(1, 64)]
            case "overwrite":
                data[place % min(len(data), 64)] = rng.choice([0x00, 0x01, 0x7F, 0xC0, 0xD9, 0xFF])
            case "size":
                frame = data.find(b"\xff\xc0")
                place = frame + rng.choice([5, 7]) if frame >= 0 else rng.choice(SIZE_PLACES)
                data[place : place + 2] = rng.choice([0, 1, 33, 500, 65535]).to_bytes(2, rng.choice(["big", "little"]))
    return bytes(data)


@pytest.mark.starts("decoder")
def test_no_mutant_crashes_or_hangs_and_each_ends_the_same_twice() -> None:
    dispositions: Counter[str] = Counter()
    with DecodeSandbox() as sandbox:
        for number in range(NUM_MUTANTS):
            data = mutant(number)
            source = SourceImage(f"mutant {number}", len(data), mtime_ns=5, etag="e")
            first = sandbox.process(source, data, OPTIONS_OF_MUTANTS)
            # The second time without the sandbox, where nothing could hide an exception.
            assert process_image(source, data, OPTIONS_OF_MUTANTS) == first, number
            assert first.source_sha256 == hashlib.sha256(data).hexdigest(), number
            if isinstance(first, Rejection):
                assert first.reason in RejectReason, number
                assert not first.reason.startswith("decoder_"), (number, first)
                assert (first.key, first.size_bytes, first.mtime_ns, first.etag) == (source.key, len(data), 5, "e")
                assert first.stage == "decode", number
                assert first.detail.isprintable(), number
                dispositions[first.reason] += 1
            else:
                shape_HWC = (first.height, first.width, first.channels)
                assert shape_HWC == OPTIONS_OF_MUTANTS.image_shape_HWC, number
                decode_stored(first.image, OPTIONS_OF_MUTANTS.encoding, shape_HWC)
                dispositions["accepted"] += 1
    print(dispositions)
    assert dispositions.total() == NUM_MUTANTS
    # The mutations must not all be of one kind: each of these is met dozens of times in 300.
    assert {"accepted", "truncated", "corrupt_scan", "checksum", "bad_header", "not_an_image"} <= set(dispositions)


def test_no_mutant_ends_otherwise_with_the_native_kernel() -> None:
    pytest.importorskip("shardmill_native", reason="the native kernel is not built (scripts/setup.sh says why)")
    # Smaller than every one of the pictures, so that there is something to shrink.
    wheels = OPTIONS_OF_MUTANTS.model_copy(update={"image_size": 18, "encoding": "raw"})
    native = wheels.model_copy(update={"kernel": "native"})
    num_accepted = num_rejected = num_different = 0
    for number in range(NUM_MUTANTS):
        data = mutant(number)
        if data[:2] != b"\xff\xd8":
            continue
        source = SourceImage(f"mutant {number}.jpg", len(data))
        expected, found = (process_image(source, data, options) for options in (wheels, native))
        if isinstance(expected, Rejection):
            assert found == expected, number
            num_rejected += 1
            continue
        assert isinstance(found, ImageSample), number
        assert (found.notes, found.source_sha256) == (expected.notes, expected.source_sha256), number
        pixels, expected_pixels = (np.frombuffer(each.image, np.uint8).astype(int) for each in (found, expected))
        assert np.abs(pixels - expected_pixels).max() <= 1, number
        num_accepted += 1
        num_different += found.image != expected.image
    assert min(num_accepted, num_rejected) > NUM_MUTANTS / 40 and num_different > NUM_MUTANTS / 200


PNG_OPTIONS = NormalizeOptions(image_size=16, encoding="png")
SMALL = png(gray_photo())
# 49 megapixels in some kilobytes.
HUGE = png(np.zeros((7000, 7000, 3), np.uint8))

Images = list[tuple[SourceImage, bytes]]


def images_of(*contents: bytes) -> Images:
    return [(SourceImage(f"{number}.png", len(data)), data) for number, data in enumerate(contents)]


def without_limits(images: Images) -> Iterator[tuple[SourceImage, bytes]]:
    """Asserts, whenever the decoder takes an image, that nothing limits who reads it."""
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    for image in images:
        yield image
        assert resource.getrlimit(resource.RLIMIT_AS) == unlimited
        assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_outcomes_come_in_order_and_limits_hold_for_nothing_else():
    images = images_of(*[SMALL, b"not an image"] * 40)
    decoder = OwnProcessDecoder(DecodeLimits())
    outcomes = list(decoder.decode(without_limits(images), PNG_OPTIONS))
    assert outcomes == [(source, process_image(source, data, PNG_OPTIONS)) for source, data in images]


@pytest.mark.starts("decoder")
def test_of_a_run_of_images_one_that_needs_too_much_memory_is_refused_and_no_neighbour_is():
    images = images_of(SMALL, SMALL, HUGE, SMALL)
    decoder = OwnProcessDecoder(DecodeLimits(decode_memory_bytes=100_000_000))
    outcomes = [outcome for _, outcome in decoder.decode(without_limits(images), PNG_OPTIONS)]
    refused = outcomes.pop(2)
    assert isinstance(refused, Rejection) and refused.reason is RejectReason.DECODER_MEMORY
    assert all(isinstance(outcome, ImageSample) for outcome in outcomes)


def decode_all(images: Images, limits: DecodeLimits) -> None:
    assert len(list(OwnProcessDecoder(limits).decode(images, PNG_OPTIONS))) == len(images)


def exit_code_of(images: Images, limits: DecodeLimits) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=decode_all, args=(images, limits))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.starts("program")
def test_each_image_of_a_run_has_the_time_for_itself(monkeypatch: pytest.MonkeyPatch):
    # Only CPU time counts here, however long the machine pauses.
    monkeypatch.setattr(sandbox, "CLOCK_PER_CPU_SECOND", 10_000)
    images = images_of(*[png(np.zeros((2000, 2000, 3), np.uint8))] * 20)
    process_image(*images[0], PNG_OPTIONS)
    begun = time.process_time()
    process_image(*images[0], PNG_OPTIONS)
    seconds = time.process_time() - begun
    assert exit_code_of(images, DecodeLimits(decode_timeout_seconds=8 * seconds)) == 0
    assert exit_code_of(images, DecodeLimits(decode_timeout_seconds=seconds / 20)) == -signal.SIGPROF
