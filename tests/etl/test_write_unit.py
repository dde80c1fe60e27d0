"""A work unit: what it writes, under which attempt, with which decoder, and of which images it keeps the size."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from benchmarks.driver_memory import unit_result
from etl.checks.listing import inferred_facts
from etl.checks.source_check import check_source_images
from etl.commit import commit_results
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from etl.plan import BuildPlan, plan_build, plan_changes
from etl.units.read_source import check_decoders, decoders_here
from etl.units.results import Finished, kept_result
from etl.units.units import WorkUnit
from etl.units.write_unit import Decoders, sandboxes_of_process, write_unit
from pipeline.cli_options import Common
from pipeline.commands.dry_run import dry_run
from shardmill.dataset.build import PENDING, UnitResult, decode_sample_ids, encode_unit_result
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.maintenance.gc import Retention, collect_garbage
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, ShardmillError, StorageError, UsageError
from shardmill.failpoints import VARIABLE
from shardmill.ids import add_digests, format_digest, key_hash, sample_id_of
from shardmill.images.decoder_id import DECODER_ID, decoder_id
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import WARNING, FieldValue, SilentObserver
from shardmill.options import NormalizeOptions
from shardmill.stores import open_store
from shardmill.values import ImageSample, Nonce, Rejection, SourceImage
from tests.etl.building import images, listed, tree_for
from tests.lab.datasets import HERE, build_here, write_images
from tests.shardmill.images.make import png, tiff_of, with_pages

NUM_IMAGES = 12


def planned(folder: Path, source: SourceConfig | None = None, **etl: Any) -> BuildPlan:
    config = EtlConfig(
        image_size=16, encoding="png", formats=("parquet",), chunk_bytes=2_000, max_reject_fraction=0.5
    ).model_copy(update=etl)
    source = source or SourceConfig(uri=str(folder / "images"))
    return plan_build(
        EtlTree(source=source, dataset=DatasetConfig(uri=str(folder / "dataset")), etl=config), run_id="r"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With images, one of them broken."""
    write_images(tmp_path / "images", num_images=NUM_IMAGES)
    (tmp_path / "images" / "class_1" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return tmp_path


def keys(folder: Path) -> list[str]:
    images = folder / "images"
    return sorted(str(path.relative_to(images)) for path in images.rglob("*.png") if path.name != "broken.png")


def stored(folder: Path) -> list[str]:
    return [path.name for path in (folder / "dataset").rglob("*") if path.is_file() and "listing" not in path.parts]


def test_every_source_is_a_row_or_a_rejection(folder: Path):
    plan = planned(folder)
    [unit] = plan.units
    result = write_unit(unit, plan.task)
    assert [(each.key, each.stage) for each in result.rejections] == [("class_1/broken.png", "decode")]
    assert (
        sum(split.num_rows for split in result.splits) == sum(shard.num_rows for shard in result.shards) == NUM_IMAGES
    )
    assert result.accepted_key_sum == format_digest(add_digests(*(key_hash(key) for key in keys(folder))))
    assert (result.unit_index, result.fingerprint, result.unchanged_ids) == (unit.index, unit.fingerprint, "")
    # A run that plans the same unit finds it.
    assert (kept := kept_result(plan.store, unit)) and encode_unit_result(kept) == encode_unit_result(result)


def test_a_check_decodes_everything_and_stores_nothing(folder: Path):
    plan = planned(folder)
    [unit] = plan.units
    before = stored(folder)
    checked = write_unit(unit, replace(plan.task, is_check=True))
    assert stored(folder) == before and not checked.shards
    whole = write_unit(unit, plan.task)
    assert (checked.rejections, checked.accepted_key_sum) == (whole.rejections, whole.accepted_key_sum)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"decoder_id": "another"}, UsageError, "decode"),
        ({"reach": Nonce("", "reach/none", "x")}, UsageError, "does not share"),
        ({"probes": ("not/there.png",)}, StorageError, "does not see the source"),
    ],
)
def test_a_host_that_is_not_the_drivers_publishes_nothing(
    folder: Path, changes: dict[str, Any], error: type[ShardmillError], message: str
):
    plan = planned(folder)
    before = stored(folder)
    if "reach" in changes:
        changes = {"reach": replace(changes["reach"], uri=plan.task.dataset_uri)}
    with pytest.raises(error, match=message):
        write_unit(plan.units[0], replace(plan.task, **changes))
    assert stored(folder) == before
    # One probe that is left is enough, and the driver's file as well.
    nonce = Nonce(plan.task.dataset_uri, "reach/here", "x")
    plan.store.put(nonce.path, b"x")
    assert write_unit(plan.units[0], replace(plan.task, reach=nonce, probes=("not/there.png", keys(folder)[0]))).shards


