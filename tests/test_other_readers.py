"""Other tools read the files of a version as docs/other-readers.md says: each row of the split once, none of another.

The folder holds two versions, and shards that no version names.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardmill.dataset.card import refresh_card
from shardmill.dataset.open import open_dataset
from shardmill.loader.dataset import LoadableDataset
from shardmill.loader.dataset import open_dataset as open_loadable
from shardmill.stores import open_store
from tests.lab.commands import ENVIRONMENT, in_process
from tests.lab.datasets import make_dataset
from tests.services.packed_environment import find_uv

PAGE = Path(__file__).resolve().parent.parent / "docs" / "other-readers.md"
SPLITS = ("train", "validation", "test")


def blocks(section: str) -> list[str]:
    """The programs of a section of the page; those before the first one are of section ""."""
    found = re.split(r"^## (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = dict(zip(["", *found[1::2]], found[::2], strict=True))
    return re.findall(r"^```python\n(.*?)```", texts[section], re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a reader of the page, with `demo-work/dataset`."""
    folder = tmp_path_factory.mktemp("readers")
    make_dataset(folder / "demo-work", num_images=90)
    first = set(open_dataset(str(folder / "demo-work/dataset")).files("train"))
    # Another version, of more images, and what killed builds leave.
    uri = make_dataset(folder / "demo-work", num_images=150)
    newest = set(open_dataset(uri).files("train"))
    assert open_dataset(uri).manifest.version == 2 and not newest & first
    for path in [Path(path) for path in (*first, *open_dataset(uri).files("train", "tfrecord"))]:
        shutil.copy(path, path.with_name(f"orphan-{path.name}"))
    refresh_card(open_store(uri))
    return folder


@pytest.fixture
def dataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LoadableDataset:
    monkeypatch.chdir(folder)
    return open_loadable("demo-work/dataset")


def ids_of(dataset: LoadableDataset, split: str = "train") -> list[int]:
    return sorted(dataset.metadata(split, ["sample_id"]).column("sample_id").to_pylist())


def run_section(section: str) -> dict[str, Any]:
    """The names that its first program leaves."""
    names: dict[str, Any] = {}
    exec("\n".join([*blocks(""), blocks(section)[0]]), names)
    return names


def test_files_are_those_of_one_split_of_the_version_in_one_format(dataset: LoadableDataset):
    for format, suffix in (("parquet", ".parquet"), ("tfrecord", ".tfrecord"), ("auto", ".parquet")):
        of_splits = [dataset.files(split, format=format) for split in SPLITS]
        files = [file for each in of_splits for file in each]
        assert len(set(files)) == len(files) and all(Path(file).is_file() and file.endswith(suffix) for file in files)
        named = {shard.path for shard in dataset.shards if shard.path.endswith(suffix)}
        assert {str(Path(file).relative_to(Path(dataset.store.uri))) for file in files} == named
    on_disk = list(Path("demo-work/dataset/shards").rglob("*.parquet"))
    assert len(on_disk) > 2 * len(dataset.files("train"))


def test_pandas(dataset: LoadableDataset):
    frame = run_section("pandas")["frame"]
    assert sorted(frame["sample_id"]) == ids_of(dataset)
    assert set(frame.columns) == set(dataset.manifest.columns)


def test_polars(dataset: LoadableDataset):
    assert sorted(run_section("polars")["frame"]["sample_id"]) == ids_of(dataset)


def test_duckdb(dataset: LoadableDataset):
    names = run_section("DuckDB")
    found = names["duckdb"].sql("SELECT sample_id FROM train").fetchall()
    assert sorted(each for (each,) in found) == ids_of(dataset)
    assert [count for _, count in names["per_class"]] == list(dataset.manifest.splits["train"].class_counts)


def test_webdataset(dataset: LoadableDataset, folder: Path):
    done = in_process("export-tar", "demo-work/dataset", "demo-work/tars", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(about["sample_id"] for _, _, about in run_section("WebDataset")["rows"]) == ids_of(dataset)


def test_tf_data(dataset: LoadableDataset):
    rows = run_section("tf.data")["rows"]
    assert sorted(int(row["image/sample_id"]) for row in rows) == ids_of(dataset)


@pytest.mark.drill
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_petastorm(dataset: LoadableDataset):
    assert sorted(run_section("petastorm")["ids"]) == ids_of(dataset)


@pytest.mark.exhaustive
def test_spark(dataset: LoadableDataset, folder: Path):
    code = "\n".join([*blocks(""), *blocks("Spark"), "print('ids', *(row.sample_id for row in frame.collect()))"])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(map(int, done.stdout.split("ids", 1)[1].split())) == ids_of(dataset)


# It needs a newer pyarrow than petastorm does, so it has an environment of its own.
IDS_OF_SPLITS = """
for split in {splits}:
    print(split, *(row["sample_id"] for row in splits[split]))
assert splits["train"].features["label"].names == ["class_0", "class_1", "class_2"]
assert {{row["image"].size for row in splits["train"]}} == {{(16, 16)}}
streamed = load_dataset("demo-work/dataset", streaming=True)
assert [row["sample_id"] for row in streamed["test"]] == list(splits["test"]["sample_id"])
"""


@pytest.mark.exhaustive
def test_hugging_face(dataset: LoadableDataset, folder: Path, tmp_path: Path):
    python = tmp_path / "venv/bin/python"
    for command in (
        ("venv", "--no-python-downloads", "--python", sys.executable, tmp_path / "venv"),
        ("pip", "install", "--python", python, "datasets", "pillow"),
    ):
        subprocess.run([find_uv(), *map(str, command)], check=True, capture_output=True, timeout=240)
    clean = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PATH": ENVIRONMENT["PATH"]}
    by_card, by_files, _ = blocks("Hugging Face")
    programs = (
        by_card + IDS_OF_SPLITS.format(splits=SPLITS),
        f"files = {dataset.files('train')}\n{by_files}\nprint('train', *rows['sample_id'])\nrows[0]['image'].load()",
    )
    told = [
        subprocess.run([python, "-c", each], cwd=folder, env=clean, capture_output=True, text=True, timeout=200)
        for each in programs
    ]
    assert not any(done.returncode for done in told), "".join(done.stderr[-2000:] for done in told)
    for done, splits in zip(told, (SPLITS, ("train",)), strict=True):
        found = {line.split()[0]: sorted(map(int, line.split()[1:])) for line in done.stdout.splitlines()}
        assert found == {split: ids_of(dataset, split) for split in splits}
