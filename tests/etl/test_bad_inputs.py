"""The whole bad-input table through the ETL: every file ends as its row says, and the table has every row."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from etl.config import SourceConfig
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.open import open_dataset
from shardmill.values import Rejection
from tests.bad_images import interlaced_png
from tests.bad_input import BadInput
from tests.bad_inputs import all_inputs, write_inputs
from tests.etl.building import build_source
from tests.shardmill.images.make import decode, gray_photo

TABLE = Path(__file__).parents[2] / "docs" / "rejects.md"
NUM_ROWS = 105
# Not files of one tree: root may read everything, and the others are tables, URLs, label maps and whole sources.
TESTED_ELSEWHERE = {91, 98, 102, 103, 104, 105}


def rows_of(numbers: str) -> range:
    first, _, last = numbers.partition("-")
    return range(int(first), int(last or first) + 1)


def test_every_file_of_the_table_ends_as_its_row_says(tmp_path: Path) -> None:
    inputs = {each.key: each for each in write_inputs(tmp_path / "source")}
    manifest = build_source(
        SourceConfig(uri=str(tmp_path / "source")), tmp_path / "dataset", image_size=24, max_reject_fraction=1.0
    )

    dataset = open_dataset(str(tmp_path / "dataset"))
    accepted: dict[str, tuple[str, ...]] = {}
    for split in manifest.splits:
        for uri in dataset.files(split, "parquet"):
            rows = pq.ParquetFile(uri).read(["source", "notes"]).to_pylist()
            accepted |= {row["source"]: tuple(filter(None, row["notes"].split(","))) for row in rows}
    rejected = {each.key: each for each in read_rejections(dataset.store, manifest)}
    wrong = [found for each in inputs.values() if (found := problem(each, accepted, rejected))]
    assert not wrong, "\n".join(wrong)
    assert accepted.keys() | rejected.keys() == inputs.keys()
    assert manifest.counts.listed == len(inputs) == len(accepted) + len(rejected)
    assert manifest.counts.conflicting_label >= 2


def problem(expected: BadInput, accepted: dict[str, tuple[str, ...]], rejected: dict[str, Rejection]) -> str:
    """What is wrong about this file; empty if nothing."""
    where = f"row {expected.row}, {expected.key!r}"
    if expected.reason is None:
        if expected.key not in accepted:
            return f"{where}: rejected as {rejected.get(expected.key)}"
        notes = accepted[expected.key]
        return "" if notes == expected.notes else f"{where}: notes {notes}, expected {expected.notes}"
    if expected.key not in rejected:
        return f"{where}: accepted with {accepted.get(expected.key)}, expected {expected.reason}"
    found = rejected[expected.key]
    if found.reason is not expected.reason or not found.detail.startswith(expected.detail):
        return f"{where}: {found.reason} ({found.detail}), expected {expected.reason} {expected.detail}"
    return ""


def test_the_table_has_a_decision_for_every_row_and_a_file_for_every_row_that_is_one() -> None:
    ranges = re.findall(r"^\| (\d+(?:-\d+)?) \|", TABLE.read_text(), flags=re.MULTILINE)
    assert [row for numbers in ranges for row in rows_of(numbers)] == list(range(1, NUM_ROWS + 1))
    built = {each.row for each in all_inputs()}
    assert not built & TESTED_ELSEWHERE
    assert built | TESTED_ELSEWHERE == set(range(1, NUM_ROWS + 1))


def test_keys_are_written_as_they_are(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    found = {str(Path(folder, name).relative_to(tmp_path)) for folder, _, names in os.walk(tmp_path) for name in names}
    assert found | {"links/upwards"} == {each.key for each in inputs}


def test_an_interlaced_png_is_put_together() -> None:
    assert np.array_equal(decode(interlaced_png(gray_photo())).pixels_HWC[:, :, 0], gray_photo())
