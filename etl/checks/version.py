"""Warns about a version once its images have been read, one sentence for each problem."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import pyarrow as pa

from shardmill.data_quality.quality import find_faults
from shardmill.data_quality.row_looks import LOOKED_AT, looks_of_rows
from shardmill.dataset.duplicates import DuplicateExamples, find_examples
from shardmill.dataset.index import read_shards
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.row_segments import MAX_KEPT_ROWS, RowReader
from shardmill.errors import ShardmillError
from shardmill.images.annotations import DROPPED_NOTE, OUTSIDE_NOTE
from shardmill.options import IMAGE_SIZES
from shardmill.storage import Store
from shardmill.words import counted, name_some, printable

# A build of few images makes up to 64 in each of three splits.
_MANY_SHARDS = 256
FEW_IN_SPLIT = 30
"""Fewer images than this say little about a model, whatever their accuracy is: one of 30 is more than 3 %."""


def version_warnings(store: Store, manifest: Manifest) -> Iterator[str]:
    """One sentence for each thing that looks wrong once the images have been read."""
    counts = manifest.counts
    if manifest.predicted_by is not None:
        yield from lost_by_decoding(counts.by_note)
        return
    yield from _untested_classes(manifest)
    yield from lost_by_decoding(counts.by_note)
    yield from _lost_boxes(manifest)
    yield from _enlarged(manifest)
    yield from _many_small_shards(store, manifest)
    if not counts.conflicting_label and not counts.leaked_content:
        return
    examples = DuplicateExamples()
    # The version is committed: a warning without names is better than a failed build; `verify` reports damage.
    with suppress(ShardmillError, FileNotFoundError):
        shards = [shard for shard in read_shards(store, manifest) if shard.format == manifest.formats[0]]
        examples = find_examples(store, shards)
    if counts.conflicting_label:
        yield (
            f"{counts.conflicting_label} accepted images have the same bytes as one of another class"
            f"{_such_as(map(printable, examples.conflicting))}; a model cannot learn both: remove them from one of the "
            "classes"
        )
    if counts.leaked_content:
        named = (f"{printable(source)} ({split})" for source, split in examples.leaked)
        yield (
            f"{counts.leaked_content} accepted images have the same bytes as one in another split{_such_as(named)}; a "
            "model would be tested on images that it was trained on: remove them from one of the splits, or set "
            'etl.duplicates = "drop"'
        )


def _untested_classes(manifest: Manifest) -> Iterator[str]:
    """Of splits that are too small for the warnings before the build, which estimate."""
    empty = set(manifest.empty_classes)
    for name, split in manifest.splits.items():
        pairs = zip(manifest.class_names, split.class_counts, strict=True)
        absent = tuple(class_name for class_name, here in pairs if not here and class_name not in empty)
        if absent and name != "train" and split.num_rows < FEW_IN_SPLIT:
            yield (
                f"the split {name} has no image of {len(absent)} of {len(manifest.class_names)} classes "
                f"({name_some(absent)}): add images, or set etl.stratified_splits = true"
            )


def lost_by_decoding(by_note: Mapping[str, int]) -> Iterator[str]:
    """Describe the notes on images that lost information in decoding."""
    num_16_bit = sum(times for note, times in by_note.items() if note.startswith("scaled_"))
    if num_dark := by_note.get("low_range_16_bit", 0):
        yield (
            f"{num_dark} of {num_16_bit} accepted 16-bit images use at most 14 of their bits, and are dark: if they "
            "come from 10, 12 or 14 bits, set etl.significant_bits to that"
        )
    if num_cut := by_note.get("extra_bands_dropped", 0):
        yield f"{num_cut} accepted TIFF images have bands in addition to their colours; these were dropped"
    if num_previews := by_note.get("preview_only", 0):
        yield f"{num_previews} accepted TIFF images are marked as previews of photos that are not in the file"
    if num_small := by_note.get("larger_page_behind", 0):
        yield (
            f"{num_small} accepted TIFF images have a larger page of the same shape after the page that was used: if "
            "the first page is only a preview, save the larger one as a file of its own"
        )


def _lost_boxes(manifest: Manifest) -> Iterator[str]:
    num_boxes, num_images = _count(manifest, OUTSIDE_NOTE)
    if num_boxes:
        yield (
            f"{num_boxes} boxes of {num_images} images end outside of their images: if these are many, check "
            "source.boxes.format (the bbox of COCO is x, y, width and height), and in which size the boxes were drawn"
        )
    num_boxes, num_images = _count(manifest, DROPPED_NOTE)
    if num_boxes:
        cuts = manifest.normalize.resize_mode == "crop"
        advice = ": etl.resize_mode pad or stretch keeps all of an image" if cuts else ""
        where = "what is kept of the image" if cuts else "the image"
        yield f"{num_boxes} boxes of {num_images} images lie outside of {where}, or are empty, and were dropped{advice}"


def _count(manifest: Manifest, note: str) -> tuple[int, int]:
    """Boxes and images of a note that ends with the number of an image's boxes."""
    found = {each: times for each, times in manifest.counts.by_note.items() if each.startswith(note)}
    return sum(int(each.removeprefix(note)) * times for each, times in found.items()), sum(found.values())


