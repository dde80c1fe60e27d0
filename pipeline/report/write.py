"""The last stage: `report.html` from a run's record, its dataset version and (for refused files) the source."""

from __future__ import annotations

import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from pipeline.report.data import MistakenImage, Picture, RejectedGroup, ReportData, SuspectGroup
from pipeline.report.page import answers, render
from pipeline.report.thumbnail import THUMBNAIL_SIDE, thumbnail
from shardmill.data_quality.drift import Drift
from shardmill.data_quality.quality import SuspectImage, by_fault, find_faults
from shardmill.data_quality.row_looks import read_looks
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.ledger import read_ledger, read_rejections
from shardmill.errors import ShardmillError
from shardmill.jobs.run_files import StageRecord, read_stage_records, run_folder
from shardmill.loader.annotations import RowBoxes
from shardmill.loader.pictures import is_drawn, named_boxes, picture_of
from shardmill.loader.samples import Samples, read_samples, samples_by_id
from shardmill.storage import Store, join_uri
from shardmill.stores import open_store
from shardmill.typed_columns import BOXES
from shardmill.values import Rejection, RejectReason
from train.contracts.values import EpochRecord, Evaluation

if TYPE_CHECKING:
    import numpy as np

    from etl.sources import SourceReader
    from shardmill.dataset.dataset import Dataset

NUM_SAMPLES = 48
EXAMPLES_PER_REASON = 4
# Reading the facts of more rows would take longer than the rest of a report; `shardmill inspect --quality` does.
MAX_ROWS_SEARCHED_FOR_FAULTS = 2_000_000
MAX_THUMBNAIL_SOURCE_BYTES = 5_000_000
MAX_THUMBNAIL_PIXELS = 20_000_000
# Only files that were refused for the state of their pixels are opened again, never those refused as a danger.
REASONS_WITH_THUMBNAIL = frozenset({RejectReason.TRUNCATED, RejectReason.CORRUPT_SCAN, RejectReason.DECODER_ERROR})


def write_report(workdir: str | Path, run_id: str, summary: dict[str, Any]) -> str:
    """Write `<workdir>/runs/<run_id>/report.html`, self-contained, and return its URI."""
    path = f"{run_folder(run_id)}/report.html"
    store = open_store(workdir)
    store.put(path, render(gather(workdir, run_id, summary)).encode("utf-8"))
    return join_uri(store.uri, path)


def report_record(uri: str) -> StageRecord:
    """The record of a report that was written just now."""
    return StageRecord(stage="report", started=time.time(), sections={"report": {"path": uri}})


def gather(workdir: str | Path, run_id: str, summary: dict[str, Any]) -> ReportData:
    """Read what the run left. Parts that cannot be read are left out: a report is needed most after a failure."""
    stages = read_stage_records(workdir, run_id)
    detail = {record.stage: record.detail for record in stages}
    history = TypeAdapter(tuple[EpochRecord, ...]).validate_python(detail.get("train", {}).get("history", ()))
    evaluation = TypeAdapter(Evaluation | None).validate_python(detail.get("evaluate", {}).get("evaluation"))
    data = {
        "run_id": run_id,
        "summary": summary,
        "config_toml": _read_text(open_store(workdir), f"{run_folder(run_id)}/config.toml"),
        "stages": stages,
        "history": history,
        "evaluation": evaluation,
        "mistakes": _mistakes(evaluation, detail.get("evaluate", {}).get("dataset")),
        "drift": _drift(summary, detail),
    }
    failed_build = detail.get("etl", {}).get("ledger")
    config = data["config_toml"]
    found = (
        _of_failed_build(detail["etl"], config) if failed_build else _of_dataset(summary.get("dataset") or {}, config)
    )
    return ReportData(**data, **found)


def _drift(summary: dict[str, Any], detail: dict[str, dict[str, Any]]) -> Drift | None:
    """Of the version, or of the one that was refused for it."""
    refused = (detail.get(stage, {}).get("drift") for stage in ("etl", "drift"))
    found = next(filter(None, (*refused, summary.get("drift"))), None)
    return Drift.model_validate(found) if found else None


