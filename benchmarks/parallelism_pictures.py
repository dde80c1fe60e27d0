"""Draws the pictures of docs/training/parallelism.md from steps that it takes: what each rank holds, and when it waits.

    .venv/bin/python -m benchmarks.parallelism_pictures           # measure (a minute), and draw
    .venv/bin/python -m benchmarks.parallelism_pictures --draw    # draw what docs/training/pictures/steps.json has

Four ranks hold a small vision transformer by each strategy in turn. Of each the shortest of several steps is drawn:
when a rank computed, and when a collective blocked it. What ranks hold is the index that they would write into a
checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.coupled_ranks import no_training, random_batch
from benchmarks.training_step import SPEC, SilentReporter
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.values import DatasetPin
from train.backends import BACKENDS
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.task import WorkerTask
from train.contracts.values import Reporter, TrainResult
from train.contracts.world import World
from train.launching import LAUNCHERS
from train.planning.checks import check
from train.planning.setup import resolve
from train.reporting.observer import GlobalStep
from train.strategies import STRATEGIES

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "training" / "pictures"
NUM_RANKS, GLOBAL_BATCH_SIZE, NUM_STEPS = 4, 32, 12
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"strategy": "torch_ddp"},
    "sharded": {"strategy": "torch_fsdp"},
    "tensor": {"strategy": "tensor_parallel"},
    "hybrid": {"strategy": "hybrid", "mesh": {"tensor": 2}},
    "pipeline": {"strategy": "pipeline_parallel"},
}
SHOWN = ("attention.query.weight", "attention.out.weight", "fc1.weight", "fc2.weight")
"""The weights of a block that are drawn."""
COLORS = ("#2f6fde", "#e8833a", "#2a9d76", "#8660c9")
INK, MUTED, WAIT = "#1d2733", "#6b7785", "#d5dbe3"
# Images a second with machines of equal speed, and with one of two 3 and 6 times slower: docs/choosing.md.
SLOW_MACHINE = {"allreduce (horovod)": (368, 161, 84), "parameter server": (473, 279, 228)}


def model(image_shape: tuple[int, int, int], num_classes: int) -> Any:
    """Four heads, so that four ranks can divide a layer."""
    from train.models.vit_torch import vit

    return vit(image_shape, num_classes, width=256, num_blocks=4, num_heads=4)


def measure(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """On each rank: `train.launching.rank.Worker`."""
    from train.backends.torch.collectives import blocked

    config = task.config
    BACKENDS["torch"].start(world, config.seed)
    member: Any = STRATEGIES[config.strategy].join(
        world, config, lambda: BACKENDS["torch"].build(config, SPEC), SilentReporter()
    )
    member.start({}, 0, "")
    batch = random_batch(GLOBAL_BATCH_SIZE // member.data.count, member.data.index)
    for number in range(NUM_STEPS):
        reporter.doing(Activity(f"step {number}"))
        member.barrier()
        start = time.perf_counter()
        with blocked() as found:
            member.train_step(batch, GLOBAL_BATCH_SIZE, None)
        waits = json.dumps(found.waits)
        fields = {"rank": world.rank, "number": number, "start": start, "end": time.perf_counter(), "waits": waits}
        reporter.event("step_of_rank", fields)
    share = GLOBAL_BATCH_SIZE // member.data.count
    reporter.event("reads", {"rank": world.rank, "first": share * member.data.index, "count": share})
    if world.rank == 0 and hasattr(member, "_index"):
        boxes = [
            [[each.name, each.global_shape, each.offsets, each.shape] for each in shards if each.part == "weights"]
            for shards in member._index.of_ranks
        ]
        reporter.event("owned", {"rank": 0, "boxes": json.dumps(boxes)})
    member.barrier()
    member.close()
    return no_training(task, world)


@dataclass
class Seen:
    """A driver's observer."""

    steps: dict[int, dict[int, Any]] = field(default_factory=dict)
    """number -> rank -> start, end and waits."""
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    boxes: list[Any] = field(default_factory=list)

    def step(self, step: GlobalStep) -> None:
        return

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        rank = int(fields.get("rank") or 0)
        if name == "step_of_rank":
            waits = json.loads(str(fields["waits"]))
            times = {"start": fields["start"], "end": fields["end"], "waits": waits}
            self.steps.setdefault(int(fields["number"] or 0), {})[rank] = times
        if name == "reads":
            self.rows[rank] = int(fields["first"] or 0), int(fields["count"] or 0)
        if name == "owned":
            self.boxes = json.loads(str(fields["boxes"]))

    def document(self) -> dict[str, Any]:
        def duration(step: dict[int, Any]) -> float:
            return max(each["end"] for each in step.values()) - min(each["start"] for each in step.values())

        shortest = min(list(self.steps.values())[2:], key=duration)
        begin = min(each["start"] for each in shortest.values())
        ranks = [shortest[rank] for rank in sorted(shortest)]
        spans = [
            {"start": each["start"] - begin, "end": each["end"] - begin,
             "waits": [[first - begin, last - begin] for first, last in each["waits"]]}
            for each in ranks
        ]  # fmt: skip
        return {"ranks": spans, "rows": [self.rows[rank] for rank in sorted(self.rows)], "boxes": self.boxes}


