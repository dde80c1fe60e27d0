"""`evaluate` repeats what the training recorded for the very rows that it was trained on, and for no others."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardmill.checksummed import with_checksum
from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.dataset.open import open_dataset
from shardmill.errors import IntegrityError, UsageError
from shardmill.loader.reader import read_split
from shardmill.stores import open_store
from shardmill.values import DatasetPin
from tests.lab.datasets import make_dataset
from tests.train.exports import put_export
from tests.train.launch_workers import result_of
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import RESULT, to_json
from train.contracts.world import World
from train.published.evaluation import Evaluated, evaluate_on
from train.published.exported import Export, ExportedModel
from train.published.figures import evaluate_export

FOLDER = "trainings/0/v00000001-00000000/epochs-00001-best"


class Trained:
    """A dataset `a`, and an export of a training on its version 1 that recorded figures like no others."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.uri = folder, make_dataset(folder / "a")
        export = put_export(str(folder / "models"), self.uri)
        self.pin = export.record.dataset
        self.export = Export(export.number, export.record.model_copy(update={"training_dir": FOLDER}))
        assert export.record.evaluation is not None
        self.recorded = replace(export.record.evaluation, num_samples=123_456)
        self.put_result(self.pin)

    def put_result(self, pin: DatasetPin) -> None:
        task = WorkerTask(TrainConfig(), pin, str(self.folder / "models"), FOLDER, "")
        result = replace(result_of(task, World()), checkpoint="c", last_checkpoint="c", evaluation=self.recorded)
        open_store(self.folder / "models").put(f"{FOLDER}/{RESULT}", with_checksum(to_json(result)))

    def evaluate(self, dataset_uri: str) -> Evaluated:
        return evaluate_on(str(self.folder / "models"), self.export, dataset_uri, is_new=False)

    def is_recorded(self, dataset_uri: str) -> bool:
        found = self.evaluate(dataset_uri)
        assert found.skipped == (found.evaluation == self.recorded)
        return found.skipped


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(tmp_path)


def test_the_trainings_own_version_is_not_measured_again(trained: Trained):
    assert trained.is_recorded(trained.uri) and trained.is_recorded(f"{trained.uri}@1")
    # A later version is measured if it is named, and a rollback to the rows of the first one is those rows.
    make_dataset(trained.folder / "a", num_images=150)
    roll_back(open_store(trained.uri), 1, "run")
    found = [trained.is_recorded(f"{trained.uri}{version}") for version in ("", "@1", "@2", "@3")]
    assert found == [True, True, False, True]


def test_another_dataset_of_the_same_version_number_is_measured(trained: Trained):
    other = make_dataset(trained.folder / "b", num_images=60)
    for uri in (f"{other}@1", other):
        found = trained.evaluate(uri).evaluation
        manifest = open_dataset(other).manifest
        assert found is not None and found.num_samples == manifest.splits["test"].num_rows
    # Without a version it is the latest, whatever number the training's has.
    make_dataset(trained.folder / "b", num_images=90)
    found = trained.evaluate(other).evaluation
    assert found is not None and found.num_samples == open_dataset(other).manifest.splits["test"].num_rows


def test_a_dataset_that_was_built_anew_is_measured(trained: Trained):
    shutil.rmtree(trained.uri)
    make_dataset(trained.folder / "a", num_images=60)
    assert not trained.is_recorded(f"{trained.uri}@1") and not trained.is_recorded(trained.uri)
    # Also if it has fewer versions than the one that is gone.
    gone = DatasetPin(trained.uri, 3, "0" * 64)
    trained.put_result(gone)
    trained.export = Export(trained.export.number, trained.export.record.model_copy(update={"dataset": gone}))
    assert not trained.is_recorded(trained.uri)


def test_what_is_not_there_is_named(trained: Trained):
    for version in (0, 7):
        with pytest.raises(UsageError, match=f"has no version {version}"):
            trained.evaluate(f"{trained.uri}@{version}")
    [manifest] = (Path(trained.uri) / "manifests").iterdir()
    manifest.write_bytes(manifest.read_bytes().replace(b"test", b"tent"))
    with pytest.raises(IntegrityError, match="manifests"):
        trained.evaluate(trained.uri)


def test_a_class_that_the_dataset_does_not_have_is_a_wrong_answer(tmp_path: Path):
    export = put_export(str(tmp_path / "models"), make_dataset(tmp_path / "three"))
    # In another order of names than the columns, which are those of three classes.
    names = ("class_2", *export.record.class_names[:2])
    export = Export(export.number, export.record.model_copy(update={"class_names": names}))

    def figures(answers: list[float]) -> Any:
        served: Any = SimpleNamespace(
            outputs=lambda images_NHWC: np.tile(np.float32(answers), (len(images_NHWC), 1)), outputs_are_logits=False
        )
        dataset = open_dataset(two)
        with read_split(dataset, "test") as batches:
            return evaluate_export(ExportedModel(export, served), dataset, "test", batches)

    two = make_dataset(tmp_path / "two", num_classes=2)
    num_first, num_second = open_dataset(two).manifest.splits["test"].class_counts
    found = figures([0.9, 0.06, 0.04])
    assert found.accuracy == 0 and [each.recall for each in found.per_class] == [0, 0]
    assert [each.precision for each in found.per_class] == [0, 0]
    assert (found.confused.true, found.confused.predicted) == ((0, 1), (2, 2))
    assert found.confused.num_samples == (num_first, num_second)
    assert found.loss == pytest.approx(
        -(num_first * np.log(0.06) + num_second * np.log(0.04)) / (num_first + num_second), rel=1e-5
    )
    sure = figures([0.2, 0.5, 0.3])
    assert sure.accuracy == num_first / (num_first + num_second)
    assert sure.confused.predicted == (0, 0) and sure.per_class[0].precision == sure.accuracy
