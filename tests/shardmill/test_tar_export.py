"""`export-tar`: every row of the version once, verified, in tar files that `webdataset` and our own source read."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest
import webdataset

from etl.config import EtlConfig, SourceConfig
from shardmill.dataset.open import open_dataset
from shardmill.dataset.tar_export import export_tar
from shardmill.dataset.tar_progress import EXPORT, PROGRESS, TarExport
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.failpoints import VARIABLE
from shardmill.ids import format_sample_id
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from tests.lab.commands import BIN, ENVIRONMENT, in_process, last_line
from tests.lab.datasets import build_here, make_dataset

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
    killed = subprocess.run([BIN / "shardmill", *command], cwd=tmp_path, env=environment, check=False, timeout=150)
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
