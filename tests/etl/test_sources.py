"""What holds for every kind of source: how it is read, listed beside others, and what happens if files vanish."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
import socket
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pydantic import ValidationError

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from etl.plan import BuildPlan, plan_build
from etl.sources import SOURCES
from etl.sources.recognise import recognise
from etl.units.read_source import check_source, in_reading_order, read_source
from etl.units.units import read_unit
from etl.units.write_unit import write_unit
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.ledger import read_rejections
from shardmill.errors import StorageError, UsageError
from shardmill.formats.tf_example import encode_example
from shardmill.formats.tfrecord import frame
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.reach import planted
from shardmill.loader.samples import read_samples
from shardmill.registry import Entry
from shardmill.storage import StoredFile
from shardmill.stores import STORES
from shardmill.stores.local import LocalStore
from shardmill.values import Rejection, RejectReason
from tests.cifar_files import records
from tests.etl.building import build_source, images_of, list_images
from tests.etl.source_files import add_member
from tests.lab.datasets import HERE, write_images
from tests.services.faulty_store import FaultyStore

Files = list[tuple[Path, str]]
"""Image files with their classes."""


def as_folders(folder: Path, files: Files) -> str:
    return str(files[0][0].parent.parent)


def as_table(folder: Path, files: Files) -> str:
    with open(folder / "table.csv", "w", newline="") as out:
        csv.writer(out).writerows([("uri", "label"), *files])
    return str(folder / "table.csv")


def as_tars(folder: Path, files: Files) -> str:
    """Two shards, one of them packed."""
    (folder / "shards").mkdir()
    for name, mode, some in (("0.tar", "w", files[::2]), ("1.tar.gz", "w:gz", files[1::2])):
        with tarfile.open(folder / "shards" / name, mode) as tar:  # pyright: ignore  a mode of two
            for file, label in some:
                add_member(tar, f"{file.stem}.cls", label.encode())
                add_member(tar, f"{file.stem}.png", file.read_bytes())
    return str(folder / "shards")


def hugging_face_rows(files: Files) -> pa.Table:
    """As Hugging Face writes them: a struct, numbers for classes."""
    names = sorted({label for _, label in files})
    feature = {"names": names, "_type": "ClassLabel"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"label": feature, "image": {"_type": "Image"}}}})}
    rows = [
        {"image": {"bytes": file.read_bytes(), "path": file.name}, "label": names.index(label)} for file, label in files
    ]
    return pa.Table.from_pylist(rows).replace_schema_metadata(metadata)


def as_arrow(folder: Path, files: Files) -> str:
    """The streams of `save_to_disk`, and a Feather file beside them."""
    (folder / "saved").mkdir()
    table = hugging_face_rows(files)
    for number, part in enumerate((table.slice(0, 60), table.slice(60, 60))):
        with pa.ipc.new_stream(str(folder / "saved" / f"data-{number:05d}-of-00002.arrow"), table.schema) as out:
            out.write_table(part, max_chunksize=25)
    pyarrow.feather.write_feather(table.slice(120), str(folder / "saved" / "more.feather"), chunksize=20)
    return str(folder / "saved")


def as_parquet(folder: Path, files: Files) -> str:
    """The files of `push_to_hub`, with small row groups."""
    (folder / "rows").mkdir()
    table = hugging_face_rows(files)
    for number, part in enumerate((table.slice(0, 90), table.slice(90))):
        pq.write_table(part, folder / "rows" / f"{number:04d}.parquet", row_group_size=20)
    return str(folder / "rows")


def as_zip(folder: Path, files: Files) -> str:
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for place, (file, label) in enumerate(files):
            kind = zipfile.ZIP_STORED if place % 2 else zipfile.ZIP_DEFLATED
            archive.write(file, f"pile/{label}/{file.name}", kind)
    return str(folder / "a.zip")


def as_tfrecords(folder: Path, files: Files) -> str:
    (folder / "records").mkdir()
    for number, some in enumerate((files[::2], files[1::2])):
        records = [
            frame(encode_example({"image/encoded": file.read_bytes(), "image/class/text": label.encode()}))
            for file, label in some
        ]
        (folder / "records" / f"x.tfrecord-{number:05d}-of-00002").write_bytes(b"".join(records))
    return str(folder / "records")


def as_idx(folder: Path, files: Files) -> str:
    (folder / "idx").mkdir()
    pixels = np.stack([cv2.imread(str(file)) for file, _ in files])[..., ::-1]
    labels = np.array([int(label[-1]) for _, label in files], np.uint8)
    for name, items in (("images-idx4", pixels), ("labels-idx1", labels)):
        header = struct.pack(f">HBB{items.ndim}I", 0, 8, items.ndim, *items.shape)
        (folder / "idx" / f"train-{name}-ubyte").write_bytes(header + items.tobytes())
    return str(folder / "idx")


def as_coco(folder: Path, files: Files) -> str:
    """One box in each image, of the image's class."""
    names = sorted({label for _, label in files})
    boxes = enumerate(label for _, label in files)
    content = {
        "images": [{"id": n, "file_name": file.relative_to(folder).as_posix()} for n, (file, _) in enumerate(files)],
        "categories": [{"id": number, "name": name} for number, name in enumerate(names)],
        "annotations": [{"image_id": n, "category_id": names.index(label), "bbox": [0, 0, 9, 9]} for n, label in boxes],
    }
    (folder / "instances.json").write_text(json.dumps(content))
    return str(folder / "instances.json")


