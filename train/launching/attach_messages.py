"""What rank 0's process and the others of an attached job say to each other; part of the protocol in wire.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Admitted:
    """Rank 0's answer to a process that has proved the job's token: its own proof."""

    proof: str
    kind: Literal["admitted"] = "admitted"


@dataclass(frozen=True, slots=True)
class Begin:
    """Start your rank: the watchdog listens. Its token follows from the job's token and `nonce`."""

    address: str
    nonce: str
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True, slots=True)
class Stop:
    """A process to rank 0's: what has ended it, or will; that ends the whole job."""

    why: str = ""
    """Empty if a signal has asked it to end."""
    kind: Literal["stop"] = "stop"


@dataclass(frozen=True, slots=True)
class Ended:
    """Rank 0's command has ended, and so do all others."""

    exit_code: int
    line: str
    """Why, for people; empty with exit code 0."""
    kind: Literal["ended"] = "ended"


AttachMessage = Admitted | Begin | Stop | Ended
