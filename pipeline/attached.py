"""How a command ends in the processes of an attached job that are not rank 0's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from train.launching.attach import EndedWithJob


@contextmanager
def ended_with_its_job() -> Iterator[None]:
    """Let a process that is another rank than 0 of an attached job exit as that job did: rank 0 has told it all."""
    try:
        yield
    except EndedWithJob as ended:
        raise typer.Exit(ended.code if isinstance(ended.code, int) else 0) from None