def as_delta(folder: Path, files: Files) -> str:
    """Two commits; classes are folders that the log alone names."""
    for some in (files[::2], files[1::2]):
        rows = [{"image": file.read_bytes(), "label": label} for file, label in some]
        table = pa.Table.from_pylist(rows)
        write_deltalake(str(folder / "delta"), table, mode="append", partition_by=["label"])
    return str(folder / "delta")


def as_lance(folder: Path, files: Files) -> str:
    """Two versions; rows of another table were deleted from it."""
    lance = pytest.importorskip("lance")
    for mode, some in (("create", files[::2]), ("append", files[1::2])):
        rows = [{"image": file.read_bytes(), "label": label} for file, label in some]
        rows = [each for row in rows for each in (row, {"image": b"deleted", "label": "none"})]
        lance.write_dataset(pa.Table.from_pylist(rows), str(folder / "table.lance"), mode=mode, max_rows_per_file=64)
    lance.dataset(str(folder / "table.lance")).delete("label = 'none'")
    return str(folder / "table.lance")


def as_iceberg(folder: Path, files: Files) -> str:
    """Two snapshots of a table whose classes partition it; rows of another class were deleted from it."""
    catalog = pytest.importorskip("tests.etl.iceberg_tables").catalog_in(folder)
    table = None
    for some in (files[::2], files[1::2]):
        rows = [{"image": file.read_bytes(), "label": label} for file, label in some]
        rows = pa.Table.from_pylist([*rows, {"image": b"deleted", "label": "none"}])
        table = table or catalog.create_table("photos.train", rows.schema)
        table.append(rows)
    assert table is not None
    table.delete("label = 'none'")
    return table.metadata_location.removeprefix("file://")


def as_cifar(folder: Path, files: Files) -> str:
    pixels = np.stack([cv2.resize(cv2.imread(str(file)), (32, 32)) for file, _ in files])[..., ::-1]
    labels = np.array([int(label[-1]) for _, label in files])
    (folder / "cifar").mkdir()
    data = records(pixels.transpose(0, 3, 1, 2).reshape(len(files), -1), labels)
    (folder / "cifar" / "data_batch_1.bin").write_bytes(data)
    return str(folder / "cifar")


def as_parts(folder: Path, files: Files) -> SourceConfig:
    """Half of the images in a folder tree of their own, half in a ZIP archive."""
    for file, label in files[::2]:
        (folder / "half" / label).mkdir(parents=True, exist_ok=True)
        (folder / "half" / label / file.name).write_bytes(file.read_bytes())
    parts = {
        "tree": SourceConfig(uri=str(folder / "half")),
        "archive": SourceConfig(uri=as_zip(folder, files[1::2]), kind="zip"),
    }
    return SourceConfig(kind="several", parts=parts)


WRITERS: dict[str, Callable[[Path, Files], str]] = {
    "folders": as_folders, "table": as_table, "webdataset": as_tars, "parquet": as_parquet, "idx": as_idx,
    "cifar": as_cifar, "tfrecord": as_tfrecords, "zip": as_zip, "coco": as_coco, "delta": as_delta,
    "arrow": as_arrow, "lance": as_lance, "iceberg": as_iceberg,
}  # fmt: skip
# Pixels without files of their own cannot be the bytes that the other kinds read.
HOLDS_FILES = [kind for kind in SOURCES if kind not in ("idx", "cifar")]


