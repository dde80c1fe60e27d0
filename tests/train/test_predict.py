"""Image files, and a whole source, to labels: as the training images went, also if models see a smaller size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
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
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.config import DatasetConfig, ModelsConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.loader.samples import read_samples
from shardmill.options import DecodeLimits
from shardmill.values import ImageSample
from tests.lab.commands import ENGINE_HERE, ROOT, SUMMARY_SCHEMA, in_process, last_line
from tests.lab.datasets import make_dataset
from tests.train.training import check_trainable
from train.backends.model_spec import model_spec
from train.config import TrainConfig
from train.published.evaluation import evaluate_on
from train.published.export import export_training
from train.published.exported import load_exported
from train.published.gate import promote_export
from train.published.predict import MAX_BATCH_SIZE, open_model, predict_files, predict_images
from train.published.row_mapper import mapping_of, open_mapper
from train.reporting.run_log import RunLog
from train.settings import GateConfig
from train.training import finished_training, train_model
from train.tree import TrainTree


def tree_of(folder: Path) -> TrainTree:
    return TrainTree(dataset=DatasetConfig(uri=str(folder / "dataset")),
                     models=ModelsConfig(uri=str(folder / "models")),
                     train=TrainConfig(epochs=4, learning_rate=3e-3, global_batch_size=24, num_streams=6),
                     gate=GateConfig(min_accuracy=0.9))  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`images/`, `dataset/`, and `models/` with one promoted export of a model that has learned them."""
    folder = tmp_path_factory.mktemp("data")
    make_dataset(folder, encoding="jpeg")
    tree = tree_of(folder)
    trained = train_model(tree, RunLog(SilentObserver()))
    (folder / "temporary").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "temporary"))
        exported = export_training(trained.models_uri, tree.train, trained.result, "run")
    assert promote_export(exported.models_uri, exported.export, tree.gate, "run").gate.decision == "promoted"
    # 48 megapixels in some kilobytes: as large as is allowed, and 144 MB when it is decoded.
    assert cv2.imwrite(str(folder / "bomb.png"), np.zeros((6000, 8000, 3), np.uint8))
    return folder


def test_files_get_the_labels_of_their_folders_and_the_probabilities_of_the_stored_images(folder):
    stored = {sample.source: sample for sample in read_samples(open_dataset(str(folder / "dataset")), "train", 80)}
    assert len(stored) > MAX_BATCH_SIZE
    paths = [str(folder / "images" / source) for source in stored]
    predictions = predict_images(str(folder / "models"), paths)
    assert [each.path for each in predictions] == paths
    right = [each.label == Path(each.path).parent.name for each in predictions]
    assert np.mean(right) > 0.9
    images_NHWC = np.stack([sample.image_HWC for sample in stored.values()])
    expected_NK = load_exported(str(folder / "models"), 1).predict(images_NHWC)
    given_N = np.array([each.probability for each in predictions])
    assert np.abs(given_N - expected_NK.max(axis=1)).max() < 1e-6


def test_exports_and_predictions_leave_no_temporary_files(folder, monkeypatch):
    temporary = folder / "temporary"
    assert not _left_in(temporary), "left by the export"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    [prediction] = predict_images(str(folder / "models"), [str(next((folder / "images").rglob("*.png")))])
    assert prediction.label and not _left_in(temporary)


def test_without_tensorflow_the_extra_is_named_and_nothing_is_left(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(UsageError, match=r"needs TensorFlow: .*pip install '\.\[tensorflow\]'"):
        open_model(str(folder / "models"))
    assert not _left_in(tmp_path)


def test_without_tensorflow_nothing_is_exported_and_the_extra_is_named(folder, monkeypatch):
    tree = tree_of(folder)
    trained = finished_training(tree)
    shutil.move(folder / "models/exports", folder / "exports")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    try:
        with pytest.raises(UsageError, match=r"needs TensorFlow: .*pip install '\.\[tensorflow\]'"):
            export_training(trained.models_uri, tree.train, trained.result, "run")
    finally:
        shutil.move(folder / "exports", folder / "models/exports")


def test_what_the_etl_would_reject_is_rejected_for_the_same_reason(folder, tmp_path):
    good = next((folder / "images").rglob("*.png"))
    (tmp_path / "page.jpg").write_bytes(b"<html></html>")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:200])
    paths = [str(tmp_path / "page.jpg"), str(good), str(tmp_path / "empty.png"), str(tmp_path / "none.png")]
    paths.append(str(tmp_path / "cut.png"))
    predictions = predict_images(str(folder / "models"), paths)
    assert [each.path for each in predictions] == paths
    reasons = [each.rejection.split(":")[0] for each in predictions]
    assert reasons == ["not_an_image", "", "empty_file", "missing", "truncated"]
    assert [bool(each.label) for each in predictions] == [False, True, False, False, False]


