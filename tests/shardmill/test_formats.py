"""Formats of shards: the same rows in each, also in one that an extension brings; the export as tar."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset

from etl.config import EtlConfig, EtlTree, SourceConfig
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.tar_export import EXPORT, PROGRESS, TarExport, export_tar
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.failpoints import VARIABLE
from shardmill.formats import SHARD_FORMATS, tfrecord
from shardmill.formats.parquet import PARQUET, parquet_schema
from shardmill.formats.rows import ByteRange, RowSchema, StoredRow, WrittenShard, cut_chunks, cut_shards
from shardmill.formats.tf_example import encode_example, find_values, integers_at
from shardmill.ids import format_sample_id
from shardmill.jobs.config import load_tree
from shardmill.loader.reader import read_batches
from shardmill.loader.row_source import ReaderOptions
from shardmill.loader.samples import read_samples
from shardmill.registry import Entry
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from shardmill.values import ImageSample, SourceImage
from tests.lab.commands import BIN, ENVIRONMENT, in_process, last_line
from tests.lab.datasets import build_here, make_dataset

_SEED = random.SystemRandom().randrange(2**32)
SHAPE_HWC = (4, 4, 3)
CLASS_NAMES = ("a", "b", "c")
SCHEMA = RowSchema("jpeg", SHAPE_HWC, CLASS_NAMES)


def make_rows(num_rows: int, encoding: str, *, labels: bool = True, seed: int = 1) -> list[StoredRow]:
    rng = random.Random(seed)
    return [
        StoredRow.of(
            SourceImage(f"a/{n} é.jpg", 10, label="a" if labels else None, sample_id=rng.randrange(-(2**63), 2**63)),
            n % 3 if labels else None,
            ImageSample(rng.randbytes(48 if encoding == "raw" else rng.randrange(1, 900)), 4, 4, 3, "ab" * 32, (), ()),
        )
        for n in range(num_rows)
    ]


def write(name: str, chunks: Sequence[Sequence[StoredRow]], schema: RowSchema = SCHEMA) -> tuple[bytes, WrittenShard]:
    file = io.BytesIO()
    written = SHARD_FORMATS[name].write_shard(file, chunks, schema)
    return file.getvalue(), written


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
@pytest.mark.parametrize("name", SHARD_FORMATS)
def test_rows_survive_a_round_trip(name: str, encoding: str, labels: bool):
    shard_format = SHARD_FORMATS[name]
    chunks = list(cut_chunks(make_rows(500, encoding, labels=labels), 9_000))
    schema = RowSchema(encoding, SHAPE_HWC, CLASS_NAMES if labels else ())
    data, written = write(name, chunks, schema)
    footer = shard_format.open_footer(written.footer, data[written.footer.start :])
    assert len(written.chunks) == len(chunks) > 2
    for number, (place, chunk) in enumerate(zip(written.chunks, chunks, strict=True)):
        found = shard_format.read_chunk(
            footer, number, place, data[place.start : place.start + place.num_bytes], schema
        )
        assert [bytes(image) for image in found.images] == [row.sample.image for row in chunk]
        assert found.labels_N.tolist() == [-1 if row.label_id is None else row.label_id for row in chunk]
        assert found.sample_ids_N.tolist() == [row.source.sample_id for row in chunk]
        assert list(found.sources) == [row.source.key for row in chunk]


@pytest.mark.parametrize("name", SHARD_FORMATS)
def test_chunks_and_footer_cover_the_file_without_gaps(name: str):
    chunks = list(cut_chunks(make_rows(300, "jpeg"), 9_000))
    data, written = write(name, chunks)
    position = written.chunks[0].start
    for place in (*written.chunks, written.footer):
        assert place.start == position
        position += place.num_bytes
    assert position == len(data)


def test_chunks_close_at_their_size_and_shards_before_theirs():
    rows = make_rows(400, "jpeg")
    chunks = list(cut_chunks(rows, 5_000))
    assert [row for chunk in chunks for row in chunk] == rows
    assert all(sum(row.image_bytes for row in chunk) >= 5_000 for chunk in chunks[:-1])
    assert all(sum(row.image_bytes for row in chunk[:-1]) < 5_000 for chunk in chunks)
    shards = list(cut_shards(chunks, 20_000))
    assert [chunk for shard in shards for chunk in shard] == chunks and len(shards) > 3
    assert all(sum(row.image_bytes for chunk in shard for row in chunk) <= 20_000 for shard in shards)


def test_tensorflow_reads_the_tfrecord(tmp_path: Path):
    tf = pytest.importorskip("tensorflow")
    rows = make_rows(20, "jpeg")
    (tmp_path / "shard").write_bytes(write("tfrecord", [rows])[0])
    found = [tf.train.Example.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(tmp_path / "shard"))]
    for row, example in zip(rows, found, strict=True):
        features = example.features.feature
        assert features["image/encoded"].bytes_list.value[0] == row.sample.image
        assert features["image/class/label"].int64_list.value[0] == row.label_id
        assert features["image/sample_id"].int64_list.value[0] == row.source.sample_id
        assert features["image/filename"].bytes_list.value[0].decode() == row.source.key
        data, name = example.SerializeToString(), b"image/sample_id"
        place = find_values(data, 0, len(data), [name])[name]
        assert int(integers_at(data, np.array([place]))[0]) == row.source.sample_id


def test_plain_parquet_readers_need_nothing_of_ours():
    rows = make_rows(20, "jpeg")
    table = pq.read_table(io.BytesIO(write("parquet", [rows])[0]))
    assert table.column("image").to_pylist() == [row.sample.image for row in rows]
    assert table.column("label").to_pylist() == [row.label_id for row in rows]


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
def test_images_are_where_they_were_read(encoding: str):
    schema = RowSchema(encoding, SHAPE_HWC, CLASS_NAMES)
    chunks = list(cut_chunks(make_rows(60, encoding), 1_000))
    data, written = write("parquet", chunks, schema)
    footer = PARQUET.open_footer(written.footer, data[written.footer.start :])
    for number, place in enumerate(written.chunks):
        chunk = data[place.start : place.start + place.num_bytes]
        assert all(
            memoryview(image).obj is chunk for image in PARQUET.read_chunk(footer, number, place, chunk, schema).images
        )


OTHER_LAYOUTS = {
    "pages": {"data_page_size": 64, "write_batch_size": 1},
    "dictionary": {"use_dictionary": True},
    "compressed": {"compression": "snappy"},
    "version_2": {"data_page_version": "2.0"},
    "optional": {"schema": parquet_schema(SCHEMA).remove(0).insert(0, pa.field("image", pa.binary()))},
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_images_of_another_layout_are_read_all_the_same(layout: str):
    rows = make_rows(40, "jpeg")
    table = pq.read_table(io.BytesIO(write("parquet", [rows])[0]))
    given = {"compression": "NONE", "use_dictionary": False, "schema": table.schema, **OTHER_LAYOUTS[layout]}
    file = io.BytesIO()
    with pq.ParquetWriter(file, **given) as writer:
        writer.write_table(table.cast(given["schema"]))
    data = file.getvalue()
    place = ByteRange(4, len(data) - 4)
    found = PARQUET.read_chunk(PARQUET.open_footer(ByteRange(0, len(data)), data), 0, place, data[4:], SCHEMA)
    assert [bytes(image) for image in found.images] == [row.sample.image for row in rows]


def test_a_page_that_does_not_add_up_is_an_integrity_error_or_other_images():
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    data, written = write("parquet", [make_rows(20, "jpeg")])
    footer, (place,) = PARQUET.open_footer(written.footer, data[written.footer.start :]), written.chunks
    page_bytes = pq.read_metadata(io.BytesIO(data)).row_group(0).column(0).total_compressed_size
    num_refused = 0
    for _ in range(200):
        altered = bytearray(data[place.start : place.start + place.num_bytes])
        # In the page's header or its first length, or anywhere in it.
        altered[rng.randrange(rng.choice((30, page_bytes)))] = rng.randrange(256)
        try:
            assert len(PARQUET.read_chunk(footer, 0, place, bytes(altered), SCHEMA).images) == 20
        except IntegrityError:
            num_refused += 1
    assert num_refused > 10


@pytest.mark.parametrize("data", [b"\x0a", b"\xff\xff\xff", b"\x0a\xff\x01\x00", b"hello"])
def test_what_is_not_an_example_is_an_integrity_error(data: bytes):
    with pytest.raises(IntegrityError, match="not a tf.Example"):
        find_values(data, 0, len(data), [b"n"])


def test_example_bytes_follow_from_the_features_alone():
    assert encode_example({"a": 1, "b": b"x"}) == encode_example({"a": 1, "b": b"x"})


def test_a_shard_alone_says_what_its_labels_mean():
    import pyarrow.parquet as pq

    schema = RowSchema("jpeg", SHAPE_HWC, ("cat", "Hündin", 'a "b"'))
    shard = write("parquet", [make_rows(3, "jpeg")], schema)[0]
    metadata = pq.read_metadata(io.BytesIO(shard)).metadata
    assert json.loads(metadata[b"shardmill.class_names"]) == list(schema.class_names)
    assert json.loads((pq.read_schema(io.BytesIO(shard)).metadata or {})[b"shardmill.class_names"])
    assert b"image/class/text" in write("tfrecord", [make_rows(3, "jpeg")], schema)[0]


@pytest.mark.parametrize("shape_HWC", [SHAPE_HWC, None])
@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_a_parquet_shard_alone_says_what_its_images_are(encoding: str, shape_HWC: tuple[int, int, int] | None):
    if encoding == "raw" and shape_HWC is None:
        shape_HWC = (2, 8, 3)  # raw has one shape, always
    shard = write("parquet", [make_rows(3, encoding)], RowSchema(encoding, shape_HWC, CLASS_NAMES))[0]
    table = pq.read_table(io.BytesIO(shard))
    image = json.loads((table.schema.metadata or {})[b"shardmill.image"])
    assert image == {"encoding": encoding, "dtype": "uint8", "shape_HWC": shape_HWC and list(shape_HWC)}
    if encoding == "raw":
        # Enough to see the pixels with nothing but NumPy.
        pixels = np.frombuffer(table["image"][0].as_py(), image["dtype"]).reshape(image["shape_HWC"])
        assert pixels.tobytes() == make_rows(3, encoding)[0].sample.image


@pytest.mark.skipif(tfrecord._native_find_values is None, reason="the native kernel is not built")
def test_the_kernel_finds_what_python_finds_and_declines_the_same_damage(monkeypatch):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    data = write("tfrecord", [make_rows(20, "jpeg")])[0]
    names = (b"image/encoded", b"image/class/label", b"image/sample_id", b"image/filename", b"none")

    def found_by(kernel: object, chunk: bytes) -> list | str:
        monkeypatch.setattr(tfrecord, "_native_find_values", kernel)
        try:
            return tfrecord._find_all(chunk, names).tolist()
        except IntegrityError as error:
            return str(error)

    num_refused = 0
    native = tfrecord._native_find_values
    # The tag of the first feature's name becomes one of two bytes.
    wide = data.replace(b"\n\rimage/encoded", b"\x82\rimage/encoded", 1)
    assert wide != data and found_by(native, wide) == found_by(None, wide)
    for trial in range(300):
        altered = bytearray(data)
        if trial:
            altered[rng.randrange(len(data))] = rng.randrange(256)
        if trial % 3 == 2:
            del altered[rng.randrange(len(data)) :]
        ours = found_by(native, bytes(altered))
        assert ours == found_by(None, bytes(altered))
        num_refused += isinstance(ours, str)
    assert num_refused > 10


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
def test_an_added_format_works_from_config_to_batches(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entry = Entry("tests.shardmill.tar_format:TAR", "WebDataset; a chunk is a run of members")
    monkeypatch.setitem(SHARD_FORMATS.entries, "tar", entry)
    formats = load_tree(EtlTree, None, ("etl.formats=parquet,tar",)).etl.formats
    assert formats == ("parquet", "tar")

    dataset = open_dataset(make_dataset(tmp_path, num_images=60, formats=formats, encoding=encoding))
    verify_dataset(dataset, deep=True).raise_if_failed()
    plan = dataset.plan_epoch(dataset.plan_spec("train", seed=0, global_batch_size=8, num_streams=2), epoch=0)
    seen = []
    for name in formats:
        with read_batches(dataset, plan, options=ReaderOptions(format=name)) as batches:
            seen.append([(batch.images_NHWC, batch.labels_N, batch.sample_ids_N) for batch in batches])
    assert len(seen[0]) == plan.num_steps
    for ours, added in zip(*seen, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(ours, added, strict=True))


ALL = 10**6


def export(uri: str, target: Path, max_bytes: int = 10**8) -> TarExport:
    return export_tar(open_dataset(uri), open_store(str(target)), max_bytes)


def read_tars(target: Path, split: str) -> dict[str, dict[str, bytes]]:
    """Key -> suffix -> content."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(target.glob(f"{split}-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, suffix = member.name.partition(".")
                file = tar.extractfile(member)
                assert file is not None and suffix not in found.setdefault(key, {})
                found[key][suffix] = file.read()
    return found


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("tar"), num_classes=12)


