"""A task on a host that does not see the driver's files: a missing root is distinguished from a missing image."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.plan import BuildPlan, plan_build
from etl.sources import SOURCES
from etl.units.read_source import read_source
from etl.units.units import read_unit
from etl.units.write_unit import write_unit
from shardmill.errors import StorageError, UsageError
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.reach import planted
from shardmill.values import Rejection
from tests.lab.datasets import write_images
from tests.services.faulty_store import FaultyStore

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