def config_of(kind: str, folder: Path, files: Files) -> SourceConfig:
    return as_parts(folder, files) if kind == "several" else SourceConfig(uri=WRITERS[kind](folder, files), kind=kind)


EVERY_KIND = pytest.mark.parametrize("kind", SOURCES)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    write_images(tmp_path / "images", num_images=150)
    return [(file, file.parent.name) for file in sorted((tmp_path / "images").rglob("*.png"))]


def contents(dataset: str) -> set[tuple[str, str, int]]:
    """(split, SHA-256 of the source, class or the only one of several) of every row."""
    opened = open_dataset(dataset)
    return {
        (split, row["source_sha256"], row["label"][0] if isinstance(row["label"], list) else row["label"])
        for split in opened.manifest.counts.by_split
        for file in opened.files(split, "parquet")
        for row in pq.read_table(file, columns=["source_sha256", "label"]).to_pylist()
    }


@pytest.mark.parametrize("kind", HOLDS_FILES)
def test_every_kind_gives_the_same_samples(kind: str, files: Files, tmp_path: Path):
    config = config_of(kind, tmp_path, files)
    assert kind == "several" or recognise(config.uri) == kind
    manifest = build_source(config, tmp_path / "dataset")
    build_source(SourceConfig(uri=str(tmp_path / "images")), tmp_path / "of_folder")
    assert (manifest.counts.accepted, manifest.counts.rejected) == (150, 0)
    assert manifest.class_names == ("class_0", "class_1", "class_2")
    assert contents(str(tmp_path / "dataset")) == contents(str(tmp_path / "of_folder"))


@EVERY_KIND
def test_every_kind_reads_what_it_listed_in_any_order(kind: str, files: Files, tmp_path: Path):
    config = config_of(kind, tmp_path, files)
    source = SOURCES[kind](config)
    images = images_of(list_images(config, max_source_bytes=100_000))
    forward = {image.key: source.open(100_000).read(image) for image in in_reading_order(images)}
    one_reader = source.open(100_000)
    assert {image.key: one_reader.read(image) for image in reversed(images)} == forward
    if kind in HOLDS_FILES:
        assert set(forward.values()) == {file.read_bytes() for file, _ in files}


@EVERY_KIND
def test_every_kind_knows_when_its_files_are_gone(kind: str, files: Files, tmp_path: Path):
    config = config_of(kind, tmp_path, files)
    reader = SOURCES[kind](config).open(100_000)
    probes = list_images(config, max_source_bytes=100_000).probes
    check_source(reader, config.uri, probes)
    for folder in [path for path in tmp_path.iterdir() if path.is_dir()]:
        folder.rename(folder.with_name(f"{folder.name}-moved"))
    for file in [path for path in tmp_path.iterdir() if path.is_file()]:
        file.rename(file.with_name(f"{file.name}-moved"))
    with pytest.raises(StorageError, match="does not see the source"):
        check_source(reader, config.uri, probes)


