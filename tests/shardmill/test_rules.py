"""Rules: whatever a version claims is made again, and no claim makes a reader allocate more than its files hold."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import EtlConfig
from shardmill.checksummed import checksum_file
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.index import INDEX_SCHEMA, index_table
from shardmill.dataset.ledger import ledger_table
from shardmill.dataset.manifest import Manifest, encode_manifest
from shardmill.dataset.row_segments import put_segment, read_rows, read_segment
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import record_commit
from shardmill.errors import IntegrityError
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from shardmill.values import Rejection, RejectReason, ShardInfo
from tests.lab.datasets import build_here, make_dataset, write_images
from tests.processes import memory_below


def recommit(root: Path, manifest: Manifest) -> None:
    """Replace version 1 with all of its own digests right: as someone would who wants to be believed."""
    data = encode_manifest(manifest)
    (root / "manifests" / "00000001.json").write_bytes(data)
    record_commit(open_store(root), 1, data)


def with_index(root: Path, change: Callable[[ShardInfo], ShardInfo]) -> None:
    """Commit an index again in which each shard went through `change`."""
    dataset = open_dataset(str(root))
    segment = put_segment(dataset.store, "indexes", index_table([change(shard) for shard in dataset.shards]))
    recommit(root, dataset.manifest.model_copy(update={"index_segments": (segment,)}))


def claims(manifest: Manifest) -> dict[str, Manifest]:
    """The manifest with one thing that it claims changed, for each such thing."""
    counts, sums, train = manifest.counts, manifest.channel_sums, manifest.splits["train"]
    changed: dict[str, Manifest] = {}
    for name in ("listed", "accepted", "rejected", "duplicate_content", "conflicting_label", "leaked_content"):
        wrong = counts.model_copy(update={name: getattr(counts, name) + 1})
        changed[name] = manifest.model_copy(update={"counts": wrong})
    for name in ("by_reason", "by_split", "by_note"):
        wrong = counts.model_copy(update={name: {**getattr(counts, name), "tiny": 3}})
        changed[name] = manifest.model_copy(update={"counts": wrong})
    for name in ("num_rows", "num_chunks", "num_shards", "image_bytes"):
        wrong = train.model_copy(update={name: getattr(train, name) + 1})
        changed[f"train {name}"] = manifest.model_copy(update={"splits": {**manifest.splits, "train": wrong}})
    first, second, *rest = train.class_counts
    for name, value in (("class_counts", (first - 1, second + 1, *rest)), ("row_digest_sum", "1" * 64)):
        wrong = train.model_copy(update={name: value})
        changed[f"train {name}"] = manifest.model_copy(update={"splits": {**manifest.splits, "train": wrong}})
    for name in ("sums", "square_sums"):
        wrong = sums.model_copy(update={name: tuple(each + 1 for each in getattr(sums, name))})
        changed[name] = manifest.model_copy(update={"channel_sums": wrong})
    wrong = sums.model_copy(update={"num_pixels": sums.num_pixels + 1})
    changed["num_pixels"] = manifest.model_copy(update={"channel_sums": wrong})
    assert manifest.sizes is not None
    for name in ("source", "stored"):
        wrong = getattr(manifest.sizes, name).model_copy(update={"num_bytes": 1})
        changed[f"sizes {name}"] = manifest.model_copy(
            update={"sizes": manifest.sizes.model_copy(update={name: wrong})}
        )
    for name in ("content_digest", "layout_digest", "ledger_digest"):
        changed[name] = manifest.model_copy(update={name: "1" * 64})
    changed["class_names"] = manifest.model_copy(update={"class_names": manifest.class_names[::-1]})
    return changed


def test_every_claim_of_the_manifest_is_made_again(dataset_root: Path):
    manifest = open_dataset(str(dataset_root)).manifest
    for name, wrong in claims(manifest).items():
        recommit(dataset_root, wrong)
        report = verify_dataset(open_dataset(str(dataset_root)))
        assert report.problems, f"{name} may say anything"
        assert not any("cannot be checked" in check.problem for check in report.problems), (name, report.problems)
    recommit(dataset_root, manifest)
    verify_dataset(open_dataset(str(dataset_root)), deep=True).raise_if_failed()


def _balanced_sums(rows: list[dict]) -> None:
    rows[0]["channel_sums"][0] += 5
    rows[1]["channel_sums"][0] -= 5


def _sharper(rows: list[dict]) -> None:
    rows[0]["laplacian_square_sum"] += 1


def _another_hash(rows: list[dict]) -> None:
    rows[0]["difference_hash"] = 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [(_balanced_sums, "the channel sums"), (_sharper, "their sharpness"), (_another_hash, "their sharpness")],
)
def test_sums_that_only_the_pixels_contradict_are_found_by_deep(dataset_root: Path, change, problem: str):
    dataset = open_dataset(str(dataset_root))
    target = dataset.shards_of("train", "parquet")[0]
    table = read_rows(dataset.store, target, dataset.manifest.row_schema)
    rows = table.to_pylist()
    change(rows)
    file = put_segment(dataset.store, "rows/train", pa.Table.from_pylist(rows, schema=table.schema))
    with_index(
        dataset_root,
        lambda shard: replace(
            shard, rows_path=file.path, rows_bytes=file.size_bytes, rows_sha256=file.sha256
        ) if shard == target else shard,
    )  # fmt: skip
    dataset = open_dataset(str(dataset_root))
    assert not verify_dataset(dataset).problems
    with pytest.raises(IntegrityError, match=f"do not match {problem}"):
        verify_dataset(dataset, deep=True).raise_if_failed()


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
def test_whole_datasets_of_every_encoding_pass(encoding: str, tmp_path: Path):
    verify_dataset(open_dataset(make_dataset(tmp_path, encoding=encoding, num_images=40)), deep=True).raise_if_failed()


_HUGE = 1 << 50


def _grown(shard: ShardInfo, **first: int) -> ShardInfo:
    return replace(shard, chunks=(replace(shard.chunks[0], **first), *shard.chunks[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda shard: _grown(shard, num_bytes=_HUGE), lambda shard: _grown(shard, num_rows=_HUGE),
        lambda shard: _grown(shard, image_bytes=_HUGE), lambda shard: _grown(shard, start=-1),
        lambda shard: replace(shard, footer_bytes=_HUGE, size_bytes=shard.size_bytes + _HUGE - shard.footer_bytes),
        lambda shard: replace(shard, footer_start=_HUGE), lambda shard: replace(shard, size_bytes=_HUGE),
        lambda shard: replace(shard, num_rows=_HUGE),
    ],
)  # fmt: skip
def test_sizes_that_no_file_has_are_refused_before_anything_is_allocated(
    dataset_root: Path, change: Callable[[ShardInfo], ShardInfo]
):
    with_index(dataset_root, change)
    with pytest.raises(IntegrityError):
        verify_dataset(open_dataset(str(dataset_root))).raise_if_failed()
    with pytest.raises(IntegrityError):
        read_samples(open_dataset(str(dataset_root)), "train", 1000)


def test_a_row_segment_of_a_size_that_no_file_has_is_refused(dataset_root: Path):
    with_index(dataset_root, lambda shard: replace(shard, rows_bytes=_HUGE))
    with pytest.raises(IntegrityError, match=f"expected {_HUGE}"):
        verify_dataset(open_dataset(str(dataset_root))).raise_if_failed()


def test_an_index_that_would_fill_the_memory_is_refused(dataset_root: Path):
    dataset = open_dataset(str(dataset_root))
    num_rows = 1_000_000
    # Less than half a byte a row on disk: every column is one value, millions of times.
    value = {field.name: 1 if pa.types.is_integer(field.type) else "x" * 500 for field in INDEX_SCHEMA}
    columns = [
        pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array([value[field.name]])).cast(
            pa.dictionary(pa.int32(), field.type)
        )
        if pa.types.is_string(field.type)
        else pa.array([1] * num_rows, field.type)
        for field in INDEX_SCHEMA
    ]
    out = io.BytesIO()
    pq.write_table(pa.table(columns, names=INDEX_SCHEMA.names), out, compression="zstd", store_schema=False)
    assert len(out.getvalue()) < 500_000
    dataset.store.put("indexes/bomb.parquet", out.getvalue())
    bomb = checksum_file("indexes/bomb.parquet", out.getvalue())
    for num_chunks in (dataset.manifest.splits["train"].num_chunks, num_rows):
        splits = {
            name: split.model_copy(update={"num_chunks": num_chunks}) for name, split in dataset.manifest.splits.items()
        }
        recommit(dataset_root, dataset.manifest.model_copy(update={"index_segments": (bomb,), "splits": splits}))
        before_bytes = pa.total_allocated_bytes()
        with memory_below(100_000_000), pytest.raises(IntegrityError, match="1000000 rows"):
            _ = open_dataset(str(dataset_root)).shards
        assert pa.total_allocated_bytes() - before_bytes < 50_000_000


def test_a_text_that_is_small_only_while_it_is_compressed_is_refused(dataset_root: Path):
    table = pa.table([pa.array(["x" * 1_000_000] * 100)], names=["text"])
    store = open_store(dataset_root)
    for use_dictionary in (True, False):
        out = io.BytesIO()
        pq.write_table(table, out, compression="zstd", use_dictionary=use_dictionary)
        store.put("bomb.parquet", out.getvalue())
        with pytest.raises(IntegrityError, match="would grow from .* bytes in memory"):
            read_segment(store, checksum_file("bomb.parquet", out.getvalue()), table.schema, 100)


def test_a_ledger_of_nonsense_is_a_finding_and_no_traceback(dataset_root: Path):
    dataset = open_dataset(str(dataset_root))
    rejection = Rejection("a.png", RejectReason.TRUNCATED, "cut")
    table = ledger_table([rejection]).set_column(2, "reason", pa.array(["no such reason"]))
    file = put_segment(dataset.store, "rejects", table)
    counts = dataset.manifest.counts.model_copy(update={"rejected": 1})
    recommit(dataset_root, dataset.manifest.model_copy(update={"ledger_segments": (file,), "counts": counts}))
    report = verify_dataset(open_dataset(str(dataset_root)), deep=True)
    assert any("a row that is not a rejection" in check.problem for check in report.problems)


def test_a_manifest_that_was_lost_is_named_and_its_number_is_not_given_away(dataset_root: Path, tmp_path: Path):
    config = EtlConfig(image_size=8, formats=("parquet",), unit_min_images=40)
    write_images(tmp_path / "images", num_images=40)
    build_here(str(tmp_path / "images"), str(dataset_root), config)
    newest = dataset_root / "manifests" / "00000002.json"
    data = newest.read_bytes()
    newest.unlink()
    for attempt in (
        lambda: open_dataset(str(dataset_root)),
        lambda: open_dataset(f"{dataset_root}@2"),
        lambda: build_here(str(tmp_path / "images"), str(dataset_root), config),
    ):
        with pytest.raises(IntegrityError, match=r"00000002.json is missing; version 2 was committed"):
            attempt()
    first = verify_dataset(open_dataset(f"{dataset_root}@1"))
    assert [check.problem for check in first.problems] == [
        f"{newest} is missing; version 2 was committed; manifests are never deleted"
    ]
    newest.write_bytes(data)
    verify_dataset(open_dataset(str(dataset_root)), deep=True).raise_if_failed()
    # An older one is missed just as much.
    (dataset_root / "manifests" / "00000001.json").unlink()
    with pytest.raises(IntegrityError, match=r"00000001.json is missing"):
        open_dataset(str(dataset_root))