class _Killed(BaseException):
    pass


@pytest.mark.parametrize(("point", "is_recorded"), [("decode", False), ("task_report", True)])
def test_a_kill_before_the_report_leaves_the_record_and_one_before_a_decode_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, point: str, is_recorded: bool
):
    def kill(pid: int, number: int) -> None:
        raise _Killed

    plan = planned(folder)
    monkeypatch.setenv(VARIABLE, point)
    monkeypatch.setattr(os, "kill", kill)
    with pytest.raises(_Killed):
        write_unit(plan.units[0], plan.task)
    assert bool(list(plan.store.list(PENDING))) == bool(list(plan.store.list("shards"))) == is_recorded


class Losing:
    """A decoder that answers for each image so many times."""

    def __init__(self, plan: BuildPlan, times: int) -> None:
        self._decoder, self._times = sandboxes_of_process(plan.task.config).images, times

    def decode(
        self, images: Iterable[tuple[SourceImage, bytes]], options: NormalizeOptions
    ) -> Iterator[tuple[SourceImage, ImageSample | Rejection]]:
        for number, outcome in enumerate(self._decoder.decode(images, options)):
            yield from [outcome] * (self._times if number == 3 else 1)


@pytest.mark.parametrize("times", [0, 2])
def test_a_source_that_was_lost_or_counted_twice_stops_the_unit(folder: Path, times: int):
    plan = planned(folder)
    losing = Losing(plan, times)
    with pytest.raises(IntegrityError, match=f"work unit {plan.units[0].index} lost or duplicated an input"):
        write_unit(plan.units[0], plan.task, Decoders(losing, losing))
    assert not list(plan.store.list(PENDING))


def committed(plan: BuildPlan) -> None:
    commit_results(plan, Finished(plan.listing, [write_unit(unit, plan.task) for unit in plan.units]))


def later(folder: Path, source: SourceConfig | None = None) -> UnitResult:
    """What the next run makes of what it finds to be listed otherwise; its sources are compared by their bytes."""
    plan, changes = plan_changes(planned(folder, source, detect_changes="content"), SilentObserver())
    assert changes is not None
    results = [write_unit(unit, plan.task) for unit in plan.units]
    assert len(results) == 1
    return results[0]


def test_of_known_sources_those_with_other_bytes_are_stored(folder: Path):
    committed(planned(folder))
    touched, changed, other = (folder / "images" / key for key in keys(folder)[:3])
    os.utime(touched, ns=(1, 1))
    shutil.copy(other, changed)
    result = later(folder)
    assert decode_sample_ids([result.unchanged_ids]).tolist() == [sample_id_of(keys(folder)[0])]
    assert sum(shard.num_rows for shard in result.shards) == 1


