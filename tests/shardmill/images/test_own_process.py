"""Decoding in this very process: limits hold for images alone, and of a run of images each has its time for itself."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from shardmill.images.own_process import OwnProcessDecoder
from shardmill.images.process import process_image
from shardmill.options import DecodeLimits, NormalizeOptions
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from tests.shardmill.images.make import gray_photo, png

OPTIONS = NormalizeOptions(image_size=16, encoding="png")
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
    outcomes = list(decoder.decode(without_limits(images), OPTIONS))
    assert outcomes == [(source, process_image(source, data, OPTIONS)) for source, data in images]


@pytest.mark.starts("decoder")
def test_of_a_run_of_images_one_that_needs_too_much_memory_is_refused_and_no_neighbour_is():
    images = images_of(SMALL, SMALL, HUGE, SMALL)
    decoder = OwnProcessDecoder(DecodeLimits(decode_memory_bytes=100_000_000))
    outcomes = [outcome for _, outcome in decoder.decode(without_limits(images), OPTIONS)]
    refused = outcomes.pop(2)
    assert isinstance(refused, Rejection) and refused.reason is RejectReason.DECODER_MEMORY
    assert all(isinstance(outcome, ImageSample) for outcome in outcomes)


def decode_all(images: Images, limits: DecodeLimits) -> None:
    assert len(list(OwnProcessDecoder(limits).decode(images, OPTIONS))) == len(images)


def exit_code_of(images: Images, limits: DecodeLimits) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=decode_all, args=(images, limits))
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.starts("program")
def test_each_image_of_a_run_has_the_time_for_itself():
    images = images_of(*[png(np.zeros((3000, 3000, 3), np.uint8))] * 6)
    process_image(*images[0], OPTIONS)
    begun = time.process_time()
    process_image(*images[0], OPTIONS)
    seconds = time.process_time() - begun
    assert exit_code_of(images, DecodeLimits(decode_timeout_seconds=3 * seconds)) == 0
    assert exit_code_of(images, DecodeLimits(decode_timeout_seconds=seconds / 3)) == -signal.SIGPROF
