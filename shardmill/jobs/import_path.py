"""What the processes that we start may import: what we can, and nothing that happens to lie in a working directory.

People have an `etl.py` or a `train.py` of their own. In a task or a rank it must neither hide our package nor be hidden
by it (train/models/user.py finds a user's module on purpose).
"""

from __future__ import annotations

import os
import sys

# Python's own name for "do not put the working directory, or the script's folder, first on the path".
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def python_path() -> str:
    """Everything that this process can import, as the PYTHONPATH of a process of the same machine."""
    # An empty entry means the working directory.
    return os.pathsep.join(filter(None, sys.path))
