"""The manifest, and what is read off it: statistics and the difference of two versions."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from etl.config import EtlConfig
from shardmill.checksummed import ChecksummedFile
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.diff import ChangeKind, RowLocation, count_changes, diff_versions
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.manifest import (
    Counts,
    Manifest,
    SourceRef,
    SplitInfo,
    VersionRange,
    content_digest,
    digested_classes,
    encode_manifest,
    manifest_path,
    parse_manifest,
)
from shardmill.dataset.statistics import (
    ASPECT_NAMES,
    SIDE_NAMES,
    ChannelSums,
    ImageSizes,
    SizeCounts,
    add_sizes,
    count_sizes,
)
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, SecurityRefusal
from shardmill.formats.rows import NO_IMAGES
from shardmill.ids import canonical_digest
from shardmill.images.process import process_image
from shardmill.kernel import resolve_kernel
from shardmill.options import NormalizeOptions
from shardmill.typed_columns import ExtraColumn
from shardmill.values import ImageSample, SourceImage
from tests.etl.incremental import build, opened
from tests.lab.datasets import build_here, write_images
from tests.shardmill.images.make import with_orientation

ZERO = "0" * 64
COUNTS = Counts(
    listed=0, accepted=0, rejected=0, by_reason={}, by_split={}, duplicate_content=0, conflicting_label=0,
    leaked_content=0, by_note={},
)  # fmt: skip
SOURCE = SourceRef(uri="/images", kind="folder", listing_fingerprint="f", key_sum=ZERO, names_splits=False)


def split(*class_counts: int, num_rows: int = 1) -> SplitInfo:
    return SplitInfo(num_rows=num_rows, num_chunks=1, num_shards=1, image_bytes=0, class_counts=class_counts,
                     row_digest_sum=ZERO)  # fmt: skip


def manifest(**given: Any) -> Manifest:
    """Valid, but for what is `given`."""
    plain: dict[str, Any] = {
        "version": 3, "commit_id": "c", "run_id": "r", "created_at": "2026-11-28T12:00:00+00:00", "parent_version": 2,
        "content_digest": ZERO, "layout_digest": ZERO, "columns": {"image": "binary", "label": "int64"},
        "formats": ("parquet",), "class_names": ("a", "b", "c"), "splits": {"train": split(1, 0, 2)},
        "counts": COUNTS, "channel_sums": ChannelSums(), "sizes": ImageSizes(),
        "normalize": NormalizeOptions(encoding="png"), "normalization_fingerprint": "n", "decoder_id": "d",
        "config": {"etl": "é"}, "config_fingerprint": "f",
        "source": SOURCE, "index_segments": (), "ledger_segments": (), "ledger_digest": "l",
    }  # fmt: skip
    return Manifest(**plain | given)


def encoded(body: dict[str, Any]) -> bytes:
    """The bytes of any body, with its digest: what a valid writer of it would have published."""
    body = {**body, "manifest_digest": canonical_digest(body)}
    return json.dumps(body, sort_keys=True, indent=1, ensure_ascii=False).encode() + b"\n"


def body_of(written: Manifest) -> dict[str, Any]:
    body = json.loads(encode_manifest(written))
    del body["manifest_digest"]
    return body


def test_a_manifest_is_read_as_it_was_written_a_line_for_each_field():
    written = manifest()
    data = encode_manifest(written)
    assert parse_manifest(data, 3, "u") == written
    assert data == encoded(body_of(written)) and b'\n "commit_id": "c",\n' in data and "é".encode() in data
    assert body_of(written)["schema_version"] == 1
    assert manifest_path(12) == "manifests/00000012.json"


@pytest.mark.parametrize(
    ("path", "least"),
    [
        (("version",), 1),
        *((("counts", name), 0) for name in ("listed", "accepted", "rejected", "duplicate_content")),
        *((("counts", name), 0) for name in ("conflicting_label", "leaked_content")),
        *((("splits", "train", name), 1) for name in ("num_rows", "num_chunks", "num_shards")),
        (("splits", "train", "image_bytes"), 0),
        (("expired_versions", 0, "first"), 1),
        (("expired_versions", 0, "last"), 1),
    ],
)
def test_numbers_have_a_least_value(path, least):
    for value in (least, least - 1):
        body = body_of(manifest(expired_versions=(VersionRange(first=1, last=1),)))
        place = body
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        version = value if path == ("version",) else 3
        if value == least:
            parse_manifest(encoded(body), version, "u")
        else:
            with pytest.raises(
                IntegrityError, match=f"{'.'.join(map(str, path))}: Input should be greater than or equal"
            ):
                parse_manifest(encoded(body), version, "u")


WRONG = {
    "was altered": lambda data: data.replace(b'"run_id": "r"', b'"run_id": "s"'),
    "was altered: digest": lambda data: json.dumps(json.loads(data)).encode(),
    "is not JSON": lambda data: data[:-3],
    "is not a manifest": lambda data: b"[]",
    "has schema version 2": lambda data: encoded({**body_of(manifest()), "schema_version": 2}),
    "claims to be version 4": lambda data: encode_manifest(manifest(version=4)),
    "columns of types that this version": lambda data: encoded({**body_of(manifest()), "columns": {"mine": "float8"}}),
    "Field required": lambda data: encoded({"schema_version": 1}),
}


@pytest.mark.parametrize("message", WRONG)
def test_anything_else_is_an_integrity_error(message):
    with pytest.raises(IntegrityError, match=message) as refused:
        parse_manifest(WRONG[message](encode_manifest(manifest())), 3, "u")
    assert "manifests/00000003.json" in str(refused.value)


@pytest.mark.parametrize("kind", ["index_segments", "ledger_segments"])
def test_a_segment_lies_inside_the_dataset(kind):
    outside = ChecksummedFile(path="../secret", size_bytes=1, sha256=ZERO)
    with pytest.raises(SecurityRefusal, match="leaves its root folder"):
        parse_manifest(encode_manifest(manifest(**{kind: (outside,)})), 3, "u")


def test_digests_cover_the_classes_that_have_an_image():
    """Sorted by name, so that the order of the map does not count."""
    splits = {"train": split(0, 1, 0), "test": split(2, 0, 0)}
    assert digested_classes(("b", "a", "c"), splits) == ("a", "b")
    found = manifest(splits=splits, class_names=("b", "a", "c"))
    assert (found.digested_classes, found.empty_classes) == (("a", "b"), ("c",))


def test_the_content_digest_depends_on_all_that_it_is_given():
    arguments: dict[str, Any] = {"columns": {"image": "binary"}, "classes": ("a",), "normalization_fingerprint": "n",
                                 "splits": {"train": split(1)}}  # fmt: skip
    others: dict[str, Any] = {"columns": {"image": "string"}, "classes": ("b",), "normalization_fingerprint": "m",
                              "splits": {"train": split(1, num_rows=2)}}  # fmt: skip
    digest = content_digest(**arguments)
    for name, other in others.items():
        assert content_digest(**arguments | {name: other}) != digest
    # Of a split its rows count, and how these lie in chunks does not.
    moved = {"train": split(5).model_copy(update={"num_chunks": 9})}
    assert content_digest(**arguments | {"splits": moved}) == digest


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"splits": dict.fromkeys(("train", "validation", "test"), split(1, 1, 1))}, "evaluation_split", "test"),
        ({"splits": dict.fromkeys(("train", "validation"), split(1, 1, 1))}, "evaluation_split", "validation"),
        ({}, "evaluation_split", None),
        ({}, "origin_version", None),
        ({"operation": "append"}, "origin_version", None),
        ({"operation": "compact"}, "origin_version", 2),
        ({"operation": "expire"}, "origin_version", 2),
        ({"operation": "rollback", "restored_version": 1}, "origin_version", 1),
    ],
)
def test_what_a_manifest_says(given, name, expected):
    assert getattr(manifest(**given), name) == expected


def test_the_schema_of_its_rows():
    images = manifest(columns={"image": "binary", "label": "list<int64>", "size": "int64", "note": "string"}).row_schema
    assert (images.encoding, images.label_type, images.vector_size) == ("png", "list<int64>", 0)
    assert images.extra == (ExtraColumn("note", "string"), ExtraColumn("size", "int64"))
    predictions = manifest(columns={"label": "int64", "embedding": "float32[4]"}).row_schema
    assert (predictions.encoding, predictions.extra, predictions.vector_size) == (NO_IMAGES, (), 4)


def test_versions_expire_in_ranges_with_both_ends():
    found = manifest(expired_versions=(VersionRange(first=2, last=3), VersionRange(first=6, last=6)))
    assert [version for version in range(1, 9) if found.has_expired(version)] == [2, 3, 6]


@pytest.mark.parametrize(
    ("change", "is_equivalent"),
    [
        ({"version": 4, "commit_id": "d", "run_id": "s", "created_at": "later", "config": {}}, True),
        ({"counts": COUNTS.model_copy(update={"leaked_content": 3})}, False),
        ({"content_digest": "1" * 64}, False),
        ({"layout_digest": "1" * 64}, False),
        ({"ledger_digest": "other"}, False),
        ({"formats": ("parquet", "tfrecord")}, False),
        ({"counts": COUNTS.model_copy(update={"listed": 1})}, False),
        ({"expired_versions": (VersionRange(first=1, last=1),)}, False),
    ],
)
def test_versions_are_equivalent_if_no_reader_sees_a_difference(change, is_equivalent):
    assert manifest(**change).is_equivalent_to(manifest()) == is_equivalent
    both = manifest(formats=("parquet", "tfrecord"))
    assert both.is_equivalent_to(manifest(formats=("tfrecord", "parquet")))


def test_a_source_continues_another_if_it_holds_all_of_its_parts():
    one = SOURCE.model_copy(update={"parts": {"x": "/x"}})
    two = SOURCE.model_copy(update={"parts": {"x": "/x", "y": "/y"}, "uri": "x, y"})
    assert two.continues(one) and not one.continues(two)
    assert SOURCE.continues(SOURCE.model_copy(update={"listing_fingerprint": "g"}))
    for change in ({"uri": "/other"}, {"kind": "table"}, {"parts": {"x": "/x"}}):
        assert not SOURCE.is_same_source(SOURCE.model_copy(update=change))
        assert not SOURCE.continues(SOURCE.model_copy(update=change))
    assert not two.continues(one.model_copy(update={"kind": "table"}))
    assert (SOURCE.described, two.described) == ("/images", "x (/x), y (/y)")


_SEED = random.SystemRandom().randrange(2**32)


def bucket(width: int, height: int) -> tuple[str, str]:
    """The names of its buckets, from what they say."""

    def holds_side(name: str) -> bool:
        low, _, high = name.partition("-")
        least, most = int(low.rstrip("+")), 10**9 if low.endswith("+") else int(high or low)
        return least <= max(width, height) <= most

    def ratio(edge: str) -> float:
        return int(edge.split(":")[0]) / int(edge.split(":")[1])

    def holds_aspect(name: str) -> bool:
        if name[0] in "<>":
            edge = ratio(name[2:])
            return width / height < edge if name[0] == "<" else width / height > edge
        low, high = map(ratio, name.split(" to "))
        is_above = width / height >= low if low < 1 else width / height > low
        return is_above and (width / height <= high if high > 1 else width / height < high)

    [side], [aspect] = filter(holds_side, SIDE_NAMES), filter(holds_aspect, ASPECT_NAMES)
    return side, aspect


def test_every_image_is_in_the_buckets_whose_names_describe_it():
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    edges = [1, 2, 3, 4, 5, 7, 8, 16, 255, 256, 32767, 32768, 65535]
    shapes = [
        (rng.choice([*edges, rng.randint(1, 70_000)]), rng.choice([*edges, rng.randint(1, 999)])) for _ in range(300)
    ]
    for width, height in shapes:
        counts = count_sizes([height], [width], 5)
        side, aspect = bucket(width, height)
        assert counts.by_longer_side[SIDE_NAMES.index(side)] == counts.by_aspect_ratio[ASPECT_NAMES.index(aspect)] == 1
        assert counts.num_images == sum(counts.by_aspect_ratio) == 1
        # A picture and the same one turned by 90 degrees are in mirrored buckets.
        assert count_sizes([width], [height], 5).by_aspect_ratio == counts.by_aspect_ratio[::-1]
    whole = ImageSizes(source=count_sizes([h for h, _ in shapes], [w for _, w in shapes], 300))
    cut = rng.randrange(300)
    parts = [
        ImageSizes(source=count_sizes([h for h, _ in part], [w for _, w in part], len(part)))
        for part in (shapes[:cut], shapes[cut:])
        if part
    ]
    assert add_sizes(parts) == whole


def test_images_of_unknown_size_are_left_out():
    assert count_sizes([0, 4], [0, 4], 9).num_images == 1
    assert add_sizes([]) == ImageSizes(source=SizeCounts(), stored=count_sizes([], [], 0))


@pytest.mark.parametrize("kernel", ["wheels", "auto"])
def test_the_size_before_is_that_of_the_whole_upright_source(kernel: str):
    ok, encoded = cv2.imencode(".jpg", np.zeros((300, 500, 3), np.uint8))
    assert ok
    options = NormalizeOptions(image_size=16, kernel=resolve_kernel(kernel))
    for orientation in range(1, 9):
        jpeg = with_orientation(encoded.tobytes(), orientation)
        sample = process_image(SourceImage("a.jpg", len(jpeg)), jpeg, options)
        assert isinstance(sample, ImageSample)
        # From 5 on, rows and columns are exchanged.
        shape = (300, 500) if orientation < 5 else (500, 300)
        assert (sample.source_height, sample.source_width, sample.source_bytes) == (*shape, len(jpeg))


def paint(file: Path, width: int, height: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(width * height).integers(0, 255, (height, width, 3), np.uint8)
    assert cv2.imwrite(str(file), pixels)


def grow(folder: Path, rng: random.Random, prefix: str, num_images: int) -> None:
    for number in range(num_images):
        paint(
            folder / "images" / f"class_{number % 2}" / f"{prefix}{number}.png", rng.randint(8, 90), rng.randint(8, 90)
        )


def change(folder: Path, rng: random.Random) -> None:
    files = sorted((folder / "images").rglob("*.png"))
    for file in files[:4]:
        file.unlink()
    paint(files[5], 77, 11)
    grow(folder, rng, "new", 3)


@pytest.mark.parametrize("mode", ["crop", "longer"])
def test_a_child_version_counts_what_a_full_build_does(mode: str, tmp_path: Path):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    grow(tmp_path, rng, "", 30)
    options = {"resize_mode": mode}
    first = build(tmp_path, **options).manifest.sizes
    assert first is not None and first.source.num_images == first.stored.num_images == 30
    assert first.source.num_bytes == sum(file.stat().st_size for file in (tmp_path / "images").rglob("*.png"))
    change(tmp_path, rng)
    child = build(tmp_path, **options).manifest
    assert (child.operation, child.sizes) == ("incremental", build(tmp_path, "whole", **options).manifest.sizes)
    verify_dataset(opened(tmp_path)).raise_if_failed()


_CONFIG = EtlConfig(image_size=16, encoding="png", unit_min_images=8, formats=("tfrecord",))


def test_added_removed_changed_and_relabelled_images_are_found_by_their_keys(tmp_path: Path):
    print(f"seed {_SEED}")
    images = tmp_path / "images"
    write_images(images, num_images=60)
    root = build_here(str(images), str(tmp_path / "dataset"), _CONFIG)
    first = open_dataset(root)

    rng = random.Random(_SEED)
    keys = sorted(str(path.relative_to(images)) for path in images.rglob("*.png"))
    rng.shuffle(keys)
    removed, changed, moved = set(keys[:3]), set(keys[3:8]), keys[8]
    for key in removed:
        (images / key).unlink()
    write_images(tmp_path / "others", num_images=60, seed=1)
    for key in changed:
        shutil.copy(tmp_path / "others" / key, images / key)
    # A class is a folder: an image in another class has another key.
    new_key = f"class_x/{Path(moved).name}"
    (images / new_key).parent.mkdir()
    (images / moved).rename(images / new_key)
    build_here(str(images), root, _CONFIG)
    second = open_dataset(root)

    changes = diff_versions(first, second)
    by_kind = {kind: {each.source for each in changes if each.kind == kind} for kind in ChangeKind}
    assert by_kind == {
        ChangeKind.ADDED: {new_key},
        ChangeKind.REMOVED: removed | {moved},
        ChangeKind.CHANGED: changed,
    }
    [added] = [each for each in changes if each.kind == ChangeKind.ADDED]
    assert added.before is None and added.after is not None and added.after.class_name == "class_x"
    counts = count_changes(changes)
    assert counts.total() == len(changes) == 10
    assert counts[ChangeKind.ADDED, RowLocation(added.after.split, "class_x")] == 1

    # The other way round, everything is the other way round; and a compaction changes no row.
    backwards = diff_versions(second, first)
    assert {each.source for each in backwards if each.kind == ChangeKind.REMOVED} == by_kind[ChangeKind.ADDED]
    compact_dataset(second, "compacting")
    assert not diff_versions(second, open_dataset(root))
    assert len(diff_versions(first, open_dataset(root))) == 10