def test_of_known_images_those_with_another_mask_are_stored(folder: Path):
    """A mask is compared with what was made of it: an image is decoded for its mask alone."""
    images = folder / "images"
    rows = [
        {"uri": f"images/{key}", "outline": f"{number}.png", "label": "x"} for number, key in enumerate(keys(folder))
    ]
    for number in range(NUM_IMAGES):
        write_mask(folder / f"{number}.png", value=1)
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = SourceConfig.model_validate({"uri": str(folder / "t.jsonl"), "kind": "table", "mask_field": "outline"})
    committed(planned(folder, source))
    write_mask(folder / "1.png", value=2)
    for number in (0, 1):
        os.utime(images / keys(folder)[number], ns=(1, 1))
    result = later(folder, source)
    assert sum(shard.num_rows for shard in result.shards) == 1
    unchanged = decode_sample_ids([result.unchanged_ids]).tolist()
    assert sample_id_of(rows[1]["uri"]) not in unchanged and sample_id_of(rows[0]["uri"]) in unchanged


def write_mask(path: Path, value: int) -> None:
    cv2.imwrite(str(path), np.full((16, 16), value, np.uint8))


ROOT = Path(__file__).parents[2]
_ETL = EtlConfig(image_size=16, encoding="png", unit_min_images=12, chunk_bytes=4_000)


class Slowed:
    """A decoder that gets on only when it may, as a process on a machine that hardly runs."""

    def __init__(self, plan: BuildPlan, may_go_on: Event) -> None:
        self._decoder = sandboxes_of_process(plan.task.config).images
        self._may_go_on = may_go_on

    def decode(
        self, images: Iterable[tuple[SourceImage, bytes]], options: NormalizeOptions
    ) -> Iterator[tuple[SourceImage, ImageSample | Rejection]]:
        for outcome in self._decoder.decode(images, options):
            assert self._may_go_on.wait(300)
            yield outcome


def _slow_attempt(plan: BuildPlan, unit: WorkUnit, may_go_on: Event) -> None:
    write_unit(unit, plan.task, replace(sandboxes_of_process(plan.task.config), images=Slowed(plan, may_go_on)))


@pytest.mark.starts("program")
@pytest.mark.parametrize("ends", ["before the commit", "behind the commit"])
def test_of_two_attempts_at_a_unit_one_is_committed(tmp_path: Path, ends: str):
    write_images(tmp_path / "images", num_images=24)
    plan = plan_build(tree_for(tmp_path, "dataset", etl=_ETL), run_id="run")
    context = multiprocessing.get_context("fork")
    may_go_on = context.Event()
    slow = context.Process(target=_slow_attempt, args=(plan, plan.units[0], may_go_on))
    slow.start()
    results = [write_unit(unit, plan.task) for unit in plan.units]
    for step in ("before the commit", "behind the commit"):
        if step == ends:
            may_go_on.set()
            slow.join(300)
            assert slow.exitcode == 0
        if step == "before the commit":
            manifest = commit_results(plan, Finished(plan.listing, results))
    whole = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "whole"), _ETL))
    dataset = open_dataset(str(tmp_path / "dataset"))
    assert manifest.content_digest == whole.manifest.content_digest
    verify_dataset(dataset, deep=True).raise_if_failed()

    # Nothing is left of the other attempt but files that nothing names.
    store = open_store(dataset.pin.uri)
    collect_garbage(store, Retention(None, 0.0), "gc")
    named = {path for shard in dataset.shards for path in (shard.path, shard.rows_path)}
    assert {file.path for folder in ("shards", "rows") for file in store.list(folder)} == named
    assert not list(store.list("pending"))
    verify_dataset(dataset, deep=True).raise_if_failed()