def _enlarged(manifest: Manifest) -> Iterator[str]:
    """Most images, by their longer sides, which are counted between powers of two."""
    options, sizes = manifest.normalize, manifest.sizes
    if options.resize_mode == "none" or not options.enlarges or options.image_size <= IMAGE_SIZES[-1]:
        return
    num_sides = options.image_size.bit_length() - 1
    num_smaller, num_known = sum(sizes.source.by_longer_side[:num_sides]), sum(sizes.source.by_longer_side)
    if 2 * num_smaller > num_known:
        yield (
            f"{num_smaller} of {num_known} images have a longer side of less than {1 << num_sides} pixels, and were "
            f"enlarged to etl.image_size = {options.image_size}: training takes longer without more detail"
        )


def _many_small_shards(store: Store, manifest: Manifest) -> Iterator[str]:
    """Of a version that later runs have added to: they read something of every shard."""
    splits, max_bytes = manifest.splits.values(), int(manifest.config["shard_max_bytes"])
    num_shards = sum(each.num_shards for each in splits)
    num_full = sum(-(-each.image_bytes // max_bytes) for each in splits)
    if manifest.operation in ("append", "incremental") and num_shards >= max(_MANY_SHARDS, 4 * num_full):
        yield (
            f"the version has {num_shards:,} shards, and its images fill {num_full:,}: each later run reads a file for "
            f"every shard; `shardmill compact {shlex.quote(store.uri)}` merges small ones"
        )


def _such_as(names: Iterable[str]) -> str:
    listed = ", ".join(names)
    return f", such as {listed}" if listed else ""


def fault_warnings(reader: RowReader, manifest: Manifest) -> Iterator[str]:
    """One sentence or none, from the row segments alone."""
    if manifest.predicted_by is not None or not 0 < manifest.counts.accepted <= MAX_KEPT_ROWS:
        return
    of_splits: dict[str, list[pa.Table]] = {split: [] for split in manifest.splits}
    try:
        shards = [each for each in read_shards(reader.store, manifest) if each.format == manifest.formats[0]]
        for shard, rows in zip(shards, reader.read_each(shards, LOOKED_AT), strict=True):
            of_splits[shard.split].append(rows)
    except (ShardmillError, FileNotFoundError):
        # The version is committed; `verify` reports damage.
        return
    found = find_faults(looks_of_rows(manifest, [pa.concat_tables(parts) for parts in of_splits.values() if parts]))
    sentences = [each.words for each in found.telltales]
    if found.suspects:
        num_images = len({(each.split, each.row_in_split) for each in found.suspects})
        by_fault = Counter(each.fault for each in found.suspects)
        named = ", ".join(f"{times:,} {fault.look}" for fault, times in by_fault.items())
        sentences.append(f"{counted(num_images, 'accepted image')} may be faulty: {named}")
    if sentences:
        place = shlex.quote(f"{reader.store.uri}@{manifest.version}")
        yield f"{'; '.join(sentences)}; `shardmill inspect {place} --quality` shows them"
