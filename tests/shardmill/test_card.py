"""A dataset for people: its card, its samples, the ledger of rejections."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml
from PIL import Image

import shardmill
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from shardmill.calls.predictions import Predictions
from shardmill.dataset.card import CARD, put_card, refresh_card
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.ledger import RejectionLog, ledger_digest, read_rejections, write_ledger
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.ids import add_digests, key_bytes, key_hash
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import WARNING
from shardmill.jobs.reach import REACH, check_nonce, planted
from shardmill.loader import pictures as sheets
from shardmill.loader.pictures import contact_sheet
from shardmill.loader.samples import iterate_samples, read_samples
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from shardmill.values import Nonce, Rejection, RejectReason
from tests.etl import test_extra_columns as extra_columns
from tests.etl import test_labels as label_kinds
from tests.etl.building import ETL
from tests.etl.incremental import build_from
from tests.lab.commands import in_process
from tests.lab.datasets import HERE, build_here, make_dataset, upload, write_images
from tests.services.faulty_store import FaultyStore


def front_matter(root: str | Path) -> dict:
    text = open_store(str(root)).read(CARD).decode()
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def listed(root: str | Path) -> dict[str, list[str]]:
    [config] = front_matter(root)["configs"]
    return {each["split"]: each["path"] for each in config["data_files"]}


def shards_of(root: str | Path) -> dict[str, list[str]]:
    dataset = open_dataset(str(root))
    shards = {split: dataset.shards_of(split, "parquet") for split in dataset.manifest.splits}
    return {split: [shard.path for shard in each] for split, each in shards.items()}


class Warnings:
    """An observer that keeps them."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def event(self, name: str, fields: dict) -> None:
        if WARNING in fields:
            self.sentences.append(str(fields[WARNING]))


def build_carded(folder: Path, observer: Warnings | None = None) -> Warnings:
    observer = observer or Warnings()
    tree = EtlTree(
        source=SourceConfig(uri=str(folder / "images")),
        dataset=DatasetConfig(uri=str(folder / "dataset")),
        etl=EtlConfig(image_size=16, encoding="png", engine=HERE),
    )
    build_dataset(tree, run_id="r", observer=observer)  # pyright: ignore[reportArgumentType]
    return observer


