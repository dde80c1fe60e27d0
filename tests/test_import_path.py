"""A user's own `train.py`, `etl.py` and `pipeline.py`, beside the data or on PYTHONPATH: they hide nothing of ours, and
nothing of ours hides them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.peer_script import find_uv
from tests.lab.commands import ROOT
from tests.lab.datasets import write_images

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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel holds, as in an environment's folder of packages."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [find_uv(), "build", "--wheel", "--out-dir", folder, ROOT], check=True, capture_output=True, timeout=300
    )
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "packages")
    return folder / "packages"


@pytest.fixture
def path(tmp_path: Path, installed: Path) -> str:
    """PYTHONPATH with modules of the applications' names in front of the installed package."""
    traps = tmp_path / "on_path"
    traps.mkdir()
    for name in ("train", "etl", "pipeline"):
        (traps / f"{name}.py").write_text(TRAP)
    return f"{traps}{os.pathsep}{installed}"


@pytest.mark.drill
def test_etl_and_training_run_beside_modules_of_the_same_names(home: Path):
    settings = {
        "etl.image_size": 16, "train.model": "train:f", "train.epochs": 1, "train.global_batch_size": 16,
        "train.strategy": "horovod", "train.launcher": "local", "train.num_workers": 2, "spark.master": "local[1]",
    }  # fmt: skip
    chosen = [argument for name, value in settings.items() for argument in ("--set", f"{name}={value}")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("shardmill")), "run", "images", "--json", *chosen], cwd=home,
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["train"]["world_size"] == 2
    assert (home / "was_called").exists()
    # What the driver planted for the ranks to read back is gone again.
    assert not list((home / "shardmill-work/models").glob(".reach-*"))


FIND = """
import sys
from train.models import MODELS
print(MODELS["train:f"].__module__, sys.modules["train"].__file__)
"""


@pytest.mark.starts("program")
def test_a_factory_is_found_in_the_working_directory_first(home: Path):
    (home / "train.py").write_text("def f(image_shape, num_classes): ...\n")  # without Keras, which takes long
    done = subprocess.run([sys.executable, "-P", "-c", FIND], cwd=home, capture_output=True, text=True, timeout=120)
    module, ours = done.stdout.split()
    assert module == "_shardmill_user.train"
    assert Path(ours).parent.parent == Path(__file__).parents[1]


PACKAGE = {
    "__init__": "",
    "blocks": "def width():\n    return 7\n",
    "absolute": "from train.blocks import width\ndef f(image_shape, num_classes): ...\n",
    "whole": "import train\ndef f(image_shape, num_classes):\n    return train.blocks.width()\n",
    "late": "def f(image_shape, num_classes):\n    from train.blocks import width\n    return width()\n",
    "relative": "from .blocks import width\ndef f(image_shape, num_classes):\n    return width()\n",
    "late_relative": "def f(image_shape, num_classes):\n    from .blocks import width\n    return width()\n",
}
BUILD = """
import sys
from contextlib import suppress
from shardmill.errors import UsageError
from train.models import MODELS
from train.models.user import call_factory
for name in sys.argv[1:]:
    with suppress(UsageError):
        MODELS[name]
for name in sys.argv[1:]:
    try:
        print(call_factory(name, (8, 8, 3), 2))
    except UsageError as error:
        print(error)
"""


def built(home: Path, *names: str, path: tuple[Path, ...] = ()) -> list[str]:
    """What calling these factories gives, or the error, a line each."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", BUILD, *names], cwd=home, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def write_package(folder: Path, modules: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.mark.starts("program")
@pytest.mark.parametrize("is_regular", [True, False])
def test_a_users_package_of_our_name_imports_itself_relatively_or_is_asked_to(tmp_path: Path, is_regular: bool):
    package = write_package(tmp_path / "train", PACKAGE)
    if not is_regular:
        (package / "__init__.py").unlink()
    names = [f"train.{name}:f" for name in ("absolute", "whole", "late", "relative", "late_relative")]
    *refused, relative, late_relative = built(tmp_path, *names)
    assert (relative, late_relative) == ("7", "7")
    for line, said in zip(refused, ["No module named 'train.blocks'", "has no attribute", "No module"], strict=True):
        assert said in line and "python -c 'import MODULE'" not in line
        assert f"`train` resolves to {ROOT}/train/__init__.py, not {package}: rename that folder" in line


@pytest.mark.starts("program")
def test_a_users_file_of_our_name_that_another_one_imports_is_named(tmp_path: Path):
    write_package(tmp_path / "home", {"train": "from etl import load\n", "etl": "def load(): ...\n"})
    [line] = built(tmp_path / "home", "train:f")
    assert "cannot import name 'load' from 'etl'" in line and f"not {tmp_path}/home/etl.py: rename that file" in line


@pytest.mark.starts("program")
def test_modules_of_two_folders_with_names_of_ours_stay_importable(tmp_path: Path):
    # Each imports more of its own folder when it is called; all have been loaded by then.
    for top in ("train", "etl"):
        late = PACKAGE["late_relative"].replace("return width()", f"return width(), '{top}', f.__module__")
        write_package(tmp_path / top / top, {**PACKAGE, "late_relative": late})
    found = built(
        tmp_path, "train.relative:f", "etl.relative:f", "train.late_relative:f", "etl.late_relative:f",
        path=(tmp_path / "train", tmp_path / "etl"),
    )  # fmt: skip
    assert found[:2] == ["7", "7"]
    assert found[2:] == [
        "(7, 'train', '_shardmill_user.train.late_relative')",
        "(7, 'etl', '_shardmill_user_2.etl.late_relative')",
    ]


# The console script of an installed wheel.
SHARDMILL = [sys.executable, "-P", "-c", "import sys; from shardmill.applications import main; main()"]


def run(*command: str | Path, cwd: Path, path: str, timeout: float = 200) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**environment, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.exhaustive
def test_an_installed_wheel_runs_on_spark_behind_modules_of_the_same_names(home: Path, path: str):
    """The command, Spark's workers and their processes, and the ranks of Horovod on Spark."""
    settings = {"etl.image_size": 16, "etl.engine": "spark", "spark.master": "local[2]"}
    training = {
        **settings, "train.model": "train:f", "train.epochs": 1, "train.global_batch_size": 16,
        "train.strategy": "horovod", "train.launcher": "horovod_spark", "train.num_workers": 2,
    }  # fmt: skip

    def stage(name: str, what: str, settings: dict[str, object]) -> dict[str, object]:
        chosen = [f"--set={key}={value}" for key, value in settings.items()]
        return json.loads(run(*SHARDMILL, name, what, "--json", *chosen, cwd=home, path=path, timeout=280))

    built = stage("etl", "images", settings)
    assert built["sections"]["etl"]["engine"] == "spark"  # pyright: ignore[reportIndexIssue]
    trained = stage("train", "shardmill-work/dataset", training)
    assert trained["sections"]["train"]["world_size"] == 2  # pyright: ignore[reportIndexIssue]
    assert (home / "was_called").exists()


