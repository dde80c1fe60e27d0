"""Batches as PyTorch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardmill.errors import UsageError
from shardmill.loader.batch import LoaderBatch
from shardmill.registry import install_hint

if TYPE_CHECKING:
    from shardmill.values import Batch

Layout = Literal["NCHW", "NHWC"]


def require_torch() -> None:
    """Raises UsageError if PyTorch cannot be imported: before the first batch, which a thread reads."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"a torch_loader needs PyTorch: {error}", "not installed here", install_hint("torch")
        ) from None


def as_tensors(batch: Batch, layout: Layout = "NCHW") -> LoaderBatch:
    """CPU tensors over the memory of the batch: nothing is copied.

    `NCHW` is a view in PyTorch's channels-last memory format, in which its convolutions compute fastest.
    """
    import torch

    images = torch.from_numpy(batch.images_NHWC)
    return LoaderBatch(
        images.permute(0, 3, 1, 2) if layout == "NCHW" else images,
        torch.from_numpy(batch.labels_N),
        torch.from_numpy(batch.weights_N),
        torch.from_numpy(batch.sample_ids_N),
        batch.epoch,
        batch.step,
        batch.extra,
    )
