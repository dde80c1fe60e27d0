"""GPUs by the names that people give, as their makers' data sheets have them, and what that says of a step: a range.

Pure. A data sheet states peaks, of which a network reaches a part that depends on its layers and its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_OF_PEAK, MOST_OF_PEAK = 0.1, 0.5
# A step launches hundreds of kernels, some microseconds each: it takes no less than one of these, whatever it computes.
LEAST_LAUNCHES_SECONDS, MOST_LAUNCHES_SECONDS = 0.0005, 0.005
GIB = 2**30


@dataclass(frozen=True, slots=True)
class DataSheet:
    """One kind of GPU; peaks in TFLOP/s, without sparsity."""

    memory_gib: int
    """What a program can use."""
    float32: float
    tf32: float = 0.0
    """By which frameworks may compute float32; 0 if it has none."""
    float16: float = 0.0
    bfloat16: float = 0.0

    @property
    def memory_bytes(self) -> int:
        return self.memory_gib * GIB


DATA_SHEETS = {
    "T4": DataSheet(15, 8.1, float16=65),
    "V100": DataSheet(16, 15.7, float16=125),
    "A10": DataSheet(22, 31.2, 62.5, 125, 125),
    "L4": DataSheet(22, 30.3, 60, 121, 121),
    "RTX4090": DataSheet(24, 82.6, 82.6, 165, 165),
    "A100": DataSheet(40, 19.5, 156, 312, 312),
    "L40S": DataSheet(45, 91.6, 183, 362, 362),
    "A100-80": DataSheet(80, 19.5, 156, 312, 312),
    "H100": DataSheet(80, 67, 494, 989, 989),
    "H200": DataSheet(141, 67, 494, 989, 989),
    "B200": DataSheet(180, 75, 1100, 2250, 2250),
}


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a training's speed on devices that are not here. Not measured."""

    least_images_per_second: float
    most_images_per_second: float
    image_flops: int
    """Of the forward and the backward pass, as the framework counts them."""
    least_step_seconds: float
    """With the exchange."""
    most_step_seconds: float
    assumption: str
    """On which the numbers stand, for people."""

    def __str__(self) -> str:
        speed = f"{self.least_images_per_second:,.0f} to {self.most_images_per_second:,.0f} images/s"
        step = f"{1000 * self.least_step_seconds:,.2f} to {1000 * self.most_step_seconds:,.2f} ms a step"
        return f"predicted, not measured: {speed}, {step}, if input keeps up; {self.assumption}"


def predicted(
    kind: str, precision: str, image_flops: int, images_of_step: tuple[int, int], exchange_seconds: float
) -> Prediction | None:
    """`images_of_step`: on the rank with most, and in all. None if the framework counted nothing, or the device does
    not have the precision."""
    local_batch_size, global_batch_size = images_of_step
    sheet, counted = DATA_SHEETS[kind], image_flops * local_batch_size
    low, high, stated = _peaks(sheet, precision)
    if not counted or not high:
        return None
    fast, slow = (counted / (share * 1e12) for share in (MOST_OF_PEAK * high, LEAST_OF_PEAK * low))
    assumption = (
        f"{image_flops / 1e9:,.3g} GFLOP an image, forward and backward, at {LEAST_OF_PEAK:.0%} to {MOST_OF_PEAK:.0%} "
        f"of the peak that the data sheet of {kind} states ({stated})"
    )
    if exchange_seconds:
        assumption += f", and {1000 * exchange_seconds:.1f} ms of exchange that nothing hides"
    if slow < MOST_LAUNCHES_SECONDS:
        launches = f"{1000 * LEAST_LAUNCHES_SECONDS:g} to {1000 * MOST_LAUNCHES_SECONDS:g} ms"
        assumption += (
            f"; so little arithmetic ({1000 * fast:.2g} ms) that launching its kernels counts, taken as {launches}"
        )
    steps = max(fast, LEAST_LAUNCHES_SECONDS) + exchange_seconds, max(slow, MOST_LAUNCHES_SECONDS) + exchange_seconds
    return Prediction(global_batch_size / steps[1], global_batch_size / steps[0], image_flops, *steps, assumption)


def _peaks(sheet: DataSheet, precision: str) -> tuple[float, float, str]:
    """The lowest and the highest that may count, in TFLOP/s, and how they are stated."""
    if precision in ("float16", "bfloat16"):
        peak: float = getattr(sheet, precision)
        return peak, peak, f"{peak:g} TFLOP/s in {precision}"
    if not sheet.tf32:
        return sheet.float32, sheet.float32, f"{sheet.float32:g} TFLOP/s in float32"
    # Which of the two a layer takes is the framework's choice.
    return sheet.float32, sheet.tf32, f"{sheet.float32:g} TFLOP/s in float32, {sheet.tf32:g} in TF32"
