"""Sums the gradients of a `torch_ddp` step over ranks bucket by bucket, while the backward pass computes others.

PyTorch's DistributedDataParallel does the same, but lays its buckets out anew after a process's first step, or else
asks all ranks in every step which weights were used (docs/LOG.md). Here the layout follows from the weights alone,
buckets leave in one fixed order, and what the backward pass did not reach counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from shardmill.errors import TrainingError
from train.config import TrainConfig

DEFAULT_BYTES = 25 * 2**20
"""PyTorch's default."""
DEFAULT_BYTES_ON_CPU = 4 * 2**20
"""Faster over Gloo (docs/benchmarks/training.md)."""
COMPRESSED = {"none": "", "fp16": "float16", "bf16": "bfloat16"}
"""`train.compression` -> PyTorch's name of the type in which gradients are sent; empty: their own."""
LAST_SENT_BYTES = 2**20
"""Size of the last bucket: small, because no computation is left to hide its exchange."""


class Bucket:
    """Gradients of a few weights, one behind the other in one tensor."""

    def __init__(self, weights: Sequence[Any], compressed: Any | None) -> None:
        import torch

        self.weights = tuple(weights)
        sizes = [weight.numel() for weight in weights]
        self._flat = torch.zeros(sum(sizes), dtype=compressed or weights[0].dtype, device=weights[0].device)
        self._places = self._views(self._flat)
        self.missing: set[int] = set()
        """Weights, by number, whose gradients this step's backward pass has yet to compute."""
        self._work: Any = None

    def begin(self) -> None:
        """Before a backward pass: it computes gradients of the weights that are not frozen."""
        self.missing = {number for number, weight in enumerate(self.weights) if weight.requires_grad}
        self._work = None
        for number in range(len(self.weights)):
            if number not in self.missing:
                self._places[number].zero_()

    def take(self, number: int) -> None:
        """The gradient of a weight is complete: as it is in the cache, and so that its memory is free again."""
        weight, place = self.weights[number], self._places[number]
        if number in self.missing:
            place.copy_(weight.grad)
            self.missing.remove(number)
        elif self._work is None:
            place.add_(weight.grad)
        else:
            # Activations that are computed again by a backward pass inside the backward pass can do that.
            raise TrainingError(
                f"a weight of shape {tuple(weight.shape)} got a gradient twice in one backward pass",
                "expected one: the first was already summed over the ranks",
                "use torch.utils.checkpoint with use_reentrant=False",
            )
        weight.grad = None

    def take_the_rest(self) -> None:
        """The backward pass is over: what it did not reach has the gradient of earlier microbatches, or none."""
        for number in self.missing:
            weight = self.weights[number]
            if weight.grad is None:
                self._places[number].zero_()
            else:
                self._places[number].copy_(weight.grad)
        self.missing.clear()

    def send(self) -> None:
        """Begin to sum it, unless all of its weights are frozen, on all ranks alike."""
        import torch.distributed as dist

        if any(weight.requires_grad for weight in self.weights):
            self._work = dist.all_reduce(self._flat, async_op=True)

    def sums(self) -> list[Any]:
        """Sums in the order of the weights; float32, valid until the next step."""
        if self._work is not None:
            self._work.wait()
        summed = self._flat.float()
        return self._places if summed is self._flat else self._views(summed)

    def _views(self, flat: Any) -> list[Any]:
        parts = flat.split([weight.numel() for weight in self.weights])
        return [part.view(weight.shape) for part, weight in zip(parts, self.weights, strict=True)]


class BucketSums:
    """All gradients of a model. In each step `begin`, then a backward pass, then `finish`; on all ranks alike.

    With `train.sync_batch_norm` nothing leaves before `finish`.
    """

    def __init__(self, weights: Sequence[Any], config: TrainConfig) -> None:
        import torch

        default_bytes = DEFAULT_BYTES_ON_CPU if weights[0].device.type == "cpu" else DEFAULT_BYTES
        self._layout = layout([_kind_and_bytes(weight) for weight in weights], config.bucket_bytes or default_bytes)
        sent = COMPRESSED[config.compression]
        compressed = getattr(torch, sent) if sent else None
        self._buckets = [Bucket([weights[index] for index in indices], compressed) for indices in self._layout]
        self._num_sent = 0
        self._collects = False
        # Batch norms sum over ranks during the backward pass, too. When a bucket is complete depends on the weights
        # that a rank uses: sent then, it could be one rank's exchange before such a sum, and another's after it.
        self._waits = config.sync_batch_norm
        for bucket in self._buckets:
            for number, weight in enumerate(bucket.weights):
                weight.register_post_accumulate_grad_hook(partial(self._take, bucket, number))

    def begin(self) -> None:
        """The next backward pass completes the gradients."""
        self._num_sent, self._collects = 0, True
        for bucket in self._buckets:
            bucket.begin()

    def finish(self) -> list[Any]:
        """After that pass: the sums over all ranks, in the order of the weights. They hold until the next step."""
        self._collects = False
        for bucket in self._buckets[self._num_sent :]:
            bucket.take_the_rest()
            bucket.send()
        sums = {}
        for indices, bucket in zip(self._layout, self._buckets, strict=True):
            sums |= dict(zip(indices, bucket.sums(), strict=True))
        return [sums[index] for index in range(len(sums))]

    def _take(self, bucket: Bucket, number: int, _: Any) -> None:
        """The hook of one weight. Earlier microbatches leave their gradients where they are."""
        if not self._collects:
            return
        bucket.take(number)
        if self._waits:
            return
        # In the one order that all ranks have, whatever order their gradients come in.
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].missing:
            self._buckets[self._num_sent].send()
            self._num_sent += 1


def layout(kinds_and_bytes: Sequence[tuple[object, int]], limit_bytes: int) -> list[list[int]]:
    """Return the weights, by number, of each bucket, in the order in which buckets are sent: the last weights first.

    A bucket holds weights of one kind (type and device), up to the limit or a single one that is larger.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[object, tuple[list[int], int]] = {}
    limits: dict[object, int] = {}
    for index, (kind, num_bytes) in enumerate(kinds_and_bytes):
        indices, filled = open_buckets.get(kind, ([], 0))
        if indices and filled + num_bytes > limits.get(kind, min(LAST_SENT_BYTES, limit_bytes)):
            buckets.append(indices)
            limits[kind] = limit_bytes
            indices, filled = [], 0
        open_buckets[kind] = [*indices, index], filled + num_bytes
    buckets += [indices for indices, _ in open_buckets.values()]
    return sorted(buckets, reverse=True)


def _kind_and_bytes(weight: Any) -> tuple[object, int]:
    return (weight.dtype, weight.device), weight.numel() * weight.element_size()