@pytest.mark.exhaustive
def test_a_wheel_takes_no_name_that_people_use(installed: Path):
    found = {each.name for each in installed.iterdir()}
    assert {each for each in found if not each.endswith(".dist-info")} == {"airflow_dags", "shardmill"}


SHIP = """
import sys
from shardmill.applications import OnExecutor, put_applications_first
put_applications_first()
from etl.units.units import decode_unit
sys.stdout.buffer.write(OnExecutor(decode_unit).shipped)
"""
RECEIVE = """
import sys
from shardmill.applications import OnExecutor
shipped = OnExecutor.of_shipped(open(sys.argv[1], "rb").read())
assert "etl" not in sys.modules
try:
    shipped(b"no unit")
except ValueError:
    print(sys.modules["etl"].__file__)
"""


@pytest.mark.exhaustive
def test_an_executor_unpickles_what_is_ours(path: str, installed: Path, tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    shipped = subprocess.run([sys.executable, "-P", "-c", SHIP], env=environment, check=True, capture_output=True)
    (tmp_path / "shipped").write_bytes(shipped.stdout)
    file = run(sys.executable, "-P", "-c", RECEIVE, tmp_path / "shipped", cwd=tmp_path, path=path)
    assert file.strip() == str(installed / "shardmill/_applications/etl/__init__.py")


def test_all_that_is_shipped_to_executors_finds_our_applications_first():
    """A function that Spark ships bare is imported on the executor by its module's name, which may be a user's file;
    what these two ship is `OnExecutor`."""
    shipping = re.compile(r"\.(?:mapPartitions(?:WithIndex)?|foreachPartition|mapIn\w+|applyIn\w+)\b")
    files = [file for folder in ("etl", "train", "shardmill") for file in sorted((ROOT / folder).rglob("*.py"))]
    shipped = {file.name for file in files if shipping.search(file.read_text(encoding="utf-8"))}
    assert shipped == {"spark_tasks.py", "spark_connect.py"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["etl", "train"])
def test_an_installed_job_file_starts(stage: str, home: Path, path: str):
    """As Airflow submits it: its operators find the file beside the library."""
    code = f"from airflow_dags.factory import job_file; print(job_file({stage!r}))"
    file = run(sys.executable, "-P", "-c", code, cwd=home, path=path).splitlines()[-1]
    assert file.endswith(f"/shardmill/_applications/{stage}/job.py")
    assert "--workdir" in run(sys.executable, file, "--help", cwd=home, path=path)


@pytest.mark.starts("program")
def test_a_file_that_hides_a_package_is_named(tmp_path: Path):
    (tmp_path / "botocore.py").write_text("")
    done = subprocess.run(
        [Path(sys.executable).with_name("shardmill"), "inspect", "s3://bucket/dataset"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"{tmp_path / 'botocore.py'} has the name of a package; rename it" in done.stderr


FIND_BELOW_A_FOLDER = """
from train.models import MODELS
print(MODELS["examples.mine:f"].__module__)
"""


@pytest.mark.starts("program")
@pytest.mark.parametrize("is_on_path", [False, True])
def test_a_module_in_a_folder_is_found_beside_an_installed_package_of_the_folders_name(tmp_path, is_on_path: bool):
    # Python itself takes the package, wherever it is on the path. Petastorm installs one, `examples`.
    (tmp_path / "site" / "examples").mkdir(parents=True)
    (tmp_path / "site" / "examples" / "__init__.py").write_text("")
    (tmp_path / "home" / "examples").mkdir(parents=True)
    (tmp_path / "home" / "examples" / "mine.py").write_text("def f(image_shape, num_classes): ...\n")
    path = [str(tmp_path / "home")] * is_on_path + [str(tmp_path / "site"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", FIND_BELOW_A_FOLDER], cwd=tmp_path / "home",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout.strip() == "_shardmill_user.examples.mine", done.stderr[-2000:]
