"""What a run leaves for people: its record and its report."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import cv2
import jsonschema
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import EtlConfig, SourceConfig
from pipeline.cli_options import Common
from pipeline.config_file import to_toml
from pipeline.output.progress import RunProgress, TerminalBars
from pipeline.report import write
from pipeline.report.charts import Bar, Line, bar_chart, confusion_chart, line_chart, nice_ticks, share_bar
from pipeline.report.data import Picture, RejectedGroup, ReportData
from pipeline.report.page import render
from pipeline.report.write import gather, reader_of_run
from pipeline.running import SUMMARY_SECTIONS, WHOLE_PIPELINE, open_run
from pipeline.tree import PipelineTree
from shardmill.dataset.dataset import open_dataset
from shardmill.errors import CommitConflict, IntegrityError, ShardmillError, UsageError
from shardmill.ids import format_sample_id
from shardmill.jobs import observer
from shardmill.jobs.observer import Observer
from shardmill.jobs.process import Terminated
from shardmill.jobs.run_files import (
    PARTIAL,
    StageRecord,
    latest_run,
    new_run_id,
    read_run_state,
    read_stage_record,
    read_stage_records,
    write_stage_record,
    write_summary,
)
from shardmill.jobs.run_record import RunRecord, recording, run_job
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from shardmill.values import Rejection, RejectReason
from tests.lab.commands import SUMMARY_SCHEMA
from tests.lab.datasets import build_here, write_images
from train.contracts.values import Confusion, EpochRecord, Evaluation, MetricsOfClass, Mistake
from train.published.evaluation import Evaluated, evaluation_record

HOSTILE = "<script>alert('x')</script>\"&"


def evaluation_of(names: tuple[str, ...]) -> Evaluation:
    cells = [(row, column, 9 if row == column else 1) for row in range(len(names)) for column in range(len(names))]
    figures = tuple(MetricsOfClass(name, 10, 0.9, 0.8) for name in names)
    return Evaluation(
        "test", 10 * len(names), 0.25, 0.875, 0.99, figures, confused=Confusion(*zip(*cells, strict=True))
    )


def test_a_page_without_anything_still_renders():
    page = render(ReportData("r", {"status": "failed", "exit_code": 4, "error": f"no space {HOSTILE}"}))
    assert "ERROR 4" in page and "no space" in page
    assert "<script" not in page


@pytest.mark.parametrize("num_classes", [1, 3, 12, 30, 51, 200])
def test_labels_are_text_at_every_number_of_classes(num_classes: int):
    names = tuple(f"{HOSTILE}{number}" for number in range(num_classes))
    history = tuple(EpochRecord(n, 5, 1 / (n + 1), 0.5, 1e-3, 2.0, evaluation_of(names)) for n in range(3))
    counts = {"listed": 5, "accepted": 5, "rejected": 0, "by_split": {HOSTILE: 5}}
    data = ReportData(
        run_id=HOSTILE,
        summary={
            "status": "ok",
            "dataset": {"uri": HOSTILE, "version": 1, "counts": counts},
            "train": {
                "strategy": HOSTILE,
                "exchange": "exchange: a tenth of a step",
                "strategy_reason": f"{HOSTILE} on two CPUs",
                "memory": "a rank needs 1.5 GiB",
                "world_size": 2,
                "steps": 15,
                "time_shares": {"compute": 0.5, "other": 0.5},
                "rank_times": [
                    {"rank": rank, "host": HOSTILE, "num_steps": 10, "seconds": seconds}
                    for rank, seconds in enumerate(
                        [{"compute": 3.0, "allreduce": 1.0}, {"compute": 4.0, "allreduce": 1.0}]
                    )
                ],
            },
            "promotion": {"decision": "kept", "reason": HOSTILE},
        },
        config_toml=HOSTILE,
        class_names=names,
        class_counts={"train": (5,) * num_classes},
        notes={HOSTILE: 1},
        history=history,
        evaluation=evaluation_of(names),
    )
    page = render(data)
    assert "<script" not in page and "alert(&#39;x&#39;)" in page
    of_training = "exchange: a tenth of a step", "strategy chosen because", "on two CPUs", "a rank needs 1.5 GiB"
    for words in ("Class balance", "Loss", "Confusion matrix", "The gate", "87.50%", *of_training):
        assert words in page
    of_ranks = page[page.index("A step of each rank") :].split("</table>")[0]
    rows = [re.findall(r'<td class="number">([^<]*)</td>', row) for row in of_ranks.split("<tr>")[2:]]
    assert rows == [["75%", "25%", "400.0"], ["80%", "20%", "500.0"]]


def test_the_files_of_a_run_are_gathered(tmp_path: Path):
    write_images(tmp_path / "images" / "train", num_images=60)
    (tmp_path / "images" / "test" / "class_1").mkdir(parents=True)
    shutil.copy(tmp_path / "images/train/class_0/00003.png", tmp_path / "images/test/class_1/copy.png")
    config = EtlConfig(image_size=16, label_map=("class_0", "class_1", "class_2", "nothing <b>"))
    uri = build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), config)
    dataset = open_dataset(uri)
    named = {"uri": uri, "version": 1, "counts": dataset.manifest.counts.model_dump()}
    write_stage_record(tmp_path, "r", StageRecord(stage="etl", seconds=1.5, sections={"dataset": named}))
    data = gather(tmp_path, "r", {"dataset": named})
    assert data.class_names == config.label_map
    assert sum(map(sum, data.class_counts.values())) == 61
    # All classes are seen first, whatever the order of storage.
    assert {picture.caption for picture in data.samples[:3]} == set(data.class_names[:3])
    assert all(picture.png.startswith(b"\x89PNG") for picture in data.samples)
    assert [record.stage for record in data.stages] == ["etl"]
    page = " ".join(render(data).split())
    figures = (dataset.manifest.channel_mean, dataset.manifest.channel_std)
    mean, std = (", ".join(f"{each:.2f}" for each in channels) for channels in figures)
    assert f"Pixels of train, by channel, from 0 to 255: mean {mean}; standard deviation {std}." in page
    assert "Without any image: nothing &lt;b&gt;." in page
    assert (
        "1 extra copy of images in the dataset. 2 images in groups of equal bytes with several classes. "
        "2 images in groups in several splits: a leak." in page
    )
    # All images have 16 pixels a side, and are about square.
    num_bytes = sum(file.stat().st_size for file in (tmp_path / "images").rglob("*.png"))
    assert f"Before: {num_bytes / 1e6:.1f} MB in 61 files" in page
    for title, bucket in (("Longer side, in pixels", "16-31"), ("Width to height", "7:8 to 8:7")):
        assert bucket in page[page.index(title) :].split("</svg>")[0]


def test_the_most_confident_mistakes_are_shown_with_their_images(tmp_path: Path):
    for split in ("train", "test"):
        write_images(tmp_path / "images" / split, num_images=6)
    uri = build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), EtlConfig(image_size=16))
    dataset = open_dataset(uri)
    first, second, third = read_samples(dataset, "test", 3)
    gone = Mistake(1234567, 0, 1, 0.97)
    shown = [Mistake(second.sample_id, 0, 3, 0.991), Mistake(first.sample_id, 2, 1, 0.5)]
    evaluation = replace(
        evaluation_of(dataset.manifest.class_names), confused=Confusion((0,), (1,), (3,), (shown[0], gone, shown[1]))
    )
    write_stage_record(tmp_path, "r", evaluation_record(Evaluated(evaluation, dataset.pin, skipped=False)))
    data = gather(tmp_path, "r", {})
    assert [each.sample_id for _, each in data.mistakes] == [each.sample_id for each in shown]
    page = render(data)
    pictures = re.findall(r"<figure.*?</figure>", page[page.index("The most confident mistakes") :], re.DOTALL)
    assert len(pictures) == 2 and all("data:image/png" in each for each in pictures)
    assert format_sample_id(third.sample_id) not in page
    for each in (
        "class_0",
        "a class that is not in the dataset",
        "0.99",
        format_sample_id(second.sample_id),
        second.source,
    ):
        assert each in pictures[0]
    # A version that is gone leaves the figures.
    shutil.rmtree(tmp_path / "dataset")
    data = gather(tmp_path, "r", {})
    assert data.mistakes == () and data.evaluation == evaluation


def test_a_report_of_very_many_images_says_that_it_has_not_searched_them(tmp_path: Path, monkeypatch):
    write_images(tmp_path / "images", num_images=12)
    uri = build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), EtlConfig(image_size=16))
    monkeypatch.setattr(write, "MAX_ROWS_SEARCHED_FOR_FAULTS", 11)
    page = render(gather(tmp_path, "r", {"dataset": {"uri": uri, "version": 1}}))
    assert "The 12 images are too many to search them for faults" in page


def test_refused_files_are_shown_where_something_can_be_seen(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40, num_classes=2)
    ok, jpeg = cv2.imencode(".jpg", np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    assert ok
    (tmp_path / "images/class_0/cut.jpg").write_bytes(jpeg.tobytes()[: len(jpeg) // 2])
    (tmp_path / "images/class_0/empty.jpg").write_bytes(b"")
    uri = build_here(
        str(tmp_path / "images"), str(tmp_path / "dataset"), EtlConfig(image_size=16, max_reject_fraction=0.5)
    )
    files = sorted(file.relative_to(tmp_path) for file in (tmp_path / "images").rglob("*.*"))
    (tmp_path / "table.csv").write_text("".join(f"{each}\n" for each in ("uri", *files)))
    table = SourceConfig(uri=str(tmp_path / "table.csv"), kind="table")
    of_table = build_here(table, str(tmp_path / "by_table"), EtlConfig(image_size=16, max_reject_fraction=0.5))
    for built, key in ((uri, "class_0/cut.jpg"), (of_table, "images/class_0/cut.jpg")):
        summary = {"dataset": {"uri": built, "version": 1}}
        groups = {group.reason: group for group in gather(tmp_path, "r", summary).rejected}
        assert set(groups) == {"truncated", "empty_file"}
        [(picture, rejection)] = groups["truncated"].examples
        assert picture.png.startswith(b"\x89PNG") and rejection.key == key
        assert groups["empty_file"].examples[0][0].png == b""


@pytest.mark.parametrize("kind", ["webdataset", "zip", "parquet", "several"])
def test_refused_images_of_containers_are_shown_as_well(kind: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=40, num_classes=2)
    ok, jpeg = cv2.imencode(".jpg", np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    assert ok
    (tmp_path / "images/class_0/cut.jpg").write_bytes(jpeg.tobytes()[: len(jpeg) // 2])
    files = sorted((tmp_path / "images").rglob("*.*"))
    names = [str(file.relative_to(tmp_path / "images")) for file in files]
    source = SourceConfig(uri=str(tmp_path / "images.tar"), kind="webdataset")
    if kind in ("webdataset", "several"):
        with tarfile.open(source.uri, "w") as tar:
            for file, name in zip(files, names, strict=True):
                tar.add(file, name)
    if kind == "several":
        source = SourceConfig(kind="several", parts={"of_a_tar": source})
    elif kind == "zip":
        source = SourceConfig(uri=str(tmp_path / "images.zip"), kind="zip")
        with zipfile.ZipFile(source.uri, "w") as archive:
            for file, name in zip(files, names, strict=True):
                archive.write(file, name)
    elif kind == "parquet":
        source = SourceConfig(uri=str(tmp_path / "images.parquet"), kind="parquet", key_field="name")
        columns = {
            "image": [file.read_bytes() for file in files],
            "name": names,
            "label": [n.split("/")[0] for n in names],
        }
        pq.write_table(pa.table(columns), source.uri, row_group_size=10)
    config = EtlConfig(image_size=16, max_reject_fraction=0.5)
    uri = build_here(source, str(tmp_path / "dataset"), config)
    open_store(tmp_path).put("runs/r/config.toml", to_toml(PipelineTree(source=source)).encode())
    [group] = gather(tmp_path, "r", {"dataset": {"uri": uri, "version": 1}}).rejected
    [(picture, rejection)] = group.examples
    assert picture.png.startswith(b"\x89PNG") and rejection.key.endswith("class_0/cut.jpg")


def test_a_report_imports_nothing_that_a_dataset_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "hostile_source.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    kind, uri = "hostile_source:Source", str(tmp_path)
    assert reader_of_run("", kind, uri) is None and reader_of_run('[source]\nkind = "folders"\n', kind, uri) is None
    assert "hostile_source" not in sys.modules
    # A report fetches nothing.
    assert reader_of_run("", "webdataset", "https://127.0.0.1:9/images.tar") is None


def test_words_of_a_refusal_stay_whole_on_a_narrow_page():
    rejection = Rejection("class_0/cut.jpg", RejectReason.TRUNCATED, "no end marker", 10)
    group = RejectedGroup("truncated", 1, ((Picture("", rejection.key), rejection),))
    page = render(
        ReportData("r", {"dataset": {"counts": {"listed": 1}}}, class_counts={"train": ()}, rejected=(group,))
    )
    # The table scrolls by itself; cells as narrow as their longest word, which `anywhere` would be free to break.
    assert re.search(r'<div class="scroll">\s*<table>.*class_0/cut\.jpg.*</table>\s*</div>', page, re.DOTALL)
    assert ".scroll { overflow-x: auto; } .scroll td, .scroll code { overflow-wrap: break-word; }" in page


def test_a_name_that_is_not_utf8_is_shown_by_its_bytes():
    rejection = Rejection("cat.tar\x007/bad\udcff.jpg", RejectReason.PATH_NOT_UTF8, "the name is not UTF-8")
    group = RejectedGroup("path_not_utf8", 1, ((Picture("", rejection.key), rejection),))
    page = render(ReportData("r", {"status": "ok"}, class_counts={"train": (1,)}, rejected=(group,), num_listed=2))
    assert r"cat.tar\07/bad\xff.jpg" in page and "1 of 2 listed inputs" in page


@pytest.mark.parametrize("num_classes", [2, 60])
def test_answers_beside_the_datasets_classes_are_shown(num_classes: int):
    evaluation = evaluation_of(tuple(f"c{number}" for number in range(num_classes)))
    evaluation = replace(evaluation, confused=Confusion((0, 1), (0, num_classes), (3, 4)))
    page = render(ReportData("r", {"status": "ok"}, evaluation=evaluation))
    assert "a class that is not in the dataset" in page


def test_charts_hold_their_numbers():
    chart = line_chart(
        [Line("a", (1.0, 2.0), (0.5, float("nan"))), Line("b", (1.0, 2.0), (1.0, 2.0))], y_label="y", x_label="x"
    )
    assert chart.count("<polyline") == 2 and "nan" not in chart
    assert "nothing was recorded" in line_chart([], y_label="y", x_label="x")
    bars = bar_chart([Bar(f"c{n}", (float(n),)) for n in range(100)], part_names=["n"], title="t", limit=10)
    assert "91 more" in bars and "9 to 99 each, 4,914 in all" in bars and ">c9<" not in bars
    # The longest bar is one of those that are shown.
    assert max(map(float, re.findall(r'<rect[^>]* width="([\d.]+)"', bars))) > 400
    ends = bar_chart([Bar(f"c{n}", (n + 1.0,)) for n in range(10)], part_names=["n"], title="t", limit=6, num_last=2)
    assert list(dict.fromkeys(re.findall(r">(c\d|\d more)<", ends))) == ["c0", "c1", "c2", "c8", "c9", "5 more"]
    assert "25%" in share_bar([("a", 1.0), ("b", 3.0)], title="t")
    assert "true a, predicted b: 2 of 5" in confusion_chart(["a", "b"], [[3, 2], [0, 0]])


@pytest.mark.parametrize(
    "ends", [(0.136, 0.0563), (0.98, 1.0), (0.5, 0.5001, 0.4999), (1.0, 1.0, 1.0), (3.0, 0.0, 1.0)]
)
def test_curves_are_named_beside_their_ends_in_the_order_of_their_values(ends: tuple[float, ...]):
    lines = [Line(f"c{number}", (1.0, 2.0), (4.0, end)) for number, end in enumerate(ends)]
    chart = line_chart(lines, y_label="y", x_label="x")
    heights = {name: float(y) for y, name in re.findall(r'<text x="[^"]*" y="([^"]*)"[^>]*>(c\d)<', chart)}
    points = [float(y) for y in re.findall(r'cy="([^"]*)"', chart)[1::2]]
    order = sorted(range(len(ends)), key=lambda number: points[number])
    placed = [heights[f"c{number}"] for number in order]
    assert all(after - before >= 27.9 for before, after in pairwise(placed))
    # No farther from its end than the others need.
    assert max(abs(heights[f"c{number}"] - points[number]) for number in order) <= 28 * (len(ends) - 1) + 3
    assert min(placed) > 0 and max(placed) + 13 < 260 - 20


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.97, 1.0), (5.0, 5.0), (0.0, 0.0), (-3.0, 2.0), (1e-9, 1e9)])
def test_ticks_enclose_the_data(low: float, high: float):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and high <= ticks[-1] * (1 + 1e-12) and 2 <= len(ticks) <= 9


def summary_on_disk(folder: Path) -> dict:
    summary = json.loads((folder / "runs/r/summary.json").read_text())
    jsonschema.validate(summary, SUMMARY_SCHEMA)
    return summary


def do_stage(record: RunRecord, name: str, **fields: object) -> None:
    record.stage(name, lambda: None, lambda _: StageRecord(stage=name, **fields))


def test_a_stage_gives_its_value_to_the_next_one(tmp_path: Path):
    with recording(RunRecord(str(tmp_path), "r")) as record:
        number = record.stage("one", lambda: 41, lambda value: StageRecord(stage="one", detail={"value": value}))
        assert record.stage("two", lambda: number + 1, lambda _: StageRecord(stage="two", status="skipped")) == 42
    first, second = read_stage_records(tmp_path, "r")
    assert (first.stage, first.detail, second.status) == ("one", {"value": 41}, "skipped")
    assert record.ended == [first, second] and 0 < first.started <= second.started
    events = [json.loads(line) for line in (tmp_path / "runs/r/events.jsonl").read_text().splitlines()]
    assert [each["event"] for each in events] == ["stage.started", "stage.ended"] * 2 + ["run.ended"]


def test_warnings_are_said_and_stay_with_their_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record = RunRecord(str(tmp_path), "r")
    progress = RunProgress(record, num_epochs=12)

    def work() -> None:
        progress.event("etl.warning", {"warning": "few \x1b[2J images"})
        progress.event("train.resumed", {"epoch": 2, "step": 4, "rank": 0})

    record.stage("etl", work, lambda _: StageRecord(stage="etl"))
    do_stage(record, "train")
    summary = record.close()
    jsonschema.validate(summary, SUMMARY_SCHEMA)
    assert list(summary["warnings"]) == ["etl"] and len(summary["warnings"]["etl"]) == 1
    said = capsys.readouterr().err
    # People count from 1, and a name cannot command their terminal.
    assert r"WARNING: few \x1b[2J images" in said and "resuming at epoch 3/12, step 5" in said


def test_the_latest_run_is_one_that_did_something(tmp_path: Path):
    for run_id in ("r", "mistyped"):
        with recording(RunRecord(str(tmp_path), run_id)) as record:
            if run_id == "r":
                do_stage(record, "etl")
    assert latest_run(tmp_path) == "r"
    with pytest.raises(UsageError, match="no run below"):
        latest_run(tmp_path / "elsewhere")


@pytest.mark.parametrize("is_named", [False, True])
def test_a_run_without_a_config_is_recorded_only_for_who_named_it(is_named: bool, tmp_path: Path):
    common = Common((), str(tmp_path / "work"), "r", is_run_named=is_named, json=False, debug=False)
    with pytest.raises(UsageError, match="no config file"), open_run(str(tmp_path / "c.toml"), common):
        pass
    # A scheduler names its runs, and finds the reason of a failed task in the summary.
    assert (tmp_path / "work/runs/r/summary.json").exists() == is_named
    assert (tmp_path / "work").exists() == is_named


def test_time_left_is_estimated_from_work_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    progress = RunProgress(RunRecord(str(tmp_path), "r"), num_epochs=1)
    # (seconds, images): 500 were kept, Spark takes 20 s to start, then ten images a second are done.
    for now, num_done in ((0.0, 500), (20.0, 510), (30.0, 610), (40.0, 710), (1020.0, 760)):
        monkeypatch.setattr("pipeline.output.progress.time.monotonic", lambda now=now: now)
        progress.event("etl.progress", {"num_done": num_done, "num_images": 1010})
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" images")[2] for line in lines] == [
        "", "", ", 10 a second, 40 s left", ", 10 a second, 30 s left", ", 4 s each, 1,000 s left"
    ]  # fmt: skip


def test_a_bar_counts_no_rate_of_what_was_kept_and_shows_slow_steps_in_seconds(monkeypatch):
    with closing(TerminalBars()) as bars:
        for now, num_done in ((0.0, 500), (5.0, 501), (10.0, 502), (15.0, 503)):
            monkeypatch.setattr(bars._bars, "get_time", lambda now=now: now)
            bars.advance(observer.Bar("train, epoch 1/1", num_done, 1000, "steps, loss 0.5"))
        _, _, _, _, rate, _ = bars._bars.make_tasks_table(bars._bars.tasks).columns
        assert [str(cell) for cell in rate.cells] == ["5 s each"]


def test_no_rate_is_computed_from_two_units_that_ended_together(tmp_path: Path, capsys, monkeypatch):
    progress = RunProgress(RunRecord(str(tmp_path), "r"), num_epochs=1)
    for now, num_done in ((0.0, 0), (1.9, 250), (1.902, 500)):
        monkeypatch.setattr("pipeline.output.progress.time.monotonic", lambda now=now: now)
        progress.event("etl.progress", {"num_done": num_done, "num_images": 500})
    assert capsys.readouterr().err.splitlines() == ["etl: 0 of 500 images", "etl: 500 of 500 images"]


@pytest.fixture
def signal_handlers_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signal_handlers_restored")
def test_every_observer_records_the_same_events_and_warnings(tmp_path: Path):
    def work(observer: Observer) -> None:
        observer.event("etl.progress", {"num_done": 1, "num_images": 2})
        observer.event("train.progress", {"rank": 0, "epoch": 0, "step": 0, "num_steps": 2, "loss": 1.0})
        observer.event("etl.warning", {"warning": "few images"})
        observer.event("train.loss_stuck", {"rank": 0, "epoch": 1, "warning": "the loss has not moved"})
        observer.event("train.checkpoint", {"rank": 0, "global_step": 2})

    def job(record: RunRecord, observer: Observer) -> None:
        record.stage("s", lambda: work(observer), lambda _: StageRecord(stage="s"))

    with recording(RunRecord(str(tmp_path), "command")) as record, RunProgress(record, 2) as progress:
        job(record, progress)
    assert run_job(job, str(tmp_path), "job", command="", sections=(), debug=True) == 0
    for run_id in ("command", "job"):
        lines = (tmp_path / f"runs/{run_id}/events.jsonl").read_text().splitlines()
        told = [json.loads(line)["event"] for line in lines if '"s"' not in line]
        assert told == ["etl.warning", "train.loss_stuck", "train.checkpoint", "run.ended"]
        summary = json.loads((tmp_path / f"runs/{run_id}/summary.json").read_text())
        assert summary["warnings"] == {"s": ["few images", "the loss has not moved"]}


@pytest.mark.starts("program")
@pytest.mark.parametrize("debug", ["", "--debug"])
def test_what_libraries_log_of_their_errors_is_for_debug_only(tmp_path: Path, debug):
    command = [sys.executable, "-m", "tests.programs.log_a_traceback", str(tmp_path), debug]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.rstrip().splitlines()[-1].startswith("ERROR 130: ")
    assert ("the JVM is gone" in done.stderr) == bool(debug)


def _draw_run_ids(drawn: SimpleQueue[list[str]]) -> None:
    drawn.put([new_run_id() for _ in range(25)])


@pytest.mark.starts("program")
def test_run_ids_are_unique_and_plain():
    # In 20 processes that begin with the same memory; most draw theirs within one second.
    context = multiprocessing.get_context("fork")
    drawn = context.SimpleQueue()
    processes = [context.Process(target=_draw_run_ids, args=(drawn,)) for _ in range(20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    run_ids = [run_id for _ in processes for run_id in drawn.get()]
    assert len(set(run_ids)) == len(run_ids) == 500
    for hostile in ("a/b", "../x", ".hidden", ""):
        with pytest.raises(Exception, match="run id|leaves its root"):
            RunRecord("/nowhere", hostile or "/")


def test_a_summary_has_every_section_whenever_the_run_ended(tmp_path: Path):
    def fail() -> None:
        raise IntegrityError("a shard is cut", "expected 9 bytes")

    section = {"engine": "spark", "seconds": 1.0, "images_per_second": 2.0}
    record = RunRecord(str(tmp_path), "r", sections=SUMMARY_SECTIONS, whole=WHOLE_PIPELINE)
    with pytest.raises(IntegrityError), recording(record):
        do_stage(record, "etl", sections={"etl": section})
        running = summary_on_disk(tmp_path)
        assert (running["status"], running["exit_code"], running["export"]) == ("running", None, None)
        record.stage("verify", fail, lambda _: StageRecord(stage="verify"))
    summary = summary_on_disk(tmp_path)
    assert summary == record.summary
    assert (summary["exit_code"], summary["error"]) == (3, "a shard is cut; expected 9 bytes")
    assert summary["stages"]["verify"]["status"] == "failed"
    assert summary["etl"] == section and summary["train"] is None


def test_a_run_is_ok_only_when_it_has_been_through_the_whole_pipeline(tmp_path: Path):
    order = ["etl", "verify", "train", "export", "evaluate", "promote"]
    assert set(order) == WHOLE_PIPELINE
    for stage in order:
        # One process for each, as a scheduler does it; jobs under spark-submit do not know the pipeline.
        assert not (tmp_path / "runs").exists() or summary_on_disk(tmp_path)["status"] == "partial"
        whole = frozenset() if stage in ("etl", "train") else WHOLE_PIPELINE
        with recording(RunRecord(str(tmp_path), "r", whole=whole)) as record:
            do_stage(record, stage, status="skipped" if stage == "export" else "done")
    assert (summary_on_disk(tmp_path)["status"], summary_on_disk(tmp_path)["exit_code"]) == ("ok", 0)
    (tmp_path / "runs/r/summary.json").unlink()
    assert read_run_state(tmp_path, "r", WHOLE_PIPELINE).status == "ok"
    # A stage that failed is not made good by a later one.
    with recording(RunRecord(str(tmp_path), "r", whole=WHOLE_PIPELINE)) as record:
        do_stage(record, "verify", status="failed", exit_code=3, error="damaged")
    assert (summary_on_disk(tmp_path)["status"], summary_on_disk(tmp_path)["exit_code"]) == ("failed", 3)
    with recording(RunRecord(str(tmp_path), "r", whole=WHOLE_PIPELINE)) as record:
        do_stage(record, "promote")
    assert summary_on_disk(tmp_path)["status"] == "partial"


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("x"), 2), (KeyboardInterrupt(), 130), (Terminated(), 143), (ValueError("x"), 1)]
)
def test_each_way_to_end_is_recorded_with_its_code(error: BaseException, code: int, tmp_path: Path):
    def fail() -> None:
        raise error

    record = RunRecord(str(tmp_path), "r")
    with pytest.raises(type(error)), recording(record):
        record.stage("etl", fail, lambda _: StageRecord(stage="etl"))
    written = read_stage_record(tmp_path, "r", "etl")
    assert written is not None and (written.status, written.exit_code) == ("failed", code)
    assert read_run_state(tmp_path, "r").exit_code == code


def test_the_error_of_a_stage_counts_more_than_that_of_its_record(tmp_path: Path):
    def fail() -> None:
        # Where the record would be, there is a folder now.
        (tmp_path / "runs/r/etl.json").mkdir(parents=True)
        raise UsageError("the stage's own error")

    with pytest.raises(ShardmillError, match="the stage's own error"), recording(RunRecord(str(tmp_path), "r")) as run:
        run.stage("etl", fail, lambda _: StageRecord(stage="etl"))


def test_stages_in_processes_of_their_own_make_one_summary(tmp_path: Path):
    records = [
        StageRecord(stage="b", started=1, sections={"x": {"a": 0, "b": 2}}),
        StageRecord(stage="a", started=2, sections={"y": None, "x": {"a": 1}}),
    ]
    for record in random.sample(records, 2):
        write_stage_record(tmp_path, "r", record)
    summary = write_summary(tmp_path, "r", PARTIAL, ("y",))
    # Later stages win, in whatever order their records were written.
    assert summary["x"] == {"a": 1, "b": 2} and summary["y"] is None and list(summary["stages"]) == ["b", "a"]


def test_an_attempt_that_lost_leaves_the_run_what_the_one_that_won_has_recorded(tmp_path: Path):
    """Both are of one run: a scheduler that loses sight of a task starts it again under the same name.

    A lease of a remote work folder has lapsed if the first one was suspended.
    """

    def lose() -> None:
        winner = RunRecord(str(tmp_path), "r")
        do_stage(winner, "train", sections={"train": {"weights_sha256": "0" * 64}})
        winner.close()
        raise CommitConflict("attempt 2 began")

    lost = RunRecord(str(tmp_path), "r")
    with pytest.raises(CommitConflict), recording(lost):
        lost.stage("train", lose, lambda _: StageRecord(stage="train"))
    assert lost.ended[-1].exit_code == CommitConflict.exit_code
    record = read_stage_record(tmp_path, "r", "train")
    assert record is not None and record.status == "done"
    assert read_run_state(tmp_path, "r") == PARTIAL

    # What begins afterwards and fails is told.
    with pytest.raises(UsageError), recording(RunRecord(str(tmp_path), "r")) as later:
        later.stage("train", lambda: (_ for _ in ()).throw(UsageError("wrong")), lambda _: StageRecord(stage="train"))
    assert (read_run_state(tmp_path, "r").status, read_run_state(tmp_path, "r").exit_code) == ("failed", 2)


def test_a_damaged_record_of_a_run_is_one_line_and_ends_no_other_stage(tmp_path: Path):
    write_stage_record(tmp_path, "r", StageRecord(stage="etl", sections={"x": {"a": 0}}))
    file = tmp_path / "runs/r/etl.json"
    whole = file.read_bytes()
    flipped = [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in range(len(whole))
    ]
    for damaged in (b"", b"{}", b"\xff" * 100, whole[:-1], *flipped):
        file.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=r"etl\.json was altered; .*delete it"):
            read_stage_record(tmp_path, "r", "etl")
    with recording(RunRecord(str(tmp_path), "r")) as record:
        do_stage(record, "train")
    assert list(summary_on_disk(tmp_path)["stages"]) == ["train"]
    file.unlink()
    for damaged in (b"", b"[]", b"\xff", b"{}"):
        (tmp_path / "runs/r/summary.json").write_bytes(damaged)
        assert read_run_state(tmp_path, "r") == PARTIAL