def test_every_row_is_in_one_file_of_bounded_size(uri: str, tmp_path: Path):
    dataset = open_dataset(uri)
    done = export(uri, tmp_path / "tars", max_bytes=60_000)
    assert json.loads((tmp_path / "tars" / EXPORT).read_bytes()) == json.loads(json.dumps(done.document()))
    assert sorted(path.name for path in (tmp_path / "tars").glob("*.tar")) == sorted(each.path for each in done.shards)
    for shard in done.shards:
        assert (tmp_path / "tars" / shard.path).stat().st_size == shard.size_bytes <= 60_000
    for split, info in dataset.manifest.splits.items():
        rows = read_tars(tmp_path / "tars", split)
        assert sum(shard.num_rows for shard in done.shards if shard.split == split) == info.num_rows == len(rows)
        for sample in read_samples(dataset, split, ALL):
            files = rows[format_sample_id(sample.sample_id)]
            about = json.loads(files["json"])
            assert sorted(files) == ["cls", "json", "png"] and int(files["cls"]) == sample.label == about["label"]
            assert sample.label is not None and about["class_name"] == dataset.manifest.class_names[sample.label]
            assert about["source"] == sample.source and about["sample_id"] == sample.sample_id
    assert len([each for each in done.shards if each.split == "train"]) > 2

    # A limit below one row gives files of one row; equal versions give equal files.
    single = export(uri, tmp_path / "single", max_bytes=1)
    assert {shard.num_rows for shard in single.shards} == {1}
    export(uri, tmp_path / "again", max_bytes=60_000)
    for shard in done.shards:
        assert (tmp_path / "again" / shard.path).read_bytes() == (tmp_path / "tars" / shard.path).read_bytes()