_SETTINGS = EtlConfig(engine=HERE, image_size=8, encoding="png", max_reject_fraction=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two trees with equal paths and different images, and a third class in the second."""
    write_images(tmp_path / "a", num_images=12, num_classes=2, seed=1)
    write_images(tmp_path / "b", num_images=12, num_classes=3, seed=2)
    (tmp_path / "b" / "class_0" / "broken.png").write_bytes(b"\x89PNG")
    return tmp_path


def build(folder: Path, **parts: str):
    source = SourceConfig(
        kind="several", parts={name: SourceConfig(uri=str(folder / path)) for name, path in parts.items()}
    )
    tree = EtlTree(source=source, dataset=DatasetConfig(uri=str(folder / "dataset")), etl=_SETTINGS)
    return build_dataset(tree, run_id="r").manifest


def test_equal_paths_in_two_sources_are_two_images(folder: Path):
    manifest = build(folder, a="a", b="b")
    assert (manifest.counts.accepted, manifest.counts.rejected) == (24, 1)
    assert manifest.class_names == ("class_0", "class_1", "class_2")
    assert manifest.source.parts == {"a": str(folder / "a"), "b": str(folder / "b")}
    dataset = open_dataset(str(folder / "dataset"))
    keys = {each.source for split in manifest.splits for each in read_samples(dataset, split, 100)}
    assert len(keys) == 24 and {key.partition("\0")[0] for key in keys} == {"a", "b"}
    [refused] = read_rejections(dataset.store, manifest)
    assert refused.key == "b\0class_0/broken.png"


def test_a_source_that_is_added_makes_an_incremental_version(folder: Path):
    build(folder, a="a")
    grown = build(folder, a="a", b="b")
    assert (grown.version, grown.operation, grown.counts.accepted) == (2, "incremental", 24)
    shutil.rmtree(folder / "dataset")
    assert build(folder, a="a", b="b").content_digest == grown.content_digest


def test_a_name_refers_to_one_place(folder: Path):
    build(folder, a="a", b="b")
    with pytest.raises(UsageError, match="was built from a .*, b .*, not from a"):
        build(folder, a="b")


def test_classes_in_some_sources_alone_are_refused(folder: Path):
    (folder / "flat").mkdir()
    for number, file in enumerate(sorted((folder / "a").rglob("*.png"))):
        shutil.copy(file, folder / "flat" / f"{number}.png")
    with pytest.raises(UsageError, match=r"source.parts.a has classes and source.parts.flat has none"):
        build(folder, a="a", flat="flat")


def test_wrong_parts_are_refused_by_the_config():
    with pytest.raises(ValidationError, match="parts only with kind"):
        SourceConfig(parts={"a": SourceConfig(uri="a")})
    with pytest.raises(ValidationError, match="the part b has parts itself"):
        SourceConfig(kind="several", parts={"b": SourceConfig(kind="several", parts={})})
    with pytest.raises(UsageError, match="source.parts is empty"):
        build_source(SourceConfig(kind="several"), Path("nowhere"))


ETL = EtlConfig(image_size=16, encoding="png", unit_min_images=20)


def planned(folder: Path, num_images: int = 40, scheme: str = "") -> BuildPlan:
    write_images(folder / "images", num_images=num_images)
    source, dataset = SourceConfig(uri=f"{scheme}{folder}/images"), DatasetConfig(uri=str(folder / "dataset"))
    return plan_build(EtlTree(source=source, dataset=dataset, etl=ETL), run_id="a")


def rejections_of(plan: BuildPlan) -> list[Rejection]:
    return [rejection for unit in plan.units for rejection in write_unit(unit, plan.task).rejections]


@pytest.mark.parametrize("leaves_mount_point", [False, True])
def test_a_source_that_this_host_does_not_see_ends_the_task(leaves_mount_point: bool, tmp_path: Path):
    plan = planned(tmp_path)
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    if leaves_mount_point:
        (tmp_path / "images").mkdir()
    with pytest.raises(StorageError, match=f"{socket.gethostname()} does not see the source {tmp_path}/images"):
        write_unit(plan.units[0], plan.task)


def test_a_source_that_vanishes_half_way_ends_the_task(tmp_path: Path, faulty: dict[str, Any]):
    plan = planned(tmp_path, scheme="faulty://")
    calls = []

    def unmounted(store: FaultyStore, path: str) -> bytes:
        calls.append(path)
        if len(calls) == 5:
            (tmp_path / "images").rename(tmp_path / "elsewhere")
        return store.sound.read(path)

    faulty["read"] = unmounted
    with pytest.raises(StorageError, match="does not see the source"):
        write_unit(plan.units[0], plan.task)
    assert len(calls) == 5


def test_a_single_file_that_vanished_is_one_rejection(tmp_path: Path):
    plan = planned(tmp_path)
    gone = plan.task.probes[0]
    (tmp_path / "images" / gone).unlink()
    assert [(each.key, str(each.reason)) for each in rejections_of(plan)] == [(gone, "missing")]


@pytest.mark.starts("program")
def test_a_file_that_this_user_may_not_read_is_one_rejection(tmp_path: Path):
    # A child that gives up root's rights: for root every file is readable.
    plan = planned(tmp_path)
    image = read_unit(plan.task.listing, plan.units[0], plan.task.config.seed)[0]
    secret = tmp_path / "images" / image.key
    secret.chmod(0)
    for folder in (tmp_path, *tmp_path.parents):
        if os.stat(folder).st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o755)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "nothing"
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            reader = SOURCES[plan.task.source.kind](plan.task.source).open(plan.task.config.max_source_bytes)
            outcome = read_source(reader, image, plan.task)
            answer = f"{outcome.key}:{outcome.reason}" if isinstance(outcome, Rejection) else "read"
        except BaseException as error:  # the parent compares
            answer = repr(error)
        finally:
            os.write(write_end, answer.encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 10_000).decode() == f"{image.key}:unreadable"


def test_an_executor_with_a_dataset_folder_of_its_own_is_refused_before_it_works(tmp_path: Path):
    plan = planned(tmp_path)
    with planted(plan.store) as nonce:
        task = dataclasses.replace(plan.task, reach=nonce)
        write_unit(plan.units[0], task)
        shutil.rmtree(tmp_path / "dataset")
        with pytest.raises(UsageError, match=f"{socket.gethostname()} does not share {tmp_path}/dataset"):
            write_unit(plan.units[0], task)
        assert not (tmp_path / "dataset").exists()


@pytest.mark.starts("decoder")
def test_an_image_that_takes_too_much_is_one_rejection_and_the_task_continues(tmp_path: Path):
    """49 megapixels in a few kilobytes, and a limit that they break; their neighbours know nothing of it."""
    plan = planned(tmp_path)
    bomb = cv2.imencode(".png", np.zeros((7000, 7000, 3), np.uint8))[1].tobytes()
    (tmp_path / "images" / "class_0" / "bomb.png").write_bytes(bomb)
    tree = EtlTree(
        source=SourceConfig(uri=str(tmp_path / "images")),
        dataset=DatasetConfig(uri=str(tmp_path / "dataset")),
        etl=ETL.model_copy(update={"decode_memory_bytes": 100_000_000}),
    )
    limited = plan_build(tree, run_id="b")
    [rejection] = rejections_of(limited)
    assert (rejection.key, rejection.reason) == ("class_0/bomb.png", "decoder_memory")
    assert limited.build.num_listed == plan.build.num_listed + 1


class VanishingStore(LocalStore):
    """`vanishing:///folder`: files with `gone` in their names are deleted as soon as they were listed."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri.removeprefix("vanishing://"))

    def list(self, prefix: str) -> Iterator[StoredFile]:
        found = list(super().list(prefix))
        for file in found:
            if "gone" in file.path:
                self.delete(file.path)
        return iter(found)


@pytest.fixture(autouse=True)
def scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORES.entries, "vanishing", Entry("tests.etl.test_sources:VanishingStore", ""))


