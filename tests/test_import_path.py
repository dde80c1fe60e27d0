"""A user's own `train.py`, `etl.py` and `shardmill.py` beside the data: neither hides ours, nor is hidden by ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.command import ROOT
from tests.support import write_images

MODEL = """
from pathlib import Path
import keras
import helper

def f(image_shape, num_classes):
    Path(__file__).with_name("was_called").touch()
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)])
"""
TRAP = "raise RuntimeError(f'{__name__} of the working directory was imported by accident')\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder as people have them, with modules of our names."""
    write_images(tmp_path / "images", num_images=60)
    (tmp_path / "train.py").write_text(MODEL)
    (tmp_path / "helper.py").write_text("")
    for name in ("etl", "shardmill", "pipeline", "horovod", "pyspark"):
        (tmp_path / f"{name}.py").write_text(TRAP)
    return tmp_path


def test_etl_and_training_run_beside_modules_of_the_same_names(home: Path):
    settings = {
        "etl.image_size": 16,
        "train.model": "train:f",
        "train.epochs": 1,
        "train.global_batch_size": 16,
        "train.strategy": "horovod",
        "train.launcher": "local",
        "train.num_workers": 2,
        "spark.master": "local[1]",
    }
    chosen = [argument for name, value in settings.items() for argument in ("--set", f"{name}={value}")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("shardmill")), "run", "images", "--json", *chosen],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["train"]["world_size"] == 2
    assert (home / "was_called").exists()
    # What the driver planted for the ranks to read back is gone again.
    assert not list((home / "shardmill-work/models").glob(".reach-*"))


FIND = """
import sys
from train.models import MODELS
factory = MODELS["train:f"]
print(factory.__module__, sys.modules["train"].__file__)
"""


def test_a_factory_is_found_in_the_working_directory_first(home: Path):
    done = subprocess.run([sys.executable, "-P", "-c", FIND], cwd=home, capture_output=True, text=True, timeout=120)
    module, ours = done.stdout.split()
    assert module == "_shardmill_user.train"
    assert Path(ours).parent.parent == Path(__file__).parents[1]


def test_a_file_that_hides_a_package_is_named(tmp_path: Path):
    (tmp_path / "train.py").write_text("")
    done = subprocess.run(
        [Path(sys.executable).with_name("shardmill"), "config", "show"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{tmp_path / 'train.py'} has the name of a package; rename it" in done.stderr


FIND_BELOW_A_FOLDER = """
from train.models import MODELS
print(MODELS["examples.mine:f"].__module__)
"""


@pytest.mark.parametrize("is_on_path", [False, True])
def test_a_module_in_a_folder_is_found_beside_an_installed_package_of_the_folders_name(
    tmp_path: Path, is_on_path: bool
):
    # Python itself takes the package, wherever it is on the path. Petastorm installs one, `examples`.
    (tmp_path / "site" / "examples").mkdir(parents=True)
    (tmp_path / "site" / "examples" / "__init__.py").write_text("")
    (tmp_path / "home" / "examples").mkdir(parents=True)
    (tmp_path / "home" / "examples" / "mine.py").write_text("def f(image_shape, num_classes): ...\n")
    path = [str(tmp_path / "home")] * is_on_path + [str(tmp_path / "site"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", FIND_BELOW_A_FOLDER], cwd=tmp_path / "home",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.strip() == "_shardmill_user.examples.mine", done.stderr[-2000:]