def _mistakes(evaluation: Evaluation | None, dataset: str | None) -> tuple[tuple[Picture, MistakenImage], ...]:
    """Those that the evaluation has kept, with their images."""
    if evaluation is None or evaluation.confused is None or dataset is None:
        return ()
    names = answers(evaluation, evaluation.confused)
    mistakes = {
        each.sample_id: MistakenImage(
            each.sample_id, evaluation.split, names[each.true], names[each.predicted], each.confidence
        )
        for each in evaluation.confused.mistakes
    }
    try:
        found = samples_by_id(open_dataset(dataset), mistakes.values())
    except (ShardmillError, FileNotFoundError):
        return ()
    return tuple(
        (Picture("", found[sample_id].source, *thumbnail(found[sample_id].image_HWC)), each)
        for sample_id, each in mistakes.items()
        if sample_id in found
    )


def _of_dataset(named: dict[str, Any], config_toml: str) -> dict[str, Any]:
    if not named.get("version"):
        return {}
    try:
        dataset = open_dataset(f"{named['uri']}@{named['version']}")
        found = dataset.manifest.splits
        splits = {name: found[name] for name in ("train", "validation", "test") if name in found}
        first_split = next(iter(splits), None)
        return {
            "class_names": dataset.manifest.class_names,
            "class_counts": {name: split.class_counts for name, split in splits.items()},
            "notes": dataset.manifest.counts.by_note,
            "empty_classes": dataset.manifest.empty_classes,
            "sizes": dataset.manifest.sizes,
            "channel_mean": dataset.manifest.channel_mean,
            "channel_std": dataset.manifest.channel_std,
            "samples": _sample_pictures(dataset, first_split) if first_split else (),
            **_faults(dataset),
            "num_listed": dataset.manifest.counts.listed,
            "rejected": _rejected_groups(
                read_rejections(dataset.store, dataset.manifest),
                reader_of_run(config_toml, dataset.manifest.source.kind, dataset.manifest.source.uri),
            ),
        }
    except (ShardmillError, FileNotFoundError):
        # The run may have failed for this very reason; its error is at the head of the page.
        return {}


def _faults(dataset: Dataset) -> dict[str, Any]:
    if dataset.manifest.counts.accepted > MAX_ROWS_SEARCHED_FOR_FAULTS:
        return {"num_not_searched": dataset.manifest.counts.accepted}
    quality = find_faults(read_looks(dataset))
    return {
        "suspects": tuple(
            SuspectGroup(str(fault), len(images), tuple(_suspects(dataset, images[:EXAMPLES_PER_REASON])))
            for fault, images in by_fault(quality.suspects).items()
            if images
        ),
        "telltales": tuple(each.words for each in quality.telltales),
    }


def _suspects(dataset: Dataset, images: Iterable[SuspectImage]) -> Iterator[tuple[Picture, SuspectImage]]:
    for each in images:
        png, is_small = thumbnail(Samples(dataset, each.split)[each.row_in_split].image_HWC)
        yield Picture(each.class_name or "", each.source, png, is_small), each


def _of_failed_build(detail: dict[str, Any], config_toml: str) -> dict[str, Any]:
    """Return the rejections of a build that broke a limit: no version names its ledger, but the record of the stage
    does.
    """
    try:
        return {
            "num_listed": detail["num_listed"],
            "rejected": _rejected_groups(
                read_ledger(detail["ledger"]),
                reader_of_run(config_toml, detail.get("source_kind", "folders"), detail["source"]),
            ),
        }
    except (ShardmillError, FileNotFoundError):
        return {}


