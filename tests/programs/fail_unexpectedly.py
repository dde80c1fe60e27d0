"""A command with a bug: it raises the built-in exception argv[1] with the text argv[2]."""

import builtins
import sys

import typer

from pipeline.output.ending import run_app

app = typer.Typer()


@app.command()
def fail(error: str, text: str) -> None:
    raise getattr(builtins, error)(text)


sys.argv[0] = "shardmill"
run_app(app)