@pytest.mark.parametrize("encoding", ["jpeg", "png", "raw", "webp"])
def test_webdataset_reads_the_same_images_and_classes(encoding: str, tmp_path: Path):
    dataset = open_dataset(make_dataset(tmp_path, num_images=60, encoding=encoding))
    export(dataset.store.uri, tmp_path / "tars", max_bytes=60_000)
    urls = [str(path) for path in sorted((tmp_path / "tars").glob("train-*.tar"))]
    rows = webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8").to_tuple("jpg;png;webp", "cls", "json")
    expected = {sample.sample_id: sample for sample in read_samples(dataset, "train", ALL)}
    seen = []
    for image_HWC, label, about in rows:
        sample = expected[about["sample_id"]]
        assert label == sample.label
        # Pillow decodes JPEG and WebP to pixels that may differ by rounding.
        tolerance = 0 if encoding in ("png", "raw") else 3
        assert np.abs(image_HWC.astype(int) - sample.image_HWC).max() <= tolerance
        seen.append(about["sample_id"])
    assert sorted(seen) == sorted(expected)


def test_our_own_source_builds_the_same_rows_from_it(uri: str, tmp_path: Path):
    export(uri, tmp_path / "tars", max_bytes=60_000)
    config = EtlConfig(image_size=16, encoding="png", keep_bytes=True)
    source = SourceConfig(uri=str(tmp_path / "tars"), kind="webdataset")
    before, after = open_dataset(uri), open_dataset(build_here(source, str(tmp_path / "rebuilt"), config))
    assert after.manifest.class_names == before.manifest.class_names
    for split in before.manifest.splits:
        rows = [
            sorted((each.label, each.image_HWC.tobytes()) for each in read_samples(dataset, split, ALL))
            for dataset in (before, after)
        ]
        assert rows[0] == rows[1]
    # That file is `export.json`.
    assert after.manifest.counts.by_reason == {"not_an_image_name": 1}


