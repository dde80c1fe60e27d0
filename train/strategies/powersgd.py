"""`train.compression = "powersgd"` of `torch_ddp`: sends the strongest directions of a gradient, the rest later.

Vogels, Karimireddy, Jaggi, arXiv:1905.13727. A gradient M, as a matrix, is seen along the directions Q of the step
before: P = M Q is summed over the ranks and made orthonormal, then Q = M' P is summed, and P Q' is applied. What of its
own M is not in that, the residual, a rank adds to its next one (error feedback). All of that is linear in the ranks'
gradients: what is applied follows from the sum of what they have and keep, so that ranks may come and go if what they
kept is given to others.

Why this is not PyTorch's hook: docs/LOG.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from train.checkpoints.state import load_arrays
from train.config import TrainConfig
from train.strategies.compression import matrix_of
from train.strategies.options import TorchDdpOptions
from train.strategies.torch_buckets import Bucket, BucketSums

DIRECTIONS = "powersgd.npz"
NEGLIGIBLE_SHARE = 1e-5
"""A direction in which there is so much less than in the strongest one is float32's rounding."""
RESIDUAL_FILES = r"powersgd-\d{5,}\.npz"


def residual_file(rank: int) -> str:
    """The residuals of a rank: the parts of its gradients that were not sent yet."""
    return f"powersgd-{rank:05d}.npz"


class LowRank:
    """One gradient of a bucket, as a matrix of n rows and m columns, and what is remembered of it."""

    def __init__(self, gradient_nm: Any, rank: int) -> None:
        import torch

        def zeros(*shape: int) -> Any:
            return torch.zeros(shape, device=gradient_nm.device)

        num_rows, num_columns = gradient_nm.shape
        self.num_sent_first, self.num_sent_second = num_rows * rank, num_columns * rank
        self._gradient_nm = gradient_nm
        self.residual_nm = zeros(num_rows, num_columns)
        self.directions_mr = zeros(num_columns, rank)
        """Equal on all ranks."""
        self._fresh_mr = zeros(num_columns, rank)
        self._rank = rank

    def begin(self, generator: Any) -> None:
        """Begin with random directions, which also replace empty directions."""
        import torch

        self._fresh_mr.copy_(torch.randn(self._fresh_mr.shape, generator=generator))
        self.directions_mr.copy_(self._fresh_mr)

    def project(self, sent: Any) -> None:
        """Write P into `sent`, the residual of this rank included."""
        import torch

        self._gradient_nm.add_(self.residual_nm)
        self._p_nr = sent.view(-1, self._rank)
        torch.mm(self._gradient_nm, self.directions_mr, out=self._p_nr)

    def project_back(self, sent: Any) -> None:
        """P has been summed: write Q into `sent`."""
        import torch

        # A matrix of lower rank, also one of zeros, gets as many orthonormal columns; along the rest there is nothing.
        self._p_nr = torch.linalg.qr(self._p_nr.double()).Q.float()
        self._q_mr = sent.view(-1, self._rank)
        torch.mm(self._gradient_nm.T, self._p_nr, out=self._q_mr)
        self._q_here_mr = self._q_mr.clone()

    def summed(self) -> Any:
        """Q has been summed: the gradient of all ranks, as far as its rank reaches. (n, m)"""
        return self._p_nr @ self._q_mr.T

    def keep_residual(self) -> None:
        """After the update: keep the part of this rank's gradient that was not sent, and reuse the directions."""
        import torch

        torch.addmm(self._gradient_nm, self._p_nr, self._q_here_mr.T, alpha=-1, out=self.residual_nm)
        lengths_r = self._q_mr.double().norm(dim=0)
        is_something_r = lengths_r > NEGLIGIBLE_SHARE * lengths_r.max()
        self.directions_mr = torch.where(is_something_r, (self._q_mr / lengths_r).float(), self._fresh_mr)


