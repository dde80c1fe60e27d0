"""`process_image` is pure, deterministic and total: whatever the bytes, a sample or a rejection comes back."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.formats.encodings import decode_stored
from shardmill.images.decode import DECODERS
from shardmill.images.process import process_image
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from tests.shardmill.images.make import OPTIONS, gray_photo, jpeg, one_of_each_format, photo, png

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