def test_what_is_no_regular_file_is_rejected_without_waiting_for_it(folder, tmp_path):
    os.mkfifo(tmp_path / "fifo.jpg")
    good = next((folder / "images").rglob("*.png"))
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", 50_000_001)
    paths = [str(tmp_path / "fifo.jpg"), "/dev/zero", "/dev/null", str(tmp_path / "large.png"), "/proc/self/mem"]
    predictions = predict_images(str(folder / "models"), [*paths, str(good)])
    reasons = [each.rejection.split(":")[0] for each in predictions]
    assert reasons == [*["not_regular_file"] * 3, "too_large_bytes", "unreadable", ""]


@pytest.mark.starts("decoder")
def test_an_image_that_takes_too_much_is_rejected_and_the_next_one_is_not(folder):
    """Decoding happens in a process of its own, under limits."""
    good = [str(each) for each in sorted((folder / "images").rglob("*.png"))[:2]]
    model = open_model(str(folder / "models"))
    assert [each.rejection for each in predict_files(model, good)] == ["", ""]
    too_little = predict_files(
        model, [str(folder / "bomb.png"), good[0]], limits=DecodeLimits.model_construct(decode_memory_bytes=20_000_000)
    )
    assert [each.rejection.split(":")[0] for each in too_little] == ["decoder_memory", ""]
    # The ETL's config keys have no effect here, so none is named.
    assert "etl." not in too_little[0].rejection


def test_folders_are_their_files_in_order(folder, tmp_path):
    good = sorted((folder / "images").rglob("*.png"))[:3]
    for place, source in zip(("b/2.png", "a/deep/1.png", "a.png"), good, strict=True):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / place)
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    predictions = predict_images(str(folder / "models"), [str(good[0]), str(tmp_path)], num_top=2)
    below = [os.path.relpath(each.path, tmp_path) for each in predictions[1:]]
    assert below == ["a.png", "a/deep/1.png", "b/2.png"] and predictions[0].path == str(good[0])
    for each in predictions:
        assert each.top[0].label == each.label and len(each.top) == 2
        assert each.top[0].probability >= each.top[1].probability
    with pytest.raises(UsageError, match="no files below"):
        predict_images(str(folder / "models"), [str(tmp_path / "empty")])


def test_a_model_is_named_by_root_by_number_or_by_its_folder(folder):
    models = folder / "models"
    [artifact] = (models / "artifacts").iterdir()
    for name in (str(models), f"{models}/", f"{models}@1", str(artifact), f"{artifact}/saved_model"):
        assert open_model(name).export.number == 1


def test_a_model_that_is_not_there_is_refused(folder, tmp_path):
    with pytest.raises(UsageError, match="holds no exports; expected a models folder or URI; .*WORKDIR/models"):
        open_model(str(tmp_path))
    with pytest.raises(UsageError, match=f"{folder} holds no exports; .*; did you mean {folder}/models\\?"):
        open_model(str(folder))
    with pytest.raises(UsageError, match="has no export 9"):
        open_model(f"{folder / 'models'}@9")
    with pytest.raises(IntegrityError, match="no export of .* names artifacts/other"):
        open_model(str(folder / "models" / "artifacts" / "other"))


def _left_in(temporary: Path) -> list[Path]:
    # AutoGraph writes the code that it generates into files, which TensorFlow deletes when the process ends; sometimes
    # Python has compiled one into `__pycache__`.
    files = [path for path in temporary.rglob("*") if not path.is_dir() or path.name != "__pycache__"]
    return [path for path in files if not path.name.startswith("__autograph_generated_file")]