def run(settings: Mapping[str, Any]) -> dict[str, Any]:
    config = TrainConfig.model_validate(
        {
            **settings, "model": "benchmarks.parallelism_pictures:model", "launcher": "local", "backend": "torch",
            "num_workers": NUM_RANKS, "optimizer": "adam", "global_batch_size": GLOBAL_BATCH_SIZE,
        }
    )  # fmt: skip
    seen = Seen()
    with tempfile.TemporaryDirectory() as scratch:
        config = check(resolve(config, SparkConfig())).config
        task = WorkerTask(config, DatasetPin(Path(scratch).as_uri(), 1, ""), scratch, "t", "")
        LAUNCHERS["local"].launch(task, SparkConfig(), seen, worker="benchmarks.parallelism_pictures:measure")
    return seen.document()


def draw(name: str, found: dict[str, Any], suffix: str = "svg") -> None:
    """One picture: above what each rank holds and reads, below its step."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(8.6, 3.6), height_ratios=(1, 1.15), layout="constrained")
    _draw_ownership(axes[0], found)
    _draw_timeline(axes[1], found)
    figure.savefig(FOLDER / f"{name}.{suffix}", metadata={"Date": None} if suffix == "svg" else None)
    plt.close(figure)


def _draw_ownership(axes: Any, found: dict[str, Any]) -> None:
    """The weights of the first block, to scale; of each rank in its colour what it holds."""
    from matplotlib.patches import Rectangle

    whole = {name.partition("blocks.0.")[2]: shape for name, shape, *_ in _boxes(found, 0) if "blocks.0." in name}
    scale, left = 1 / 512, 0.0
    for rank in range(NUM_RANKS):
        x, first_x = left, left
        for name in SHOWN:
            rows, columns = whole[name]
            height, width = rows * scale, columns * scale
            axes.add_patch(Rectangle((x, 0), width, height, facecolor="none", edgecolor=MUTED, linewidth=0.8))
            for found_name, _, offsets, shape in _boxes(found, rank):
                if found_name.endswith(f"blocks.0.{name}"):
                    place = (x + offsets[1] * scale, offsets[0] * scale)
                    size = (shape[1] * scale, shape[0] * scale)
                    axes.add_patch(Rectangle(place, *size, facecolor=COLORS[rank], edgecolor="none"))
            label = {"attention.query.weight": "query", "attention.out.weight": "out"}.get(name, name.split(".")[0])
            axes.text(x + width / 2, -0.06, label, ha="center", va="bottom", fontsize=7, color=MUTED)
            x += width + 0.12
        first, count = found["rows"][rank]
        words = f"rank {rank}\nreads images {first} to {first + count - 1}{_stage(found, rank)}"
        axes.text((first_x + x - 0.12) / 2, 1.1, words, ha="center", va="top", fontsize=8.5, color=COLORS[rank])
        left = x + 0.35
    axes.set_xlim(-0.1, left - 0.3)
    axes.set_ylim(1.62, -0.2)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title("What a rank holds: weights of the first block", fontsize=9.5, color=INK, loc="left")


def _stage(found: dict[str, Any], rank: int) -> str:
    """The blocks of a stage, in words; empty if a rank holds something of all."""
    blocks = {name.partition("blocks.")[2].partition(".")[0] for name, *_ in _boxes(found, rank) if "blocks." in name}
    of_all = itertools.chain.from_iterable(found["boxes"])
    all_blocks = {name.partition("blocks.")[2].partition(".")[0] for name, *_ in of_all}
    return f"\nholds block {', '.join(sorted(blocks))}" if blocks < all_blocks - {""} else ""


def _boxes(found: dict[str, Any], rank: int) -> list[Any]:
    """Without an index, each rank holds all."""
    if found["boxes"]:
        return found["boxes"][rank]
    shapes = {"attention.query.weight": (256, 256), "attention.out.weight": (256, 256), "fc1.weight": (512, 256),
              "fc2.weight": (256, 512)}  # fmt: skip
    return [[f"blocks.0.{name}", shape, (0, 0), shape] for name, shape in shapes.items()]


def _draw_timeline(axes: Any, found: dict[str, Any]) -> None:
    for rank, times in enumerate(found["ranks"]):
        start, end = 1e3 * times["start"], 1e3 * times["end"]
        axes.broken_barh([(start, end - start)], (rank - 0.36, 0.72), facecolor=COLORS[rank])
        waits = [(1e3 * first, 1e3 * (last - first)) for first, last in times["waits"]]
        axes.broken_barh(waits, (rank - 0.36, 0.72), facecolor=WAIT)
    axes.set_yticks(range(NUM_RANKS), [f"rank {rank}" for rank in range(NUM_RANKS)], fontsize=8)
    axes.set_ylim(NUM_RANKS - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("ms of one step; grey: blocked by an exchange", fontsize=8, color=MUTED)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title("When it computes", fontsize=9.5, color=INK, loc="left")


def draw_servers(suffix: str = "svg") -> None:
    """Allreduce and parameter server beside a slow machine."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.6, 2.4), layout="constrained")
    labels = ("equal speed", "one of two 3 times slower", "one of two 6 times slower")
    for number, (name, rates) in enumerate(SLOW_MACHINE.items()):
        places = [place + 0.36 * (number - 0.5) for place in range(len(labels))]
        axes.barh(places, rates, 0.34, color=COLORS[number], label=name)
        for place, rate in zip(places, rates, strict=True):
            axes.text(rate + 5, place, str(rate), va="center", fontsize=8, color=MUTED)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("images a second of two machines together", fontsize=8, color=MUTED)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(FOLDER / f"servers.{suffix}", metadata={"Date": None} if suffix == "svg" else None)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--only", default="", help="measure one layout, and keep the others")
    parser.add_argument("--suffix", choices=("svg", "png"), default="svg")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    steps = FOLDER / "steps.json"
    found: dict[str, Any] = json.loads(steps.read_text()) if steps.exists() else {}
    if not given.draw:
        for name in [given.only] if given.only else LAYOUTS:
            found[name] = run(LAYOUTS[name])
        steps.write_text(json.dumps(found) + "\n", encoding="utf-8")
    import matplotlib as mpl

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "shardmill", "font.family": "sans-serif"})
    for name in LAYOUTS:
        if name in found:
            draw(name, found[name], given.suffix)
    draw_servers(given.suffix)


if __name__ == "__main__":
    main()
