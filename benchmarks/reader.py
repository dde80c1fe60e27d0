"""Measures what the reader costs over bare decoding: one epoch of stored images, two threads each, alternating runs."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from etl.commit import commit_results
from etl.config import EtlConfig, EtlTree, SourceConfig, SplitFractions
from etl.plan import plan_build
from etl.units.finished import Finished
from etl.units.write_unit import write_unit
from shardmill.augment.options import AugmentOptions
from shardmill.dataset.chunks import ChunkFetcher
from shardmill.dataset.open import open_dataset
from shardmill.formats.encodings import decode_stored
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.reader import ReaderOptions, read_batches

_NUM_THREADS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", required=True, type=Path)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fractions = SplitFractions(train=1, validation=0, test=0)
        formats = ("parquet", "tfrecord")
        etl = EtlConfig(image_size=arguments.image_size, split_fractions=fractions, formats=formats)
        source, target = SourceConfig(uri=str(arguments.images)), DatasetConfig(uri=folder)
        plan = plan_build(EtlTree(source=source, dataset=target, etl=etl), run_id="benchmark")
        commit_results(plan, Finished(plan.listing, [write_unit(unit, plan.task) for unit in plan.units]))
        dataset = open_dataset(folder)
        spec = dataset.plan_spec("train", seed=0, global_batch_size=64, num_streams=8)
        stored = _stored_images(folder)
        options = dataset.manifest.normalize

        def read_epoch(epoch: int, format_name: str) -> float:
            started = time.perf_counter()
            reader = ReaderOptions(format=format_name, num_threads=_NUM_THREADS)
            plan = dataset.plan_epoch(spec, epoch)
            with read_batches(dataset, plan, options=reader, augment=AugmentOptions(random_flip=True)) as batches:
                num_rows = sum(int(batch.weights_N.sum()) for batch in batches)
            assert num_rows == len(stored)
            return time.perf_counter() - started

        def decode_all() -> float:
            started = time.perf_counter()
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                list(pool.map(lambda data: decode_stored(data, options.encoding, options.image_shape_HWC), stored))
            return time.perf_counter() - started

        rounds = [
            (read_epoch(epoch, "parquet"), read_epoch(epoch, "tfrecord"), decode_all())
            for epoch in range(arguments.rounds)
        ]
    print(
        f"{len(stored)} images of {arguments.image_size} px, {arguments.rounds} paired rounds, {_NUM_THREADS} threads"
    )
    for place, name in enumerate(("parquet", "tfrecord", "bare decode")):
        rate = len(stored) / statistics.median(times[place] for times in rounds)
        share = statistics.median(times[2] / times[place] for times in rounds)
        print(f"{name:12s} {rate:7.0f} images/s (median)   {share:.0%} of the limit")


def _stored_images(folder: str) -> list[bytes]:
    dataset = open_dataset(folder)
    fetcher = ChunkFetcher(dataset.store, dataset.index("train"), dataset.manifest.row_schema)
    chunks = [fetcher.read_chunk(chunk) for chunk in range(fetcher.index.num_chunks)]
    return [bytes(image) for chunk in chunks for image in chunk.images]


if __name__ == "__main__":
    main()
