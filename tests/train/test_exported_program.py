"""An exported PyTorch program, as a service without our code runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.train.ranks import SMOOTH_MODEL
from tests.train.test_export import config_of, dataset, images_of, trained
from train.published.export import export_training
from train.published.load import load_exported

__all__ = ["dataset"]

PROGRAM = Path(__file__).parents[1] / "programs" / "answers_of_pt2.py"


@pytest.mark.starts("program")
def test_standardization_and_class_names_are_inside(dataset, tmp_path):
    config = config_of(model=SMOOTH_MODEL["torch"], epochs=1)
    record = export_training(str(tmp_path), config, trained(dataset, tmp_path, config), "run").export.record
    images = images_of(dataset)
    expected = load_exported(str(tmp_path), 1).predict(images)
    np.save(tmp_path / "images.npy", images)
    [file] = (tmp_path / record.artifact_dir).rglob("*.pt2")
    # In another folder and isolated, so that no module of ours is there.
    command = [sys.executable, "-I", str(PROGRAM), str(file), str(tmp_path / "images.npy")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told, names = json.loads(done.stdout.splitlines()[-1]), dataset.manifest.class_names
    assert np.abs(np.array(told["probabilities"], np.float32) - expected).max() <= 1e-5
    assert told["label"] == [names[best] for best in expected.argmax(axis=1)]
