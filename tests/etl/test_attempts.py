"""A unit that is tried twice at once, and a disk that is full: the version holds every row once, or there is none."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from etl.commit import commit_results
from etl.config import EtlConfig
from etl.plan import BuildPlan, plan_build
from etl.units.finished import Finished
from etl.units.units import WorkUnit
from etl.units.write_unit import sandboxes_of_process, write_unit
from shardmill.dataset.maintenance.gc import collect_garbage
from shardmill.dataset.maintenance.retention import Retention
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.options import NormalizeOptions
from shardmill.stores import open_store
from shardmill.values import ImageSample, Rejection, SourceImage
from tests.etl.building import tree_for
from tests.lab.datasets import build_here, write_images

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
            assert self._may_go_on.wait(60)
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
            slow.join(60)
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
    done = subprocess.run([*mounted, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)
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