def test_a_build_writes_the_card_of_its_version_and_each_later_commit_replaces_it(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build_carded(tmp_path)
    first = shards_of(tmp_path / "dataset")
    assert listed(tmp_path / "dataset") == first and list(first) == ["test", "train", "validation"]

    write_images(tmp_path / "images", num_images=90)
    build_carded(tmp_path)
    second = shards_of(tmp_path / "dataset")
    assert listed(tmp_path / "dataset") == second != first
    assert verify_dataset(open_dataset(str(tmp_path / "dataset")), deep=True).problems == ()

    done = in_process("rollback", tmp_path / "dataset@1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert listed(tmp_path / "dataset") == first
    done = in_process("gc", tmp_path / "dataset", "--keep", "1", "--older-than", "0", "--delete", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        listed(tmp_path / "dataset") == first
        and "Version 4 of a dataset" in (tmp_path / "dataset/README.md").read_text()
    )


def test_the_features_are_those_of_the_columns(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    assert refresh_card(open_store(dataset)) == ()
    features = {each["name"]: each for each in front_matter(dataset)["dataset_info"]["features"]}
    assert features["image"]["dtype"] == "image"
    assert features["label"]["dtype"]["class_label"]["names"] == {"0": "class_0", "1": "class_1", "2": "class_2"}
    assert features["height"]["dtype"] == "int32" and features["source"]["dtype"] == "string"


@pytest.mark.parametrize("name", ['it\'s: [a] "name" # no', "été ☃ 😀", "a\u200db", "- true"])
def test_a_class_may_have_any_name(name: str, tmp_path: Path):
    write_images(tmp_path / "images", num_classes=2)
    (tmp_path / "images/class_0").rename(tmp_path / "images" / name)
    build_carded(tmp_path)
    features = {each["name"]: each for each in front_matter(tmp_path / "dataset")["dataset_info"]["features"]}
    assert set(features["label"]["dtype"]["class_label"]["names"].values()) == {name, "class_1"}


def test_a_card_that_was_lost_or_never_written_comes_back_and_one_of_the_user_stays(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build_carded(tmp_path)
    card = tmp_path / "dataset" / CARD
    written = card.read_bytes()
    card.unlink()
    assert not any("card" in each for each in build_carded(tmp_path).sentences)
    assert card.read_bytes() == written

    card.write_text("# My flowers\n")
    assert any("was not written by shardmill" in each for each in build_carded(tmp_path).sentences)
    assert card.read_text() == "# My flowers\n"


def test_a_writer_that_is_late_leaves_the_card_of_a_later_version(tmp_path: Path):
    store, mark = open_store(str(tmp_path)), "# Version "
    for number in (9, 10, 2):
        assert put_card(store, mark, number, lambda text=f"{mark}{number}\n": text)
    assert store.read(CARD) == b"# Version 10\n"


def test_a_store_that_refuses_the_card_costs_a_warning_and_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put = LocalStore.put

    def refuse(self: LocalStore, path: str, data: bytes) -> None:
        if path == CARD:
            raise StorageError("no space for it")
        put(self, path, data)

    monkeypatch.setattr(LocalStore, "put", refuse)
    write_images(tmp_path / "images", num_images=60)
    told = build_carded(tmp_path).sentences
    assert any("no space for it" in each for each in told)
    assert open_dataset(str(tmp_path / "dataset")).manifest.version == 1


def test_of_two_writers_the_one_that_writes_its_card_last_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path / "images", num_images=60)
    build_carded(tmp_path)
    store = open_store(str(tmp_path / "dataset"))
    (tmp_path / "dataset" / CARD).unlink()
    put = type(store).put

    def commit_meanwhile(self: object, path: str, data: bytes) -> None:
        monkeypatch.undo()
        write_images(tmp_path / "images", num_images=90)
        build_carded(tmp_path)
        put(store, path, data)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(type(store), "put", commit_meanwhile)
    assert refresh_card(store) == ()
    assert listed(tmp_path / "dataset") == shards_of(tmp_path / "dataset")


def test_a_dataset_without_parquet_has_a_card_that_names_no_files(tmp_path: Path):
    dataset = make_dataset(tmp_path, formats=("tfrecord",))
    assert refresh_card(open_store(dataset)) == ()
    assert set(front_matter(dataset)) == {"pretty_name"}


def test_the_card_goes_to_an_object_store(s3_bucket: str, tmp_path: Path):
    uri = upload(Path(make_dataset(tmp_path)), f"{s3_bucket}/dataset")
    assert refresh_card(open_store(uri)) == ()
    assert listed(uri) == shards_of(uri)


@pytest.mark.parametrize("format", ["parquet", "tfrecord"])
def test_a_row_by_its_number_is_that_of_the_stored_order(format, dataset):
    expected = list(iterate_samples(dataset, "train"))
    samples = dataset.samples("train", format=format)
    assert len(samples) == len(expected) == dataset.manifest.splits["train"].num_rows

    def same(found, number) -> bool:
        return found.sample_id == expected[number].sample_id and np.array_equal(
            found["image"], expected[number].image_HWC
        )

    for number in (0, 7, len(samples) - 1, -1, -len(samples)):
        assert same(samples[number], number)
    numbers = [len(samples) - 1, 3, 7, 3, -2]
    assert all(map(same, samples[np.array(numbers)], numbers)) and all(map(same, samples[numbers], numbers))
    assert all(map(same, samples[2:40:3], range(2, 40, 3))) and samples[[]] == []
    assert all(map(same, samples, range(len(samples))))
    for number in (len(samples), -len(samples) - 1):
        with pytest.raises(IndexError, match=f"sample {number} of the {len(samples)} of split 'train'"):
            samples[number]


def test_a_mask_chooses_the_rows_for_which_it_is_true(dataset):
    torch, pandas = pytest.importorskip("torch"), pytest.importorskip("pandas")
    samples = dataset.samples("train")
    ids = [sample.sample_id for sample in samples]
    mask_N = np.isin(np.arange(len(ids)), chosen := [5, 9, len(ids) - 1])
    masks = [
        mask_N, mask_N.tolist(), list(mask_N), torch.tensor(mask_N), list(torch.tensor(mask_N)), pandas.Series(mask_N),
        pandas.array(mask_N), pa.array(mask_N), pa.chunked_array([mask_N]),
    ]  # fmt: skip
    for mask in masks:
        assert [each.sample_id for each in samples[mask]] == [ids[number] for number in chosen], type(mask)
    assert samples[np.zeros(len(ids), bool)] == []
    for number in (torch.tensor(4), np.int64(4), np.array(4), torch.tensor(4, dtype=torch.uint8)):
        assert samples[number].sample_id == ids[4]
    assert [each.sample_id for each in samples[torch.tensor([4, 2])]] == [ids[4], ids[2]]
    for wrong in ([True, False], mask_N[1:], [*mask_N.tolist(), 1], [3, True], pandas.array([True, None] * 3), True):
        with pytest.raises(IndexError, match="expected a mask of a bool for each row, or numbers alone"):
            samples[wrong]


def test_threads_may_ask_for_samples_at_once(dataset):
    samples = dataset.samples("train")
    numbers = [number * 37 % len(samples) for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: samples[number].sample_id, numbers))
    expected = [sample.sample_id for sample in samples]
    assert found == [expected[number] for number in numbers]


def test_a_sample_is_a_mapping(dataset):
    sample = dataset.samples("train")[0]
    assert list(sample) == ["image", "label", "sample_id", "source"] and len(sample) == 4
    assert sample["label"] == sample.label and sample["source"] == sample.source
    with pytest.raises(KeyError):
        sample["caption"]


def test_an_altered_chunk_is_noticed(tmp_path):
    damaged = shardmill.open_dataset(make_dataset(tmp_path))
    [path, *_] = [shard.path for shard in damaged.shards_of("train")]
    file = tmp_path / "dataset" / path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match="was altered"):
        list(map(damaged.samples("train").__getitem__, range(damaged.shards_of("train")[0].num_rows)))


@pytest.mark.parametrize(
    "start_method", ["", *(pytest.param(each, marks=pytest.mark.starts("program")) for each in ("fork", "spawn"))]
)
def test_samples_are_a_map_style_dataset_of_torch(start_method, dataset):
    torch = pytest.importorskip("torch")
    samples = dataset.samples("train")
    first = samples[0]
    workers = {"num_workers": 2, "multiprocessing_context": start_method} if start_method else {}
    rows = torch.utils.data.DataLoader(samples, batch_size=16, **workers)
    batches = list(rows)
    expected = [sample.sample_id for sample in iterate_samples(dataset, "train")]
    assert torch.cat([batch["sample_id"] for batch in batches]).tolist() == expected
    assert np.array_equal(batches[0]["image"][0].numpy(), first["image"])
    assert batches[0]["label"].dtype == torch.int64 and batches[0]["source"][0] == first.source


def test_metadata_has_a_row_for_each_sample_in_the_same_order(dataset):
    table = dataset.metadata("train")
    samples = list(dataset.samples("train"))
    for name in ("sample_id", "label", "source"):
        assert table.column(name).to_pylist() == [sample[name] for sample in samples]
    assert table.column("class_name").to_pylist() == [dataset.class_names[sample.label] for sample in samples]
    assert dataset.metadata("train", ["label", "class_name"]).column_names == ["label", "class_name"]
    with pytest.raises(UsageError, match="no metadata column captoin in .*expected some of sample_id"):
        dataset.metadata("train", ["captoin"])


def test_a_data_frame_has_no_pixels_unless_they_are_asked_for(dataset):
    pytest.importorskip("pandas")
    frame = dataset.to_pandas("validation")
    assert list(frame["sample_id"]) == dataset.metadata("validation").column("sample_id").to_pylist()
    assert "image" not in frame
    with_images = dataset.to_pandas("validation", ["label"], images=True)
    assert list(with_images) == ["label", "image"]
    assert np.array_equal(with_images["image"][5], dataset.samples("validation")[5].image_HWC)


def test_without_pandas_its_command_is_named(dataset, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="to_pandas needs pandas.*`pip install pandas`, or use dataset.metadata"):
        dataset.to_pandas("train")
    with pytest.raises(UsageError, match="to_pandas needs pandas.*`pip install pandas`, or use predictions.to_arrow"):
        Predictions("r", dataset, 60, 1.0, is_new=True).to_pandas()


def test_a_contact_sheet_shows_samples_from_all_over_the_split(dataset):
    sheet = dataset.show(4)
    assert isinstance(sheet, Image.Image) and sheet.mode == "RGB"
    samples = dataset.samples("train")
    # Each image lies as it is, but larger, in a cell of its own.
    side, gap, line = 64, 4, 14
    for place in range(4):
        left, top = gap + (place % 2) * (side + gap), gap + (place // 2) * (side + gap + line)
        shown = np.asarray(sheet)[top : top + side, left : left + side]
        assert np.array_equal(shown[2::4, 2::4], samples[place * len(samples) // 4].image_HWC)
    assert dataset.show(10**6, "validation").width > sheet.width
    with pytest.raises(UsageError, match="num_samples = 0; expected at least one"):
        dataset.show(0)
    with pytest.raises(UsageError, match=r"show\(split='train'\)"):
        dataset.show("train")


@pytest.mark.parametrize("has_fonts", [True, False])
def test_letters_with_accents_are_drawn(dataset, has_fonts: bool, monkeypatch: pytest.MonkeyPatch):
    if not has_fonts:
        monkeypatch.setattr(sheets, "_SYSTEM_FONTS", ())
    sheets.caption_font.cache_clear()
    [sample] = read_samples(dataset, "train", 1)

    def drawn(name: str) -> bytes:
        sheet = contact_sheet([sample], [name] * 10)
        return sheet.crop((0, sheet.height - 18, sheet.width, sheet.height)).tobytes()

    pictures = [drawn(name) for name in ("d\xf6g", "d\xe9g", "dog", "d?g")]
    assert len(set(pictures)) == 4 and drawn("do\u0308g") == pictures[0] and drawn("d\uffffg") == pictures[3]
    sheets.caption_font.cache_clear()


def test_extra_columns_have_their_types_in_metadata(tmp_path):
    build_from(extra_columns.as_parquet(tmp_path, extra_columns.ROWS), tmp_path / "dataset")
    dataset = shardmill.open_dataset(str(tmp_path / "dataset"))
    table = dataset.metadata("train")
    assert {name: str(table.schema.field(name).type) for name in ("caption", "age", "ratio")} == {
        "caption": "string",
        "age": "int64",
        "ratio": "float",
    }
    samples = list(dataset.samples("train"))
    for name in extra_columns.TYPES:
        assert table.column(name).to_pylist() == [sample[name] for sample in samples], name


@pytest.mark.parametrize("kind", label_kinds.LABELS)
def test_labels_of_every_kind_are_in_metadata(kind, tmp_path):
    build_from(label_kinds.as_parquet(tmp_path, kind, label_kinds.LABELS[kind]), tmp_path / "dataset")
    dataset = shardmill.open_dataset(str(tmp_path / "dataset"))
    for split in dataset.manifest.splits:
        table = dataset.metadata(split)
        assert "class_name" not in table.column_names
        assert table.column("label").to_pylist() == [sample["label"] for sample in dataset.samples(split)]


def few_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmill.dataset.ledger.MAX_WAITING", 7)
    monkeypatch.setattr("shardmill.dataset.ledger.ROW_GROUP_ROWS", 3)
    monkeypatch.setattr("shardmill.dataset.ledger.SEGMENT_ROWS", 5)


def test_a_log_is_a_sorted_list_of_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    few_in_memory(monkeypatch)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    names = {rng.randbytes(3).decode("utf-8", "surrogateescape") for _ in range(100)}
    reasons = list(RejectReason)
    rejections = [Rejection(name, rng.choice(reasons), f"no. {place}", place) for place, name in enumerate(names)]
    log = RejectionLog(tmp_path, rejections[:30])
    assert list(log) == sorted(rejections[:30], key=lambda each: key_bytes(each.key))
    log.add(rejections[30:])
    for _ in range(2):
        assert list(log) == sorted(rejections, key=lambda each: key_bytes(each.key))
    assert len(log) == len(rejections) and log.by_reason == Counter(each.reason for each in rejections)
    assert log.digest == ledger_digest(rejections)
    assert log.key_sum == add_digests(*(key_hash(each.key) for each in rejections))
    assert len(write_ledger(open_store(tmp_path), log)) == -(-len(rejections) // 5)


def test_a_version_of_many_rejections_is_that_of_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path / "images", num_images=30)
    for number in range(9):
        (tmp_path / "images" / "class_0" / f"broken{number}.jpg").write_bytes(b"<html>not found</html>")
        (tmp_path / "images" / "class_1" / f"note{number}.txt").write_text("a note")
    etl = ETL.model_copy(update={"max_reject_fraction": 1.0, "formats": ("parquet",)})
    in_memory = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "in_memory"), etl))
    few_in_memory(monkeypatch)
    on_disk = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "on_disk"), etl))
    assert [len(each.manifest.ledger_segments) for each in (in_memory, on_disk)] == [1, 4]
    ours, theirs = (list(read_rejections(each.store, each.manifest)) for each in (in_memory, on_disk))
    assert ours == theirs and len(ours) == 18
    assert in_memory.manifest.ledger_digest == on_disk.manifest.ledger_digest
    assert in_memory.manifest.counts == on_disk.manifest.counts
    assert in_memory.manifest.source == on_disk.manifest.source
    verify_dataset(on_disk, deep=True).raise_if_failed()


