"""Planted wrong labels of real digits are found first, and the CSV that lists them comes back as their correction."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.planted_labels import plant_wrong_labels
from etl.config import SplitFractions
from etl.job import build_dataset
from shardmill.data_quality.mislabels import Mislabels, find_mislabels
from shardmill.data_quality.predicted_rows import check_memory, may_be_seen, read_predicted_rows
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.errors import UsageError
from shardmill.loader.samples import iterate_samples
from shardmill.values import DatasetPin
from shardmill.words import from_cell
from tests.etl.incremental import tree_for
from tests.etl.pixels import predict_pixels
from tests.lab.commands import ROOT, in_process, last_line
from tests.lab.datasets import write_images

ETL = {"image_size": 32, "unit_min_images": 400, "formats": ("parquet",)}


@dataclass(frozen=True)
class Planted:
    """The demo's digits, 5 % of them in the folder of another class, and predictions of them."""

    folder: Path
    true_label: dict[str, str]
    """Of the planted ones, by key."""
    dataset: Dataset
    predictions: Dataset


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    folder = tmp_path_factory.mktemp("mislabels")
    true_label = plant_wrong_labels(folder / "images", 0.05)
    build_dataset(tree_for(folder, **ETL), run_id="first")
    dataset = open_dataset(str(folder / "dataset"))
    return Planted(folder, true_label, dataset, predict_pixels(dataset, folder / "predictions"))


def test_a_search_that_would_not_fit_in_memory_is_refused_before_anything_is_read(planted: Planted):
    check_memory(planted.predictions, 10**9)
    check_memory(planted.predictions, 0)
    with pytest.raises(UsageError, match=r"images of 10 classes, with .* take about .* GB .* that are free"):
        check_memory(planted.predictions, 10**5)


