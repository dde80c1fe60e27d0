"""What the processes of a training are for; a strategy declares which of them it needs."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a process of a training is for."""

    MEMBER = "member"
    """One of equals: runs the loop."""
    CHIEF = "chief"
    """Runs the loop for all."""
    WORKER = "worker"
    """Computes what a chief dispatches."""
    SERVER = "server"
    """Holds variables."""

    @property
    def runs_loop(self) -> bool:
        return self in (Role.MEMBER, Role.CHIEF)

    @property
    def computes(self) -> bool:
        """Whether a GPU is of use to it."""
        return self is not Role.SERVER