class LowRankBucket(Bucket):
    """Gradients of which those that are large enough travel as two thin matrices, in two sums; the others in the first.

    All collectives are begun and awaited by the thread that trains, in one order on all ranks.
    """

    def __init__(self, weights: Sequence[Any], rank: int) -> None:
        import torch

        super().__init__(weights, torch.float32)
        self.low: dict[int, LowRank] = {}
        """Low-rank states by the number of the weight."""
        for number, place in enumerate(self._places):
            if matrix := matrix_of(tuple(place.shape), rank):
                self.low[number] = LowRank(place.view(matrix), rank)
        self._whole = [number for number in range(len(weights)) if number not in self.low]
        sizes = [self._places[number].numel() for number in self._whole]
        sizes += [each.num_sent_first for each in self.low.values()]
        self._first = torch.zeros(sum(sizes), device=self._flat.device)
        self._first_parts = self._first.split(sizes)
        sizes = [each.num_sent_second for each in self.low.values()]
        self._second = torch.zeros(sum(sizes), device=self._flat.device)
        self._second_parts = self._second.split(sizes)

    def send(self) -> None:
        import torch.distributed as dist

        if not any(weight.requires_grad for weight in self.weights):
            return
        num_whole = len(self._whole)
        for number, part in zip(self._whole, self._first_parts[:num_whole], strict=True):
            part.copy_(self._places[number].view(-1))
        for low, part in zip(self.low.values(), self._first_parts[num_whole:], strict=True):
            low.project(part)
        self._work = dist.all_reduce(self._first, async_op=True)

    def send_rest(self) -> None:
        import torch.distributed as dist

        if self._work is None or not self.low:
            return
        self._work.wait()
        for low, part in zip(self.low.values(), self._second_parts, strict=True):
            low.project_back(part)
        self._work = dist.all_reduce(self._second, async_op=True)

    def sums(self) -> list[Any]:
        if self._work is None:
            return self._places
        self._work.wait()
        flat = dict(zip(self._whole, self._first_parts, strict=False))
        flat |= {number: low.summed() for number, low in self.low.items()}
        return [flat[number].view(place.shape) for number, place in enumerate(self._places)]

    def settle(self) -> None:
        if self._work is not None:
            for low in self.low.values():
                low.keep_residual()


class LowRankSums(BucketSums):
    """`BucketSums` that are approximations, and remember what they left out."""

    def __init__(self, weights: Sequence[Any], config: TrainConfig) -> None:
        import torch

        super().__init__(weights, config)
        low: dict[int, LowRank] = {}
        for indices, bucket in zip(self._layout, self._buckets, strict=True):
            assert isinstance(bucket, LowRankBucket)
            low |= {indices[number]: each for number, each in bucket.low.items()}
        # In the order of the weights, because buckets may have another size when a training continues.
        self._low = [low[index] for index in sorted(low)]
        generator = torch.Generator().manual_seed(config.seed)
        for each in self._low:
            each.begin(generator)

    def _new_bucket(self, weights: Sequence[Any], config: TrainConfig) -> Bucket:
        return LowRankBucket(weights, config.options(TorchDdpOptions).powersgd_rank)

    def state_files(self, rank: int) -> dict[str, list[np.ndarray]]:
        files = {residual_file(rank): [each.residual_nm.cpu().numpy().copy() for each in self._low]}
        if rank == 0:
            files[DIRECTIONS] = [each.directions_mr.cpu().numpy().copy() for each in self._low]
        return files

    def files_to_resume(self, rank: int, world_size: int, saved_world_size: int) -> list[str]:
        """The residuals of all old ranks, shared among the new ones; with the same number of ranks, its own."""
        return [DIRECTIONS, *(residual_file(saved) for saved in range(rank, saved_world_size, world_size))]

    def start(self, files: Mapping[str, bytes]) -> None:
        import torch

        for name in files.keys() & {DIRECTIONS}:
            for low, array in zip(self._low, load_arrays(files[name]), strict=True):
                low.directions_mr.copy_(torch.from_numpy(array))
        for name in sorted(name for name in files if re.fullmatch(RESIDUAL_FILES, name)):
            for low, array in zip(self._low, load_arrays(files[name]), strict=True):
                low.residual_nm.add_(torch.from_numpy(array).to(low.residual_nm.device))
