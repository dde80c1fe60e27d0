"""Runs first in each Python process of the tests: Keras does not find what it imports for wrappers and plots alone, and
nothing waits for the disk, and PyTorch does not find Triton.

`import keras` takes scikit-learn (and with it most of SciPy) and Matplotlib if they are installed, and the extras of a
training install neither: of 5 seconds of a rank's start 2 were theirs. All but Keras find both.

What a killed process has written is there, synced or not; tests/test_power_loss.py records what is synced. A small
file that was synced with its folder took 4.5 ms, and three processes of tests wait for each other's.

Triton compiles for GPUs. Its copy of LLVM and that of TensorFlow abort a process that has both, as pytest's has.
"""

from __future__ import annotations

import os
import sys

_NOT_FOR_KERAS = frozenset({"sklearn", "matplotlib"})


class _Hidden:
    """A finder in front of the others. `import` calls it: the frames above it are Python's own, then the importer's."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in _NOT_FOR_KERAS and _importer().startswith("keras."):
            raise ModuleNotFoundError(f"No module named {name!r}: hidden from Keras by {__file__}", name=name)


def _importer() -> str:
    """The module whose import is under way."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals["__name__"].startswith(("importlib.", "_frozen_importlib")):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


sys.meta_path.insert(0, _Hidden)  # pyright: ignore[reportArgumentType]
# As for Python itself: `import` and `find_spec` find none.
sys.modules["triton"] = None  # pyright: ignore[reportArgumentType]


def _sync_nothing(fd: object) -> None:
    """Raises what `os.fsync` raises for a descriptor that is not open."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())  # pyright: ignore[reportAttributeAccessIssue]


os.fsync = os.fdatasync = _sync_nothing
