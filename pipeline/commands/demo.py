"""The command `demo`: images of its own, broken ones among them, and the whole pipeline on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from pipeline.cli_options import Common, Fresh, command

SETTINGS = (
    "etl.image_size=32", "train.epochs=8", "train.learning_rate=2e-3", "train.warmup_steps=20",
    "train.augment.random_crop_padding=2", "gate.min_accuracy=0.97",
)  # fmt: skip


@command()
def demo(context: typer.Context, fresh: Fresh = False) -> None:
    from pipeline.demo.data import WORKDIR, write_demo_images
    from pipeline.output.printing import print_table
    from pipeline.run import run_pipeline
    from shardmill.jobs.run_files import DEFAULT_WORKDIR
    from shardmill.jobs.summary_rows import summary_rows
    from train.planning.resume import ResumePolicy

    common: Common = context.obj
    workdir = WORKDIR if common.workdir == DEFAULT_WORKDIR else common.workdir
    images = write_demo_images(Path(workdir, "images"))
    typer.echo(images.words, err=True)
    common = replace(common, workdir=workdir, overrides=(*SETTINGS, *common.overrides))
    summary = run_pipeline(str(images.folder), common, again=ResumePolicy(fresh))
    print_table(common, summary, summary_rows(summary), title=f"run {summary['run_id']}")