def _sample_pictures(dataset: Dataset, split: str) -> tuple[Picture, ...]:
    import numpy as np

    names = dataset.manifest.class_names
    by_label: dict[int | None, list[Any]] = {}
    for sample in read_samples(dataset, split, NUM_SAMPLES * 8):
        by_label.setdefault(sample.label, []).append(sample)
    # Round robin over the classes: a grid in storage order shows a big class many times and a small one never.
    queues = [by_label[label] for label in sorted(by_label, key=lambda label: -1 if label is None else label)]
    longest = max(map(len, queues), default=0)
    chosen = [queue[place] for place in range(longest) for queue in queues if place < len(queue)][:NUM_SAMPLES]
    pictures = []
    for sample in chosen:
        caption, image_HWC = "" if sample.label is None or not names else names[sample.label], sample.image_HWC
        if is_drawn(sample.extra):
            image_HWC = np.asarray(picture_of(image_HWC, sample.extra, THUMBNAIL_SIDE))
        if isinstance(boxes := sample.extra.get(BOXES), RowBoxes):
            caption = caption or ", ".join(map(str, named_boxes(boxes, names)))
        png, is_small = thumbnail(image_HWC)
        pictures.append(Picture(caption, sample.source, png, is_small))
    return tuple(pictures)


def reader_of_run(config_toml: str, kind: str, uri: str) -> SourceReader | None:
    """Return a reader of this run's source, by the run's own config; None if the source is gone or cannot be opened.

    None for a user's own source, unless that config names it: a dataset must not make a report import what it names.
    A report fetches nothing from the web.
    """
    from etl.config import SourceConfig
    from etl.sources import SOURCES
    from etl.sources.uris import is_on_the_web

    try:
        given = tomllib.loads(config_toml).get("source", {})
        # A training alone may have been given another source, or none.
        is_given = given.get("kind") == kind
        if not is_given and kind not in SOURCES:
            return None
        config = SourceConfig(**given) if is_given else SourceConfig(kind=kind)
        if kind != "several":
            config = config.model_copy(update={"uri": uri})
        if any(map(is_on_the_web, config.uris().values())):
            return None
        return SOURCES[kind](config).open(MAX_THUMBNAIL_SOURCE_BYTES)
    except Exception:  # a user's own source may raise anything, and the report of a failed run is needed most
        return None


def _rejected_groups(rejections: Iterable[Rejection], source: SourceReader | None) -> tuple[RejectedGroup, ...]:
    rejections = sorted(rejections, key=lambda rejection: rejection.key)
    counts = Counter(rejection.reason for rejection in rejections)
    return tuple(
        RejectedGroup(
            str(reason),
            count,
            tuple(
                (_rejected_picture(source, rejection), rejection)
                for rejection in [each for each in rejections if each.reason == reason][:EXAMPLES_PER_REASON]
            ),
        )
        for reason, count in counts.most_common()
    )


def _rejected_picture(source: SourceReader | None, rejection: Rejection) -> Picture:
    is_wanted = rejection.reason in REASONS_WITH_THUMBNAIL and rejection.size_bytes <= MAX_THUMBNAIL_SOURCE_BYTES
    if source is not None and is_wanted and _is_near(rejection):
        try:
            data = source.read(rejection.source)
            image_HWC = None if isinstance(data, Rejection) else _decode_leniently(data)
        except Exception:  # as in `reader_of_run`
            image_HWC = None
        if image_HWC is not None:
            png, is_small = thumbnail(image_HWC)
            return Picture("", rejection.key, png, is_small)
    return Picture("", rejection.key)


def _is_near(rejection: Rejection) -> bool:
    """Not a URL that a table names, and not in an archive that would be unpacked up to the one image."""
    from etl.sources.containers import is_packed_name
    from etl.sources.uris import is_on_the_web

    # Of several sources, the name of its own comes first.
    file, container = (text.rpartition("\0")[2] for text in (rejection.key, rejection.container))
    return not (is_packed_name(container) or is_on_the_web(container) or is_on_the_web(file))


def _decode_leniently(data: bytes) -> np.ndarray | None:
    """Decode the readable part of a damaged JPEG, RGB, or None. Other damaged formats show nothing useful."""
    import simplejpeg

    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        is_small_enough = int(height) * int(width) <= MAX_THUMBNAIL_PIXELS
        return simplejpeg.decode_jpeg(data, "RGB", strict=False) if is_small_enough else None
    except ValueError:
        return None


def _read_text(store: Store, path: str) -> str:
    try:
        return store.read(path).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