def test_planted_labels_are_at_the_head_of_the_list(planted: Planted):
    rows = read_predicted_rows(planted.predictions)
    num_images = len(rows.sources)
    found = find_mislabels(rows, limit=num_images)
    assert num_images == 1_797 and len(planted.true_label) == 89
    order = [each.source for each in found.suspects]
    assert len(set(order)) == num_images
    head = set(order[: num_images // 10])
    assert len(head & planted.true_label.keys()) >= 0.8 * len(planted.true_label)
    # Most of those that are called likely are planted ones, and their right class is suggested.
    likely = {each.source: each.suggested_label for each in found.suspects if each.is_likely}
    assert found.num_likely == len(likely) <= 2 * len(planted.true_label)
    right = sum(likely.get(key) == label for key, label in planted.true_label.items())
    assert right >= 0.7 * len(planted.true_label)
    # About five of a hundred labels of each class.
    shares = [each.wrong_share for each in found.classes]
    assert 0.02 < np.mean(np.array(shares, float)) < 0.1
    # Every split is judged; the model is only asked about those that it has not learned.
    assert {each.split for each in found.suspects} == {"train", "validation", "test"}
    assert {each.split for each in found.mistakes} == {"validation", "test"}
    assert found.num_tested == sum(split != "train" for split in rows.splits) >= found.num_mistaken > 0


def test_the_csv_comes_back_as_corrections(planted: Planted, tmp_path: Path):
    command = ("mislabels", planted.folder / "predictions", "--csv", "found.csv", "--html", "found.html", "--json")
    done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["num_judged"] == 1_797 and found["num_likely"] == len(found["suspects"])
    assert found["dataset"]["uri"] == planted.dataset.pin.uri
    page = (tmp_path / "found.html").read_text()
    assert len(re.findall("data:image/png", page)) >= min(found["num_likely"], 100)
    # Both labels in full, on the page and under the pointer.
    assert ".labelled figure { white-space: normal;" in page
    first = found["suspects"][0]
    given, suggested = first["given_label"], first["suggested_label"]
    assert f"<span>given <b>{given}</b></span><span>suggested <b>{suggested}</b>" in page
    assert f'title="{first["source"]} ({first["split"]}): given {given}, suggested {suggested} ' in page
    # The same in a notebook.
    value = Mislabels.of(found)
    assert value.show(2).height < value.show(9).height and "data:image/png" in value._repr_html_()
    of_source = replace(value, dataset=None)
    assert "the predictions are those of a source" in of_source._repr_html_()

    # A person looks at the list, and knows the digits.
    with open(tmp_path / "found.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) >= found["num_likely"] and not any(line["label"] for line in lines)
    for line in lines:
        line["label"] = planted.true_label.get(from_cell(line["source"]), "")
    with open(tmp_path / "found.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    num_corrected = sum(bool(line["label"]) for line in lines)
    assert num_corrected >= 0.8 * len(planted.true_label)

    tree = tree_for(planted.folder, **ETL, corrections=str(tmp_path / "found.csv"))
    outcome = build_dataset(tree, run_id="second")
    assert (outcome.manifest.operation, outcome.num_images_read) == ("incremental", num_corrected)
    again = in_process(*command, cwd=tmp_path)
    assert again.returncode == 2
    assert "found.csv exists already" in last_line(again)


def test_predictions_are_read_with_pandas_as_the_page_says(planted: Planted, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(import pandas\n.*?)```", page, re.DOTALL)
    monkeypatch.chdir(planted.folder)
    names: dict[str, Any] = {}
    exec(block, names)
    rows, frame, whole = read_predicted_rows(planted.predictions), names["frame"], names["with_embeddings"]
    num_tested = rows.splits.count("test")
    assert len(frame) == len(whole) == num_tested and list(frame["source"]) == list(whole["source"])
    of_split = np.array(rows.splits, object) == "test"
    assert (np.stack(whole["embedding"].to_list()) == rows.embeddings_ND[of_split]).all()
    assert "embedding" not in frame and list(frame["prediction"]) == list(whole["prediction"])


def test_mistakes_are_listed_only_of_images_that_the_model_has_not_seen(planted: Planted):
    rows = read_predicted_rows(planted.predictions)
    made_by = planted.predictions.manifest.predicted_by
    assert made_by is not None and made_by.predicted is not None
    splits_N = np.array(rows.splits, object)
    moved = replace(made_by, predicted=replace(made_by.predicted, uri="/moved"))
    assert (rows.is_seen_N == (splits_N == "train")).all()
    assert (may_be_seen(moved, splits_N, rows.sample_ids_N) == rows.is_seen_N).all()
    # A source may hold the training's images.
    of_source = replace(made_by, predicted=None)
    found = find_mislabels(replace(rows, is_seen_N=may_be_seen(of_source, splits_N, rows.sample_ids_N)))
    assert (found.num_tested, found.mistakes) == (0, ()) and found.num_likely


def test_an_image_of_the_training_is_seen_in_every_version_and_place(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60, num_classes=2)
    build_dataset(tree_for(tmp_path), run_id="trained")
    trained = open_dataset(str(tmp_path / "dataset"))
    learned = {sample.source for sample in iterate_samples(trained, "train")}
    shutil.copytree(tmp_path / "dataset", tmp_path / "copy")
    # Of those that the training has learned, one gets another name, one other bytes, and one a copy.
    renamed, changed = sorted(learned)[:2]
    (tmp_path / "images" / renamed).rename(tmp_path / "images" / "class_0" / "renamed.png")
    shutil.copyfile(tmp_path / "images" / sorted(learned)[2], tmp_path / "images" / "class_1" / "twin.png")
    write_images(tmp_path / "other", num_images=2, num_classes=1, seed=9)
    (tmp_path / "other" / "class_0" / "00000.png").replace(tmp_path / "images" / changed)
    other_splits = SplitFractions(train=0.4, validation=0.2, test=0.4)
    for name in ("dataset", "copy"):
        build_dataset(tree_for(tmp_path, name, split_fractions=other_splits), run_id=name)

    def seen(out: str, dataset: Dataset, trained_on: DatasetPin) -> set[str]:
        rows = read_predicted_rows(predict_pixels(dataset, tmp_path / out, trained_on=trained_on))
        assert {"train", "test"} <= {
            split for split, source in zip(rows.splits, rows.sources, strict=True) if source in learned
        }
        return {source for source, is_seen in zip(rows.sources, rows.is_seen_N, strict=True) if is_seen}

    later, copied = open_dataset(str(tmp_path / "dataset")), open_dataset(str(tmp_path / "copy"))
    same = learned - {renamed} | {"class_0/renamed.png", "class_1/twin.png"}
    assert later.pin.version == copied.pin.version == 2
    assert seen("of_later", later, trained.pin) == same
    # Elsewhere, a name says nothing: another dataset may have used it.
    assert seen("of_copy", copied, trained.pin) == same - {changed}
    # The copy has the trained version, too.
    assert seen("of_moved", copied, replace(trained.pin, uri=str(tmp_path / "gone"))) == same - {changed}
    gone = replace(trained.pin, uri=str(tmp_path / "gone"), manifest_sha256="0" * 64)
    rows = read_predicted_rows(predict_pixels(later, tmp_path / "of_gone", trained_on=gone))
    assert rows.is_seen_N.all()


def test_embeddings_that_tell_nothing_apart_are_refused(planted: Planted, monkeypatch: pytest.MonkeyPatch):
    rows = read_predicted_rows(planted.predictions)
    with pytest.raises(UsageError, match="0 of 10 classes have 10 different images"):
        find_mislabels(replace(rows, hashes_N=np.zeros_like(rows.hashes_N)))
    with monkeypatch.context() as patched:
        patched.setattr("shardmill.data_quality.predicted_rows.np.isfinite", np.isnan)
        with pytest.raises(UsageError, match="1,797 of 1,797 embeddings have numbers that are NaN or infinite"):
            read_predicted_rows(planted.predictions)


def test_what_cannot_be_judged_is_refused_before_the_work(planted: Planted, tmp_path: Path):
    for arguments, says in (
        ((planted.folder / "dataset",), "holds images; expected predictions of a dataset; shardmill predict"),
        ((planted.folder / "predictions", "--csv", "no/found.csv"), "there is no folder no"),
        ((planted.folder / "predictions", "--csv", "a", "--html", "./a"), "--csv and --html are both a"),
        ((planted.folder / "predictions", "--html", "."), "cannot write .: it is a folder"),
        (("nowhere",), "nowhere"),
    ):
        done = in_process("mislabels", *arguments, cwd=tmp_path)
        assert done.returncode == 2 and says in last_line(done)
    write_images(tmp_path / "images", num_images=12, num_classes=2)
    build_dataset(tree_for(tmp_path), run_id="few")
    few = predict_pixels(open_dataset(str(tmp_path / "dataset")), tmp_path / "predictions")
    with pytest.raises(UsageError, match="0 of 2 classes have 10 different images; expected at least two"):
        find_mislabels(read_predicted_rows(few))


def test_a_model_may_know_more_classes_than_the_images_have_but_not_fewer(tmp_path: Path):
    for name, num_classes in (("two", 2), ("three", 3)):
        write_images(tmp_path / name / "images", num_images=12, num_classes=num_classes)
        build_dataset(tree_for(tmp_path / name), run_id="r")
    two, three = (open_dataset(str(tmp_path / name / "dataset")) for name in ("two", "three"))
    larger = predict_pixels(two, tmp_path / "larger", ("class_0", "class_2"), three.pin)
    assert "class_2" in read_predicted_rows(larger).predictions
    smaller = predict_pixels(three, tmp_path / "smaller", trained_on=two.pin)
    with pytest.raises(UsageError, match="/models@1 does not know class_2, which images are labelled with"):
        read_predicted_rows(smaller)
    # Its dataset is gone: what it answers is all that is known of it.
    gone = replace(two.pin, uri=str(tmp_path / "gone"))
    renamed = predict_pixels(two, tmp_path / "renamed", ("cat", "class_1"), gone)
    with pytest.raises(UsageError, match="does not know class_0, .* all their classes: it also knows cat"):
        read_predicted_rows(renamed)
    assert (
        read_predicted_rows(predict_pixels(two, tmp_path / "same", trained_on=gone)).class_names
        == two.manifest.class_names
    )
