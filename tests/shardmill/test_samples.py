"""Single rows, metadata and pictures of a dataset, without an epoch."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import shardmill
from shardmill.errors import IntegrityError, UsageError
from shardmill.loader import contact_sheet as sheets
from shardmill.loader.contact_sheet import contact_sheet
from shardmill.loader.samples import iterate_samples, read_samples
from tests.etl import test_extra_columns as extra_columns
from tests.etl import test_label_kinds as label_kinds
from tests.etl.extra_columns import build
from tests.lab.datasets import SharedDatasets, make_dataset


@pytest.fixture(scope="module")
def dataset(shared_dataset: SharedDatasets) -> shardmill.Dataset:
    return shardmill.open_dataset(shared_dataset())


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
    build(extra_columns.as_parquet(tmp_path, extra_columns.ROWS), tmp_path / "dataset")
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
    build(label_kinds.as_parquet(tmp_path, kind, label_kinds.LABELS[kind]), tmp_path / "dataset")
    dataset = shardmill.open_dataset(str(tmp_path / "dataset"))
    for split in dataset.manifest.splits:
        table = dataset.metadata(split)
        assert "class_name" not in table.column_names
        assert table.column("label").to_pylist() == [sample["label"] for sample in dataset.samples(split)]
