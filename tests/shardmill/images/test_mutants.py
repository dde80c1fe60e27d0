"""Damaged copies of small real images: none crashes or hangs, each is accounted for, and twice the same.

300 mutants, the same in every run; in `make test-all` 10,000. A failure names its mutant:
`mutant(1234)` makes it again.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections import Counter

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

from shardmill.formats.encodings import decode_stored
from shardmill.images.process import process_image
from shardmill.images.sandbox import DecodeSandbox
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from tests.lab.scale import usually
from tests.shardmill.images.make import (
    OPTIONS,
    gray_profile,
    jpeg,
    one_of_each_format,
    png,
    rgb_profile,
    with_orientation,
    with_profile,
)

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
