"""What the driver receives about a rank from whoever has started its process: what it prints, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Output:
    """An agent read whole lines of what its rank's process printed."""

    text: str
    kind: Literal["output"] = "output"


@dataclass(frozen=True, slots=True)
class RankExit:
    """An agent saw its rank's process end."""

    returncode: int
    """As `subprocess` gives it: minus the signal's number if a signal ended it."""
    output_tail: str
    """The last lines that the process wrote to stdout and stderr."""
    kind: Literal["rank_exit"] = "rank_exit"
