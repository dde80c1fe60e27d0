"""A unit counts each of its sources once, stores what changed, and refuses a host that sees other files or pixels."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from etl.commit import commit_results
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.plan import BuildPlan, plan_build, plan_changes
from etl.units.finished import Finished
from etl.units.pending import kept_result
from etl.units.write_unit import Decoders, sandboxes_of_process, write_unit
from shardmill.dataset.unit_result import PENDING, UnitResult, decode_sample_ids, encode_unit_result
from shardmill.errors import IntegrityError, ShardmillError, StorageError, UsageError
from shardmill.failpoints import VARIABLE
from shardmill.ids import add_digests, format_digest, key_hash, sample_id_of
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, Nonce, Rejection, SourceImage
from tests.lab.datasets import write_images

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
    changed = plan_changes(planned(folder, source, detect_changes="content"), SilentObserver())
    assert changed is not None
    plan, _ = changed
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
