"""Build a version of predictions: the ETL with a model's images, and its answers stored in place of pixels.
Also `spark-submit etl/predict_job.py`.

spark-submit etl/predict_job.py MODELS[@N] --config FILE --out DIR [--dataset DATASET[@N]] [--top K] [--layer NAME]
  [--set SECTION.NAME=VALUE]... [--workdir DIR --run-id ID] [--replace-source]
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # spark-submit puts this file's folder first, where `config` or `plan` would hide other people's modules.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from shardmill.applications import put_applications_first

    put_applications_first()

from collections.abc import Callable
from dataclasses import replace

from etl.checks.limits import NO_LIMIT
from etl.config import BoxesConfig, EtlTree, SourceConfig, SplitFractions
from etl.job import BuildOutcome, build_dataset
from etl.sources import COMMITTED
from shardmill.dataset.dataset import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.config import DatasetConfig, load_tree
from shardmill.jobs.observer import Observer
from shardmill.jobs.run_files import StageRecord, dataset_section
from shardmill.jobs.run_record import RunRecord, job_parser, run_job
from shardmill.jobs.spark import spark_application
from shardmill.registry import load_object
from shardmill.row_mapping import RowMapping

# By its name: the ETL imports nothing of training.
_MAPPING = "train.published.row_mapper:mapping_of"
SUMMARY_SECTIONS = ("predictions",)
"""The section that a run's summary gets."""


def predict_source(
    tree: EtlTree, mapping: RowMapping, *, run_id: str, observer: Observer | None = None, replace_source: bool = False
) -> BuildOutcome:
    """The next version of the predictions in `dataset.uri`, or the latest one if nothing is new. Raises as
    `build_dataset` does.
    """
    source = _unlabelled(tree.source)
    if source.kind == COMMITTED:
        # The version to read, and the mapping of its pixels.
        dataset = open_dataset(source.uri)
        dataset.require_images()
        pin = dataset.pin
        if dataset.manifest.normalization_fingerprint != mapping.normalization_fingerprint:
            raise UsageError(
                f"the images of {pin.uri}@{pin.version} were not normalized like those that {mapping.predicted_by} "
                "learned",
                "expected a dataset of the same settings and decoders",
                "predict the images that it was built from: they are decoded as the model needs them",
            )
        source = source.model_copy(update={"uri": f"{pin.uri}@{pin.version}"})
        mapping = replace(mapping, encoding="raw", predicted_by=replace(mapping.predicted_by, predicted=pin))
    # The images that the model takes; and what makes sense of rows that nobody is going to train on.
    settings = {
        **dict(mapping.normalize),
        "formats": ("parquet",),
        "split_fractions": SplitFractions(train=0, validation=0, test=1),
        "stratified_splits": False,
        "label_map": (),
        "corrections": "",
        "duplicates": "report",
        "write_mode": "overwrite",
        "max_drift": NO_LIMIT,
        "drift_baseline": 0,
    }
    decided = tree.model_copy(update={"source": source, "etl": tree.etl.model_copy(update=settings)})
    return build_dataset(decided, run_id=run_id, observer=observer, replace_source=replace_source, mapping=mapping)


def predictions_record(outcome: BuildOutcome) -> StageRecord:
    """Return the part of a run's summary that `predict` adds."""
    made_by = outcome.manifest.predicted_by
    assert made_by is not None
    predictions = {
        **dataset_section(outcome.pin, outcome.manifest),
        "model": str(made_by),
        "source": outcome.manifest.source.described,
        "num_predicted": outcome.num_images_read,
        **outcome.work,
    }
    status = "skipped" if outcome.skipped else "done"
    return StageRecord(stage="predict", status=status, sections={"predictions": predictions})


def _unlabelled(source: SourceConfig) -> SourceConfig:
    """Without labels, which nobody has to know; those that are asked for are kept beside the predictions.

    Without boxes and masks, too: predictions have no images that they could lie in.
    """
    if source.kind == "webdataset" and source.mask_field and not source.image_field:
        raise UsageError(
            f"source.mask_field = {source.mask_field!r}, and predictions read no masks: they would be read as images",
            "expected images that are named",
            'set source.mask_field = "" and source.image_field, such as "jpg;png"',
        )
    parts = {name: _unlabelled(part) for name, part in source.parts.items()}
    keeps = "label_kind" in source.model_fields_set or source.kind == COMMITTED
    kind = source.label_kind if keeps and not source.labels_are_of_boxes else "none"
    update = {"label_kind": kind, "parts": parts, "boxes": BoxesConfig(), "mask_field": "", "coco_masks": False}
    return source.model_copy(update=update)


def main() -> int:
    """The command line of `spark-submit etl/predict_job.py`; returns the exit code."""
    parser = job_parser("Predict all images of a source.")
    parser.add_argument("model", metavar="MODELS[@N]", help="models folder or URI (its current model), or one export")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder or URI of the predictions")
    parser.add_argument(
        "--dataset", default="", metavar="DATASET[@N]", help="predict its images, not the file's source"
    )
    parser.add_argument("--top", type=int, default=1, metavar="K", help="most probable classes to store of each image")
    parser.add_argument("--layer", default="", metavar="NAME", help="also store the output of this layer")
    parser.add_argument("--replace-source", action="store_true", help="allow the images to come from another source")
    arguments = parser.parse_args()

    @spark_application()
    def job(run: RunRecord, observer: Observer) -> None:
        tree = load_tree(EtlTree, arguments.config, tuple(arguments.set))
        source = SourceConfig(uri=arguments.dataset, kind=COMMITTED) if arguments.dataset else tree.source
        tree = tree.model_copy(update={"dataset": DatasetConfig(uri=arguments.out), "source": source})
        run.name_dataset(tree.dataset.uri)
        mapping_of: Callable[[str, int, str], RowMapping] = load_object(_MAPPING)
        run.stage(
            "predict",
            lambda: predict_source(
                tree,
                mapping_of(arguments.model, arguments.top, arguments.layer),
                run_id=run.run_id,
                observer=observer,
                replace_source=arguments.replace_source,
            ),
            predictions_record,
        )

    return run_job(
        job, arguments.workdir, arguments.run_id, command="predict", sections=SUMMARY_SECTIONS, debug=arguments.debug
    )


if __name__ == "__main__":
    sys.exit(main())
