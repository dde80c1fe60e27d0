"""The examples of fine-tuning and of a sweep do what their comments say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.etl.annotations import ROWS, as_jsonl
from tests.etl.building import build_source
from tests.lab.commands import BIN, ENVIRONMENT
from tests.lab.datasets import write_images

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
