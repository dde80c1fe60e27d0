"""The promoted model over a whole source: the answers are those of `predict_files`, one row for each image."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.predict_job import predict_source
from etl.sources import COMMITTED
from shardmill.checksummed import verified_body, with_checksum
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.config import DatasetConfig, ModelsConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.values import ImageSample
from tests.lab.commands import ENGINE_HERE, ROOT, SUMMARY_SCHEMA, in_process, last_line
from tests.lab.datasets import make_dataset
from train.config import TrainConfig
from train.published.export import export_training
from train.published.gate import promote_export
from train.published.predict import predict_images
from train.published.row_mapper import mapping_of, open_mapper
from train.reporting.run_log import RunLog
from train.settings.gate import GateConfig
from train.training import train_model
from train.tree import TrainTree


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`images/`, `dataset/`, and `models/` with one promoted export."""
    folder = tmp_path_factory.mktemp("data")
    make_dataset(folder, encoding="jpeg", formats=("parquet",))
    tree = TrainTree(
        dataset=DatasetConfig(uri=str(folder / "dataset")),
        models=ModelsConfig(uri=str(folder / "models")),
        train=TrainConfig(epochs=2, learning_rate=3e-3, global_batch_size=24, num_streams=6),
        gate=GateConfig(),
    )
    trained = train_model(tree, RunLog(SilentObserver()))
    exported = export_training(trained.models_uri, tree.train, trained.result, "run")
    assert promote_export(exported.models_uri, exported.export, tree.gate, "run").gate.decision == "promoted"
    return folder


def rows_of(out: Path) -> pa.Table:
    dataset = open_dataset(str(out))
    verify_dataset(dataset, deep=True).raise_if_failed()
    files = [file for split in dataset.manifest.splits for file in dataset.files(split)]
    return pa.concat_tables([pq.read_table(file) for file in files]).sort_by("source")


