"""Runs first in each Python process of the tests: Keras does not find what it imports for wrappers and plots alone.

`import keras` takes scikit-learn (and with it most of SciPy) and Matplotlib if they are installed, and the extras of a
training install neither: of 5 seconds of a rank's start 2 were theirs. All but Keras find both.
"""

from __future__ import annotations

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
