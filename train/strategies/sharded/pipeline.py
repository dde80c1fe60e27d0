"""Pipeline parallelism: each rank holds some layers in a row, and computes microbatch after microbatch.

Huang et al., arXiv:1811.06965. Copies of the pipeline (`train.mesh.data`) read rows of their own and add up gradients.
Where a module is cut: train/backends/torch/chain.py; how a rank computes: train/backends/torch/stages.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

from shardmill.errors import UsageError
from train.api import Build, Member, RankState, Shape, SharedModel, Strategy, num_bytes, replicated_state
from train.config import TrainConfig
from train.contracts.mesh import Mesh, MeshShape
from train.contracts.values import Reporter, from_json, to_json
from train.contracts.world import World
from train.strategies import mesh_of
from train.strategies.collective import AnnouncedCollective
from train.strategies.sharded.member import ShardedMember, Sharding, device_mesh_of, sum_in_place, sum_over_all
from train.strategies.sharded.pipeline_schedules import (
    PipelineOptions,
    most_kept,
    num_microbatches_of,
    schedule_named,
    schedule_of,
)
from train.strategies.torch_ddp import TORCH_DDP, TorchCollective

if TYPE_CHECKING:
    from train.backends.torch.backend import TorchLearner
    from train.backends.torch.chain import Stage
    from train.backends.torch.stages import Pipeline


def join_pipeline(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
    """`train.api.Join`."""
    from train.backends.torch.chain import Stage, chain_of
    from train.backends.torch.stages import StagePasses, StageTensors

    mesh = mesh_of(config)
    # The only backend of this strategy; a Keras model was refused by the driver (`needs_module`).
    learner = cast("TorchLearner", build(materialized=world.rank == 0))
    # Rank 0 alone has a materialized module; what is cut where must be the same on all ranks anyway.
    mine = to_json(_stages(config, learner)) if world.rank == 0 else b""
    collective = AnnouncedCollective(TorchCollective, world, reporter)
    stages = tuple(from_json(list[Stage], collective.broadcast_bytes(mine)))
    pipeline, readers = _groups(config, mesh.shape, chain_of(config, learner.module), stages)
    if world.rank == 0:
        _tell(config, pipeline, mesh, reporter)
    sharding = Sharding(
        pipeline.place,
        StageTensors(pipeline, learner.module, mesh.data_size, sum_over_all),
        partial(_add_up, readers if mesh.data_size > 1 else None),
        make_passes=partial(StagePasses, pipeline),
        draws_alike=False,
    )
    return ShardedMember(learner, collective, mesh.data_index(world.rank), world, reporter, sharding)


def _stages(config: TrainConfig, learner: TorchLearner) -> tuple[Stage, ...]:
    from train.backends.torch.chain import stages_of

    num_ranks = mesh_of(config).shape.pipeline
    schedule = schedule_named(config.options(PipelineOptions).schedule, num_ranks)
    return stages_of(config, learner, num_ranks * schedule.stages_per_rank)


def _groups(
    config: TrainConfig, shape: MeshShape, blocks: list[Any], stages: tuple[Stage, ...]
) -> tuple[Pipeline, Any]:
    """-> this rank's pipeline, and the process group of the ranks that have its stages. All ranks call it."""
    import torch.distributed as dist

    from train.backends.torch.stages import Pipeline

    options = config.options(PipelineOptions)
    schedule = schedule_named(options.schedule, shape.pipeline)
    ranks = device_mesh_of(shape, ("pipeline", "data"))
    group = ranks["pipeline"].get_group()
    pipeline = Pipeline(
        tuple(blocks),
        stages,
        schedule.rank_of_stage(shape.pipeline),
        dist.get_rank(group),
        group,
        partial(schedule_of, schedule),
        partial(num_microbatches_of, options, num_ranks=shape.pipeline),
    )
    return pipeline, ranks["data"].get_group()