def test_the_command_predicts_a_folder_as_it_predicts_files(folder: Path, tmp_path: Path):
    (tmp_path / "images").mkdir()
    for file in sorted((folder / "images").rglob("*.png"))[:70]:
        shutil.copy(file, tmp_path / "images" / file.name)
    (tmp_path / "images" / "broken.jpg").write_bytes(b"no image")
    command = ("predict", folder / "models", "images", "--out", "out", "--engine", ENGINE_HERE, "--top", "3", "--json")
    done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["sections"]["predictions"]
    counts = made["counts"]
    assert (counts["listed"], counts["accepted"], counts["rejected"]) == (71, 70, 1)
    assert (made["uri"], made["version"], made["model"]) == (str(tmp_path / "out"), 1, f"{folder}/models@1")

    rows = rows_of(tmp_path / "out").to_pylist()
    paths = [str(tmp_path / "images" / row["source"]) for row in rows]
    for row, alone in zip(rows, predict_images(str(folder / "models"), paths, num_top=3), strict=True):
        assert row["prediction"] == alone.label
        assert row["top_labels"] == [guess.label for guess in alone.top]
        expected = [guess.probability for guess in alone.top]
        assert np.allclose(row["top_probabilities"], expected, atol=1e-5)
        assert row["probability"] == pytest.approx(alone.probability, abs=1e-5)

    # The same command finds nothing to do; `verify` and `gc` take the folder for the dataset that it is.
    again = in_process(*command, cwd=tmp_path)
    assert json.loads(again.stdout)["status"] == "skipped"
    for other in (("verify", "out", "--deep"), ("gc", "out"), ("inspect", "out")):
        done = in_process(*other, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert f"\nmodel\t{folder}/models@1\n" in done.stdout
    refused = in_process("train", "out", cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert "holds predictions, and no images" in refused.stderr


def predict_here(source: SourceConfig, folder: Path, out: Path, **options: object) -> pa.Table:
    tree = EtlTree(
        source=source, dataset=DatasetConfig(uri=str(out)), etl=EtlConfig(engine=ENGINE_HERE)
    )  # fmt: skip
    predict_source(tree, mapping_of(str(folder / "models"), **options), run_id="r")
    return rows_of(out)


def test_a_dataset_is_predicted_from_its_stored_images(folder: Path, tmp_path: Path):
    from_files = predict_here(SourceConfig(uri=str(folder / "images")), folder, tmp_path / "of_files")
    stored = predict_here(SourceConfig(uri=str(folder / "dataset"), kind=COMMITTED), folder, tmp_path / "of_dataset")
    for name in ("source", "sample_id", "prediction", "probability"):
        assert stored.column(name) == from_files.column(name)
    # Labels are those of the dataset; of a folder nobody has asked for them.
    names = ("class_0", "class_1", "class_2")
    assert [names[label] for label in stored.column("label").to_pylist()] == [
        key.partition("/")[0] for key in stored.column("source").to_pylist()
    ]
    assert from_files.column("label").null_count == 120


def test_the_output_of_a_layer_is_an_embedding(folder: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="the model has no layer 'poolin'; expected one of its .* layers"):
        mapping_of(str(folder / "models"), layer="poolin")
    found = predict_here(SourceConfig(uri=str(folder / "images")), folder, tmp_path / "out", layer="flatten")
    vectors_ND = np.array(found.column("embedding").to_pylist(), np.float32)
    assert vectors_ND.shape[0] == 120 and vectors_ND.std() > 0
    plain = predict_here(SourceConfig(uri=str(folder / "images")), folder, tmp_path / "plain")
    assert found.column("prediction") == plain.column("prediction")
    difference = np.abs(found.column("probability").to_numpy() - plain.column("probability").to_numpy()).max()
    assert difference < 1e-4


def test_what_is_made_of_an_image_does_not_depend_on_its_batch(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    mapping = mapping_of("models")
    # Workers have other working directories.
    assert mapping.predicted_by.models_uri == str(folder / "models")
    monkeypatch.chdir("/")
    mapper = open_mapper(mapping.options, "raw")
    rng = np.random.default_rng(0)
    samples = [
        ImageSample(rng.integers(0, 255, (16, 16, 3), np.uint8).tobytes(), 16, 16, 3, "", (), ())
        for _ in range(mapper.batch_size)
    ]
    together = mapper.map(samples)
    assert [mapper.map([each])[0] for each in samples[::5]] == together[::5]


def test_a_worker_refuses_another_model_than_the_drivers(folder: Path, tmp_path: Path):
    # A copy that is made anew while late workers start.
    models = tmp_path / "models"
    shutil.copytree(folder / "models", models)
    mapping = mapping_of(str(models))
    open_mapper(mapping.options, "raw")
    record = models / "exports" / "00000001.json"
    digest, body = mapping.predicted_by.weights_sha256.encode(), verified_body(record.read_bytes(), str(record))
    record.write_bytes(with_checksum(body.replace(digest, b"0" * 64)))
    assert mapping_of(str(models)).predicted_by.weights_sha256 == "0" * 64
    with pytest.raises(IntegrityError, match="the digest 0{12}; expected .* with which this job began"):
        open_mapper(mapping.options, "raw")


def test_at_least_one_class_is_stored(folder: Path):
    # spark-submit and the operator have no minimum of their own; workers failed after the source was listed.
    for top in (0, -2):
        with pytest.raises(UsageError, match=f"^{top} classes to store of each image; expected at least 1"):
            mapping_of(str(folder / "models"), top=top)


def test_more_classes_than_there_are_is_all_of_them(folder: Path):
    assert mapping_of(str(folder / "models"), top=9) == mapping_of(str(folder / "models"), top=3)


@pytest.mark.parametrize(
    "models, source, said",
    [
        (
            "model",
            "images",
            "model does not exist; expected a models folder or URI, or MODELS@N for one export; did you",
        ),
        ("models@7", "images", "models has no export 7; it has 1; name one of them"),
        ("images", "models", "images holds no exports; expected a models folder or URI"),
        ("models", "imags", "imags does not exist; expected a folder of images, an archive, a table"),
        ("models", "images/class_1/00001.png", "is one image; expected with --out a folder"),
    ],
)
def test_a_mistyped_batch_job_leaves_nothing(models: str, source: str, said: str, folder: Path):
    done = in_process("predict", models, source, "--out", "out", cwd=folder)
    assert done.returncode == 2 and said in last_line(done), done.stderr
    assert not (folder / "out").exists() and not (folder / "shardmill-work").exists()


def test_options_of_a_batch_job_need_a_folder(folder: Path, tmp_path: Path):
    done = in_process("predict", folder / "models", "x.png", "--engine", "local", cwd=tmp_path)
    assert done.returncode == 2 and "expected --out DIR" in done.stderr
    assert cv2.imwrite(str(tmp_path / "x.png"), np.zeros((16, 16, 3), np.uint8))
    done = in_process("predict", folder / "models", "x.png", "y", "--out", "out", cwd=tmp_path)
    assert done.returncode == 2 and "--out with 2 sources" in done.stderr


def submitted(folder: Path, cwd: Path, *arguments: str) -> dict[str, Any]:
    """What a run of the job of spark-submit, with `photos.toml` in `cwd`, says that it has made."""
    command = [sys.executable, ROOT / "etl" / "predict_job.py", f"{folder}/models@1", "--config", "photos.toml"]
    command += ["--out", cwd / "out", "--workdir", cwd / "work", *arguments]
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["sections"]["predictions"]


@pytest.mark.starts("program")
def test_the_job_of_spark_submit_predicts_a_dataset_version_in_place_of_the_source(folder: Path, tmp_path: Path):
    (tmp_path / "photos.toml").write_text('[source]\nuri = "no/images"\n[etl]\nengine = "local"\n')
    made = submitted(folder, tmp_path, "--dataset", f"{folder}/dataset@1")
    counts = open_dataset(f"{folder}/dataset@1").manifest.counts
    assert (made["source"], made["counts"]["accepted"]) == (f"{folder}/dataset", counts.accepted)
    made_by = open_dataset(str(tmp_path / "out")).manifest.predicted_by
    assert made_by is not None and made_by.predicted == open_dataset(f"{folder}/dataset@1").pin


@pytest.mark.drill
def test_the_job_of_spark_submit_gives_on_spark_what_the_local_engine_gives(folder: Path, tmp_path: Path):
    engine = 'engine = "spark"\nunit_min_images = 20\n[spark]\nmaster = "local[2]"\n'
    (tmp_path / "photos.toml").write_text(f'[source]\nuri = "{folder}/images"\n[etl]\n{engine}')
    made = submitted(folder, tmp_path)
    assert (made["version"], made["counts"]["accepted"], made["published"]) == (1, 120, True)
    assert (made["engine"], made["num_units"]) == ("spark", 8)
    [summary] = (tmp_path / "work" / "runs").glob("*/summary.json")
    jsonschema.validate(json.loads(summary.read_text()), SUMMARY_SCHEMA)

    here = predict_here(SourceConfig(uri=str(folder / "images")), folder, tmp_path / "here")
    assert rows_of(tmp_path / "out") == here
    digests = {open_dataset(str(tmp_path / name)).manifest.content_digest for name in ("out", "here")}
    assert len(digests) == 1
