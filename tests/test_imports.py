"""Checks imports and unpickling with the interpreter itself, and which code may depend on a framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.import_graph import HEAVY, ROOT, imports_of, modules
from tests.lab.datasets import make_dataset

FRAMEWORKS = {"tensorflow", "keras", "torch", "torchvision", "horovod", "jax"}
# Where they may be used, at any depth, and what of them: backends compute, strategies exchange, models have layers,
# loaders hand over batches; all else sees those through their registries (docs/decisions/0008).
ROOMS = {
    **dict.fromkeys(("train/backends/", "train/strategies/", "train/models/", "train/layers/"), tuple(FRAMEWORKS)),
    "shardmill/loader/torch.py": ("torch",),
    "shardmill/loader/tensorflow.py": ("tensorflow",), "shardmill/loader/jax.py": ("jax",),
    # It asks the framework that runs for its processes.
    "shardmill/loader/ranks.py": ("jax",),
    # Of Horovod that which starts ranks.
    "train/launching/horovod_spark.py": ("horovod.spark", "horovod.runner"),
}  # fmt: skip


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=200)


@pytest.mark.starts("program")
def test_reading_a_dataset_unpickles_nothing(tmp_path: Path):
    done = python("-m", "tests.programs.read_without_unpickling", make_dataset(tmp_path))
    assert done.stdout == "the hook works\n", done.stderr


@pytest.mark.starts("program")
def test_the_library_imports_without_the_extras():
    code = (
        "import sys\n"
        # None is what stands in sys.modules for a module that must not be imported.
        f"sys.modules.update(dict.fromkeys({sorted(HEAVY)}))\n"
        "import shardmill, shardmill.dataset.dataset, shardmill.loader.reader, shardmill.dataset.verify\n"
        "import shardmill.images.process, shardmill.epoch_plan, shardmill.loader.dataset, pipeline.cli, pipeline.run\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.starts("program")
def test_the_help_of_a_command_loads_no_application():
    code = (
        "import sys\n"
        "from pipeline.cli import COMMANDS\n"
        "for name in COMMANDS:\n"
        "    COMMANDS[name]\n"
        "    assert not {'etl.job', 'etl.plan', 'pipeline.run'} & sys.modules.keys(), name\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.starts("program")
def test_tests_of_trainings_are_collected_without_a_framework():
    """Whoever runs one of them waits for all of their modules; a test imports what it needs itself."""
    code = (
        "import sys, pytest\n"
        "assert pytest.main(['--collect-only', '-q', '--tier', 'fast', 'tests/train']) == 0\n"
        f"assert not (found := {FRAMEWORKS - {'jax'}} & sys.modules.keys()), found\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr


def test_framework_code_is_that_of_backends_strategies_and_loaders():
    used = [
        (module.relative, name)
        for module in modules().values()
        for name in sorted(imports_of(module, only_at_import=False))
        if name.partition(".")[0] in FRAMEWORKS
    ]
    assert all(any(path.startswith(room) for path, _ in used) for room in ROOMS)
    wrong = [
        f"{path} imports {name}"
        for path, name in used
        if not any(path.startswith(room) and name.startswith(names) for room, names in ROOMS.items())
    ]
    assert not wrong, "\n".join(wrong)
