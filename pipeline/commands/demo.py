"""The command `demo`: images of its own, broken ones among them, and the whole pipeline on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from pipeline.cli_options import Common, Fresh, command
from pipeline.demo import WORKDIR

SETTINGS = (
    "etl.image_size=32", "train.epochs=8", "train.learning_rate=2e-3", "train.warmup_steps=20",
    "train.augment.random_crop_padding=2", "gate.min_accuracy=0.97",
)  # fmt: skip


@command(workdir=WORKDIR)
def demo(context: typer.Context, fresh: Fresh = False) -> None:
    from pipeline.demo.data import write_demo_images
    from pipeline.output.printing import print_table
    from pipeline.run import run_pipeline
    from shardmill.errors import UsageError
    from shardmill.jobs.summary_rows import summary_rows
    from shardmill.storage_errors import as_storage_error
    from train.planning.resume import ResumePolicy

    common: Common = context.obj
    folder = Path(common.workdir, "images")
    if Path(common.workdir, "dataset").exists() and not folder.exists():
        raise UsageError(
            f"{common.workdir} holds a dataset that is not the demo's",
            "expected a folder that does not exist, an empty one, or that of an earlier demo",
            "name another one with --workdir, or leave the option out",
        )
    with as_storage_error(folder):
        images = write_demo_images(folder)
    typer.echo(images.words, err=True)
    common = replace(common, overrides=(*SETTINGS, *common.overrides))
    summary = run_pipeline(str(images.folder), common, again=ResumePolicy(fresh))
    print_table(common, summary, summary_rows(summary), title=f"run {summary['run_id']}")
