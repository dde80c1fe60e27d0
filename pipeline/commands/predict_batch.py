"""`shardmill predict --out`: the model over a whole source, as a batch job that commits a version of predictions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pipeline.config import absolute_uri, load_pipeline, require
from pipeline.output.printing import print_result
from pipeline.running import open_run
from pipeline.tree import PipelineTree
from shardmill.dataset.dataset import has_version
from shardmill.errors import UsageError
from shardmill.jobs.config import DatasetConfig, load_tree
from shardmill.words import rejected

if TYPE_CHECKING:
    from pipeline.cli_options import Common
    from pipeline.output.printing import Rows
    from shardmill.jobs.run_files import StageRecord
    from shardmill.row_mapping import RowMapping


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What the command line asks for."""

    model: str
    sources: tuple[str, ...]
    """One source of images, or a TOML file that names it."""
    out: str
    engine: str
    """Empty: as the config says."""
    top: int
    layer: str
    replace_source: bool


def predict_batch(common: Common, job: BatchJob) -> None:
    """Run the job as a stage `predict` of its run, and print what it has committed."""
    if len(job.sources) != 1:
        raise UsageError(
            f"--out with {len(job.sources)} sources",
            "expected one source, or a TOML file",
            "name all of them in a TOML file, with source.kind = several",
        )
    from etl.config import EtlTree
    from etl.predict_job import predict_source, predictions_record
    from train.published.row_mapper import mapping_of

    @cache
    def mapping() -> RowMapping:
        return mapping_of(absolute_uri(job.model), job.top, job.layer)

    def load(source: str, overrides: tuple[str, ...], workdir: str) -> PipelineTree:
        engine = (f"etl.engine={job.engine}",) if job.engine else ()
        tree = _load_source(source, (*overrides, *engine), workdir)
        # Here, because a wrong name of a model or layer is a mistyped command, too.
        mapping()
        return tree.model_copy(update={"dataset": DatasetConfig(uri=absolute_uri(job.out))})

    [source] = job.sources
    with open_run(source, common, load=load, builder="predict") as run:
        require(run.tree, "source")
        tree = run.tree.part(EtlTree)
        run.stage(
            "predict",
            lambda: predict_source(
                tree,
                mapping(),
                run_id=run.id,
                observer=run.progress,
                replace_source=job.replace_source,
            ),
            predictions_record,
        )
    _print(common, run.record.ended[-1])


def _load_source(source: str, overrides: tuple[str, ...], workdir: str) -> PipelineTree:
    """The tree of a TOML file, of a source of images, or of DATASET[@N]."""
    from etl.sources import COMMITTED
    from etl.sources.names import IMAGE_SUFFIXES, is_pattern

    if os.path.isfile(source) and os.path.splitext(source)[1].lower() in IMAGE_SUFFIXES:
        raise UsageError(
            f"{source} is one image",
            "expected with --out a folder, an archive, a table, DATASET[@N] or a TOML file",
            "leave --out away for a few images, or name their folder",
        )
    # One file is an archive, a table or a pattern, and no dataset.
    if source.endswith(".toml") or is_pattern(source) or os.path.isfile(source) or not has_version(source):
        return load_pipeline(source, overrides, workdir)
    return load_tree(PipelineTree, None, overrides, {"source": {"uri": absolute_uri(source), "kind": COMMITTED}})


def _print(common: Common, record: StageRecord) -> None:
    document = {"run_id": common.run_id, **record.model_dump(mode="json", exclude={"detail"})}
    skipped = "nothing is new; the latest version stays" if record.status == "skipped" else ""
    print_result(
        common, document, _rows(record.sections["predictions"]), title=": ".join(filter(None, ["predict", skipped]))
    )


def _rows(made: dict[str, Any]) -> Rows:
    counts = made["counts"]
    num_rejected = rejected(counts["rejected"], counts["by_reason"])
    return [
        ("images", f"{counts['accepted']:,} predicted, {num_rejected} of {counts['listed']:,} listed"),
        ("by this run", f"{made['num_predicted']:,} read, {made['images_per_second']:.1f} a second"),
        ("model", made["model"]),
        ("predictions", f"{made['uri']}@{made['version']}"),
    ]
