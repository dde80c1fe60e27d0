"""What is imported and unpickled, asked of the interpreter itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import make_dataset
from tests.test_architecture import HEAVY, ROOT


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_reading_a_dataset_unpickles_nothing(tmp_path: Path):
    done = python("-m", "tests.programs.read_without_unpickling", make_dataset(tmp_path))
    assert done.stdout == "the hook works\n", done.stderr


def test_the_library_imports_without_the_extras():
    code = (
        "import sys\n"
        # None is what stands in sys.modules for a module that must not be imported.
        f"sys.modules.update(dict.fromkeys({sorted(HEAVY)}))\n"
        "import shardmill, shardmill.dataset.dataset, shardmill.reader, shardmill.dataset.verify\n"
        "import shardmill.images.process, shardmill.epoch_plan, pipeline.cli, pipeline.run\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