def _tell(config: TrainConfig, pipeline: Pipeline, mesh: Mesh, reporter: Reporter) -> None:
    """How the model was cut, by counted costs."""
    [num_rows, *_] = _sizes_of_parts(config, mesh)
    costs = [stage.cost / sum(stage.cost for stage in pipeline.stages) for stage in pipeline.stages]
    reporter.event(
        "pipeline",
        {
            "rank": 0,
            "schedule": schedule_named(config.options(PipelineOptions).schedule, mesh.shape.pipeline).name,
            "stages": len(pipeline.stages),
            "blocks": ", ".join(str(len(stage.block_indices)) for stage in pipeline.stages),
            "cost": ", ".join(f"{cost:.0%}" for cost in costs),
            "microbatches": pipeline.num_microbatches(num_rows),
        },
    )


def _add_up(readers: Any, learner: TorchLearner, addends: list[Any]) -> list[Any]:
    """Gradients over the copies of a stage; loss and number correct, which stages but the last have not, over all."""
    *gradients, metrics = addends
    if readers is not None:
        sum_in_place(gradients, readers)
    sum_over_all(metrics)
    return addends


def _sizes_of_parts(config: TrainConfig, mesh: Mesh) -> list[int]:
    """Numbers of rows that go through a pipeline at a time: a rank's share of a step, in `accumulation_steps`."""
    rows_per_stream, parts = config.global_batch_size // mesh.num_streams, config.num_accumulated
    shares = {len(streams) * rows_per_stream for streams in mesh.streams}
    return sorted(
        {(part + 1) * rows // parts - part * rows // parts for rows in shares for part in range(min(parts, rows))}
    )


def check(config: TrainConfig) -> None:
    """`train.api.Strategy.check`."""
    options, mesh = config.options(PipelineOptions), mesh_of(config)
    for num_rows in _sizes_of_parts(config, mesh):
        num_microbatches_of(options, num_rows, mesh.shape.pipeline)
    if options.schedule == "zero_bubble" and config.unfreeze_epoch:
        raise UsageError(
            "train.pipeline_parallel.schedule = 'zero_bubble' with train.unfreeze_epoch",
            "it computes gradients of each stage's weights apart, and a frozen stage has none",
            "set train.pipeline_parallel.schedule = '1f1b'",
        )


def check_learner(config: TrainConfig, learner: Any) -> None:
    """`train.api.SharedModel.check_learner`."""
    _stages(config, learner)


def rank_state_of_stages(config: TrainConfig, module: Any) -> RankState:
    """`train.api.SharedModel.rank_state`."""
    from train.backends.torch.chain import weights_by_stage

    mesh, options, shapes = mesh_of(config), config.options(PipelineOptions), replicated_state(config, module).weights
    num_ranks = mesh.shape.pipeline
    schedule = schedule_named(options.schedule, num_ranks)
    rank_of_stage = schedule.rank_of_stage(num_ranks)
    of_ranks: list[dict[str, Shape]] = [{} for _ in range(num_ranks)]
    stage_bytes: list[int] = []
    for rank, names in zip(rank_of_stage, weights_by_stage(config, module, len(rank_of_stage)), strict=True):
        of_stage = {name: shapes[name] for name in names}
        of_ranks[rank] |= of_stage
        stage_bytes.append(num_bytes(of_stage.values()))
    held = max(of_ranks, key=lambda of_rank: num_bytes(of_rank.values()))
    held_bytes = num_bytes(held.values())
    num_microbatches = num_microbatches_of(options, _sizes_of_parts(config, mesh)[-1], num_ranks)
    # Counted as if activations were in proportion to weights.
    kept_bytes = most_kept(schedule, num_ranks, num_microbatches, stage_bytes)
    return RankState(
        held,
        held,
        module,
        # Copies add up gradients as one flat tensor.
        update_bytes=held_bytes if mesh.data_size > 1 else 0,
        activation_share=kept_bytes / num_bytes(shapes.values()) / num_microbatches,
    )


PIPELINE_PARALLEL = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    can_skip_batches=True,
    max_world_size=None,
    join=join_pipeline,
    check=check,
    secondary_error=TORCH_DDP.secondary_error,
    less_work="or give its stage fewer layers (by the model's `stages()`, or with more ranks)",
    shared_model=SharedModel(axes=("pipeline",), rank_state=rank_state_of_stages, check_learner=check_learner),
)
