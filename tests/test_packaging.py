"""What `make release` writes: complete in an empty environment, light at its base, not in the way of a user's files."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from benchmarks.peer_script import find_uv
from scripts.release import MACHINES, SBOM, cross_compiler, release
from shardmill.kernel import NATIVE_ID
from shardmill.registry import APPLICATIONS, install_hint, load_object
from tests.import_graph import modules
from tests.lab.datasets import make_dataset, write_images
from tests.lab.scale import exhaustive

ROOT = Path(__file__).resolve().parent.parent
# What a process must not see of this checkout: else it would test the checkout and not the wheel.
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PYTHONPATH", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT") and not name.startswith("PYTEST")
}


def run(
    *command: str | Path, cwd: Path, timeout: float = 240, environment: Mapping[str, str] = MappingProxyType({})
) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**CLEAN, **environment}, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pythons() -> list[str]:
    """An interpreter of the running version, and of each newer one that this machine has."""
    found = [sys.executable]
    for version in ("3.12", "3.13"):
        candidates = [*Path.home().glob(f".pyenv/versions/{version}*/bin/python"), shutil.which(f"python{version}")]
        for candidate in filter(None, candidates):
            # A shim of pyenv may be there and lead nowhere, so each candidate must answer.
            look = [str(candidate), "-c", "import sys; print(sys.version_info[:2])"]
            answer = subprocess.run(look, capture_output=True, text=True, cwd="/", env=CLEAN)
            if answer.stdout.strip() == str(tuple(map(int, version.split(".")))):
                found.append(str(candidate))
                break
    return found


PYTHONS = pythons()


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built twice, compared and checked."""
    folder = tmp_path_factory.mktemp("dist")
    release(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [wheel] = dist.glob("shardmill-*.whl")
    return wheel


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("dataset"), num_images=100, num_classes=3)


def test_the_wheel_holds_all_packages_and_takes_no_name_that_people_use():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["packages"]) == {module.relative.partition("/")[0] for module in modules().values()}
    moved = set(wheel["packages"]) - {"airflow_dags", "shardmill"}
    assert wheel["sources"] == {name: f"shardmill/{APPLICATIONS}/{name}" for name in moved}
    entry_points = [project["project"]["scripts"], *project["project"]["entry-points"].values()]
    for target in (target for group in entry_points for target in group.values()):
        assert callable(load_object(target))


def test_hints_name_make_only_in_a_clone(monkeypatch: pytest.MonkeyPatch):
    assert install_hint("s3") == "`make setup` in the checkout, or pip install '.[s3]' there"
    assert install_hint("native").endswith("pip install ./native there")
    monkeypatch.setattr("shardmill.registry.is_clone", lambda: False)
    assert [install_hint(extra) for extra in ("", "s3")] == ["", "pip install 'shardmill[s3]'"]
    monkeypatch.setattr("sys.version_info", (3, 13))
    assert install_hint("spark,horovod") == "with Python 3.11: pip install 'shardmill[spark,horovod]'"


@pytest.mark.drill
def test_the_wheel_holds_every_file_of_its_packages(wheel: Path):
    """Templates and log settings as well as modules: what is read from beside a module is there."""
    applications = ("etl", "train", "pipeline")
    tracked = run("git", "ls-files", "shardmill", *applications, "airflow_dags", cwd=ROOT).split()
    assert "shardmill/jobs/spark-log4j2.properties" in tracked
    placed = {f"shardmill/{APPLICATIONS}/{file}" if file.startswith(applications) else file for file in tracked}
    assert placed <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.drill
