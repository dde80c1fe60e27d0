"""`shardmill predict`: predictions as rows for people, as CSV for spreadsheets, and as an exit code; or, with --out, a
batch job, the model over a whole source, which commits a version of predictions.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import ReplaceSource, command
from pipeline.config import absolute_uri, existing_models, existing_path, is_dataset, load_pipeline, require
from pipeline.output.printing import print_record, print_table
from shardmill.errors import UsageError
from shardmill.words import harmless, printable, without_surrogates

if TYPE_CHECKING:
    from pipeline.cli_options import Common
    from pipeline.tree import PipelineTree
    from shardmill.row_mapping import RowMapping
    from train.published.predict import Prediction


@command()
def predict(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Models folder or URI, one export of it, or models:/NAME@ALIAS.")
    ],
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE...", help="Image files, or folders of them. With --out one source, or TOML file."
        ),
    ],
    top: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of most probable classes to give for each image.")
    ] = 1,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV on stdout.")] = False,
    out: Annotated[
        str,
        typer.Option(metavar="DIR", help="Predict a whole source, and commit the predictions to this folder or URI."),
    ] = "",
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="With --out: what runs the work, local or spark (etl.engine).")
    ] = "",
    layer: Annotated[
        str, typer.Option(metavar="NAME", help="With --out: also store the output of this layer of the model.")
    ] = "",
    replace_source: ReplaceSource = False,
) -> None:
    existing_models(model)
    if out:
        if as_csv:
            raise UsageError("--csv with --out", "expected one of them: --out commits Parquet", "leave --csv out")
        return predict_batch(context.obj, BatchJob(model, tuple(images), out, engine, top, layer, replace_source))
    if engine or layer or replace_source:
        raise UsageError(
            "--engine, --layer and --replace-source belong to a batch job", "expected --out DIR", "name its folder"
        )
    if not any("://" in each or os.path.lexists(each) for each in images):
        # Each of several is a row with its reason; of none, that is known before a framework is loaded.
        existing_path(images[0], "image files, or folders of them")
    from shardmill.result import plain
    from train.published.predict import exact_name, predict_images

    export = exact_name(model)
    sys.stderr.write(f"predict: export {printable(export)}; loading its framework\n")
    predictions = predict_images(export, images, top)
    if as_csv:
        sys.stdout.write(prediction_csv(predictions))
    else:
        print_table(context.obj, [plain(each) for each in predictions], prediction_rows(predictions), title=export)
    check_any_predicted(predictions)


def prediction_rows(predictions: Sequence[Prediction]) -> list[tuple[str, ...]]:
    """Path and rejection, or path and each class with its probability, best first, or the numbers."""
    width = 1 + max(2, *(len(each.values) or 2 * len(each.top) for each in predictions))
    rows = []
    for each in predictions:
        answers = [cell for guess in each.top for cell in (guess.label, f"{guess.probability:.4f}")]
        answers += [f"{value:.6g}" for value in each.values]
        row = [each.path, *([each.rejection] if each.rejection else answers)]
        rows.append(tuple(row + [""] * (width - len(row))))
    return rows


def prediction_csv(predictions: Sequence[Prediction]) -> str:
    """A header and one line a file, with as many columns as the longest needs. No cell is a formula."""
    num_values = max(len(each.values) for each in predictions)
    kinds, num_answers = (["label", "probability"], max(1, *(len(each.top) for each in predictions)))
    if num_values:
        kinds, num_answers = ["value"], num_values
    suffixes = ["" if place == 1 else f"_{place}" for place in range(1, num_answers + 1)]
    names = ["path", "rejection", *(f"{kind}{suffix}" for suffix in suffixes for kind in kinds)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for each in predictions:
        answers = [cell for guess in each.top for cell in (harmless(guess.label), f"{guess.probability:.6f}")]
        # A number is no formula, whatever its sign.
        answers += [f"{value:.9g}" for value in each.values]
        row = [harmless(each.path), harmless(each.rejection), *answers]
        writer.writerow(row + [""] * (len(names) - len(row)))
    return without_surrogates(text.getvalue())


def check_any_predicted(predictions: Sequence[Prediction]) -> None:
    """Raises UsageError if not a single file could be predicted."""
    if all(each.rejection for each in predictions):
        first = predictions[0]
        example = f"{printable(first.path)}: {first.rejection}"
        raise UsageError(
            f"none of {len(predictions)} file(s) could be decoded: {example}",
            "expected at least one valid image",
        )


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
    from pipeline.running import open_run
    from shardmill.jobs.config import DatasetConfig
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
    print_record(common, run.record.ended[-1])


def _load_source(source: str, overrides: tuple[str, ...], workdir: str) -> PipelineTree:
    """The tree of a TOML file, of a source of images, or of DATASET[@N]."""
    from etl.sources import COMMITTED
    from etl.sources.names import IMAGE_SUFFIXES
    from pipeline.tree import PipelineTree
    from shardmill.jobs.config import load_tree

    if os.path.isfile(source) and os.path.splitext(source)[1].lower() in IMAGE_SUFFIXES:
        raise UsageError(
            f"{source} is one image",
            "expected with --out a folder, an archive, a table, DATASET[@N] or a TOML file",
            "leave --out away for a few images, or name their folder",
        )
    if source.endswith(".toml") or not is_dataset(source):
        return load_pipeline(source, overrides, workdir, is_no_dataset=True)
    return load_tree(PipelineTree, None, overrides, {"source": {"uri": absolute_uri(source), "kind": COMMITTED}})