def test_labels_of_other_kinds_and_extra_columns_are_in_the_json(tmp_path: Path):
    rows = {"tags": ["red", "blue"], "caption": "ünï \u2028 text"}
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "a.tar", "w") as tar:
        for number in range(30):
            png = cv2.imencode(".png", np.full((16, 16, 3), number * 8, np.uint8))[1].tobytes()
            for name, data in ((f"{number}.png", png), (f"{number}.json", json.dumps(rows).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    source = SourceConfig(
        uri=str(tmp_path / "in"), kind="webdataset", label_kind="multi_label", label_field="json.tags",
        extra_columns=("json.caption",),
    )  # fmt: skip
    uri = build_here(source, str(tmp_path / "dataset"), EtlConfig(image_size=16))
    export(uri, tmp_path / "tars")
    for files in read_tars(tmp_path / "tars", "train").values():
        about = json.loads(files["json"])
        assert sorted(about["label"]) == ["blue", "red"] and rows["caption"] in about.values()
        assert sorted(files) == ["jpg", "json"]


def test_a_folder_that_is_not_empty_is_refused(uri: str, tmp_path: Path):
    (tmp_path / "tars" / "below").mkdir(parents=True)
    (tmp_path / "tars" / "below" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match=r"is not empty: it contains below/mine\.txt"):
        export(uri, tmp_path / "tars")
    done = in_process("export-tar", uri, "tars", cwd=tmp_path)
    assert done.returncode == 2 and last_line(done).startswith("ERROR 2: ") and "give another folder" in last_line(done)


def test_an_altered_row_or_a_store_that_fails_leaves_no_whole_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uri = make_dataset(tmp_path, formats=("parquet",))
    shard = Path(open_dataset(uri).files("train")[-1])
    data = shard.read_bytes()
    shard.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(IntegrityError, match="altered"):
        export(uri, tmp_path / "altered")
    assert not (tmp_path / "altered" / EXPORT).exists()

    shard.write_bytes(data)
    put_file = LocalStore.put_file

    def fail(self: LocalStore, path: str, local_file: Path) -> None:
        if path.startswith("validation"):
            raise StorageError("no space")
        put_file(self, path, local_file)

    monkeypatch.setattr(LocalStore, "put_file", fail)
    with pytest.raises(StorageError):
        export(uri, tmp_path / "full")
    # No file is half written, and what is there says that it is not all.
    assert not (tmp_path / "full" / EXPORT).exists() and not list((tmp_path / "full").rglob("*.tmp-*"))
    assert all(read_tars(tmp_path / "full", split) for split in ("test", "train"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def without_target(document: bytes) -> dict:
    return {**json.loads(document), "target": ""}


@pytest.mark.starts("program")
@pytest.mark.parametrize("nth", [1, 3, 7])
def test_a_killed_export_is_continued_by_the_same_command(uri: str, tmp_path: Path, nth: int):
    export(uri, tmp_path / "whole", max_bytes=60_000)
    command = ("export-tar", uri, "tars", "--max-bytes", "60000")
    environment = {**ENVIRONMENT, VARIABLE: f"tar_record:{nth}"}
    killed = subprocess.run([BIN / "shardmill", *command], cwd=tmp_path, env=environment, check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL and not (tmp_path / "tars" / EXPORT).exists()
    (tmp_path / "tars" / ".tmp-left").write_bytes(b"half of a file")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "tars").glob("*.tar")}
    assert len(before) == nth - 1
    done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (f"{nth - 1} tar file" in done.stderr and "there already" in done.stderr) == (nth > 1)
    found, expected = contents(tmp_path / "tars"), contents(tmp_path / "whole")
    assert without_target(found.pop(EXPORT)) == without_target(expected.pop(EXPORT)) and found == expected
    for name, time in before.items():
        assert (tmp_path / "tars" / name).stat().st_mtime_ns == time, "a finished file is not written again"
        assert f"export-tar: {name}, " not in done.stderr
    # And a finished one is what it is.
    again = in_process(*command, "--json", cwd=tmp_path)
    assert again.returncode == 0 and json.loads(again.stdout) == json.loads((tmp_path / "tars" / EXPORT).read_bytes())


def test_only_what_this_export_has_written_is_continued(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put_file = LocalStore.put_file

    def fail(self: LocalStore, path: str, local_file: Path) -> None:
        if path.startswith("validation"):
            raise StorageError("no space")
        put_file(self, path, local_file)

    with monkeypatch.context() as patched, pytest.raises(StorageError):
        patched.setattr(LocalStore, "put_file", fail)
        export(uri, tmp_path / "tars", max_bytes=60_000)
    whole = contents(tmp_path / "tars")
    with pytest.raises(
        UsageError, match="an unfinished export of .*@1 with --max-bytes 60000; expected .* 70000; give"
    ):
        export(uri, tmp_path / "tars", max_bytes=70_000)
    (tmp_path / "tars" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match=r"is not empty: it contains mine\.txt"):
        export(uri, tmp_path / "tars", max_bytes=60_000)
    (tmp_path / "tars" / "mine.txt").unlink()
    (tmp_path / "tars" / PROGRESS).write_bytes(whole[PROGRESS].replace(b"60000", b"60001"))
    with pytest.raises(IntegrityError, match=f"{PROGRESS} was altered"):
        export(uri, tmp_path / "tars", max_bytes=60_000)
    (tmp_path / "tars" / PROGRESS).write_bytes(whole[PROGRESS])
    # From the first file that is not as it was.
    (tmp_path / "tars" / "train-000001.tar").write_bytes(whole["train-000001.tar"][:-512])
    done = export(uri, tmp_path / "tars", max_bytes=60_000)
    found = contents(tmp_path / "tars")
    assert PROGRESS not in found and {name: found[name] for name in whole if name != PROGRESS} == {
        name: data for name, data in whole.items() if name != PROGRESS
    }
    with pytest.raises(UsageError, match="contains an export of .* with --max-bytes 60000; expected .* 70000"):
        export(uri, tmp_path / "tars", max_bytes=70_000)
    (tmp_path / "tars" / done.shards[-1].path).unlink()
    with pytest.raises(UsageError, match=f"lacks {done.shards[-1].path}, .*; delete the export"):
        export(uri, tmp_path / "tars", max_bytes=60_000)


def test_the_command_prints_a_table_or_its_document(uri: str, tmp_path: Path):
    done = in_process("export-tar", f"{uri}@1", "tars", "--max-bytes", "60000", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "tars" / EXPORT).read_bytes())
    assert "export-tar: train-000000.tar, " in done.stderr


def test_an_export_goes_to_an_object_store(s3_bucket: str, uri: str, tmp_path: Path):
    target = open_store(f"{s3_bucket}/tars")
    done = export_tar(open_dataset(uri), target, 10**8)
    assert {file.path: file.size_bytes for file in target.list("")}.keys() == {EXPORT, *(e.path for e in done.shards)}
    assert export_tar(open_dataset(uri), target, 10**8) == done