def test_what_is_published_is_named_with_its_digest_and_needs_no_clone(dist: Path, wheel: Path, tmp_path: Path):
    sums = {name: digest for digest, name in map(str.split, (dist / "SHA256SUMS").read_text().splitlines())}
    assert sums == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in dist.iterdir() if file.name != "SHA256SUMS"
    }
    [sdist] = dist.glob("*.tar.gz")
    kernels = {file.stem.rpartition("manylinux_2_17_")[2] for file in dist.glob("shardmill_native-*-cp311-abi3-*.whl")}
    assert kernels == {platform.machine(), *filter(cross_compiler, MACHINES)}
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"native/module.c", "native/LICENSE.libjpeg-turbo", "shardmill/py.typed", "LICENSE"} <= files
    assert not any(name.startswith(("tests/", "benchmarks/", "examples/")) for name in files)
    with zipfile.ZipFile(wheel) as archive:
        assert "shardmill/py.typed" in archive.namelist()
        [metadata] = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    # Airflow lists the provider, and imports the links that it names.
    environment = {"PYTHONPATH": str(wheel), "AIRFLOW_HOME": str(tmp_path)}
    shown = run(sys.executable, "-m", "airflow", "providers", "links", cwd=tmp_path, environment=environment)
    assert {"airflow_dags.operators.ReportLink", "airflow_dags.operators.MlflowLink"} <= set(shown.split())
    links = [each.partition(")")[0] for each in metadata.split("](")[1:]]
    assert "shardmill turns" in metadata and all(link.startswith("https://") for link in links)
    bill = json.loads((dist / SBOM).read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert {"horovod", "numpy", "torch", "libjpeg-turbo"} <= {each["name"] for each in bill["components"]}


@pytest.mark.drill
@pytest.mark.skipif(not NATIVE_ID, reason="the native kernel is not built (scripts/setup.sh says why)")
@pytest.mark.parametrize("version", PYTHONS)
def test_one_wheel_of_the_kernel_answers_on_every_python_as_the_build_of_this_checkout(
    version: str, dist: Path, dataset: str, tmp_path: Path
):
    run(find_uv(), "venv", "--no-python-downloads", "--python", version, tmp_path / "venv", cwd=tmp_path)
    into = ("--python", tmp_path / "venv/bin/python", "--find-links", dist)
    run(find_uv(), "pip", "install", *into, "shardmill[native]", cwd=tmp_path)
    assert "100" in run(tmp_path / "venv/bin/shardmill", "inspect", dataset, cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    assert (
        run(python, "-c", "from shardmill.kernel import NATIVE_ID; print(NATIVE_ID)", cwd=tmp_path) == f"{NATIVE_ID}\n"
    )

    copy = shutil.copytree(ROOT / "native", tmp_path / "native", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    run(sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path / "built", cwd=copy)
    [installed] = (tmp_path / "venv/lib").glob("python*/site-packages")
    script = ROOT / "tests/shardmill/images/fuzz_native.py"
    told = [run(python, script, folder, "5", "20000", cwd=tmp_path) for folder in (installed, tmp_path / "built")]
    assert told[0] == told[1] and told[0].startswith(NATIVE_ID)


@pytest.mark.parametrize("python", [pytest.param(PYTHONS[0], marks=pytest.mark.drill), *map(exhaustive, PYTHONS[1:])])
def test_the_base_wheel_alone_reads_a_dataset(python: str, wheel: Path, dataset: str, tmp_path: Path):
    run(find_uv(), "venv", "--no-python-downloads", "--python", python, tmp_path / "venv", cwd=tmp_path)
    run(find_uv(), "pip", "install", "--python", tmp_path / "venv/bin/python", wheel, cwd=tmp_path)
    installed = run(find_uv(), "pip", "list", "--python", tmp_path / "venv/bin/python", cwd=tmp_path).lower()
    assert not any(name in installed for name in ("pyspark", "tensorflow", "horovod", "torch", "airflow"))

    # The command line is there, whole, without any of the stages' packages.
    shown = run(tmp_path / "venv/bin/shardmill", "--help", cwd=tmp_path)
    assert all(command in shown for command in ("run", "etl", "verify", "train", "promote", "predict", "doctor"))
    run(tmp_path / "venv/bin/shardmill", "init", cwd=tmp_path)
    assert "image_size" in run(tmp_path / "venv/bin/shardmill", "config", "show", "shardmill.toml", cwd=tmp_path)
    run(tmp_path / "venv/bin/shardmill", "verify", dataset, "--deep", cwd=tmp_path)

    # The report's templates travel in the wheel.
    (tmp_path / "dataset.toml").write_text(f'[dataset]\nuri = "{dataset}"\n')
    run(tmp_path / "venv/bin/shardmill", "verify", "dataset.toml", "--run-id", "r", cwd=tmp_path)
    run(tmp_path / "venv/bin/shardmill", "report", "--run-id", "r", cwd=tmp_path)
    assert "<h1>shardmill run" in (tmp_path / "shardmill-work/runs/r/report.html").read_text()

    # So does the ETL, on this machine: the local engine needs neither Spark nor Java.
    write_images(tmp_path / "images", num_images=30)
    run(tmp_path / "venv/bin/shardmill", "etl", "images", "--set", "etl.image_size=16", cwd=tmp_path)
    run(tmp_path / "venv/bin/shardmill", "verify", "shardmill-work/dataset", "--deep", cwd=tmp_path)

    # A user's own script of the name of one of our packages does not get into the library's way.
    shutil.copy(ROOT / "tests/programs/read_a_dataset.py", tmp_path / "train.py")
    (tmp_path / "etl.py").write_text("raise RuntimeError('the library imported a user file')\n")
    told = run(tmp_path / "venv/bin/python", "train.py", dataset, cwd=tmp_path)
    numpy_version, pyarrow_version = told.split()[-2:]
    # A call takes none of these names in its caller's process.
    call = "import sys, shardmill; version = shardmill.etl('images', etl={'image_size': 16}, quiet=True); "
    show = "print(version.manifest.counts.accepted, {'etl', 'train', 'pipeline'} & sys.modules.keys())"
    assert run(tmp_path / "venv/bin/python", "-c", call + show, cwd=tmp_path) == "30 set()\n"
    # Nothing holds the base back: the newest of both were resolved.
    assert int(numpy_version.split(".")[0]) >= 2 and int(pyarrow_version.split(".")[0]) > 14


@pytest.mark.exhaustive
def test_with_the_newest_torch_the_demo_promotes_a_model_and_a_loop_is_fed(dist: Path, dataset: str, tmp_path: Path):
    """On the newest Python that this machine has, with the newest pyarrow and NumPy; no Java, TensorFlow, compiler."""
    run(find_uv(), "venv", "--no-python-downloads", "--python", PYTHONS[-1], tmp_path / "venv", cwd=tmp_path)
    into = ("--python", tmp_path / "venv/bin/python", "--find-links", dist)
    run(find_uv(), "pip", "install", *into, "shardmill[torch]", cwd=tmp_path, timeout=500)
    shown = run(tmp_path / "venv/bin/shardmill", "demo", cwd=tmp_path)
    assert "single, 1 rank" in shown and "promoted: accuracy" in shown
    [answer] = run(
        tmp_path / "venv/bin/shardmill",
        "predict",
        "demo-work/models",
        "demo-work/images/3/digit_0013.jpg",
        cwd=tmp_path,
    ).splitlines()[-1:]
    assert "3" in answer.split()
    shutil.copy(ROOT / "tests/programs/read_with_torch.py", tmp_path / "loop.py")
    told = run(tmp_path / "venv/bin/python", "loop.py", dataset, cwd=tmp_path)
    # PyTorch's libraries for CUDA are 5 GB.
    shutil.rmtree(tmp_path / "venv")
    numpy_version, pyarrow_version = told.split()[-2:]
    assert int(numpy_version.split(".")[0]) >= 2 and int(pyarrow_version.split(".")[0]) > 14


@pytest.mark.exhaustive
def test_the_base_wheel_works_with_the_lowest_versions_that_it_allows(wheel: Path, tmp_path: Path):
    run(find_uv(), "venv", "--no-python-downloads", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    into = ("--python", tmp_path / "venv/bin/python")
    # What a wheel depends on counts as indirect.
    run(
        find_uv(), "pip", "install", *into, "--resolution", "lowest-direct", "-r", ROOT / "pyproject.toml", cwd=tmp_path
    )
    run(find_uv(), "pip", "install", *into, "--no-deps", wheel, cwd=tmp_path)
    shardmill = tmp_path / "venv/bin/shardmill"
    assert "SOURCE_OR_CONFIG" in run(shardmill, "run", "--help", cwd=tmp_path)
    write_images(tmp_path / "images", num_images=30)
    run(shardmill, "etl", "images", "--set", "etl.image_size=16", cwd=tmp_path)
    run(shardmill, "verify", "shardmill-work/dataset", "--deep", cwd=tmp_path)
    # One line each: of a word that is missing, and of a key from which the default of another one follows.
    for arguments, said in (
        (["run"], "Missing argument"),
        (["run", "images", "--set", "train.global_batch_size=no"], "train.global_batch_size"),
    ):
        done = subprocess.run([shardmill, *arguments], cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr, done.stderr


@pytest.mark.exhaustive
def test_a_wheel_without_extras_names_what_is_missing(wheel: Path, tmp_path: Path):
    run(find_uv(), "venv", "--no-python-downloads", "--python", sys.executable, tmp_path / "venv", cwd=tmp_path)
    run(find_uv(), "pip", "install", "--python", tmp_path / "venv/bin/python", wheel, cwd=tmp_path)
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "x.png").write_bytes(b"x")
    done = subprocess.run(
        [tmp_path / "venv/bin/shardmill", "etl", "images", "--set", "etl.engine=spark"],
        cwd=tmp_path,
        env=CLEAN,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("ERROR 2: ") and "'shardmill[spark]'" in done.stderr

    # From Python the same line is an exception; the applications are there, and without them that is the line.
    call = "import shardmill; shardmill.run('images')"
    for home, said in (
        (None, "pip install 'shardmill[torch]'"),
        ("shardmill/_applications", "holds the library alone; `pip install shard"),
    ):
        if home:
            [packages] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
            shutil.rmtree(packages / home)
        done = subprocess.run(
            [tmp_path / "venv/bin/python", "-c", call], cwd=tmp_path, env=CLEAN, capture_output=True, text=True
        )
        assert done.stderr.splitlines()[-1].startswith("shardmill.errors.UsageError: ") and said in done.stderr


# Each costs a start between 0.1 and 5 seconds; none is needed to print a help page or to import the library.
HEAVY = {
    "numpy", "pyarrow", "PIL", "boto3", "jinja2", "tomlkit", "pyspark", "tensorflow", "keras", "horovod", "torch",
    "airflow",
}  # fmt: skip


@pytest.mark.starts("program")
@pytest.mark.parametrize("start", ["shardmill", "pipeline.cli"])
def test_starting_imports_nothing_heavy(start: str):
    told = run(sys.executable, "-m", "tests.programs.start_and_show_imports", start, *HEAVY, cwd=ROOT)
    assert told.splitlines()[-1] == "imported:"
