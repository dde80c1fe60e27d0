"""How a rank computes that has some stages of a pipeline: by a schedule of `torch.distributed.pipelining`.

A rank has the outputs of its own stages alone, and most ranks have no loss. Whatever a step, an evaluation or a hash
needs of another stage comes to all ranks of the pipeline here, so that no loop ever sees that there are stages.

Shape legend: N batch, H height, W width, C channels, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from shardmill.values import Batch
from train.backends.torch.chain import Stage
from train.backends.torch.layout import WholeTensors
from train.backends.torch.passes import Objective, Parts, on_device
from train.backends.torch.runtime import device, import_torch
from train.layers.sample_bits import drawing


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a module, and which rank of a pipeline computes which."""

    blocks: tuple[Any, ...]
    """Of the whole module, in a row."""
    stages: tuple[Stage, ...]
    rank_of_stage: tuple[int, ...]
    """Of each stage the rank in `group`."""
    rank: int
    """This one, in `group`."""
    group: Any
    """The process group of its ranks."""
    schedule: Callable[[list[Any], int, Callable[..., Any]], Any]
    """(this rank's stages for `torch.distributed.pipelining`, number of microbatches, loss) -> the schedule."""
    num_microbatches: Callable[[int], int]
    """Rows of a batch -> how many microbatches they make. Raises UsageError for rows that do not divide."""

    @property
    def mine(self) -> list[int]:
        """This rank's stages, in the order of the chain."""
        return [stage for stage, rank in enumerate(self.rank_of_stage) if rank == self.rank]

    @property
    def last(self) -> int:
        """The stage with the outputs."""
        return len(self.stages) - 1

    def has(self, stage: int) -> bool:
        """Whether it is one of this rank's."""
        return self.rank_of_stage[stage] == self.rank

    def world_rank(self, stage: int) -> int:
        """The rank that has a stage, by its number in the world."""
        import torch.distributed as dist

        return dist.get_global_rank(self.group, self.rank_of_stage[stage])

    def place(self, module: Any, kept: Collection[Any]) -> None:
        """`torch.layout.ShardModule`: other ranks' stages lose their parameters and keep their modules, so
        that names, places and buffers are those of the whole module."""
        names = {name for stage in self.mine for name in self.stages[stage].weights}
        # A parameter may have several names.
        held = {id(each) for name, each in module.named_parameters() if name in names}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter not in kept and id(parameter) not in held:
                    part._parameters[name] = None


