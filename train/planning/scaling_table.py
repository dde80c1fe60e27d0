"""`shardmill plan --scaling`: a training's predicted curve over numbers of ranks, with the source of every input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from shardmill.errors import UsageError
from train.contracts.mesh_shape import MeshShape, axes_in_words
from train.planning.memory_fit import size_of
from train.planning.scaling_step import PUBLISHED, SIZES, Step, mesh_for, predict, undivided_axis
from train.strategies import STRATEGIES, exchanges_of
from train.strategies.exchanges import Assumed, Work
from train.strategies.network import ALLREDUCES, Link, Network

FASTEST = "fastest"


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What `--assume NAME=VALUE` sets; nothing of it is measured."""

    latency_us: float = field(default=50.0, metadata={"unit": "us of a message between hosts"})
    within_gbit: float = field(default=100.0, metadata={"unit": "Gbit/s between two ranks of a host"})
    within_latency_us: float = field(default=10.0, metadata={"unit": "us of a message within a host"})
    ranks_per_host: int = field(default=1, metadata={"unit": "ranks that share a host's network"})
    overlap: float = field(default=0.0, metadata={"unit": "of the computation, which can hide exchanges"})
    allreduce: str = field(default=FASTEST, metadata={"unit": f"({', '.join(ALLREDUCES)}, or {FASTEST} of them)"})
    step_ms: float = field(default=0.0, metadata={"unit": "ms of a step of one rank"})
    """0: as it was measured."""


@dataclass(frozen=True, slots=True)
class Input:
    """One number that the curve depends on."""

    name: str
    value: str
    source: str
    """`measured here`, `given`, or `assumed` (a default)."""


@dataclass(frozen=True, slots=True)
class ScalingTable:
    """The curve: each rank keeps its batch (`steps`), or all share today's global batch (`at_this_batch`)."""

    strategy: str
    inputs: tuple[Input, ...]
    alone: Work
    steps: tuple[Step, ...]
    at_this_batch: tuple[Step | None, ...]
    """For each step that of the global batch of the config; None if there are fewer images than ranks."""

    def document(self) -> dict[str, Any]:
        """For `--json` and for the report."""
        return {
            "strategy": self.strategy,
            "inputs": [asdict(each) for each in self.inputs],
            "steps": [
                {
                    "num_ranks": step.mesh.num_ranks,
                    "mesh": step.mesh.sizes,
                    "step_seconds": step.seconds,
                    "compute_seconds": step.compute_seconds,
                    "exchange_seconds": step.exchange_seconds,
                    "bubble_seconds": step.bubble_seconds,
                    "global_batch_size": step.images,
                    "images_per_second": step.images_per_second,
                    "efficiency": step.efficiency(self.alone),
                    "images_per_second_at_this_batch": fixed.images_per_second if fixed else None,
                }
                for step, fixed in zip(self.steps, self.at_this_batch, strict=True)
            ],
            "published": [asdict(each) for each in PUBLISHED],
        }

    def rows(self) -> list[tuple[str, str]]:
        """The rows for people."""
        inputs = "; ".join(f"{each.name} {each.value} ({each.source})" for each in self.inputs)
        curve = [
            (f"{step.mesh.num_ranks:,} rank{'s' * (step.mesh.num_ranks > 1)}", self._row(step, fixed))
            for step, fixed in zip(self.steps, self.at_this_batch, strict=True)
        ]
        published = "; ".join(f"{each.efficiency:.2f} on {each.num_ranks} ({each.name})" for each in PUBLISHED)
        return [("scaling", f"{self.strategy}; {inputs}"), *curve, ("published", published)]

    def _row(self, step: Step, fixed: Step | None) -> str:
        axes = axes_in_words(step.mesh.sizes)
        bubble = f", idle {1000 * step.bubble_seconds:,.1f}" if step.bubble_seconds else ""
        parts = (
            f"{axes}: {1000 * step.seconds:,.1f} ms a step (computes {1000 * step.compute_seconds:,.1f}, exchanges "
            f"{1000 * step.exchange_seconds:,.1f}{bubble}), {step.images_per_second:,.0f} images/s, efficiency "
            f"{step.efficiency(self.alone):.2f}"
        )
        return f"{parts}; at this global batch {fixed.images_per_second:,.0f} images/s" if fixed else parts


def assumptions_of(given: Sequence[str]) -> tuple[Assumptions, frozenset[str]]:
    """-> the values of `NAME=VALUE`s, and the names that were given. Raises UsageError."""
    kinds = {each.name: type(each.default) for each in fields(Assumptions)}
    values: dict[str, Any] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in kinds:
            raise UsageError(f"--assume {text}", f"expected one of {', '.join(kinds)}", "write --assume NAME=VALUE")
        try:
            values[name] = kinds[name](value)
        except ValueError:
            raise UsageError(f"--assume {text}", "expected a number", f"write --assume {name}=1") from None
    found = replace(Assumptions(), **values)
    _check(found)
    return found, frozenset(values)


