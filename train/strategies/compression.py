"""Computes how much of its gradients a rank sends in a step (`train.compression`): arithmetic on shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from train.strategies.options import TorchDdpOptions

if TYPE_CHECKING:
    from train.config import TrainConfig


class Shaped(Protocol):
    """A gradient, or the weight that it is of: an array or a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def nbytes(self) -> int: ...


def matrix_of(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Return the rows and columns with which PowerSGD treats a gradient; None if a low rank would not halve the sent
    bytes.
    """
    if len(shape) < 2:
        return None
    # PyTorch's kernels have the outputs first, Keras's last. All other axes together are the other side.
    sides = (shape[0], math.prod(shape[1:])), (math.prod(shape[:-1]), shape[-1])
    rows, columns = min(sides, key=sum)
    return (rows, columns) if 2 * rank * (rows + columns) <= rows * columns else None


def sent_bytes(gradients: Iterable[Shaped], config: TrainConfig) -> int:
    """Return the bytes that a rank sends in one exchange of such gradients; for PowerSGD, in both sums."""
    match config.compression:
        case "none":
            return sum(each.nbytes for each in gradients)
        case "fp16" | "bf16":
            return sum(2 * math.prod(each.shape) for each in gradients)
        case "powersgd":
            rank = config.options(TorchDdpOptions).powersgd_rank
            low = [(each.shape, matrix_of(each.shape, rank)) for each in gradients]
            return 4 * sum(rank * sum(matrix) if matrix else math.prod(shape) for shape, matrix in low)


def remembered_bytes(gradients: Iterable[Shaped], config: TrainConfig) -> int:
    """Return the bytes that a rank stores in addition to such gradients: unsent remainders and
    approximations; float32.
    """
    if config.compression != "powersgd":
        return 0
    rank = config.options(TorchDdpOptions).powersgd_rank
    matrices = [matrix_of(each.shape, rank) for each in gradients]
    return 2 * 4 * sum(math.prod(matrix) for matrix in matrices if matrix)
