"""Distribution strategies; a new one is a module and an entry here; the shared tests run over it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.registry import Entry, ExtensionPoint, Registry, load_object
from train.contracts.mesh import Mesh
from train.contracts.world import Role

if TYPE_CHECKING:
    from train.api import Strategy
    from train.config import TrainConfig

STRATEGIES: Registry[Strategy] = Registry(
    "train.strategy",
    {
        "single": Entry("train.strategies.replicated:SINGLE", "one process, one device"),
        "horovod": Entry(
            "train.strategies.horovod:HOROVOD",
            "one grouped allreduce per step",
            extra="horovod",
            packages=("horovod",),
        ),
        "mirrored": Entry(
            "train.strategies.mirrored:MIRRORED",
            "several devices in one process, TensorFlow's MirroredStrategy",
            extra="tensorflow",
            packages=("tensorflow",),
            options="train.strategies.options:MirroredOptions",
        ),
        "multi_worker_mirrored": Entry(
            "train.strategies.mirrored:MULTI_WORKER_MIRRORED",
            "TensorFlow's MultiWorkerMirroredStrategy, one process per worker",
            extra="tensorflow",
            packages=("tensorflow",),
        ),
        "parameter_server": Entry(
            "train.strategies.parameter_server:PARAMETER_SERVER",
            "asynchronous: servers hold the weights, workers update them, a chief dispatches",
            extra="tensorflow",
            packages=("tensorflow",),
            options="train.strategies.options:ParameterServerOptions",
        ),
        "torch_ddp": Entry(
            "train.strategies.torch_ddp:TORCH_DDP",
            "torch.distributed: gradients are summed bucket by bucket during the backward pass",
            extra="torch",
            packages=("torch",),
        ),
        "zero1": Entry(
            "train.strategies.sharded.zero1:ZERO1",
            "optimizer state sharded over ranks, each with the whole model",
            extra="torch",
            packages=("torch",),
        ),
        "torch_fsdp": Entry(
            "train.strategies.sharded.placement:TORCH_FSDP",
            "weights, gradients and optimizer state sharded over ranks (PyTorch's FSDP2)",
            extra="torch",
            packages=("torch",),
        ),
        "tensor_parallel": Entry(
            "train.strategies.sharded.placement:TENSOR_PARALLEL",
            "each layer divided over the ranks of a group, for vision transformers",
            extra="torch",
            packages=("torch",),
        ),
        "hybrid": Entry(
            "train.strategies.sharded.placement:HYBRID",
            "layers divided along one axis of a mesh, weights sharded along the other",
            extra="torch",
            packages=("torch",),
        ),
        "pipeline_parallel": Entry(
            "train.strategies.sharded.pipeline:PIPELINE_PARALLEL",
            "each rank computes some layers in a row, microbatch after microbatch",
            extra="torch",
            packages=("torch",),
            options="train.strategies.sharded.pipeline_schedules:PipelineOptions",
        ),
        "local_sgd": Entry(
            "train.strategies.local_sgd:LOCAL_SGD",
            "several local updates per step, then weights are averaged",
            options="train.strategies.options:LocalSgdOptions",
        ),
    },
    takes_own=True,
    options_prefix="",
    point=ExtensionPoint("how ranks share the training", "train.api:Strategy"),
)


def roles_of(config: TrainConfig) -> tuple[Role, ...]:
    """Return the role of each process of a training, in rank order."""
    return STRATEGIES[config.strategy].roles(config)


def declared(name: str) -> Strategy | None:
    """The strategy of that name, whether or not its packages are installed: for what it says of itself. None if its
    module cannot be imported here."""
    try:
        return STRATEGIES[name] if STRATEGIES.is_own(name) else load_object(STRATEGIES.entry(name).target)
    except UsageError:
        return None


def strategies_that_share() -> dict[str, Strategy]:
    """Those whose ranks hold one module together, by name, in the order of the registry."""
    every = {name: declared(name) for name in STRATEGIES}
    return {name: each for name, each in every.items() if each and each.shared_model}


def axes_of(strategy: str) -> tuple[str, ...]:
    """Axes that it has beside `data`."""
    found = declared(strategy)
    return found.axes if found else ()


def mesh_of(config: TrainConfig) -> Mesh:
    """Return the mesh of a training; all ranks that `auto` chooses are copies of the model. Raises UsageError."""
    if config.strategy == "auto":
        _check_axes(config, ())
        return Mesh.of(config)
    strategy = STRATEGIES[config.strategy]
    _check_axes(config, strategy.axes)
    return strategy.mesh(config)


def _check_axes(config: TrainConfig, axes: Collection[str]) -> None:
    """Raises UsageError if `train.mesh` sets several ranks along another axis than `data` and these."""
    several = {axis: size for axis, size in config.mesh.sizes.items() if size > 1 and axis != "data"}
    missing = [axis for axis in several if axis not in axes]
    if not missing:
        return
    taking = {name: each.axes for name, each in strategies_that_share().items()}
    if not any(several.keys() <= set(axes) for axes in taking.values()):
        raise UsageError(
            " with ".join(f"train.mesh.{name} = {size}" for name, size in several.items()),
            "expected axes that one strategy has: no strategy combines these",
            f"leave {' or '.join(f'train.mesh.{name}' for name in several)} at 0",
        )
    [axis, *_] = missing
    taken_by = " or ".join(repr(name) for name, axes in taking.items() if axis in axes)
    raise UsageError(
        f"train.mesh.{axis} = {several[axis]} with train.strategy = {config.strategy!r}, which has no such axis",
        f"expected it with train.strategy = {taken_by}",
        f"set train.strategy, or leave train.mesh.{axis} at 0",
    )


def less_work_in(config: TrainConfig) -> str:
    """Return what a user does for a slow rank; of what `auto` chooses, each rank reads streams of its own."""
    default = STRATEGIES["single"].less_work
    return default if config.strategy == "auto" else STRATEGIES[config.strategy].less_work


def has_chief(config: TrainConfig) -> bool:
    """Whether one rank runs the loop and hands each global batch to one of the workers."""
    return config.strategy != "auto" and Role.CHIEF in roles_of(config)


def fitting_strategies(framework: str, world_size: int) -> list[str]:
    """Names of installed strategies that allow `world_size` ranks; `framework` filters by backend, `""` does not.

    Those that take no Keras model are for models that need them, and are not offered.
    """
    installed = {name: each for name, each in STRATEGIES.installed().items() if not each.needs_module}
    wide = {name: each for name, each in installed.items() if each.allows_world_size(world_size)}
    return [name for name, each in wide.items() if not framework or framework in each.backends]


def find_strategy(name: str, world_size: int, framework: str = "") -> Strategy:
    """The strategy of that name, if it allows the world size. Raises UsageError otherwise.

    `framework`: the backend that the training needs, if it does; only what runs with it is offered.
    """
    strategy = STRATEGIES[name]
    if not strategy.allows_world_size(world_size):
        fixes = [f'train.strategy = "{other}"' for other in fitting_strategies(framework, world_size)[:1]]
        fixes.append(f"train.num_workers = {strategy.max_world_size}")
        raise UsageError(
            f"train.strategy = {name!r} with train.num_workers = {world_size}",
            f"expected at most {strategy.max_world_size} worker",
            f"set {', or '.join(fixes)}",
        )
    return strategy
