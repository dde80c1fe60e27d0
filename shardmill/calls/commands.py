"""`shardmill.run`, `etl`, `train`, `promote`, `predict`: commands of those names as functions that return values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardmill.calls.predictions import Predictions
from shardmill.calls.process import Command
from shardmill.calls.promotion import PromotionResult
from shardmill.calls.result import RunResult, epoch_figures, version_of
from shardmill.calls.settings import as_options
from shardmill.calls.watchers import watcher_of
from shardmill.jobs.run_files import SUMMARY, read_stage_record, run_folder
from shardmill.jobs.workdir import DEFAULT_WORKDIR
from shardmill.storage import join_uri
from shardmill.stores import open_store

if TYPE_CHECKING:
    from shardmill.loader.dataset import LoadableDataset


def run(
    source_or_config: str | os.PathLike[str], /, *, workdir: str | os.PathLike[str] = DEFAULT_WORKDIR, run_id: str = "",
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
    options = [*_flags(replace_source=replace_source, fresh=fresh), *_changes(allow_change)]
    options += as_options(settings)
    return _result(_call("run", source_or_config, workdir, run_id, options, quiet=quiet), workdir)


def etl(
    source_or_config: str | os.PathLike[str], /, *, workdir: str | os.PathLike[str] = DEFAULT_WORKDIR, run_id: str = "",
    replace_source: bool = False, quiet: bool = False, **settings: Any,
) -> LoadableDataset:  # fmt: skip
    """Only the dataset, as the command `shardmill etl`: the version that it committed, or the latest one if nothing has
    changed. Arguments and errors are those of `run`.
    """
    options = [*_flags(replace_source=replace_source), *as_options(settings)]
    document = _call("etl", source_or_config, workdir, run_id, options, quiet=quiet)
    return version_of(document["sections"])


def train(
    dataset_or_config: str | os.PathLike[str], /, *, workdir: str | os.PathLike[str] = DEFAULT_WORKDIR,
    run_id: str = "", fresh: bool = False, allow_change: Sequence[str] = (), quiet: bool = False, **settings: Any,
) -> RunResult:  # fmt: skip
    """Only the training, as the command `shardmill train`: on `DATASET[@N]`, or on the dataset of a TOML file.

    Nothing is exported or promoted. A training that exists with these settings is returned without being repeated.
    """
    options = [*_flags(fresh=fresh), *_changes(allow_change)]
    options += as_options(settings)
    return _result(_call("train", dataset_or_config, workdir, run_id, options, quiet=quiet), workdir)


def promote(
    models_or_config: str | os.PathLike[str], /, *, rollback: bool = False, require_promotion: bool = False,
    replace_current: bool = False, workdir: str | os.PathLike[str] = DEFAULT_WORKDIR, run_id: str = "",
    quiet: bool = False, **settings: Any,
) -> PromotionResult:  # fmt: skip
    """An export becomes the current model, as by the command `shardmill promote`: the newest of `MODELS` if it passes
    the gate, `MODELS@N` without the gate, or with `rollback` the previous one.

    Raises GateNotPassed with `require_promotion` if the gate is not passed.
    """
    flags = {"rollback": rollback, "require": require_promotion, "replace_current": replace_current}
    options = [*_flags(**flags), *as_options(settings)]
    document = _call("promote", models_or_config, workdir, run_id, options, quiet=quiet)
    return PromotionResult.of(document["run_id"], document["sections"]["promotion"])


def predict(
    models: str | os.PathLike[str], source_or_config: str | os.PathLike[str], /, *, out: str | os.PathLike[str] = "",
    top: int = 1, layer: str = "", engine: str = "", replace_source: bool = False,
    workdir: str | os.PathLike[str] = DEFAULT_WORKDIR, run_id: str = "", quiet: bool = False, **settings: Any,
) -> Predictions:  # fmt: skip
    """A model over every image of a source or of `DATASET[@N]`, as the command `shardmill predict --out`.

    `models`: a models folder (its current model), `MODELS@N`, or `models:/NAME@ALIAS`. `out`: where the version of
    predictions is committed; `predictions` in `workdir` if it is left out. Only new or changed images are predicted.
    """
    folder = os.fspath(out) or join_uri(os.fspath(workdir), "predictions")
    named = {"--out": folder, "--top": str(top), "--layer": layer, "--engine": engine}
    options = [part for option, value in named.items() if value for part in (option, value)]
    options += [*_flags(replace_source=replace_source), *as_options(settings)]
    document = _call("predict", models, workdir, run_id, options, source_or_config, quiet=quiet)
    section = document["sections"]["predictions"]
    return Predictions(
        document["run_id"],
        version_of({"dataset": section}),
        section["num_predicted"],
        section["images_per_second"],
        is_new=document["status"] != "skipped",
    )


def _flags(**flags: bool) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name, is_set in flags.items() if is_set]


def _changes(names: Sequence[str]) -> list[str]:
    return [option for name in names for option in ("--allow-change", name)]


def _call(
    name: str, what: str | os.PathLike[str], workdir: str | os.PathLike[str], run_id: str, options: list[str],
    *others: str | os.PathLike[str], quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    # A run without a name of its own leaves no record of a wrong setting.
    named = ["--run-id", run_id] if run_id else []
    places = [os.fspath(place) for place in (what, *others)]
    command = Command(name, ["--workdir", os.fspath(workdir), *named, *options, "--", *places])
    return command.run(watcher_of(f"shardmill.{name} {' '.join(places)}", quiet=quiet))


def _result(document: Mapping[str, Any], workdir: str | os.PathLike[str]) -> RunResult:
    """From the run's record, which has more than the command prints."""
    folder, run_id = os.fspath(workdir), document["run_id"]
    store, record = open_store(folder), read_stage_record(folder, run_id, "train")
    return RunResult(
        run_id=run_id,
        folder=join_uri(store.uri, run_folder(run_id)),
        summary=json.loads(store.read(f"{run_folder(run_id)}/{SUMMARY}")),
        epochs=tuple(map(epoch_figures, record.detail["history"])) if record is not None else (),
    )
