"""Examples, recipes, notebooks and what users of other libraries write run as the documentation shows them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from pipeline.config import load_pipeline
from pipeline.preflight import refuse_what_cannot_work
from pipeline.tree import PipelineTree
from scripts.docs_site.notebooks import notebook_page
from scripts.run_notebooks import IN_ORDER, NOTEBOOKS, read_notebook, run_notebook
from shardmill.dataset.dataset import open_dataset
from shardmill.jobs.observer import SilentObserver
from tests.cifar_files import write_cifar10
from tests.etl.annotations import ROWS, as_jsonl
from tests.etl.building import build_source
from tests.etl.source_files import idx_bytes
from tests.lab.commands import BIN, ENVIRONMENT, ROOT
from tests.lab.datasets import build_here, write_images
from tests.lab.scale import exhaustive
from tests.train.training import train_here
from train.planning.checks import check
from train.planning.setup import resolve
from train.planning.trial_build import try_build

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
# Less to compute than for a person's photos; still some epochs of the head alone, and some of everything.
SMALLER = "--set etl.image_size=32 --set train.epochs=3 --set train.unfreeze_epoch=2"
# Nothing is downloaded in a test.
BACKBONE = """import keras
keras.utils.set_random_seed(1)
keras.applications.MobileNet(alpha=0.25, include_top=False, input_shape=(96, 96, 3), weights=None).save_weights(
    "mobilenet.weights.h5")"""


def commands() -> list[str]:
    comments = re.sub(r"\\\n# +", "", (EXAMPLES / "finetune.toml").read_text())
    return re.findall(r"^# +(shardmill .*)$", comments, re.MULTILINE)


@pytest.mark.exhaustive
def test_the_example_fine_tunes_from_a_file_and_then_from_its_own_export(tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    write_images(tmp_path / "my_photos", num_images=300, num_classes=3)
    write_images(tmp_path / "more_photos", num_images=100, num_classes=4)
    first, more = commands()

    def shell(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, shell=True, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
        )

    # What is not there is missed before the first image is read.
    missing = shell(first)
    assert missing.returncode == 2 and "mobilenet.weights.h5': no such file" in missing.stderr
    assert not list((tmp_path / "finetune-work").rglob("*"))

    subprocess.run([sys.executable, "-c", BACKBONE], cwd=tmp_path, env=ENVIRONMENT, check=True, timeout=100)
    for command, source in ((first, "/mobilenet.weights.h5"), (more, "/model.keras")):
        done = shell(f"{command} {SMALLER}")
        assert done.returncode == 0, done.stderr[-3000:]
        summaries = sorted((tmp_path / "shardmill-work" / "runs").glob("*/summary.json"))
        train = json.loads(summaries[-1].read_bytes())["train"]
        found = train["initialized"]
        assert train["epochs"] == 3 and found["source"].endswith(source)
        # All but the head: kernel and bias.
        assert (found["num_loaded"], found["unused"]) == (found["num_weights"] - 2, [])
        assert len(found["missing"]) + len(found["replaced"]) == 2
    assert [len(found["missing"]), len(found["replaced"])] == [0, 2], "four classes now"


@pytest.mark.drill
def test_the_example_finds_its_model_without_a_path(tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(BIN / "shardmill"), "doctor", "examples/finetune.toml", "--json", "--set", "train.init_from="],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    rows = {row["subject"]: row for row in json.loads(done.stdout)}
    assert rows["source.uri"]["status"] == "fail"
    assert "train.model" not in rows or rows["train.model"]["status"] == "ok", rows["train.model"]
    assert not any("finetune_model" in row["found"] and row["status"] == "fail" for row in rows.values())


@pytest.mark.drill
def test_the_detector_learns_from_the_boxes_of_a_loader(tmp_path):
    rows = [{**row, "split": "train"} for row in ROWS * 2]
    build_source(as_jsonl(tmp_path, rows), tmp_path / "pets-dataset", image_size=64, resize_mode="pad")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train_detector.py", "pets-dataset", "--steps", "12"],
        cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 12 and sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.exhaustive
def test_the_sweep_compares_trials_on_one_version_and_continues(tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    write_images(tmp_path / "my_photos", num_images=100)
    command = [sys.executable, "examples/sweep.py", "my_photos", "--json", "--set", "train.epochs=1"]

    def sweep(num_trials: int) -> dict:
        done = subprocess.run(
            [*command, "--trials", str(num_trials)],
            cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    first = sweep(2)
    assert first["dataset"].endswith("/shardmill-work/dataset@1") and len(first["trials"]) == 2
    values = [trial["validation_accuracy"] for trial in first["trials"]]
    assert values == sorted(values, reverse=True)
    best = first["best_run"]
    assert best["evaluation"]["split"] == "test" and best["stages"]["train"]["status"] == "skipped"
    # Two trainings, not three: the best is found again, and so are both by the same command.
    trainings = len(list((tmp_path / "shardmill-work" / "models").rglob("result.json")))
    assert trainings == 2 and sweep(2)["trials"] == first["trials"]
    assert len(list((tmp_path / "shardmill-work" / "models").rglob("result.json"))) == trainings


RECIPES = ROOT / "examples" / "recipes"
PAGE = ROOT / "docs" / "recipes.md"


class Observer(SilentObserver):
    """Hears nothing of steps."""

    def step(self, step: object) -> None:
        return


def digits(folder: Path) -> Path:
    write_images(folder / "images", num_images=200, num_classes=10, image_size=32)
    return folder / "images"


def fashion_mnist(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, count in (("train", 160), ("t10k", 40)):
        pixels = rng.integers(0, 255, (count, 28, 28), np.uint8)
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(pixels)))
        labels = np.arange(count, dtype=np.uint8) % 10
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels)))
    return folder


def cifar10(folder: Path) -> Path:
    write_cifar10(folder / "cifar-10-batches-py", 30)
    return folder / "cifar-10-batches-py"


def imagenet_resnet50(folder: Path) -> Path:
    """The table that examples/make_table.py writes."""
    write_images(folder, num_images=30, image_size=300)
    files = sorted(folder.rglob("*.png"))
    with open(folder / "imagenet.csv", "w", newline="") as out:
        rows = ((file, file.parent.name, "train" if place % 3 else "validation") for place, file in enumerate(files))
        csv.writer(out).writerows([("uri", "label", "split"), *rows])
    return folder / "imagenet.csv"


STAND_INS: dict[str, Callable[[Path], Path]] = {
    each.__name__: each for each in (digits, fashion_mnist, cifar10, imagenet_resnet50)
}
NOT_RUN = {"imagenet_resnet50"}
"""Too large to train here; its model is built."""


def checked(name: str, folder: Path) -> PipelineTree:
    """The recipe's config on its stand-in, after all that a run refuses before it works."""
    (folder / "source").mkdir()
    below = {
        "source.uri": STAND_INS[name](folder / "source"),
        "dataset.uri": folder / "dataset",
        "models.uri": folder / "models",
    }
    overrides = tuple(f"{key}={value}" for key, value in below.items())
    tree = load_pipeline(str(RECIPES / f"{name}.toml"), overrides, str(folder / "work"))
    refuse_what_cannot_work(tree, str(folder / "work"))
    return tree


NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))


@pytest.mark.starts("program")
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_passes_all_checks_of_a_run(name: str, tmp_path: Path):
    checked(name, tmp_path)


@pytest.mark.drill
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_trains_on_a_stand_in(name: str, tmp_path: Path):
    tree = checked(name, tmp_path)
    dataset = open_dataset(build_here(tree.source, tree.dataset.uri, tree.etl))
    # CIFAR's folder holds a page, too.
    assert set(dataset.manifest.counts.by_reason) <= {"not_an_image_name"} and "train" in dataset.manifest.splits
    setup = check(resolve(tree.train, tree.spark, dataset, tree.gate))
    if name in NOT_RUN:
        assert try_build(setup, dataset.manifest.row_schema, Observer()) is not None
        return
    config: dict[str, Any] = tree.train.model_dump() | {"epochs": 1, "global_batch_size": 64, "warmup_steps": 0}
    result = train_here(tree.dataset.uri, tree.models.uri, **config)
    assert len(result.history) == 1 and np.isfinite(result.history[0].train_loss)


def test_the_imagenet_recipe_has_the_published_schedule():
    """Goyal et al., arXiv:1706.02677, section 5.1: of any batch, the epochs and the rates of the paper."""
    from train.schedules import learning_rate_at

    train = load_pipeline(str(RECIPES / "imagenet_resnet50.toml"), (), "work").train
    for batch_size, rate in ((256, 0.1), (8192, 3.2)):
        steps_per_epoch = -(-1_281_167 // batch_size)
        config = train.model_copy(update={"global_batch_size": batch_size, "warmup_steps": 5 * steps_per_epoch})
        rates = [learning_rate_at(config, epoch * steps_per_epoch, steps_per_epoch) for epoch in range(90)]
        assert rates[5:30] == pytest.approx([rate] * 25) and rates[4] == pytest.approx(0.8 * rate, rel=0.01)
        expected = [rate / 10] * 30 + [rate / 100] * 20 + [rate / 1000] * 10
        assert rates[30:] == pytest.approx(expected)
    assert train.warmup_steps == 5 * -(-1_281_167 // train.global_batch_size)


def test_the_page_and_the_recipes_name_each_other():
    page = PAGE.read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", page, re.M)
    }
    for path in RECIPES.glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        assert f"shardmill run examples/recipes/{path.name}" in text and f"examples/recipes/{path.name}" in page
        assert set(re.findall(r"docs/recipes\.md#([\w-]+)", text)) <= anchors
    assert "examples/finetune.toml" in page


# In the notebook's own names, behind its last cell.
CLAIMS = {
    "explore": """
assert manifest.counts.listed == manifest.counts.accepted + manifest.counts.rejected == 603
reasons = sorted(rejection.reason for rejection in rejections)
assert reasons == ["empty_file", "not_an_image", "truncated"]
assert all(Path("digits", source).exists() for source in source_of.values() if source != "3/0003.png")
assert sum(map(len, images_by_class.values())) == manifest.splits["train"].num_rows
assert (older.manifest.version, newer.manifest.version) == (1, 2) and len(changes) == 101
assert not report.problems
# Nothing is new: a bar and lines, then what a dataset shows of itself.
shardmill.etl("digits", workdir="digits-work")
""",
    "train": """
assert exactly_once_on_1 and exactly_once_on_2 and same_global_batches
steps_per_epoch = len(steps_of_1)
assert 0 < num_before - steps_per_epoch < steps_per_epoch, "in the middle of epoch 1"
assert resumed.sample_ids == undisturbed.sample_ids[num_before:] and len(resumed.sample_ids) > steps_per_epoch
assert stopped.sample_ids == undisturbed.sample_ids[:num_before]
assert stopped.losses + resumed.losses == undisturbed.losses
assert same_samples and same_weights
for epoch in range(3):
    steps = undisturbed.sample_ids[epoch * steps_per_epoch : (epoch + 1) * steps_per_epoch]
    assert sorted(sum(steps, [])) == sorted(ids_of_1)
assert undisturbed.sample_ids[:steps_per_epoch] != undisturbed.sample_ids[steps_per_epoch : 2 * steps_per_epoch]
assert accuracy > 0.8 and num_seen == manifest.splits["validation"].num_rows
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both run in it, in order, as a reader would run them."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.drill
@pytest.mark.parametrize("name", [IN_ORDER[0], *map(exhaustive, IN_ORDER[1:])])
def test_a_notebook_runs_and_keeps_its_claims(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    if name == "train" and not (folder / "digits-work" / "dataset").exists():
        run_notebook(read_notebook("explore"), folder)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, (str(NOTEBOOKS.parents[1]), os.getenv("PYTHONPATH"))))
    )
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(variable, str(folder / "settings"))
    stored, notebook = read_notebook(name), read_notebook(name)
    notebook.cells.append(new_code_cell(CLAIMS[name], metadata={"tags": ["varies"]}))
    done = run_notebook(notebook, folder)
    if name == "explore":
        progress, dataset = (output.data["text/html"] for output in done.cells[-1].outputs)
        assert "<summary>shardmill.etl digits: done in " in progress and "etl: skipped" in progress
        assert "699 accepted" in dataset and dataset.count("<img ") == 1
    # If this fails because the notebook was meant to change: python -m scripts.run_notebooks
    assert texts(stored) == texts(done)


def texts(notebook: NotebookNode) -> list[tuple[str, str]]:
    """What cells print or show as text, without those that may differ between machines."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and "varies" not in cell.metadata.get("tags", []):
            for output in cell.outputs:
                text = output.text if output.output_type == "stream" else output.data["text/plain"]
                found.append((cell.id, text))
    return found


def test_all_notebooks_are_run_and_shown():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == sorted(IN_ORDER)
    for name in IN_ORDER:
        page = notebook_page(f"{name}.ipynb")
        # Figures first of all: a notebook whose outputs were cleared shows none.
        assert "](data:image/png;base64," in page and "```text\n" in page
        assert not any(path in page for path in ("/tmp/", "/home/", "/root/", str(NOTEBOOKS.parents[1])))


COMING_FROM = ROOT / "docs" / "coming-from.md"
NUM_IMAGES = 60
# Behind both programs: `before` is what the first one has left.
CHECKS = {
    "torchvision's ImageFolder": f"""
assert list(photos.class_names) == before["photos"].classes
assert photos.manifest.splits["train"].num_rows == len(before["photos"]) == {NUM_IMAGES}
assert tuple(images.shape[1:]) == tuple(before["images"].shape[1:]) == (3, 32, 32)
""",
    "WebDataset": f"""
assert photos.manifest.splits["train"].num_rows == {NUM_IMAGES} and list(photos.class_names) == ["0", "1", "2"]
# Small sources are enlarged here to the smallest size that is chosen.
assert images.shape[1:] == (32, 32, 3) and before["images"].shape[1:] == (16, 16, 3)
""",
    "petastorm": f"""
assert photos.manifest.counts.accepted == {NUM_IMAGES} and len(before["encoded"]) == 20
assert set(map(str, before["labels"].tolist())) < set(photos.class_names) == {{"0", "1", "2"}}
""",
    "Horovod's Spark estimators": """
assert result.summary["train"]["strategy"] == "horovod" and result.summary["train"]["world_size"] == 2
assert result.summary["etl"]["engine"] == "spark" and result.accuracy is not None
""",
    "MosaicML's Streaming": f"""
assert len(loader) == -(-{NUM_IMAGES} // 32) and images.shape[1:] == (3, 32, 32)
""",
    "PyTorch's FSDP2": """
assert result.summary["train"]["strategy"] == "torch_fsdp" and result.summary["train"]["world_size"] == 2
assert result.accuracy is not None and before["loss"].isfinite()
""",
    "Lightning": """
assert result.summary["train"]["strategy"] == "torch_ddp" and result.accuracy is not None
assert before["trainer"].global_step == 8, "two epochs of four batches"
""",
}
TABLES = ("DeepSpeed", "Megatron-LM")
"""Their sections have settings in place of programs."""
DRILL = "torchvision's ImageFolder"
"""The others run in `make test-all`."""
NOT_HERE = {"Horovod's Spark estimators", "MosaicML's Streaming"}


@dataclass(frozen=True)
class Section:
    """Two programs of the page."""

    title: str
    before: str
    after: str


def sections() -> list[Section]:
    """In the order of the page."""
    _, *found = re.split(r"^## (.*)$", COMING_FROM.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = dict(zip(found[::2], found[1::2], strict=True))
    assert not any("```" in texts.pop(title) for title in TABLES)
    programs = (re.findall(r"^```python\n(.*?)```", text, re.DOTALL | re.MULTILINE) for text in texts.values())
    return [Section(title, *both) for title, both in zip(texts, programs, strict=True)]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images in the form of each library."""
    folder = tmp_path_factory.mktemp("coming_from")
    write_images(folder / "photos" / "train", num_images=NUM_IMAGES)
    write_images(folder / "photos" / "val", num_images=15, seed=1)
    files = sorted((folder / "photos" / "train").rglob("*.png"))
    rows = [{"image": file.read_bytes(), "label": int(file.parent.name[-1])} for file in files]
    (folder / "tars").mkdir()
    for number in range(2):
        with tarfile.open(folder / "tars" / f"train-{number:06d}.tar", "w") as tar:
            for place in range(number, len(rows), 2):
                for suffix, data in (("png", rows[place]["image"]), ("cls", str(rows[place]["label"]).encode())):
                    member = tarfile.TarInfo(f"{place:04d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    (folder / "table").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "table" / "train.parquet", row_group_size=20)
    return folder


def test_every_section_has_two_programs_of_about_ten_lines():
    assert [section.title for section in sections()] == list(CHECKS)
    for section in sections():
        lines = [len(program.strip().splitlines()) for program in (section.before, section.after)]
        assert max(lines) <= 21 and lines[1] <= lines[0], section.title


def test_tables_name_settings_that_there_are():
    keys = set((ROOT / "tests" / "config_keys.txt").read_text().split())
    named = set(re.findall(r"`(train\.[\w.]+)", COMING_FROM.read_text(encoding="utf-8")))
    assert len(named) > 12 and named <= keys, named - keys


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(each, marks=pytest.mark.drill if each.title == DRILL else pytest.mark.exhaustive, id=each.title)
        for each in sections()
    ],
)
def test_a_section_does_what_it_says(section: Section, here: Path):
    before = "before = {}\n" if section.title in NOT_HERE else f"{section.before}\nbefore = dict(globals())\n"
    program = here / "program.py"
    program.write_text(f"{before}\n{section.after}\n{CHECKS[section.title]}")
    done = subprocess.run(
        [sys.executable, program], cwd=here, env=ENVIRONMENT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