def _check(found: Assumptions) -> None:
    if found.allreduce not in (FASTEST, *ALLREDUCES):
        known = ", ".join((FASTEST, *ALLREDUCES))
        raise UsageError(f"--assume allreduce={found.allreduce}", f"expected one of {known}", "choose one of them")
    if not 0 <= found.overlap <= 1:
        raise UsageError(f"--assume overlap={found.overlap:g}", "expected a share from 0 to 1", "write overlap=0.6")
    for name in ("latency_us", "within_gbit", "within_latency_us", "ranks_per_host", "step_ms"):
        value, lowest = getattr(found, name), 0 if name in ("latency_us", "within_latency_us", "step_ms") else 1e-9
        if not lowest <= value < float("inf"):
            raise UsageError(f"--assume {name}={value}", "expected a positive number", f"write --assume {name}=1")


@dataclass(frozen=True, slots=True)
class Planned:
    """The training whose curve is drawn."""

    strategy: str
    work: Work
    measured: str
    """Where the seconds of a step come from, in words."""
    mesh: MeshShape
    """At its number of ranks, whose inner axes stay the same."""
    network_gbit: float

    @property
    def global_batch_size(self) -> int:
        return self.work.local_batch_size * self.mesh.data_size


def check_scaling(strategy: str, mesh: MeshShape) -> None:
    """Raises UsageError for a strategy whose exchanges are not modelled, and for one of several ranks for each copy of
    the model whose mesh has one: its curve would be that of data parallelism."""
    if exchanges_of(strategy) is None:
        known = ", ".join(name for name in STRATEGIES if exchanges_of(name))
        raise UsageError(
            f"--scaling with train.strategy = {strategy!r}",
            f"expected a strategy whose exchanges are known: {known}",
            "leave out --scaling, or choose one of them",
        )
    axis = undivided_axis(strategy, mesh)
    if axis:
        given = "1 rank" if mesh.num_ranks == 1 else f"{mesh.num_ranks} ranks ({axes_in_words(mesh.sizes)})"
        raise UsageError(
            f"--scaling with train.strategy = {strategy!r} on {given}",
            f"expected train.mesh.{axis} of 2 or more, which all numbers of ranks keep: 1 divides nothing",
            f"set train.mesh.{axis}, for example --set train.mesh.{axis}=2",
        )


def scaling_table(planned: Planned, given: Sequence[str] = ()) -> ScalingTable:
    """Raises UsageError for an invalid assumption, and as `check_scaling` does."""
    assumptions, names = assumptions_of(given)
    check_scaling(planned.strategy, planned.mesh)
    work = replace(planned.work, step_seconds=assumptions.step_ms / 1000 or planned.work.step_seconds)
    assumed = _assumed(assumptions, planned.network_gbit)
    # Shards over all ranks stay so; shards in several copies keep their number.
    asked = planned.mesh if planned.mesh.data > 1 else replace(planned.mesh, fsdp=1)
    meshes = [mesh_for(planned.strategy, size, asked) for size in sorted({*SIZES, planned.mesh.num_ranks})]
    found = [mesh for mesh in meshes if mesh is not None]
    return ScalingTable(
        planned.strategy,
        _inputs(planned, work, assumptions, names),
        work,
        tuple(predict(planned.strategy, work, mesh, assumed) for mesh in found),
        tuple(_at_batch(planned, work, mesh, assumed) for mesh in found),
    )


def _assumed(assumptions: Assumptions, network_gbit: float) -> Assumed:
    between = Link(assumptions.latency_us / 1e6, network_gbit * 1e9 / 8)
    within = Link(assumptions.within_latency_us / 1e6, assumptions.within_gbit * 1e9 / 8)
    return Assumed(Network(between, within, assumptions.ranks_per_host), assumptions.overlap, assumptions.allreduce)


def _at_batch(planned: Planned, work: Work, mesh: MeshShape, assumed: Assumed) -> Step | None:
    """Computation and activations in proportion to the images of a rank."""
    readers = mesh.data_size
    if readers > planned.global_batch_size or mesh.num_servers:
        return None
    share = planned.global_batch_size / readers / work.local_batch_size
    less = replace(work, step_seconds=work.step_seconds * share, block_bytes=work.block_bytes * share)
    return replace(predict(planned.strategy, less, mesh, assumed), images=planned.global_batch_size)


def _inputs(planned: Planned, work: Work, assumptions: Assumptions, names: frozenset[str]) -> tuple[Input, ...]:
    measured = "given by --assume step_ms" if assumptions.step_ms else planned.measured
    found = [
        Input("a step of one rank", f"{1000 * work.step_seconds:,.1f} ms of {work.local_batch_size} images", measured),
        Input("gradients", size_of(int(work.gradient_bytes)), "of the model"),
        Input("network", f"{planned.network_gbit:g} Gbit/s between hosts", "--bandwidth"),
    ]
    if work.block_bytes:
        of_blocks = f"{size_of(int(work.block_bytes))} of activations behind each of {work.num_blocks} blocks"
        found.append(Input("blocks", of_blocks, "of the model"))
    for each in fields(Assumptions):
        if each.name != "step_ms":
            value = getattr(assumptions, each.name)
            value = value if isinstance(value, str) else f"{value:g}"
            source = "given" if each.name in names else "assumed"
            found.append(Input(each.name, f"{value} {each.metadata['unit']}", source))
    return tuple(found)
