"""Sharpness and thumbnails are the same integers by OpenCV and by the native kernel, and those of their definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmill.images import look
from shardmill.images.look import difference_hash, laplacian_square_sum, luma
from shardmill.kernel import shardmill_native

HAS_NATIVE = hasattr(shardmill_native, "average_blocks")
FUNCTIONS = {
    "opencv": (None, None),
    "native": tuple(getattr(shardmill_native, name, None) for name in ("laplacian_square_sum", "average_blocks")),
}
# One block is 1, 2, 3 or more pixels high and wide; a row has more pixels than the kernel adds up in 32 bits.
SHAPES = st.tuples(st.integers(1, 150), st.integers(1, 150)) | st.sampled_from([(1, 1), (1, 9), (2, 2), (3, 4500)])


@pytest.fixture(params=["opencv", pytest.param("native", marks=pytest.mark.skipif(not HAS_NATIVE, reason="not built"))])
def kernel(request, monkeypatch):
    for name, function in zip(("_native_square_sum", "_native_average"), FUNCTIONS[request.param], strict=True):
        monkeypatch.setattr(look, name, function)


def defined_square_sum(luma_HW: np.ndarray) -> int:
    """Beyond an edge is the pixel before it, or the only one."""
    values = luma_HW.astype(np.int64)
    for axis in (0, 1):
        mode = "reflect" if values.shape[axis] > 1 else "edge"
        values = np.pad(values, [(1, 1) if each == axis else (0, 0) for each in (0, 1)], mode=mode)
    around = values[:-2, 1:-1] + values[2:, 1:-1] + values[1:-1, :-2] + values[1:-1, 2:]
    return int(((around - 4 * values[1:-1, 1:-1]) ** 2).sum())


@pytest.mark.usefixtures("kernel")
@given(SHAPES, st.sampled_from([1, 3]), st.sampled_from([0, 120, 250]), st.integers(0, 2**32))
@example((3, 4500), 1, -1, 0)
def test_sharpness_is_exact(shape, channels, least, seed):
    if least < 0:  # a chessboard has the largest Laplacian
        image_HWC = (np.indices((*shape, channels)).sum(0) % 2 * 255).astype(np.uint8)
    else:
        image_HWC = np.random.default_rng(seed).integers(least, 256, (*shape, channels)).astype(np.uint8)
    luma_HW = luma(image_HWC)
    assert laplacian_square_sum(luma_HW) == defined_square_sum(luma_HW)
    # A view, as of a channel.
    assert laplacian_square_sum(luma_HW[:, ::-1]) == defined_square_sum(luma_HW)


@pytest.mark.skipif(not HAS_NATIVE, reason="the native kernel is not built, or an old one")
@given(SHAPES, st.sampled_from([2, 256]), st.integers(0, 2**32))
@example((9000, 40), 256, 0)  # blocks of more rows than the kernel adds up in 16 bits
def test_thumbnails_of_the_kernel_are_those_of_opencv(shape, num_values, seed):
    luma_HW = np.random.default_rng(seed).integers(256 - num_values, 256, shape).astype(np.uint8)
    by_kernel, hash_by_kernel = look._shrunk(luma_HW), difference_hash(luma_HW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(look, "_native_average", None)
        np.testing.assert_array_equal(by_kernel, look._shrunk(luma_HW))
        assert hash_by_kernel == difference_hash(luma_HW)


@pytest.mark.skipif(not HAS_NATIVE, reason="the native kernel is not built, or an old one")
def test_the_kernel_refuses_what_it_would_misread():
    luma_HW, means_HW = np.zeros((4, 6), np.uint8), np.zeros((2, 3), np.uint8)
    for wrong in (np.zeros((4, 4, 1), np.uint8), np.zeros((4, 4), np.uint16), np.zeros((0, 4), np.uint8)):
        with pytest.raises(ValueError, match="uint8"):
            shardmill_native.laplacian_square_sum(wrong)
        with pytest.raises(ValueError, match="uint8"):
            shardmill_native.average_blocks(wrong, means_HW, (1, 1))
        with pytest.raises(ValueError, match="uint8"):
            shardmill_native.average_blocks(luma_HW, wrong, (1, 1))
    for block in ((3, 2), (2, 3), (0, 1), (1, -1), (2**62, 1)):
        with pytest.raises(ValueError, match="inside"):
            shardmill_native.average_blocks(luma_HW, means_HW, block)
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        shardmill_native.laplacian_square_sum(luma_HW[:, ::2])
