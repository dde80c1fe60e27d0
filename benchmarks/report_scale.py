"""Size of the report of a large dataset, and the time to write and to open it.

python benchmarks/report_scale.py [--rows 1000000] [--classes 10000] [--browser chromium] [--keep report.html]

The dataset is a real one of some thousand images of noise, whose thumbnails hardly compress. Its version is written
anew with so many rows and classes: each shard is a link to the first one, with a row segment of its own of made-up
statistics. The training of 90 epochs and the evaluation of all classes are made up as well. Gathering, rendering and
`shardmill report` are what a run does. `--browser`: a Chromium that also opens the page, `about:blank` as its baseline.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import TypeAdapter
from results import hardware

from etl.config import EtlConfig
from pipeline.report.page import render
from pipeline.report.write import gather
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.index import INDEX_SCHEMA, INDEXES, ROWS
from shardmill.dataset.ledger import write_ledger
from shardmill.dataset.manifest import Manifest, SplitInfo, encode_manifest, manifest_path
from shardmill.dataset.row_segments import put_segment, read_segment, rows_schema, sizes_of
from shardmill.dataset.statistics import add_sizes
from shardmill.jobs.run_files import PARTIAL, StageRecord, dataset_section, write_stage_record, write_summary
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.values import DatasetPin, Rejection, RejectReason
from tests.lab.datasets import build_here, write_images
from train.contracts.values import Confusion, EpochRecord, Evaluation, MetricsOfClass

NUM_IMAGES, SIDE, EPOCHS, RUN_ID = 2500, 128, 90, "large"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--classes", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--browser", default="", help="a Chromium, such as chromium")
    parser.add_argument("--keep", type=Path, help="copy the page here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardmill-report-") as scratch:
        folder = Path(scratch)
        summary = write_run(folder, given.rows, given.classes)
        page = folder / "report.html"
        seconds: dict[str, list[float]] = {"gather": [], "render": [], "parse": []}
        for _ in range(given.repeat):
            data = timed(seconds["gather"], lambda: gather(folder / "work", RUN_ID, summary))
            html = timed(seconds["render"], lambda data=data: render(data))
            page.write_text(html, encoding="utf-8")
            timed(seconds["parse"], lambda html=html: HTMLParser().feed(html))
        if given.browser:
            measure_browser(given.browser, page, seconds, given.repeat)
        print(f"{hardware()}; load before: {os.getloadavg()[0]:.1f}; medians of {given.repeat}")
        print(f"{given.rows:,} rows, {given.classes:,} classes: {page.stat().st_size / 1e6:.2f} MB")
        for name, values in seconds.items():
            print(f"| {name} | {statistics.median(values):.2f} s |")
        if given.keep:
            shutil.copy(page, given.keep)


def timed(seconds: list[float], work: Any) -> Any:
    """What `work` returns; its seconds are added."""
    started = time.perf_counter()
    done = work()
    seconds.append(time.perf_counter() - started)
    return done


def measure_browser(browser: str, page: Path, seconds: dict[str, list[float]], repeat: int) -> None:
    """A browser opens the page, lays it out and paints it; and the same of an empty page, in turns."""
    for _ in range(repeat):
        for name, address in (("browser, empty page", "about:blank"), ("browser", page.as_uri())):
            picture = page.with_suffix(".png")
            command = [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1600",
                f"--user-data-dir={page.parent / 'browser'}", f"--screenshot={picture}", address,
            ]  # fmt: skip
            timed(
                seconds.setdefault(name, []),
                lambda command=command: subprocess.run(command, check=True, capture_output=True),
            )


def write_run(folder: Path, num_rows: int, num_classes: int) -> dict[str, Any]:
    """The dataset, and the stage records of a run on it below `folder`; returns the run's summary."""
    write_images(folder / "images", num_images=NUM_IMAGES, num_classes=3, image_size=SIDE)
    config = EtlConfig(image_size=SIDE, encoding="jpeg", unit_min_images=NUM_IMAGES)
    uri = build_here(str(folder / "images"), str(folder / "dataset"), config)
    dataset = open_dataset(uri)
    manifest = enlarged(open_store(uri), dataset.manifest, num_rows, num_classes)
    (Path(uri) / manifest_path(1)).write_bytes(encode_manifest(manifest))
    pin = open_dataset(uri).pin
    for record in records(pin, manifest):
        write_stage_record(folder / "work", RUN_ID, record)
    return write_summary(folder / "work", RUN_ID, PARTIAL)