class StagePasses:
    """`train.backends.torch.passes.Passes`, together with the other ranks of the pipeline."""

    def __init__(self, pipeline: Pipeline, parts: Parts) -> None:
        self._pipeline = pipeline
        self._parts = parts
        self._objective: Objective | None = None
        self._modules = {
            number: _stage_module()(
                tuple(pipeline.blocks[index] for index in pipeline.stages[number].block_indices),
                parts,
                is_first=number == 0,
                is_last=number == pipeline.last,
            )
            for number in pipeline.mine
        }
        # One for each size of a batch; there are two at most.
        self._schedule = cache(self._make_schedule)

    def differentiate(
        self, batch: Batch, weights_N: Any, objective: Objective, before_backward: Callable[[], None]
    ) -> None:
        torch, pipeline = import_torch(), self._pipeline
        num_rows = len(batch.labels_N)
        self._objective = objective
        before_backward()
        images = (on_device(batch.images_NHWC),) if 0 in self._modules else ()
        keys_N = self._parts.draws.keys(batch)
        target = torch.arange(num_rows, device=device()) if pipeline.has(pipeline.last) else None
        try:
            self._schedule(num_rows).step(
                *images, target=target, return_outputs=False, **({} if keys_N is None else {"keys_N": keys_N})
            )
        except RuntimeError as error:
            # PyTorch wraps what a stage has raised.
            if error.__cause__ is not None:
                raise error.__cause__ from None
            raise

    def outputs(self, images_NHWC: Any) -> Any:
        """Microbatch by microbatch, so that all stages compute; then every rank gets them."""
        import torch.distributed as dist

        torch, pipeline = import_torch(), self._pipeline
        parts = list(images_NHWC.tensor_split(min(len(images_NHWC), len(pipeline.stages))))
        sizes, sent = list(map(len, parts)), []
        for number, module in self._modules.items():
            for place, size in enumerate(sizes):
                parts[place] = module(self._input(number, size, parts[place]))
                if number != pipeline.last and not pipeline.has(number + 1):
                    to = pipeline.world_rank(number + 1)
                    sent.append((dist.isend(parts[place], to, group=pipeline.group), parts[place]))
        for work, _ in sent:
            work.wait()
        outputs_NK = torch.empty((sum(sizes), *pipeline.stages[-1].border.shape), device=device())
        if pipeline.has(pipeline.last):
            outputs_NK.copy_(torch.cat(parts))
        dist.broadcast(outputs_NK, pipeline.world_rank(pipeline.last), group=pipeline.group)
        return outputs_NK

    def _input(self, number: int, num_rows: int, here: Any) -> Any:
        """Of a stage: what this rank has computed last, or what comes from the rank of the stage before it."""
        import torch.distributed as dist

        pipeline = self._pipeline
        if number == 0 or pipeline.has(number - 1):
            return here
        border = pipeline.stages[number - 1].border
        received = import_torch().empty(
            (num_rows, *border.shape), dtype=getattr(import_torch(), border.dtype), device=device()
        )
        dist.recv(received, pipeline.world_rank(number - 1), group=pipeline.group)
        return received

    def _make_schedule(self, num_rows: int) -> Any:
        """For batches of so many rows, whose shapes at borders are known: nothing is tried out first."""
        from torch.distributed.pipelining import PipelineStage

        torch, pipeline = import_torch(), self._pipeline
        num_microbatches = pipeline.num_microbatches(num_rows)

        def example(stage: int) -> Any:
            """What leaves it; stage -1 stands for the images."""
            border = pipeline.stages[stage].border
            shape, dtype = (
                (border.shape, getattr(torch, border.dtype))
                if stage >= 0
                else (self._parts.image_shape_HWC, torch.uint8)
            )
            if stage == pipeline.last:
                dtype = torch.float32
            size = (num_rows // num_microbatches, *shape)
            return torch.empty(size, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

        stages = [
            PipelineStage(
                module, number, len(pipeline.stages), device(), input_args=example(number - 1),
                output_args=example(number), group=pipeline.group,
            )
            for number, module in self._modules.items()
        ]  # fmt: skip
        return pipeline.schedule(stages, num_microbatches, self._loss)

    def _loss(self, outputs_NK: Any, places: Any) -> Any:
        assert self._objective is not None
        return self._objective(outputs_NK, places)


class StageTensors(WholeTensors):
    """Each rank has the tensors of its stages whole, as have those ranks that hold the same stages of other copies.

    `copies`: how many copies of the model there are; `sum_over_ranks` adds up a tensor over all ranks, in place.
    """

    def __init__(self, pipeline: Pipeline, module: Any, copies: int, sum_over_ranks: Callable[[Any], None]) -> None:
        self._pipeline = pipeline
        self._copies = copies
        self._sum_over_ranks = sum_over_ranks
        owners = {name: number for number, stage in enumerate(pipeline.stages) for name in stage.weights}
        # Of the whole module: name, stage if one alone has it, shape and type.
        self._state = [
            (name, owners.get(name), tuple(each.shape), each.dtype) for name, each in module.state_dict().items()
        ]

    def state_of(self, module: Any) -> Iterator[Any]:
        import torch.distributed as dist

        torch, here, pipeline = import_torch(), module.state_dict(), self._pipeline
        for name, stage, shape, dtype in self._state:
            tensor = here[name].detach() if name in here else torch.empty(shape, dtype=dtype, device=device())
            if stage is not None:
                tensor = tensor.contiguous()
                dist.broadcast(tensor, pipeline.world_rank(stage), group=pipeline.group)
            yield tensor

    def global_norm(self, gradients: Sequence[Any]) -> float:
        """One sum of squares over all ranks, so that all have the same bits and decide alike."""
        torch = import_torch()
        total = torch.zeros((), dtype=torch.float32, device=device())
        for gradient in gradients:
            local = gradient.float()
            total += (local * local).sum()
        total /= self._copies
        self._sum_over_ranks(total)
        return float(total.sqrt())


@cache
def _stage_module() -> Any:
    """The class of a stage of a pipeline as a module.

    Tensors that go from rank to rank must be contiguous, also gradients, and must share no memory with what autograd
    keeps.
    """
    torch = import_torch()

    class Arrival(torch.autograd.Function):
        """What came from another rank, as it is; its gradient goes back contiguous."""

        @staticmethod
        def forward(ctx: Any, values: Any) -> Any:
            return values.view_as(values)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0].contiguous()

    class Departure(torch.autograd.Function):
        """A contiguous copy, no view of anything: PyTorch detaches it in place later on."""

        @staticmethod
        def forward(ctx: Any, values: Any) -> Any:
            return values.clone(memory_format=torch.contiguous_format)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0]

    class StageModule(torch.nn.Module):
        """What a rank computes between two borders: uint8 images_NHWC, or what came from the stage before it -> float32
        outputs_NK, or what the stage behind it gets."""

        def __init__(self, blocks: tuple[Any, ...], parts: Parts, *, is_first: bool, is_last: bool) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(blocks)
            self._is_first, self._is_last = is_first, is_last
            # No module of its own: only a part of what it has is this stage's.
            self._parts = (parts,)
            self._calls = tuple(parts.recomputed.chain(blocks))

        def forward(self, values: Any, keys_N: Any = None) -> Any:
            """`keys_N`: of the samples, if layers draw random numbers for each (train/layers/sample_bits.py)."""
            [parts] = self._parts
            draw = nullcontext if keys_N is None else partial(drawing, keys_N)
            with draw(), parts.precision.computing(), parts.recomputed.forward(None, draw):
                values = parts.classifier.inputs_of(values) if self._is_first else Arrival.apply(values)
                for call in self._calls:
                    values = call(values)
            return values.float() if self._is_last else Departure.apply(values)

    return StageModule
