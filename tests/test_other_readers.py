"""Other programs read what we write, and loops of others read from our loaders."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peer_script import find_uv
from shardmill.dataset.card import refresh_card
from shardmill.dataset.dataset import open_dataset
from shardmill.loader.dataset import LoadableDataset
from shardmill.loader.dataset import open_dataset as open_loadable
from shardmill.stores import open_store
from tests.lab.commands import ENVIRONMENT, in_process
from tests.lab.datasets import make_dataset
from tests.services.marked import free_ports

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


def test_in_place_of_hugging_face_on_several_ranks(dataset: LoadableDataset):
    names: dict[str, Any] = {}
    exec("\n".join([*blocks(""), blocks("Hugging Face")[-1]]), names)
    assert len(names["rows"]) == 3 and len(names["rows"][0]) > 1


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
    by_card, by_files, *_ = blocks("Hugging Face")
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


LOOPS = Path(__file__).resolve().parent.parent / "examples" / "loops"


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("loops"))


def run(*command: object) -> str:
    return run_at_once(command)[0]


def run_at_once(*commands: tuple[object, ...]) -> list[str]:
    """What each of some processes prints."""
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    ended = [process.communicate(timeout=200) for process in started]
    assert not any(process.returncode for process in started), "".join(stderr[-3000:] for _, stderr in ended)
    return [stdout for stdout, _ in ended]


# Of a script that is called several times, in one process: most of its time are imports.
CALLS = """
import contextlib, json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    print("call", flush=True)
    with contextlib.suppress(SystemExit):
        runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_calls(*calls: tuple[object, ...]) -> list[str]:
    """What each call of a script prints, one after the other."""
    printed = run("-c", CALLS, json.dumps([list(map(str, call)) for call in calls]))
    return printed.split("call\n")[1:]


def steps_of(printed: str) -> list[tuple[int, int]]:
    """The (epoch, step) of each step that a loop prints."""
    return [(int(epoch), int(step)) for epoch, step in re.findall(r"epoch (\d+) step (\d+) loss", printed)]


def losses_of(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (?:of rank 0 )?([\d.]+)", printed)]


def all_steps(uri: str) -> list[tuple[int, int]]:
    """Of two epochs."""
    num_steps = len(open_loadable(uri).batches("train", global_batch_size=32))
    return [(epoch, step) for epoch in range(2) for step in range(num_steps)]


def ddp(uri: str, checkpoint: Path, num_ranks: int, *more: object) -> tuple[list[tuple[int, int]], float]:
    """-> the (epoch, step) of its steps, and the sum of its weights at the end."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks)
    printed = run(*launch, LOOPS / "torch_ddp.py", f"{uri}@1", "--checkpoint", checkpoint, *more)
    return steps_of(printed), float(re.findall(r"weights ([\d.]+)", printed)[0])


@pytest.mark.drill
def test_the_ddp_loop_resumes_in_an_epoch_with_another_number_of_ranks(uri: str, tmp_path: Path):
    steps, weights = ddp(uri, tmp_path / "whole.pt", 2)
    begun, _ = ddp(uri, tmp_path / "stopped.pt", 2, "--stop-after", 2)
    rest, resumed = ddp(uri, tmp_path / "stopped.pt", 1)
    assert begun + rest == steps and len(begun) == 2 and steps[2][0] == 0
    # Sums of one rank and of two differ by rounding.
    assert resumed == pytest.approx(weights, rel=1e-4)


@pytest.mark.exhaustive
def test_the_lightning_loop_neither_skips_nor_repeats_a_batch_after_a_resume(uri: str, tmp_path: Path):
    call = (LOOPS / "lightning_fit.py", f"{uri}@1", "--checkpoints", tmp_path)
    # In the middle of an epoch, and at its end.
    printed = run_calls((*call, "--stop-after", 2), (*call, "--stop-after", 3), call)
    assert [len(steps_of(each)) for each in printed] == [2, 1, 3]
    found = re.findall(r"epoch (\d+) step (\d+) loss .* ids (.*)", "".join(printed))
    loader = open_loadable(f"{uri}@1").batches("train", global_batch_size=32, seed=0)
    expected = [
        (batch.epoch, batch.step, sorted(batch.sample_ids[batch.weights > 0].tolist()))
        for _ in range(2)
        for batch in loader
    ]
    assert [(int(epoch), int(step), json.loads(ids)) for epoch, step, ids in found] == expected


@pytest.mark.exhaustive
def test_the_accelerate_loop_resumes_in_one_process_what_two_have_begun(uri: str, tmp_path: Path):
    call = (LOOPS / "accelerate_loop.py", f"{uri}@1", "--checkpoint")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    begun = run(*launch, *call, tmp_path / "stopped", "--stop-after", 2)
    rest = run(*call, tmp_path / "stopped")
    assert [*steps_of(begun), *steps_of(rest)] == all_steps(uri) and len(steps_of(begun)) == 2


@pytest.mark.exhaustive
def test_the_horovod_loop_resumes_in_one_process_what_two_have_begun(uri: str, tmp_path: Path):
    def loop(checkpoint: str) -> tuple[object, ...]:
        return (LOOPS / "horovod_loop.py", f"{uri}@1", "--checkpoint", tmp_path / checkpoint)

    start = ("-m", "horovod.runner.launch", "--gloo", "-np", 2, sys.executable)
    begun = run(*start, *loop("stopped.weights.h5"), "--stop-after", 2)
    rest = run(*loop("stopped.weights.h5"))
    assert [*steps_of(begun), *steps_of(rest)] == all_steps(uri) and len(steps_of(begun)) == 2
    losses = [losses_of(each) for each in (begun + rest, run(*loop("whole.weights.h5")))]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.exhaustive
def test_keras_on_torch_resumes_in_an_epoch(uri: str, tmp_path: Path):
    call = (LOOPS / "keras_fit_torch.py", uri, "--checkpoint")
    begun, rest, whole = run_calls(
        (*call, tmp_path / "stopped.keras", "--stop-after", 2), (*call, tmp_path / "stopped.keras"),
        (*call, tmp_path / "whole.keras"),
    )  # fmt: skip
    assert steps_of(begun + rest) == steps_of(whole) == all_steps(uri) and len(steps_of(begun)) == 2
    # Keras prints the mean over an epoch; those of the second one are of the same steps.
    assert losses_of(rest)[-3:] == pytest.approx(losses_of(whole)[-3:], abs=1e-3)


@pytest.mark.drill
def test_keras_fits_and_learns(uri: str):
    printed = run(LOOPS / "keras_fit.py", uri)
    losses = [float(loss) for loss in re.findall(r" - loss: ([\d.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < 0.8 * losses[0] and len(re.findall("val_loss", printed)) == 3


@pytest.mark.exhaustive
def test_the_jax_loop_resumes_in_one_process_what_two_have_begun(uri: str, tmp_path: Path):
    def loop(checkpoint: str, *more: object) -> tuple[object, ...]:
        return (LOOPS / "jax_loop.py", f"{uri}@1", "--checkpoint", tmp_path / checkpoint, *more)

    whole = run(*loop("whole.npz"))
    of_two = ("--coordinator", f"localhost:{free_ports(1)[0]}", "--num-processes", 2, "--stop-after", 2)
    begun, _ = run_at_once(*(loop("stopped.npz", *of_two, "--process", process) for process in range(2)))
    rest = run(*loop("stopped.npz"))
    assert steps_of(begun + rest) == steps_of(whole) and len(steps_of(begun)) == 2
    losses = [losses_of(each) for each in (begun + rest, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3) and losses[1][-1] < losses[1][0]