def enlarged(store: Store, manifest: Manifest, num_rows: int, num_classes: int) -> Manifest:
    """The version with links to its first shard of train until there are so many rows."""
    [segment] = manifest.index_segments
    index = read_segment(store, segment, INDEX_SCHEMA, NUM_IMAGES)
    shard = index.filter(pc.equal(index["split"], "train"))
    shard = shard.filter(pc.equal(shard["shard"], shard["shard"][0]))
    path, rows_of_shard = shard["shard"][0].as_py(), shard["shard_rows"][0].as_py()
    parts, sizes, labels_N, rng = [], [], [], np.random.default_rng(0)
    for number in range(-(-num_rows // rows_of_shard)):
        link = f"shards/train/{number:07d}.parquet"
        os.link(Path(store.uri, path), Path(store.uri, link))
        rows = made_up_rows(manifest, number * rows_of_shard, rows_of_shard, num_classes, rng)
        labels_N.append(rows["label"].to_numpy())
        sizes.append(sizes_of(rows, rows_of_shard * SIDE * SIDE, manifest.row_schema))
        file = put_segment(store, ROWS, rows)
        facts = {"shard": link, "rows_file": file.path, "rows_bytes": file.size_bytes, "rows_sha256": file.sha256}
        parts.append(_with(shard, facts))
    others = index.filter(pc.not_equal(index["split"], "train"))
    train = manifest.splits["train"].model_copy(
        update={
            "num_rows": rows_of_shard * len(parts),
            "num_chunks": shard.num_rows * len(parts),
            "num_shards": len(parts),
            "image_bytes": pc.sum(shard["chunk_image_bytes"]).as_py() * len(parts),
            "class_counts": tuple(np.bincount(np.concatenate(labels_N), minlength=num_classes).tolist()),
        }
    )
    rejected = rejections(num_rows // 100)
    return _counted(manifest, train, num_classes, rejected).model_copy(
        update={
            "sizes": add_sizes(sizes),
            "index_segments": (put_segment(store, INDEXES, pa.concat_tables([*parts, others])),),
            "ledger_segments": write_ledger(store, rejected),
        }
    )


def _counted(manifest: Manifest, train: SplitInfo, num_classes: int, rejected: list[Rejection]) -> Manifest:
    """With the larger split, and counts that fit it."""
    none = (0,) * (num_classes - len(manifest.class_names))
    splits = {
        name: train if name == "train" else split.model_copy(update={"class_counts": split.class_counts + none})
        for name, split in manifest.splits.items()
    }
    by_split = {name: split.num_rows for name, split in splits.items()}
    accepted, by_reason = sum(by_split.values()), Counter(str(each.reason) for each in rejected)
    counts = manifest.counts.model_copy(
        update={
            "listed": accepted + len(rejected),
            "accepted": accepted,
            "rejected": len(rejected),
            "by_split": by_split,
            "by_reason": dict(by_reason),
        }
    )
    names = tuple(f"class {number:05d} of some longer name" for number in range(num_classes))
    return manifest.model_copy(update={"class_names": names, "splits": splits, "counts": counts})


def _with(table: pa.Table, facts: dict[str, Any]) -> pa.Table:
    for name, value in facts.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), pa.array([value] * table.num_rows))
    return table


def made_up_rows(manifest: Manifest, first: int, num_rows: int, num_classes: int, rng: np.random.Generator) -> pa.Table:
    """Statistics as of photographs, one in a thousand of them dark, plain, blurred, or of an odd size."""
    numbers_N = np.arange(first, first + num_rows)
    odd_N = rng.integers(0, 4000, num_rows)
    pixels = SIDE * SIDE
    mean_N1 = np.where(odd_N == 0, 5.0, rng.normal(115, 25, num_rows))[:, None]
    mean_N3 = np.clip(mean_N1 + rng.normal(0, 8, (num_rows, 3)), 2, 250)
    std_N = np.where(odd_N == 1, 1.0, rng.uniform(35, 75, num_rows))
    sharp_N = np.where(odd_N == 2, 0.001, rng.lognormal(-1.5, 0.6, num_rows))
    sides_N2 = (rng.choice([375, 500, 640, 1024], (num_rows, 2)) * np.where(odd_N == 3, 12, 1)[:, None]).astype(
        np.int32
    )
    columns = {
        "sample_id": numbers_N,
        "source": [f"class_{number % num_classes:05d}/photo_{number:09d}.jpg" for number in numbers_N.tolist()],
        "source_bytes": numbers_N % 100_000,
        "source_mtime_ns": numbers_N,
        "source_etag": [""] * num_rows,
        "source_sha256": [f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" * 4 for number in numbers_N.tolist()],
        "label": numbers_N % num_classes,
        "row_sha256": [number.to_bytes(32, "big") for number in numbers_N.tolist()],
        "notes": [""] * num_rows,
        "channel_sums": (mean_N3 * pixels).astype(np.int64).tolist(),
        "channel_square_sums": ((mean_N3**2 + std_N[:, None] ** 2) * pixels).astype(np.int64).tolist(),
        "source_height": sides_N2[:, 0],
        "source_width": sides_N2[:, 1],
        "source_read_bytes": numbers_N % 100_000,
        "laplacian_square_sum": (sharp_N * std_N**2 * pixels).astype(np.int64),
        "difference_hash": rng.integers(-(2**63), 2**63, num_rows, dtype=np.int64),
    }
    fields = rows_schema(manifest.row_schema)
    return pa.table([pa.array(columns[field.name], field.type) for field in fields], schema=fields)


def rejections(number: int) -> list[Rejection]:
    """In turns for every reason."""
    reasons = tuple(RejectReason)
    return [
        Rejection(f"photos/{place:09d}_original.jpg", reasons[place % len(reasons)], "what the decoder said", 10**7, 1)
        for place in range(number)
    ]


def records(pin: DatasetPin, manifest: Manifest) -> list[StageRecord]:
    """What the stages of a run leave, as far as the report reads it."""
    rng, names = np.random.default_rng(0), manifest.class_names
    figures = tuple(MetricsOfClass(name, 5, float(rng.random()), float(rng.random())) for name in names)
    # Some of 50,000 images are mistaken; the record of a run holds the fullest cells, as `evaluation_record` does.
    true_C, predicted_C = (rng.integers(0, len(names), 6_000) for _ in range(2))
    confused = Confusion(tuple(true_C.tolist()), tuple(predicted_C.tolist()), (1,) * 6_000).most_frequent(2_500)
    evaluation = Evaluation("test", 50_000, 1.0, 0.75, 0.92, figures, confused=confused)
    history = [
        EpochRecord(epoch, 4_000, 5 / (1 + epoch), 0.7, 0.1, 600.0, evaluation.without_classes())
        for epoch in range(EPOCHS)
    ]
    train = {"strategy": "torch_ddp", "world_size": 8, "steps": 360_000, "time_shares": {"compute": 0.9, "other": 0.1}}
    plain = TypeAdapter(list[EpochRecord]).dump_python(history, mode="json")
    shown = TypeAdapter(Evaluation).dump_python(evaluation, mode="json")
    return [
        StageRecord(stage="etl", started=1.0, seconds=900, sections={"dataset": dataset_section(pin, manifest)}),
        StageRecord(stage="train", started=2.0, seconds=9e4, sections={"train": train}, detail={"history": plain}),
        StageRecord(stage="evaluate", started=3.0, seconds=30, detail={"evaluation": shown}),
    ]


if __name__ == "__main__":
    sys.exit(main())