def test_a_nonce_is_read_back_and_leaves_nothing(tmp_path: Path):
    store = open_store(tmp_path / "dataset")
    with planted(store) as nonce, planted(store) as of_another_driver:
        check_nonce(Nonce(**json.loads(json.dumps(asdict(nonce)))))
        assert {file.path for file in store.list("")} == {nonce.path, of_another_driver.path}
    assert list(store.list("")) == []


def test_what_a_killed_driver_left_goes_after_a_day_and_a_cleanup_that_fails_hides_no_cause(tmp_path: Path):
    store = open_store(tmp_path / "dataset")
    for name in ("old", "young"):
        store.put(f"{REACH}/{name}", b"left")
    os.utime(tmp_path / "dataset" / REACH / "old", (1, 1))
    with pytest.raises(ZeroDivisionError), planted(store) as nonce:
        assert {file.path for file in store.list(REACH)} == {f"{REACH}/young", nonce.path}
        (tmp_path / "dataset" / nonce.path).unlink()
        (tmp_path / "dataset" / nonce.path).mkdir()
        raise ZeroDivisionError


def test_a_host_with_another_folder_of_that_name_is_named_with_the_folder(tmp_path: Path):
    root = tmp_path / "models"
    with planted(open_store(root)) as nonce:
        shutil.rmtree(root)
        with pytest.raises(UsageError, match=f"{socket.gethostname()} does not share {root}") as caught:
            check_nonce(nonce)
        assert "s3://" in str(caught.value)
        (root / nonce.path).parent.mkdir(parents=True)
        (root / nonce.path).write_text("of another run")
        with pytest.raises(UsageError, match="does not share"):
            check_nonce(nonce)


def test_who_is_interrupted_as_the_nonce_is_written_leaves_none(tmp_path: Path, faulty):
    def interrupted(store: FaultyStore, path: str, data: bytes) -> None:
        store.sound.put(path, data)
        raise KeyboardInterrupt

    faulty["put"] = interrupted
    with pytest.raises(KeyboardInterrupt), planted(open_store(f"faulty://{tmp_path}")):
        raise AssertionError("nothing may run")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
