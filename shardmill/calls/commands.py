"""`shardmill.run`, `etl`, `train`, `promote`, `predict`: commands of those names as functions that return values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardmill.calls.calling import Folder, Place, call, flags, named, repeated
from shardmill.calls.predictions import Predictions
from shardmill.calls.promotion import PromotionResult
from shardmill.calls.result import RunResult, run_result, version_of
from shardmill.jobs.run_files import DEFAULT_WORKDIR
from shardmill.storage import join_uri

if TYPE_CHECKING:
    from shardmill.loader.dataset import LoadableDataset


def run(
    source_or_config: Place, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "",
    replace_source: bool = False, fresh: bool = False, allow_change: Sequence[str] = (), quiet: bool = False,
    **settings: Any,
) -> RunResult:  # fmt: skip
    """The whole pipeline, as the command `shardmill run`: ETL, verify, train, export, evaluate, promote, report.

    `source_or_config`: images of any source, or a TOML file. `settings`: config keys by section,
    `train={"epochs": 3}`, or by full name, `**{"train.epochs": 3}`. The other arguments are the options of the command;
    `quiet` shows no progress. The work happens in a process of its own; Ctrl-C, or the stop button of a notebook, ends
    it in order, and the same call resumes it.

    Raises the ShardmillError with which the command ends: UsageError for a wrong setting, RejectLimitExceeded, ...
    """
    options = [*named(workdir=workdir, run_id=run_id), *flags(replace_source=replace_source, fresh=fresh)]
    options += repeated("--allow-change", allow_change)
    document = call("run", [source_or_config], options, settings, quiet=quiet)
    return run_result(workdir, document["run_id"])


def etl(
    source_or_config: Place, /, *, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "",
    replace_source: bool = False, quiet: bool = False, **settings: Any,
) -> LoadableDataset:  # fmt: skip
    """Only the dataset, as the command `shardmill etl`: the version that it committed, or the latest one if nothing has
    changed. Arguments and errors are those of `run`.
    """
    options = [*named(workdir=workdir, run_id=run_id), *flags(replace_source=replace_source)]
    return version_of(call("etl", [source_or_config], options, settings, quiet=quiet)["sections"])


def train(
    dataset_or_config: Place, /, *, workdir: Folder = DEFAULT_WORKDIR,
    run_id: str = "", fresh: bool = False, allow_change: Sequence[str] = (), quiet: bool = False, **settings: Any,
) -> RunResult:  # fmt: skip
    """Only the training, as the command `shardmill train`: on `DATASET[@N]`, or on the dataset of a TOML file.

    Nothing is exported or promoted. A training that exists with these settings is returned without being repeated.
    """
    options = [*named(workdir=workdir, run_id=run_id), *flags(fresh=fresh), *repeated("--allow-change", allow_change)]
    document = call("train", [dataset_or_config], options, settings, quiet=quiet)
    return run_result(workdir, document["run_id"])


def promote(
    models_or_config: Place, /, *, rollback: bool = False, require_promotion: bool = False,
    replace_current: bool = False, workdir: Folder = DEFAULT_WORKDIR, run_id: str = "",
    quiet: bool = False, **settings: Any,
) -> PromotionResult:  # fmt: skip
    """An export becomes the current model, as by the command `shardmill promote`: the newest of `MODELS` if it passes
    the gate, `MODELS@N` without the gate, or with `rollback` the previous one.

    Raises GateNotPassed with `require_promotion` if the gate is not passed.
    """
    options = [
        *named(workdir=workdir, run_id=run_id),
        *flags(rollback=rollback, require=require_promotion, replace_current=replace_current),
    ]
    document = call("promote", [models_or_config], options, settings, quiet=quiet)
    return PromotionResult.of(document["run_id"], document["sections"]["promotion"])


def predict(
    models: Place, source_or_config: Place, /, *, out: Folder = "",
    top: int = 1, layer: str = "", engine: str = "", replace_source: bool = False,
    workdir: Folder = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False, **settings: Any,
) -> Predictions:  # fmt: skip
    """A model over every image of a source or of `DATASET[@N]`, as the command `shardmill predict --out`.

    `models`: a models folder (its current model), `MODELS@N`, or `models:/NAME@ALIAS`. `out`: where the version of
    predictions is committed; `predictions` in `workdir` if it is left out. Only new or changed images are predicted.
    """
    folder = os.fspath(out) or join_uri(os.fspath(workdir), "predictions")
    options = named(workdir=workdir, run_id=run_id, out=folder, top=top, layer=layer, engine=engine)
    options += flags(replace_source=replace_source)
    document = call("predict", [models, source_or_config], options, settings, quiet=quiet)
    section = document["sections"]["predictions"]
    return Predictions(
        document["run_id"],
        version_of({"dataset": section}),
        section["num_predicted"],
        section["images_per_second"],
        is_new=document["status"] != "skipped",
    )
