"""The native kernel's walks over a JPEG's markers, beside those of the wheels, on whole files and damaged ones."""

from __future__ import annotations

import numpy as np
import pytest

from shardmill.images.jpeg_markers import MAX_SEGMENTS, TABLES, search_scan_or_end, segments
from shardmill.images.pixels import Refused
from tests.shardmill.images.make import gray_jpeg, gray_photo, jpeg, photo

native = pytest.importorskip("shardmill_native", reason="the native kernel is not built (scripts/setup.sh says why)")


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
