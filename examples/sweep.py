"""Searches training settings with Optuna on one dataset version, and prints the trials as a table.

    pip install optuna
    python examples/sweep.py my_photos --trials 20
    python examples/sweep.py photos.toml --trials 20 --set train.epochs=20 --json

Every trial is `shardmill.train` on the same version: equal rows, equal splits, and epochs in an order that the settings
decide. Trials are compared on the validation split; only the best one is exported, evaluated on the test split and
passed to the gate. The sampler is seeded and a finished training is found again, so the same command continues a sweep
that was interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from typing import Any

import optuna

import shardmill


def suggested(trial: optuna.Trial) -> dict[str, Any]:
    """The settings that are searched. Change them here."""
    return {
        "train.optimizer": trial.suggest_categorical("optimizer", ["adamw", "sgd"]),
        "train.learning_rate": trial.suggest_float("learning_rate", 1e-4, 3e-2, log=True),
        "train.global_batch_size": trial.suggest_categorical("global_batch_size", [16, 32, 64]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="images of any source, or a TOML file")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--workdir", default="./shardmill-work")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="for every trial, as TOML"
    )
    parser.add_argument("--json", action="store_true", help="print the trials and the best run as a document")
    arguments = parser.parse_args()
    fixed = tomllib.loads("\n".join(arguments.set))

    # One version for all trials.
    dataset = shardmill.etl(arguments.source, workdir=arguments.workdir, **fixed)
    version = f"{dataset.pin.uri}@{dataset.pin.version}"
    if arguments.source.endswith(".toml"):
        trained_on, pinned = arguments.source, {"dataset.uri": version}
    else:
        trained_on, pinned = version, {}

    def validation_accuracy(trial: optuna.Trial) -> float:
        settings = {**fixed, **suggested(trial)}
        result = shardmill.train(trained_on, workdir=arguments.workdir, quiet=True, **settings, **pinned)
        best = result.best_epoch
        trial.set_user_attr("epoch", best.epoch + 1)
        trial.set_user_attr("seconds", result.summary["train"]["seconds"])
        trial.set_user_attr("settings", settings)
        return best.validation_accuracy or 0.0

    # `tell` prints one line for a trial that fails.
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=2))
    study.optimize(
        validation_accuracy, n_trials=arguments.trials, callbacks=[lambda study, trial: tell(trial)],
        # A combination in which the loss diverges, say: the search goes on.
        catch=(shardmill.ShardmillError,),
    )  # fmt: skip

    if not any(trial.value is not None for trial in study.trials):
        raise SystemExit("every trial failed; run one by itself to see why")

    # The dataset and the training are there; export, evaluation on the test split and the gate are left to do.
    best = shardmill.run(arguments.source, workdir=arguments.workdir, **study.best_trial.user_attrs["settings"])
    trials = sorted((trial for trial in study.trials if trial.value is not None), key=lambda trial: -trial.value)
    rows = [
        {"validation_accuracy": trial.value, **trial.params, **trial.user_attrs, "trial": trial.number}
        for trial in trials
    ]
    if arguments.json:
        json.dump({"dataset": version, "trials": rows, "best_run": best.summary}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    print(as_table(rows))
    print(best)


def tell(trial: optuna.trial.FrozenTrial) -> None:
    value = "failed" if trial.value is None else f"{trial.value:.4f}"
    sys.stderr.write(f"trial {trial.number}: {value} {trial.params}\n")


def as_table(rows: list[dict[str, Any]]) -> str:
    """The trials, best first. `study.trials_dataframe()` is the same as a DataFrame of pandas."""
    names = [name for name in rows[0] if name != "settings"]
    lines = [
        names,
        *([f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows),
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)


def as_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
