"""The sandbox: the answers of `process_image`, or a rejection of what crashes, hangs or grows; nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardmill.errors import StorageError
from shardmill.images.process import process_image
from shardmill.images.sandbox import DecodeSandbox
from shardmill.options import DecodeLimits
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from tests.processes import children_of, is_running
from tests.shardmill.images.make import OPTIONS, gray_photo, jpeg, one_of_each_format, photo, png

pytestmark = pytest.mark.starts("decoder", "program")

MISBEHAVE = "tests.shardmill.images.misbehaving:misbehave"
# Longer than a machine pauses; HASTE is for code that never ends.
LIMITS = DecodeLimits(decode_timeout_seconds=60, decode_memory_bytes=300_000_000)
HASTE = DecodeLimits(decode_timeout_seconds=0.5)
DATA = jpeg(photo())
GOOD = SourceImage("good", len(DATA))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[DecodeSandbox]:
    with DecodeSandbox(LIMITS, MISBEHAVE, config_section="etl") as sandbox:
        yield sandbox


# What this process had started before: the servers and the warm child of other tests.
OTHERS: set[int] = set()


@pytest.fixture(autouse=True, scope="module")
def others() -> None:
    OTHERS.update(child_pids())


def child_pids() -> set[int]:
    """Children that the tests of this file have started, zombies included."""
    return children_of(os.getpid()) - OTHERS


def test_answers_are_those_of_process_image(sandbox: DecodeSandbox) -> None:
    files = {**one_of_each_format(), "empty": b"", "html": b"<html>", "cut": DATA[:100], "large": bytes(5_000_000)}
    for encoding in ("jpeg", "raw"):
        options = OPTIONS.model_copy(update={"encoding": encoding})
        for key, data in files.items():
            source = SourceImage(key, len(data), mtime_ns=5, etag="e", label="a", sample_id=3)
            assert sandbox.process(source, data, options) == process_image(source, data, options), key


@pytest.mark.parametrize(
    ("key", "reason", "named"),
    [
        ("abort", RejectReason.DECODER_CRASH, "SIGABRT"),
        ("segfault", RejectReason.DECODER_CRASH, "SIGSEGV"),
        ("exit", RejectReason.DECODER_CRASH, "status 7"),
        ("raise", RejectReason.DECODER_CRASH, "status 1"),
        ("kill", RejectReason.DECODER_MEMORY, "from outside"),
        ("allocate", RejectReason.DECODER_MEMORY, "300000000 bytes; etl.decode_memory_bytes"),
    ],
)
def test_what_breaks_a_limit_is_rejected_and_the_next_image_is_not(
    sandbox: DecodeSandbox, key: str, reason: RejectReason, named: str
) -> None:
    outcome = sandbox.process(SourceImage(key, len(DATA), mtime_ns=5, etag="e"), DATA, OPTIONS)
    assert isinstance(outcome, Rejection)
    assert (outcome.reason, outcome.key, outcome.stage) == (reason, key, "decode")
    assert named in outcome.detail
    assert outcome.source_sha256 == process_image(GOOD, DATA, OPTIONS).source_sha256
    assert sandbox.process(GOOD, DATA, OPTIONS) == process_image(GOOD, DATA, OPTIONS)
    assert len(child_pids()) <= 1


@pytest.mark.parametrize("key", ["spin", "sleep"])
def test_what_takes_too_long_is_rejected_and_the_next_image_is_not(key: str) -> None:
    others = child_pids()
    with DecodeSandbox(HASTE, MISBEHAVE, config_section="etl") as sandbox:
        outcome = sandbox.process(SourceImage(key, len(DATA), mtime_ns=5, etag="e"), DATA, OPTIONS)
        assert isinstance(outcome, Rejection)
        assert (outcome.reason, outcome.key, outcome.stage) == (RejectReason.DECODER_TIMEOUT, key, "decode")
        assert "0.5 s; etl.decode_timeout_seconds" in outcome.detail
        assert outcome.source_sha256 == process_image(GOOD, DATA, OPTIONS).source_sha256
        assert sandbox.process(GOOD, DATA, OPTIONS) == process_image(GOOD, DATA, OPTIONS)
        assert len(child_pids() - others) == 1


def test_an_image_that_fails_once_is_not_rejected(sandbox: DecodeSandbox, tmp_path: Path) -> None:
    outcome = sandbox.process(SourceImage(f"once:{tmp_path}/seen", len(DATA)), DATA, OPTIONS)
    assert isinstance(outcome, ImageSample)


def test_a_child_stays_warm_and_its_prints_do_no_harm(sandbox: DecodeSandbox) -> None:
    sandbox.process(GOOD, DATA, OPTIONS)
    before = child_pids()
    assert isinstance(sandbox.process(SourceImage("print", len(DATA)), DATA, OPTIONS), ImageSample)
    assert child_pids() == before


def test_an_answer_that_nobody_asked_for_is_not_the_next_images(sandbox: DecodeSandbox) -> None:
    gray = png(gray_photo())
    forgotten = sandbox.start(SourceImage("forgotten", len(gray)), gray, OPTIONS)
    assert sandbox.process(GOOD, DATA, OPTIONS) == process_image(GOOD, DATA, OPTIONS)
    with pytest.raises(ValueError, match="last one that was started"):
        sandbox.finish(forgotten)


@pytest.mark.parametrize("num_bytes", [len(DATA), 8_000_000])
def test_a_child_that_takes_nothing_more_is_given_up_in_time(num_bytes: int) -> None:
    data = DATA + bytes(num_bytes - len(DATA))
    others = child_pids()
    hours, child = 0, None

    def clock() -> float:
        """An hour goes by whenever the stopped child is waited for."""
        nonlocal hours
        hours += child in child_pids()
        return time.monotonic() + 3600 * hours

    with DecodeSandbox(DecodeLimits(decode_timeout_seconds=30), MISBEHAVE, clock=clock) as sandbox:
        sandbox.process(GOOD, DATA, OPTIONS)
        [child] = child_pids() - others
        os.kill(child, signal.SIGSTOP)
        assert isinstance(sandbox.process(SourceImage("good", len(data)), data, OPTIONS), ImageSample)
        assert child not in child_pids()


@pytest.mark.drill
def test_a_child_that_closes_its_pipe_and_lives_on_is_ended() -> None:
    # Both tries of it wait ten seconds: what dumps its core closes its pipes first.
    with DecodeSandbox(LIMITS, MISBEHAVE, config_section="etl") as sandbox:
        outcome = sandbox.process(SourceImage("close", len(DATA)), DATA, OPTIONS)
        assert isinstance(outcome, Rejection) and outcome.reason is RejectReason.DECODER_CRASH


def test_a_message_beyond_the_memory_limit_is_no_crash() -> None:
    data = DATA + bytes(60_000_000)
    with DecodeSandbox(DecodeLimits.model_construct(decode_memory_bytes=30_000_000)) as sandbox:
        outcome = sandbox.process(SourceImage("large", len(data)), data, OPTIONS)
        assert isinstance(outcome, Rejection) and outcome.reason is RejectReason.TOO_LARGE_BYTES, outcome


def test_the_parents_own_reading_is_not_the_childs_time() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), np.uint8)
    options = OPTIONS.model_copy(update={"encoding": "raw", "image_size": 1500})
    data = png(pixels)
    now, others = 0.0, child_pids()
    with DecodeSandbox(DecodeLimits(decode_timeout_seconds=60), clock=lambda: now) as sandbox:
        sandbox.process(GOOD, DATA, OPTIONS)
        [child] = child_pids() - others
        pending = sandbox.start(SourceImage("raw", len(data)), data, options)
        os.kill(child, signal.SIGSTOP)
        now += 3600
        # What it wrote before it stopped is not all: its answer is larger than the pipe.
        threading.Timer(0.1, os.kill, (child, signal.SIGCONT)).start()
        assert isinstance(sandbox.finish(pending), ImageSample)
        assert child_pids() - others == {child}


def test_real_limits_of_memory_count_what_decoders_take() -> None:
    """A 49-megapixel PNG of a few kilobytes: 147 MB of pixels, and their copies."""
    bomb = png(np.zeros((7000, 7000, 3), np.uint8))
    source = SourceImage("bomb.png", len(bomb))
    with DecodeSandbox(DecodeLimits(decode_memory_bytes=100_000_000)) as small, DecodeSandbox() as large:
        outcome = small.process(source, bomb, OPTIONS)
        assert isinstance(outcome, Rejection) and outcome.reason is RejectReason.DECODER_MEMORY, outcome
        assert isinstance(large.process(source, bomb, OPTIONS), ImageSample)


def test_files_in_the_working_directory_are_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("numpy", "json", "shardmill", "cv2"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a user file was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":.:{os.environ.get('PYTHONPATH', '')}")
    with DecodeSandbox() as sandbox:
        assert isinstance(sandbox.process(GOOD, DATA, OPTIONS), ImageSample)


def test_a_child_that_cannot_start_is_no_images_fault() -> None:
    with DecodeSandbox(entry="no.such.module:function") as sandbox:
        with pytest.raises(StorageError, match="can import this shardmill"):
            sandbox.process(GOOD, DATA, OPTIONS)
    assert len(child_pids()) <= 1  # the warm child of the other tests


def test_no_child_outlives_a_killed_parent() -> None:
    command = [sys.executable, "-m", "tests.programs.own_a_sandbox", MISBEHAVE]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"
    [child] = children_of(parent.pid)
    parent.kill()
    parent.communicate()
    while is_running(child):  # until pytest ends the test, if it outlives its parent
        time.sleep(0.02)


def test_ctrl_c_is_the_parents_matter(sandbox: DecodeSandbox) -> None:
    sandbox.process(GOOD, DATA, OPTIONS)
    [child] = child_pids()
    os.kill(child, signal.SIGINT)
    os.kill(child, signal.SIGTERM)
    sandbox.process(GOOD, DATA, OPTIONS)
    assert child_pids() == {child}