@pytest.fixture(scope="module")
def mapped_folder(tmp_path_factory) -> Path:
    """`images/`, `dataset/`, and `models/` with one promoted export."""
    mapped_folder = tmp_path_factory.mktemp("data")
    make_dataset(mapped_folder, encoding="jpeg", formats=("parquet",))
    tree = TrainTree(dataset=DatasetConfig(uri=str(mapped_folder / "dataset")),
                     models=ModelsConfig(uri=str(mapped_folder / "models")),
                     train=TrainConfig(epochs=2, learning_rate=3e-3, global_batch_size=24, num_streams=6),
                     gate=GateConfig())  # fmt: skip
    trained = train_model(tree, RunLog(SilentObserver()))
    exported = export_training(trained.models_uri, tree.train, trained.result, "run")
    assert promote_export(exported.models_uri, exported.export, tree.gate, "run").gate.decision == "promoted"
    return mapped_folder


def rows_of(out: Path) -> pa.Table:
    dataset = open_dataset(str(out))
    verify_dataset(dataset, deep=True).raise_if_failed()
    files = [file for split in dataset.manifest.splits for file in dataset.files(split)]
    return pa.concat_tables([pq.read_table(file) for file in files]).sort_by("source")


def test_the_command_predicts_a_folder_as_it_predicts_files(mapped_folder: Path, tmp_path: Path):
    (tmp_path / "images").mkdir()
    for file in sorted((mapped_folder / "images").rglob("*.png"))[:70]:
        shutil.copy(file, tmp_path / "images" / file.name)
    (tmp_path / "images" / "broken.jpg").write_bytes(b"no image")
    command = ("predict", mapped_folder / "models", "images", "--out", "out", "--engine", ENGINE_HERE, "--top", "3",
               "--json")  # fmt: skip
    done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["sections"]["predictions"]
    counts = made["counts"]
    assert (counts["listed"], counts["accepted"], counts["rejected"]) == (71, 70, 1)
    assert (made["uri"], made["version"], made["model"]) == (str(tmp_path / "out"), 1, f"{mapped_folder}/models@1")

    rows = rows_of(tmp_path / "out").to_pylist()
    paths = [str(tmp_path / "images" / row["source"]) for row in rows]
    for row, alone in zip(rows, predict_images(str(mapped_folder / "models"), paths, num_top=3), strict=True):
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
    assert f"\nmodel\t{mapped_folder}/models@1\n" in done.stdout
    refused = in_process("train", "out", cwd=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert "holds predictions, and no images" in refused.stderr


def predict_here(source: SourceConfig, mapped_folder: Path, out: Path, **options: object) -> pa.Table:
    tree = EtlTree(
        source=source, dataset=DatasetConfig(uri=str(out)), etl=EtlConfig(engine=ENGINE_HERE)
    )  # fmt: skip
    predict_source(tree, mapping_of(str(mapped_folder / "models"), **options), run_id="r")
    return rows_of(out)


def test_a_dataset_is_predicted_from_its_stored_images(mapped_folder: Path, tmp_path: Path):
    from_files = predict_here(SourceConfig(uri=str(mapped_folder / "images")), mapped_folder, tmp_path / "of_files")
    stored = predict_here(
        SourceConfig(uri=str(mapped_folder / "dataset"), kind=COMMITTED), mapped_folder, tmp_path / "of_dataset"
    )
    for name in ("source", "sample_id", "prediction", "probability"):
        assert stored.column(name) == from_files.column(name)
    # Labels are those of the dataset; of a folder nobody has asked for them.
    names = ("class_0", "class_1", "class_2")
    assert [names[label] for label in stored.column("label").to_pylist()] == [
        key.partition("/")[0] for key in stored.column("source").to_pylist()
    ]
    assert from_files.column("label").null_count == 120


def test_the_output_of_a_layer_is_an_embedding(mapped_folder: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="the model has no layer 'poolin'; expected one of its .* layers"):
        mapping_of(str(mapped_folder / "models"), layer="poolin")
    found = predict_here(
        SourceConfig(uri=str(mapped_folder / "images")), mapped_folder, tmp_path / "out", layer="flatten"
    )
    vectors_ND = np.array(found.column("embedding").to_pylist(), np.float32)
    assert vectors_ND.shape[0] == 120 and vectors_ND.std() > 0
    plain = predict_here(SourceConfig(uri=str(mapped_folder / "images")), mapped_folder, tmp_path / "plain")
    assert found.column("prediction") == plain.column("prediction")
    difference = np.abs(found.column("probability").to_numpy() - plain.column("probability").to_numpy()).max()
    assert difference < 1e-4


def test_what_is_made_of_an_image_does_not_depend_on_its_batch(mapped_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(mapped_folder)
    mapping = mapping_of("models")
    # Workers have other working directories.
    assert mapping.predicted_by.models_uri == str(mapped_folder / "models")
    monkeypatch.chdir("/")
    mapper = open_mapper(mapping.options, "raw")
    rng = np.random.default_rng(0)
    samples = [
        ImageSample(rng.integers(0, 255, (16, 16, 3), np.uint8).tobytes(), 16, 16, 3, "", (), ())
        for _ in range(mapper.batch_size)
    ]
    together = mapper.map(samples)
    assert [mapper.map([each])[0] for each in samples[::5]] == together[::5]


def test_a_worker_refuses_another_model_than_the_drivers(mapped_folder: Path, tmp_path: Path):
    # A copy that is made anew while late workers start.
    models = tmp_path / "models"
    shutil.copytree(mapped_folder / "models", models)
    mapping = mapping_of(str(models))
    open_mapper(mapping.options, "raw")
    record = models / "exports" / "00000001.json"
    digest, body = mapping.predicted_by.weights_sha256.encode(), verified_body(record.read_bytes(), str(record))
    record.write_bytes(with_checksum(body.replace(digest, b"0" * 64)))
    assert mapping_of(str(models)).predicted_by.weights_sha256 == "0" * 64
    with pytest.raises(IntegrityError, match="the digest 0{12}; expected .* with which this job began"):
        open_mapper(mapping.options, "raw")


def test_at_least_one_class_is_stored(mapped_folder: Path):
    # spark-submit and the operator have no minimum of their own; workers failed after the source was listed.
    for top in (0, -2):
        with pytest.raises(UsageError, match=f"^{top} classes to store of each image; expected at least 1"):
            mapping_of(str(mapped_folder / "models"), top=top)


def test_more_classes_than_there_are_is_all_of_them(mapped_folder: Path):
    assert mapping_of(str(mapped_folder / "models"), top=9) == mapping_of(str(mapped_folder / "models"), top=3)


@pytest.mark.parametrize(
    "models, source, said",
    [
        ("model", "images",
         "model does not exist; expected a models folder or URI, or MODELS@N for one export; did you"),
        ("models@7", "images", "models has no export 7; it has 1; name one of them"),
        ("images", "models", "images holds no exports; expected a models folder or URI"),
        ("models", "imags", "imags does not exist; expected a folder of images, an archive, a table"),
        ("models", "images/class_1/00001.png", "is one image; expected with --out a folder"),
    ],
)  # fmt: skip
def test_a_mistyped_batch_job_leaves_nothing(models: str, source: str, said: str, mapped_folder: Path):
    done = in_process("predict", models, source, "--out", "out", cwd=mapped_folder)
    assert done.returncode == 2 and said in last_line(done), done.stderr
    assert not (mapped_folder / "out").exists() and not (mapped_folder / "shardmill-work").exists()


def test_options_of_a_batch_job_need_a_folder(mapped_folder: Path, tmp_path: Path):
    done = in_process("predict", mapped_folder / "models", "x.png", "--engine", "local", cwd=tmp_path)
    assert done.returncode == 2 and "expected --out DIR" in done.stderr
    assert cv2.imwrite(str(tmp_path / "x.png"), np.zeros((16, 16, 3), np.uint8))
    done = in_process("predict", mapped_folder / "models", "x.png", "y", "--out", "out", cwd=tmp_path)
    assert done.returncode == 2 and "--out with 2 sources" in done.stderr


def submitted(mapped_folder: Path, cwd: Path, *arguments: str) -> dict[str, Any]:
    """What a run of the job of spark-submit, with `photos.toml` in `cwd`, says that it has made."""
    command = [sys.executable, ROOT / "etl" / "predict_job.py", f"{mapped_folder}/models@1", "--config", "photos.toml"]
    command += ["--out", cwd / "out", "--workdir", cwd / "work", *arguments]
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["sections"]["predictions"]


@pytest.mark.starts("program")
def test_the_job_of_spark_submit_predicts_a_dataset_version_in_place_of_the_source(mapped_folder: Path, tmp_path: Path):
    (tmp_path / "photos.toml").write_text('[source]\nuri = "no/images"\n[etl]\nengine = "local"\n')
    made = submitted(mapped_folder, tmp_path, "--dataset", f"{mapped_folder}/dataset@1")
    counts = open_dataset(f"{mapped_folder}/dataset@1").manifest.counts
    assert (made["source"], made["counts"]["accepted"]) == (f"{mapped_folder}/dataset", counts.accepted)
    made_by = open_dataset(str(tmp_path / "out")).manifest.predicted_by
    assert made_by is not None and made_by.predicted == open_dataset(f"{mapped_folder}/dataset@1").pin


@pytest.mark.drill
def test_the_job_of_spark_submit_gives_on_spark_what_the_local_engine_gives(mapped_folder: Path, tmp_path: Path):
    engine = 'engine = "spark"\nunit_min_images = 20\n[spark]\nmaster = "local[2]"\n'
    (tmp_path / "photos.toml").write_text(f'[source]\nuri = "{mapped_folder}/images"\n[etl]\n{engine}')
    made = submitted(mapped_folder, tmp_path)
    assert (made["version"], made["counts"]["accepted"], made["published"]) == (1, 120, True)
    assert (made["engine"], made["num_units"]) == ("spark", 8)
    [summary] = (tmp_path / "work" / "runs").glob("*/summary.json")
    jsonschema.validate(json.loads(summary.read_text()), SUMMARY_SCHEMA)

    here = predict_here(SourceConfig(uri=str(mapped_folder / "images")), mapped_folder, tmp_path / "here")
    assert rows_of(tmp_path / "out") == here
    digests = {open_dataset(str(tmp_path / name)).manifest.content_digest for name in ("out", "here")}
    assert len(digests) == 1


def small_tree_of(folder: Path, size: int, epochs: int = 4) -> TrainTree:
    augment = {"preset": "imagenet", "random_flip": False, "min_crop_area": 0.5, "size": size}
    return TrainTree(
        dataset=DatasetConfig(uri=str(folder / "dataset")),
        models=ModelsConfig(uri=str(folder / "models")),
        train=TrainConfig(epochs=epochs, learning_rate=3e-3, global_batch_size=24, num_streams=6, augment=augment),
    )


def export(tree: TrainTree):
    trained = train_model(tree, RunLog(SilentObserver()))
    return export_training(trained.models_uri, tree.train, trained.result, "run").export


@pytest.fixture
def of_size_20(tmp_path):
    make_dataset(tmp_path, image_size=24)
    make_dataset(tmp_path / "other", image_size=24, num_images=90)
    return export(small_tree_of(tmp_path, 20))


def test_training_export_and_predictions_have_one_size(of_size_20, tmp_path):
    models, gate, record = str(tmp_path / "models"), GateConfig(min_accuracy=0.5), of_size_20.record
    assert (record.size, record.image_shape_HWC, record.normalize.image_size) == (20, (20, 20, 3), 24)
    assert record.evaluation is not None and record.evaluation.accuracy > 0.8
    assert promote_export(models, of_size_20, gate, "run").gate.decision == "promoted"

    dataset = open_dataset(str(tmp_path / "dataset"))
    stored = {sample.source: sample.image_HWC for sample in read_samples(dataset, "test", 8)}
    predictions = predict_images(models, [str(tmp_path / "images" / source) for source in stored])
    centres_NHWC = np.stack([image_HWC[2:22, 2:22] for image_HWC in stored.values()])
    expected_NK = load_exported(models, 1).predict(centres_NHWC)
    found_N = np.array([each.probability for each in predictions])
    assert np.abs(found_N - expected_NK.max(axis=1)).max() < 1e-6

    # Another dataset of the same stored size, and a model of another size on the same stored images.
    on_other = evaluate_on(models, of_size_20, str(tmp_path / "other" / "dataset"), is_new=False).evaluation
    assert on_other is not None and on_other.accuracy > 0.8
    whole = export(small_tree_of(tmp_path, 0, epochs=2))
    assert whole.record.image_shape_HWC == (24, 24, 3)
    assert promote_export(models, whole, GateConfig(min_accuracy=0.5), "run").gate.current_value is not None


def test_a_larger_size_than_stored_is_refused_before_anything_starts(tiny_uri):
    dataset = open_dataset(tiny_uri)
    config = TrainConfig(augment={"size": 17}, num_workers=1, num_streams=8)
    with pytest.raises(UsageError, match="augment.size = 17, but the stored images have 16 x 16 pixels"):
        check_trainable(config, dataset)
    spec = model_spec(dataset.manifest, TrainConfig(augment={"size": 12}))
    assert spec.image_shape_HWC == (12, 12, 3)
