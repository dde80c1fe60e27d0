"""The command line `shardmill`: its commands by name. Each is a file, and is loaded when it is called."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from pipeline.output.ending import run_app
from shardmill.registry import Entry, Registry
from shardmill.version import __version__

COMMANDS: Registry[TyperCommand | TyperGroup] = Registry(
    "command",
    {
        "run": Entry(
            "pipeline.commands.stages:run", "The whole pipeline: etl, verify, train, export, evaluate, promote, report."
        ),
        "etl": Entry("pipeline.commands.stages:etl", "Build a committed dataset version from images."),
        "check-source": Entry(
            "pipeline.commands.check_source:check_source",
            (
                "Show which images `etl` would reject, and why: reads and decodes every image on this machine, writes "
                "nothing."
            ),
        ),
        "verify": Entry("pipeline.commands.verify:verify", "Check every rule of a dataset version, and print a table."),
        "train": Entry(
            "pipeline.commands.stages:train",
            "Train on the dataset's latest version, or continue an interrupted training.",
        ),
        "export": Entry(
            "pipeline.commands.stages:export",
            "Export the trained model (Keras: a SavedModel and a .keras file; PyTorch: model.pt2), and compare it.",
        ),
        "evaluate": Entry(
            "pipeline.commands.stages:evaluate", "Compute exact metrics of the trained model on the test split."
        ),
        "gate": Entry(
            "pipeline.commands.stages:gate",
            "Show what `promote` would decide, without promoting (exports first if there is no export yet).",
        ),
        "promote": Entry(
            "pipeline.commands.stages:promote",
            "Make the newest export the current model if it passes the gate, or export N without the gate.",
        ),
        "report": Entry(
            "pipeline.commands.stages:report",
            "Rewrite report.html for the run that --run-id names, or for the latest run.",
        ),
        "predict": Entry(
            "pipeline.commands.predict:predict",
            "Print labels and probabilities for image files, decoded as in the ETL. A refused file has its reason "
            "instead of a label; exit 2 if all are refused.",
        ),
        "lineage": Entry(
            "pipeline.commands.lineage:lineage",
            "Show where a model is, and what it was made of: training, dataset version, source.",
        ),
        "doctor": Entry(
            "pipeline.doctor.doctor:doctor",
            "Check this machine: versions, Java, compiler, config, storage, clocks, disk space, slots, devices, "
            "addresses, ports.",
        ),
        "demo": Entry("pipeline.commands.demo:demo", "Try it: the whole pipeline on digits, broken files among them."),
        "init": Entry("pipeline.commands.config:init", "Write a commented config file to start from."),
        "config": Entry("pipeline.commands.config:config", "Show the config."),
        "inspect": Entry(
            "pipeline.commands.inspect:inspect",
            "Show the contents of a dataset version, or (--rejects with its path) the ledger of a failed build.",
        ),
        "drift": Entry(
            "pipeline.commands.drift:drift",
            "Compare the classes, sizes and pixels of a dataset version with an older one. Exit 7 above a limit.",
        ),
        "mislabels": Entry(
            "pipeline.commands.mislabels:mislabels",
            "List labels that are likely wrong, confident mistakes and the classes they are in, from predictions.",
            extra="mislabels",
            packages=("cleanlab",),
        ),
        "export-tar": Entry(
            "pipeline.commands.datasets:export_tar",
            "Write a dataset version as WebDataset shards (tar files) into an empty folder, every row verified.",
        ),
        "compact": Entry(
            "pipeline.commands.datasets:compact",
            "Merge small shards into full ones, as a new version with equal content.",
        ),
        "rollback": Entry(
            "pipeline.commands.datasets:rollback",
            "Make version N the latest again, as a new version that refers to its files.",
        ),
        "gc": Entry(
            "pipeline.commands.datasets:gc",
            "Expire old versions, trainings, exports or runs, and delete files that nothing refers to, such as "
            "leftovers of killed processes.",
        ),
        "plan": Entry(
            "pipeline.commands.plan:plan",
            "Show what `train` would do, without training: the choices of `auto`, memory, and the speed measured here.",
        ),
    },
)


class Commands(TyperGroup):
    """All of `COMMANDS`: those that are listed need no more than their entries, the one that is called is loaded."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, help=entry.help) for name, entry in COMMANDS.entries.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Resolve a command as typer does, with the command itself."""
        name, listed, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, listed, rest
        command = COMMANDS[name]
        command.help = COMMANDS.entry(name).help
        return name, command, rest


app = typer.Typer(
    cls=Commands,
    help="Images to committed training shards with Spark; exact, resumable training on them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Version = Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)]


@app.callback(invoke_without_command=True)
def top(version: Version = False) -> None:
    """Options before a command: only --version."""
    if version:
        sys.stdout.write(f"shardmill {__version__}\n")
        raise typer.Exit


def main() -> None:
    """Entry point of the command `shardmill`."""
    run_app(app)


if __name__ == "__main__":
    main()
