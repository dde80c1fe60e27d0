"""Makes Linux end a process with its parent: for children that a closed pipe cannot end, including stopped ones."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent: int, exit_code: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the process `parent`, which started it, ends (prctl(2)).

    If it has ended already, this process ends at once, with `exit_code`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before we asked
        os._exit(exit_code)


def adopt_orphans() -> None:
    """From now on, a process below this one whose parent ends becomes this one's own child (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
