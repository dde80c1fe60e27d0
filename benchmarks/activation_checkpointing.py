"""Measures what `train.memory.activation_checkpointing` saves and costs: the probe of `shardmill plan`, with it off and
on.

    .venv/bin/python benchmarks/activation_checkpointing.py --backend torch --model torchvision.models:resnet50
    .venv/bin/python benchmarks/activation_checkpointing.py --backend keras --model resnet50

Each measurement is a process of its own, which computes steps of synthetic images on the CPU, once for its bytes and
once for its seconds; off and on in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import replace

from train.backends.model_spec import InputScale, ModelSpec
from train.config import TrainConfig
from train.labels import LabelSpec
from train.planning.memory_fit import size_of
from train.planning.probe import ProbeTask, StepCost, probe

NUM_CLASSES = 10


def main() -> None:
    """Measure, and print a row of the table in docs/benchmarks/training.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["torch", "keras"], required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--side", type=int, default=128, help="of the images")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of one process, of which the first is not timed")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    labels = LabelSpec("class", tuple(map(str, range(NUM_CLASSES))))
    spec = ModelSpec((args.side, args.side, 3), labels, InputScale((120.0,) * 3, (60.0,) * 3))

    def measured(setting: str) -> tuple[StepCost, float]:
        """-> what it takes, the seconds of a step."""
        config = TrainConfig.model_validate(
            {"model": args.model, "backend": args.backend, "strategy": "single", "accumulation_steps": 1,
             "memory": {"activation_checkpointing": setting}}
        )  # fmt: skip
        timed = ProbeTask(config, spec, args.batch, 1, args.steps)
        return probe(replace(timed, num_steps=2, for_memory=True)), probe(timed).step_seconds

    rounds = [(measured("off"), measured("on")) for _ in range(args.rounds)]
    off, on = ([one[place] for one in rounds] for place in (0, 1))
    cells = [args.model, args.backend, f"{args.batch} of {args.side}x{args.side}"]
    for name in ("work_bytes", "image_bytes"):
        before, after = (statistics.median(getattr(cost, name) for cost, _ in pairs) for pairs in (off, on))
        cells.append(f"{size_of(before)} -> {size_of(after)} ({after / before:.2f})")
    seconds = [statistics.median(each for _, each in pairs) for pairs in (off, on)]
    ratio = statistics.median(after / before for (_, before), (_, after) in rounds)
    cells.append(f"{seconds[0]:.2f} s -> {seconds[1]:.2f} s ({ratio:.2f})")
    sys.stdout.write("| " + " | ".join(cells) + " |\n")


if __name__ == "__main__":
    main()