@pytest.fixture
def folder_vanishing(tmp_path: Path) -> Path:
    """`tar/a.tar` and `zip/a.zip`, each with six images."""
    write_images(tmp_path / "images", num_images=6)
    (tmp_path / "tar").mkdir()
    (tmp_path / "zip").mkdir()
    places = tmp_path / "tar" / "a.tar", tmp_path / "zip" / "a.zip"
    with tarfile.open(places[0], "w") as tar, zipfile.ZipFile(places[1], "w") as zipped:
        for file in sorted((tmp_path / "images").rglob("*.png")):
            tar.add(file, arcname=f"{file.parent.name}/{file.name}")
            zipped.write(file, arcname=f"{file.parent.name}/{file.name}")
    return tmp_path


def source_of(folder_vanishing: Path, kind: str, *names: str) -> SourceConfig:
    folder_vanishing.mkdir(exist_ok=True)
    for name in names:
        (folder_vanishing / name).write_bytes(b"never read")
    return SourceConfig(uri=f"vanishing://{folder_vanishing}", kind=kind)


@pytest.mark.parametrize("kind, suffix", [("webdataset", "tar"), ("zip", "zip")])
def test_an_archive_that_vanishes_is_missing_and_the_others_are_listed(folder_vanishing: Path, kind: str, suffix: str):
    listing = list_images(source_of(folder_vanishing / suffix, kind, f"gone.{suffix}"), max_source_bytes=10_000)
    assert (listing.num_images, [each.reason for each in listing.rejections]) == (6, [RejectReason.MISSING])


@pytest.mark.parametrize(
    "kind, name",
    [
        ("parquet", "gone.parquet"),
        ("arrow", "gone.arrow"),
        ("tfrecord", "gone.tfrecord"),
        ("idx", "gone-images-idx3-ubyte"),
        ("cifar", "gone_test_batch"),
    ],
)
def test_every_kind_of_container_may_vanish(tmp_path: Path, kind: str, name: str):
    batches = list(SOURCES[kind](source_of(tmp_path / "files", kind, name)).list())
    assert [(each.key, each.reason) for batch in batches for each in batch.rejections] == [(name, "missing")]
    assert not any(batch.images.num_rows for batch in batches)


def test_a_file_that_decides_how_all_are_read_must_not_vanish(tmp_path: Path):
    with pytest.raises(
        StorageError, match=r"gone.tar vanished while .* was listed; expected a source that does not change"
    ):
        list_images(source_of(tmp_path / "files", "webdataset", "gone.tar"))