def own_mounts(folder: Path) -> list[str]:
    """What starts a program that may mount a tmpfs on the folder; the mount goes with the program."""
    refusals = []
    # In a namespace of users any of them may; containers often forbid these, but let root have one of mounts alone.
    for start in (["unshare", "-rm"], ["unshare", "-m"]):
        tried = subprocess.run([*start, "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, text=True)
        if tried.returncode == 0:
            return start
        refusals.append(f"{' '.join(start)}: {tried.stderr.strip()}")
    pytest.skip(f"no disk that can be filled: this user may mount nothing ({'; '.join(refusals)})")


@pytest.mark.starts("program")
def test_a_full_disk_publishes_nothing_and_the_build_is_finished_when_there_is_room(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    write_images(tmp_path / "images", num_images=24)
    mounted = [
        *own_mounts(tmp_path / "disk"),
        "sh",
        "-c",
        'mount -t tmpfs -o size=600k tmpfs "$2" && exec "$0" -m "$3" "$1" "$2"',
    ]
    arguments = [sys.executable, tmp_path / "images", tmp_path / "disk", "tests.programs.build_on_a_small_disk"]
    done = subprocess.run([*mounted, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    refused, after, then = done.stdout.splitlines()
    pattern = (
        rf"no space to write {tmp_path}/disk/dataset/\S+ \(\d+ bytes\): No space left on device, \d+ bytes are free"
    )
    assert re.match(pattern, refused), done.stderr
    assert after == "version 1 unpublished 0"
    large = _ETL.model_copy(
        update={"image_size": 100, "encoding": "raw", "unit_min_images": 6, "chunk_bytes": 4_000_000}
    )
    whole = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "whole"), large))
    assert then == f"then 2 {whole.manifest.content_digest}"


_NUM_UNITS = 100


def test_a_finished_unit_leaves_two_kilobytes(tmp_path: Path):
    finished = Finished(listed(images(1)), [unit_result(0)])
    tracemalloc.start()
    try:
        for place in range(1, _NUM_UNITS):
            finished.add(unit_result(place))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A unit's chunks alone, in two formats, take 30 kB; its counts of 1,000 classes as much.
    assert held < 2_000 * _NUM_UNITS
    for place, result in enumerate(finished.results):
        whole = unit_result(place)
        assert (tuple(result.shards), tuple(result.splits)) == (tuple(whole.shards), tuple(whole.splits))
        assert (len(result.shards), result.shards[1], result.shards[:1]) == (
            2,
            whole.shards[1],
            tuple(whole.shards[:1]),
        )
    folder = finished.folder
    results = finished.results
    del finished
    # The file goes with the last of those who may ask for it.
    assert results[0].splits[0].split == "train" and folder.exists()
    del results, result
    assert not folder.exists()


NATIVE = f"{DECODER_ID}+native-7"


def test_equal_decoders_pass():
    check_decoders(NATIVE, {"node1": NATIVE, "node2": NATIVE})
    config = EtlConfig(image_size=16, kernel="wheels")
    check_decoders(decoder_id(config.normalize_options()), dict(decoders_here(config)))


def test_hosts_without_the_kernel_are_named_with_both_ways_to_continue():
    with pytest.raises(UsageError) as caught:
        check_decoders(NATIVE, {"node1": NATIVE, "node3": DECODER_ID, "node2": DECODER_ID})
    said = str(caught.value)
    assert "kernel is missing on node2, node3: " in said and "node1" not in said
    assert "pip install ./native" in said and "etl.kernel = wheels" in said


def test_other_versions_are_named_with_the_packages():
    with pytest.raises(UsageError, match="^node2 decodes with x; the driver decodes with ") as caught:
        check_decoders(NATIVE, {"node1": NATIVE, "node2": "x"})
    assert "simplejpeg" in str(caught.value) and "missing" not in str(caught.value)


def test_a_host_without_a_kernel_that_was_asked_for_still_answers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardmill.kernel.NATIVE_ID", "")
    assert dict(decoders_here(EtlConfig(image_size=16, kernel="native"))) == {socket.gethostname(): DECODER_ID}


OPEN = EtlConfig(unit_min_images=10, engine=HERE)


class Warned:
    """The warnings of a build."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self.sentences += [str(fields[WARNING])] if WARNING in fields else []


def write_sources(folder: Path, sides: list[int], start: int = 0) -> None:
    """One image of each side (the other one is 7 pixels longer), in two classes."""
    for number, side in enumerate(sides, start=start):
        path = folder / f"class_{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.RandomState(number).randint(0, 256, (side, side + 7, 3)).astype(np.uint8)
        cv2.imwrite(str(path), pixels)


def tree_for_image_size(source: Path, dataset: Path, **etl: object) -> EtlTree:
    config = OPEN.model_copy(update=etl)
    return EtlTree(source=SourceConfig(uri=str(source)), dataset=DatasetConfig(uri=str(dataset)), etl=config)


def plan_of(tmp_path: Path, sides: list[int], **etl: object) -> BuildPlan:
    write_sources(tmp_path / "images", sides)
    return plan_build(tree_for_image_size(tmp_path / "images", tmp_path / "dataset", **etl), run_id="a")


@pytest.mark.parametrize(
    ("sides", "size"),
    [
        ([32] * 20, 32), ([28] * 20, 32), ([8] * 20, 32), ([50] * 20, 48), ([63] * 20, 48), ([64] * 20, 64),
        ([200] * 20, 64), ([32] * 13 + [400] * 7, 32), ([32] * 7 + [400] * 13, 64),
    ],
)  # fmt: skip
def test_the_size_is_no_larger_than_most_sources(tmp_path: Path, sides: list[int], size: int) -> None:
    plan = plan_of(tmp_path, sides)
    assert plan.build.normalize.image_size == plan.task.config.image_size == size
    assert plan.row_schema.one_shape_HWC == (size, size, 3)
    said = str(inferred_facts(plan)["image"])
    median = sorted(sides)[len(sides) // 2]
    if median > 64:
        more = f"--set etl.image_size={min(median, 224)} keeps more, as fine-tuning needs)"
        assert f"(the default; images are larger, their median short side is {median}: {more}" in said
    else:
        assert f"{size} x {size} x 3 (the median short side of the sources is {median})" in said


def test_a_size_that_is_given_stays_and_a_warning_says_that_it_enlarges(tmp_path: Path) -> None:
    warned = Warned()
    write_sources(tmp_path / "images", [32] * 12)
    given = build_dataset(
        tree_for_image_size(tmp_path / "images", tmp_path / "d", image_size=64), run_id="a", observer=warned
    )
    assert given.manifest.normalize.image_size == 64
    expected = "12 of 12 images have a longer side of less than 64 pixels, and were enlarged to etl.image_size = 64"
    assert any(expected in each for each in warned.sentences)
    for number, etl in enumerate(({"image_size": 32}, {"image_size": 64, "upscale": "never"}, {})):
        silent = Warned()
        build_dataset(
            tree_for_image_size(tmp_path / "images", tmp_path / f"d{number}", **etl), run_id="a", observer=silent
        )
        assert not any("enlarged" in each for each in silent.sentences)


def test_broken_sources_do_not_decide_and_without_any_other_the_default_does(tmp_path: Path) -> None:
    write_sources(tmp_path / "images", [32] * 5)
    for number in range(20):
        (tmp_path / "images" / "class_0" / f"broken{number}.png").write_bytes(b"<html>")
    tree = tree_for_image_size(tmp_path / "images", tmp_path / "dataset")
    assert plan_build(tree, run_id="a").task.config.image_size == 32
    for path in (tmp_path / "images").rglob("[0-9]*.png"):
        path.unlink()
    plan = plan_build(tree, run_id="a")
    assert (plan.task.config.image_size, plan.size.reason) == (64, "the default")


def test_sources_of_any_kind_are_looked_at(tmp_path: Path) -> None:
    write_sources(tmp_path / "images", [32] * 12)
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path / "images")
    table = tmp_path / "table.csv"
    paths = sorted((tmp_path / "images").rglob("*.png"))
    table.write_text("path,label\n" + "".join(f"{path},{path.parent.name}\n" for path in paths))
    for kind, uri in (("folders", str(tmp_path / "images")), ("zip", archive), ("table", str(table))):
        tree = EtlTree(
            source=SourceConfig(uri=uri, kind=kind), dataset=DatasetConfig(uri=str(tmp_path / "d")), etl=OPEN
        )
        assert plan_build(tree, run_id="a").task.config.image_size == 32


def built(tmp_path: Path, dataset: str, **etl: object) -> Manifest:
    return build_dataset(tree_for_image_size(tmp_path / "images", tmp_path / dataset, **etl), run_id=dataset).manifest


def test_a_dataset_that_is_continued_keeps_its_size_and_its_digest_is_that_of_a_full_build(tmp_path: Path) -> None:
    write_sources(tmp_path / "images", [32] * 12)
    assert built(tmp_path, "dataset").normalize.image_size == 32
    # By now most sources are large: a new dataset would get 64.
    write_sources(tmp_path / "images", [300] * 40, start=12)
    grown = built(tmp_path, "dataset")
    assert (grown.version, grown.operation, grown.normalize.image_size) == (2, "incremental", 32)
    full = built(tmp_path, "other", image_size=32)
    assert grown.content_digest == full.content_digest
    assert grown.normalization_fingerprint == full.normalization_fingerprint
    assert built(tmp_path, "new").normalize.image_size == 64
    # What was built with a size that the config gave goes on without it as well.
    assert built(tmp_path, "given", image_size=40).version == 1
    assert built(tmp_path, "given").version == 1


@pytest.mark.starts("program")
def test_all_that_plans_chooses_the_same_size(tmp_path: Path) -> None:
    write_sources(tmp_path / "images", [50] * 12)
    tree = tree_for_image_size(tmp_path / "images", tmp_path / "work" / "dataset")
    plans = [plan_build(tree, run_id=run_id) for run_id in "ab"]
    assert plans[0].digest == plans[1].digest
    assert check_source_images(tree, run_id="c", observer=SilentObserver()).num_accepted == 12
    dry = dry_run(
        str(tmp_path / "images"),
        Common((), str(tmp_path / "work"), "r", is_run_named=False, json=False, debug=False),
    )
    assert dry.stored_as.startswith("48 x 48 x 3 (the median short side of the sources is 50)")
    manifest = build_dataset(tree, run_id="d").manifest
    assert manifest.normalize.image_size == manifest.config["image_size"] == 48


def test_a_build_ends_with_what_decoding_has_lost(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / "images" / f"class_{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        twelve_bits = np.random.RandomState(number).randint(0, 4096, (32, 32)).astype(np.uint16)
        (folder / f"dark{number}.png").write_bytes(png(twelve_bits))
        (folder / f"bright{number}.png").write_bytes(png(twelve_bits * 16))
        bands = np.random.RandomState(number).randint(0, 256, (32, 32, 5)).astype(np.uint8)
        (folder / f"bands{number}.tif").write_bytes(tiff_of(bands, {338: [0, 0]}))
        (folder / f"preview{number}.tif").write_bytes(tiff_of(bands[:, :, :3], {254: [1]}))
        pages = [tiff_of(np.full((8, 8, 3), 9 + number, np.uint8)), tiff_of(bands[:, :, :3])]
        (folder / f"pages{number}.tif").write_bytes(with_pages(pages))
    warned = Warned()
    tree = tree_for_image_size(tmp_path / "images", tmp_path / "dataset")
    counts = build_dataset(tree, run_id="a", observer=warned).manifest.counts
    expected = {"low_range_16_bit": 4, "scaled_16_bit": 8, "extra_bands_dropped": 4, "preview_only": 4}
    expected |= {"first_frame_of_2": 4, "larger_page_behind": 4, "constant": 4}
    assert counts.by_note == dict(sorted(expected.items()))
    said = "\n".join(warned.sentences)
    assert "4 of 8 accepted 16-bit images use at most 14 of their bits, and are dark" in said
    assert "etl.significant_bits" in said
    assert "4 accepted TIFF images have bands in addition to their colours" in said
    assert "4 accepted TIFF images are marked as previews" in said
    assert "4 accepted TIFF images have a larger page of the same shape after the page that was used" in said


def test_images_that_keep_their_own_size_are_not_looked_at(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, [32] * 4, resize_mode="none")
    assert (plan.task.config.image_size, plan.size.reason) == (64, "the default")
