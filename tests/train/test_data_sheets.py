"""What is predicted for a device that is not here: arithmetic on its data sheet, and never without its assumption."""

from __future__ import annotations

import pytest

from tests.train.test_backends import LINEAR, SHAPE, learner
from tests.train.test_models import batch_of
from train.backends import BACKENDS
from train.checks.data_sheets import DATA_SHEETS, LEAST_LAUNCHES_SECONDS, MOST_LAUNCHES_SECONDS, predicted

# ResNet-50 on 224x224, forward and backward.
IMAGE_FLOPS = 24_000_000_000


@pytest.mark.parametrize(
    ("kind", "precision", "lowest_tflops", "highest_tflops", "stated"),
    [
        ("H200", "bfloat16", 98.9, 494.5, "(989 TFLOP/s in bfloat16)"),
        # Some layers in TF32, others not.
        ("H200", "off", 6.7, 247, "(67 TFLOP/s in float32, 494 in TF32)"),
        ("V100", "off", 1.57, 7.85, "(15.7 TFLOP/s in float32)"),
        ("T4", "float16", 6.5, 32.5, "(65 TFLOP/s in float16)"),
    ],
)
def test_a_tenth_to_half_of_the_stated_peak(kind, precision, lowest_tflops, highest_tflops, stated):
    found = predicted(kind, precision, IMAGE_FLOPS, (128, 1024), 0.01)
    assert found is not None
    counted = 128 * IMAGE_FLOPS / 1e12
    assert found.least_step_seconds == pytest.approx(counted / highest_tflops + 0.01)
    assert found.most_step_seconds == pytest.approx(counted / lowest_tflops + 0.01)
    assert found.least_images_per_second == pytest.approx(1024 / found.most_step_seconds)
    assert found.most_images_per_second == pytest.approx(1024 / found.least_step_seconds)
    told = str(found)
    assert told.startswith("predicted, not measured: ") and stated in told
    assert f"24 GFLOP an image, forward and backward, at 10% to 50% of the peak that the data sheet of {kind}" in told
    assert "10.0 ms of exchange" in told and "launching" not in told


def test_a_tiny_model_is_as_fast_as_its_kernels_are_launched():
    found = predicted("H200", "bfloat16", 1000, (8, 64), 0.0)
    assert found is not None
    assert (found.least_step_seconds, found.most_step_seconds) == (LEAST_LAUNCHES_SECONDS, MOST_LAUNCHES_SECONDS)
    assert "launching its kernels counts, taken as 0.5 to 5 ms" in str(found)


def test_no_figure_without_a_count_or_a_peak():
    assert predicted("H200", "off", 0, (128, 1024), 0.0) is None
    assert predicted("V100", "bfloat16", IMAGE_FLOPS, (128, 1024), 0.0) is None


@pytest.mark.parametrize("sheet", DATA_SHEETS.values(), ids=DATA_SHEETS)
def test_lower_precisions_are_no_slower(sheet):
    assert sheet.float32 <= (sheet.tf32 or sheet.float32) <= sheet.float16
    assert sheet.bfloat16 in (0.0, sheet.float16)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", BACKENDS)
def test_operations_are_counted_forward_and_backward(name, parts):
    """A linear layer: a product with its weights, and one for their gradient; the images need none."""
    one = learner(name, LINEAR[name], accumulation_steps=parts, num_streams=1)
    in_products = 6 * 2 * (2 * 16 * 16 * 3 * 3)
    # TensorFlow also counts what is done to each pixel, the loss and the bias.
    assert in_products <= one.num_flops(batch_of(SHAPE, num_rows=6)) < 1.5 * in_products
