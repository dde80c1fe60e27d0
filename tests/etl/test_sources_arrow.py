"""Arrow IPC, Feather and Hugging Face's `save_to_disk` as sources."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pytest

from etl.config import SourceConfig
from etl.sources import SOURCES
from etl.sources.kinds import arrow
from etl.sources.recognise import recognise
from shardmill.errors import IntegrityError, UsageError
from tests.etl.building import build_source, images_of, list_images
from tests.etl.source_files import picture, write_table

IMAGES = [picture(number) for number in range(60)]
TABLE = pa.table(
    {
        "tags": [["a", "b"], None, []] * 20,
        "image": [{"bytes": image, "path": None} for image in IMAGES],
        "label": pa.array(["x", "y", None] * 20).dictionary_encode(),
        "facts": [{"width": 1}] * 60,
        "id": [f"k{number}" for number in range(60)],
    }
)
Packing = Literal["lz4", "zstd"] | None


def write(file: Path, packing: Packing = None, rows_at_once: int = 20) -> SourceConfig:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".feather":
        name = packing or "uncompressed"
        pyarrow.feather.write_feather(TABLE, str(file), compression=name, chunksize=rows_at_once)
    else:
        options = pa.ipc.IpcWriteOptions(compression=packing)
        with pa.ipc.new_stream(str(file), TABLE.schema, options=options) as out:
            out.write_table(TABLE, max_chunksize=rows_at_once)
    return SourceConfig(uri=str(file), kind="arrow", label_kind="none", key_field="id")


@pytest.mark.parametrize("name", ["a.feather", "a.arrow"])
@pytest.mark.parametrize("packing", [None, "lz4", "zstd"])
def test_rows_are_listed_and_read_from_either_format_and_packing(name: str, packing: Packing, tmp_path: Path):
    source = write(tmp_path / name, packing)
    assert recognise(source.uri) == "arrow"
    images = images_of(list_images(source))
    assert [image.key for image in sorted(images, key=lambda image: image.place)] == TABLE["id"].to_pylist()
    assert {image.block for image in images} == {0, 1, 2}
    reader = SOURCES["arrow"](source).open(10_000)
    assert [reader.read(image) for image in images] == [IMAGES[image.place] for image in images]


def test_folders_of_a_saved_dataset_dict_are_its_splits(tmp_path: Path):
    for split in ("train", "test"):
        write(tmp_path / "saved" / split / "data-00000-of-00001.arrow")
    assert recognise(str(tmp_path / "saved")) == "arrow"
    source = SourceConfig(uri=str(tmp_path / "saved"), kind="arrow")
    listing = list_images(source)
    assert {image.split for image in images_of(listing)} == {"train", "test"}
    # Rows without a label are refused one by one.
    assert (listing.num_images, len(listing.rejections)) == (80, 40)


def test_a_listing_reads_no_image(tmp_path: Path):
    """The images of one record batch would be 160 MB."""
    table = pa.table({"image": [bytes(4_000_000)] * 40, "label": ["x", "y"] * 20})
    pyarrow.feather.write_feather(table, str(tmp_path / "a.feather"), compression="uncompressed")
    source = SourceConfig(uri=str(tmp_path / "a.feather"), kind="arrow")
    tracemalloc.start()
    arrow_bytes = pa.total_allocated_bytes()
    assert list_images(source, max_source_bytes=10_000_000).num_images == 40
    # Pages of zeros that nobody writes to count here as allocated, and take no memory.
    assert pa.total_allocated_bytes() - arrow_bytes < 10_000_000
    tracemalloc.stop()


def test_a_cut_file_lists_the_batches_before_the_cut_and_costs_no_other_file(tmp_path: Path):
    source = write(tmp_path / "in" / "a.arrow")
    data = (tmp_path / "in" / "a.arrow").read_bytes()
    (tmp_path / "in" / "a.arrow").write_bytes(data[:-3_000])
    (tmp_path / "in" / "b.arrow").write_bytes(b"no Arrow at all")
    (tmp_path / "in" / "c.feather").write_bytes(b"FEA1" + bytes(100))
    write(tmp_path / "in" / "d.feather")
    source = SourceConfig(uri=str(tmp_path / "in"), kind="arrow", label_kind="none")
    listing = list_images(source)
    assert listing.num_images == 40 + 60
    details = {each.key: each.detail for each in listing.rejections}
    assert "the file ends inside the message at byte" in details["a.arrow"] and "40 rows before" in details["a.arrow"]
    assert "no message of Arrow at byte 0" in details["b.arrow"] and "Feather version 1" in details["c.feather"]
    manifest = build_source(source, tmp_path / "dataset", max_reject_fraction=0.5)
    assert (manifest.counts.accepted, manifest.counts.by_reason) == (100, {"damaged_container": 3})


@pytest.mark.parametrize("packing", [None, "zstd"])
def test_a_flipped_byte_anywhere_ends_in_a_rejection_or_other_bytes(packing: Packing, tmp_path: Path):
    """Never in a crash: the format has no checksums, and its offsets lead anywhere."""
    source = write(tmp_path / "a.arrow", packing)
    data = (tmp_path / "a.arrow").read_bytes()
    random = np.random.default_rng(0)
    for place in [*range(0, 2_600, 29), *random.integers(0, len(data), 60).tolist()]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << int(random.integers(8))
        (tmp_path / "a.arrow").write_bytes(bytes(damaged))
        try:
            images = images_of(list_images(source))
        except UsageError:
            continue  # a column of another name, or a file without images
        reader = SOURCES["arrow"](source).open(10_000)
        for image in images:
            reader.read(image)


def test_a_record_batch_of_too_many_bytes_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write(tmp_path / "a.arrow", "zstd")
    images = images_of(list_images(source))
    monkeypatch.setattr(arrow, "_MAX_COLUMN_BYTES", 10_000)
    read = SOURCES["arrow"](source).open(10_000).read(images[0])
    assert not isinstance(read, bytes)
    assert "record batch 0 has more than 10000 bytes in the columns image; write smaller ones" in read.detail


def test_columns_that_are_missing_are_named(tmp_path: Path):
    source = write(tmp_path / "a.arrow")
    with pytest.raises(UsageError, match="source\\.image_field = 'imagee' is not a column; .* did you mean 'image'"):
        list_images(source.model_copy(update={"image_field": "imagee"}))
    with pytest.raises(UsageError, match="source\\.key_field = 'key' is not a column"):
        list_images(source.model_copy(update={"key_field": "key"}))


def test_rows_that_name_their_images_are_a_table(tmp_path: Path):
    source = write_table(tmp_path / "t.feather", {"uri": ["a.jpg", "b.jpg"], "label": ["cat", "dog"]})
    assert recognise(source.uri) == "table"
    with pytest.raises(UsageError, match=r"t\.feather has the columns uri, label; .* source\.kind=table"):
        list_images(source.model_copy(update={"kind": "arrow"}))
    (tmp_path / "t.feather").write_bytes((tmp_path / "t.feather").read_bytes()[:-900])
    with pytest.raises(IntegrityError, match=r"t\.feather does not parse: .*expected .* Arrow, CSV or JSON lines"):
        list_images(source)


@pytest.mark.parametrize("name", ["a.feather", "a.arrow"])
def test_columns_of_any_type_before_the_label_change_no_label(name: str, tmp_path: Path):
    runs = pc.run_end_encode(pa.array(["a"] * 20 + ["b"] * 40))
    columns = {"runs": runs, "label": ["x", "y"] * 30, "image": IMAGES}
    if hasattr(pa, "string_view"):
        columns = {"view": pa.array([f"a text of {'many' * 9} bytes"] * 60, pa.string_view()), **columns}
    table = pa.table(columns)
    opened = pa.ipc.new_file if name.endswith(".feather") else pa.ipc.new_stream
    with opened(str(tmp_path / name), table.schema) as out:
        out.write_table(table, max_chunksize=20)
    listing = list_images(SourceConfig(uri=str(tmp_path / name), kind="arrow"))
    assert [image.label == "xy"[image.place % 2] for image in images_of(listing)] == [True] * 60


def test_of_columns_with_one_name_the_first_is_read(tmp_path: Path):
    table = pa.Table.from_arrays(
        [pa.array(IMAGES), pa.array(["x"] * 60), pa.array(["a"] * 60), pa.array(["b"] * 60)],
        names=["image", "label", "note", "note"],
    )
    pyarrow.feather.write_feather(table, str(tmp_path / "a.feather"))
    source = SourceConfig(uri=str(tmp_path / "a.feather"), kind="arrow", extra_columns=("note",))
    [image, *_] = images_of(list_images(source))
    assert '"a"' in image.extra and '"b"' not in image.extra


def test_coordinates_that_are_not_read_are_named(tmp_path: Path):
    sides = {name: [1] * 60 for name in ("xmin", "ymin", "xmax", "ymax")}
    write_table(tmp_path / "a.parquet", {"image": IMAGES, "label": ["x"] * 60, **sides})
    listing = list_images(SourceConfig(uri=str(tmp_path / "a.parquet"), kind="parquet"))
    assert any("source.boxes.field" in each for each in listing.warnings)
