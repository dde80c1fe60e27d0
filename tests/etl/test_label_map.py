"""A label map: given or found, it only grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etl.checks.facts import inferred_warnings
from etl.config import SourceConfig
from etl.listing.label_map import read_label_map
from etl.plan import plan_build
from pipeline.output.inspection import describe
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import RejectLimitExceeded, UsageError
from tests.etl.incremental import build, opened, tree_for
from tests.lab.datasets import write_images


def test_every_kind_of_file_gives_the_same_map(tmp_path: Path):
    names = ("dog", "cat", "ant")
    (tmp_path / "map.txt").write_text("dog\n cat \n\nant\n")
    (tmp_path / "list.json").write_text(json.dumps(names))
    (tmp_path / "numbers.json").write_text(json.dumps({"ant": 2, "cat": 1, "dog": 0}))
    for given in (names, *(str(tmp_path / name) for name in ("map.txt", "list.json", "numbers.json"))):
        assert read_label_map(given) == names
    assert read_label_map(()) == ()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("map.txt", None, "no such file"),
        ("map.txt", "\n", "contains no class"),
        ("map.txt", "cat\ndog\ncat\n", "'cat' twice"),
        ("map.txt", "cat\n..\n", "'..', which is not a class name"),
        ("map.json", "{", "map.json"),
        ("map.json", '{"cat": 1, "dog": 2}', "from 0 to 1"),
        ("map.json", '[["cat"]]', "no class names"),
    ],
)
def test_a_file_that_is_no_map_is_refused_with_what_was_expected(
    tmp_path: Path, name: str, text: str | None, says: str
):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=says):
        read_label_map(str(tmp_path / name))


def test_a_given_map_decides_the_numbers_and_other_classes_are_rejected(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    names = ("class_2", "nothing", "class_0")
    outcome = build(tmp_path, label_map=names)
    assert outcome.manifest.class_names == names
    assert set(outcome.manifest.counts.by_reason) == {"unknown_class"}
    totals = [sum(split.class_counts[number] for split in outcome.manifest.splits.values()) for number in range(3)]
    assert describe(opened(tmp_path))["empty_classes"] == ["nothing"]
    assert totals[1] == 0 and min(totals[0], totals[2]) > 0
    assert sum(totals) + outcome.manifest.counts.rejected == 30


def test_ten_thousand_classes_are_listed_in_order_and_empty_ones_counted(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    names = [f"class_{number}" for number in range(10_000)]
    (tmp_path / "table.csv").write_text("uri,label\n" + "".join(f"{name}.jpg,{name}\n" for name in names))
    tree = tree_for(tmp_path).model_copy(update={"source": SourceConfig(uri=f"{tmp_path}/table.csv", kind="table")})
    plan = plan_build(tree, run_id="r")
    assert plan.build.class_names == tuple(sorted(names))
    [few] = [warning for warning in inferred_warnings(plan) if "classes have fewer" in warning]
    assert few.endswith("(class_0: 1, class_1: 1, class_10: 1, class_100: 1, class_1000: 1 and 9995 more)")
    (tmp_path / "map.txt").write_text("\n".join(reversed(names)))
    manifest = build(tmp_path, label_map=str(tmp_path / "map.txt")).manifest
    counts = [sum(found) for found in zip(*(each.class_counts for each in manifest.splits.values()), strict=True)]
    assert counts == [0] * 9_997 + [10, 10, 10]
    assert manifest.empty_classes == tuple(reversed(names[3:]))
    verify_dataset(opened(tmp_path)).raise_if_failed()


def test_an_unknown_class_may_be_an_error_before_anything_is_read(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    with pytest.raises(RejectLimitExceeded, match="class_1"):
        plan_build(tree_for(tmp_path, label_map=("class_0",), unknown_class="error"), run_id="r")


def test_a_map_that_grew_adds_what_it_had_refused_and_reads_nothing_else(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    first = build(tmp_path, label_map=("class_1", "class_0"), max_reject_fraction=0.9)
    names = ("class_1", "class_0", "class_2", "none_yet")
    grown = build(tmp_path, label_map=names)
    full = build(tmp_path, "other", label_map=names)
    assert grown.num_images_read == first.manifest.counts.rejected
    assert grown.manifest.operation == "incremental"
    assert grown.manifest.content_digest == full.manifest.content_digest
    assert build(tmp_path, label_map=names).skipped


@pytest.mark.parametrize("names", [("class_1", "class_0"), ("class_0",), ("class_0", "class_2", "class_1")])
def test_a_map_never_moves_a_class(tmp_path: Path, names: tuple[str, ...]):
    write_images(tmp_path / "images", num_images=30)
    build(tmp_path, label_map=("class_0", "class_1"), max_reject_fraction=0.9)
    with pytest.raises(UsageError, match="can only grow"):
        build(tmp_path, label_map=names, max_reject_fraction=0.9)
