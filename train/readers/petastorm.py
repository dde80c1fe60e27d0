"""Petastorm's `make_batch_reader` as a reader, for teams that standardise on it; enforces its limits.

It is given the version's own files, never the folder: that holds other versions too, and only in a folder does it
look for a `_common_metadata` file, which it unpickles. A rank gets every n-th row group. All ranks do as many steps as
the one with the fewest rows can fill; the rest of the epoch is dropped. Nothing is read ahead, no byte is verified.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.augment.pixels import augment
from shardmill.dataset.dataset import Dataset
from shardmill.epoch_plan import streams_of_rank
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats.encodings import decode_stored
from shardmill.loader.reader import OneProcess, ReaderSeconds
from shardmill.values import Batch
from train.api import Epoch
from train.contracts.mesh import DataIndex, Mesh

if TYPE_CHECKING:
    from train.config import TrainConfig
from train.labels import LabelSpec

COLUMNS = ["image", "label", "sample_id"]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of an epoch that one rank reads."""

    num_rows: int
    batch_size: int


def shares_of_ranks(dataset: Dataset, config: TrainConfig, world_size: int) -> list[Share]:
    """Shares by rank: row group i belongs to rank i mod n, as Petastorm divides files in order of their names."""
    shards = sorted(dataset.shards_of("train", "parquet"), key=lambda shard: shard.path)
    rows = [chunk.num_rows for shard in shards for chunk in shard.chunks]
    rows_per_stream = config.global_batch_size // config.num_streams
    return [
        Share(sum(rows[rank::world_size]), len(streams_of_rank(rank, world_size, config.num_streams)) * rows_per_stream)
        for rank in range(world_size)
    ]


class PetastormEpoch:
    """`Epoch` of as many whole global batches as the rank with the fewest rows can fill."""

    def __init__(self, dataset: Dataset, config: TrainConfig, number: int, data: DataIndex) -> None:
        shares = shares_of_ranks(dataset, config, data.count)
        self.num_steps = min(share.num_rows // share.batch_size for share in shares)
        self.num_rows = self.num_steps * config.global_batch_size
        self._arguments = (dataset, config, number, data)
        self._batch_size = shares[data.index].batch_size

    def num_rows_of_step(self, step: int) -> int:
        return self.num_rows // self.num_steps

    def read(self, first_step: int) -> PetastormBatches:
        assert first_step == 0, "its order cannot be resumed in the middle"
        return PetastormBatches(*self._arguments, self.num_steps, self._batch_size)


class PetastormBatches:
    """`Batches`: row groups in an order by seed and epoch, their rows shuffled inside of them."""

    def __init__(
        self, dataset: Dataset, config: TrainConfig, number: int, data: DataIndex, num_steps: int, batch_size: int
    ) -> None:
        self._dataset, self._config, self._epoch, self._data = dataset, config, number, data
        self._num_steps, self._batch_size = num_steps, batch_size
        self._pool = ThreadPoolExecutor(config.reading.threads, "shardmill-decode")
        self._seconds = ReaderSeconds()
        self._process = OneProcess()
        self._reader: Any = None

    def __enter__(self) -> PetastormBatches:
        self._reader = _open(self._dataset, [self._config.seed, self._epoch], self._data)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.is_another:
            return
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._reader.stop()
        self._reader.join()

    def __iter__(self) -> Iterator[Batch]:
        rows = self._rows()
        for step in range(self._num_steps):
            self._process.check()
            started_seconds = time.perf_counter()
            taken = [row for _, row in zip(range(self._batch_size), rows, strict=False)]
            if len(taken) < self._batch_size:
                raise IntegrityError(
                    f"Petastorm gave rank {self._data.index} too few rows for step {step} of epoch {self._epoch}",
                    f"expected {self._num_steps} batches of {self._batch_size}, as the dataset's index says",
                    "`shardmill verify --deep` looks for damage; or set train.reader = 'shardmill'",
                )
            fetched_seconds = time.perf_counter()
            batch = self._batch(step, taken)
            self._seconds = replace(
                self._seconds,
                fetch=self._seconds.fetch + fetched_seconds - started_seconds,
                decode=self._seconds.decode + time.perf_counter() - fetched_seconds,
            )
            yield batch

    def take_seconds(self) -> ReaderSeconds:
        taken, self._seconds = self._seconds, ReaderSeconds()
        return taken

    def _rows(self) -> Iterator[tuple[bytes, int, int]]:
        for number, group in enumerate(self._reader):
            key = [self._config.seed, self._epoch, self._data.index, number]
            for row in np.random.default_rng(key).permutation(len(group.sample_id)).tolist():
                yield bytes(group.image[row]), int(group.label[row]), int(group.sample_id[row])

    def _batch(self, step: int, rows: list[tuple[bytes, int, int]]) -> Batch:
        return Batch(
            images_NHWC=np.stack(list(self._pool.map(self._image_HWC, rows))),
            labels_N=np.array([label for _, label, _ in rows], dtype=np.int64),
            weights_N=np.ones(len(rows), dtype=np.float32),
            sample_ids_N=np.array([sample_id for *_, sample_id in rows], dtype=np.int64),
            epoch=self._epoch,
            step=step,
        )

    def _image_HWC(self, row: tuple[bytes, int, int]) -> np.ndarray:
        stored, _, sample_id = row
        options = self._dataset.manifest.normalize
        if options.encoding == "raw":
            # NumPy has stripped trailing zero bytes; the size is known, so nothing is lost.
            height, width, channels = options.image_shape_HWC
            stored = stored.ljust(height * width * channels, b"\0")
        image_HWC = decode_stored(stored, options.encoding, options.image_shape_HWC)
        config = self._config
        return augment(image_HWC, config.augmentation, seed=config.seed, epoch=self._epoch, sample_id=sample_id)


class Petastorm:
    """`TrainReader`."""

    is_exact = False
    follows_plan = False

    def check(self, config: TrainConfig, dataset: Dataset) -> None:
        given = "train.reader = 'petastorm'"
        fix = "or set train.reader = 'shardmill'"
        if "://" in dataset.store.uri:
            raise UsageError(f"{given} on {dataset.store.uri}", "it reads local files only", f"copy the version, {fix}")
        if config.format not in ("auto", "parquet") or "parquet" not in dataset.manifest.formats:
            formats = ", ".join(dataset.manifest.formats)
            raise UsageError(
                f"{given} with train.format = {config.format!r} on a dataset of {formats}",
                "it reads Parquet only",
                f"set train.format = 'parquet' and build the dataset with etl.formats = ['parquet'], {fix}",
            )
        if config.augment.mixes:
            raise UsageError(
                f"{given} with mixup or cutmix", "it augments each image by itself", f"set both to 0, {fix}"
            )
        labels = LabelSpec.of(dataset.manifest)
        if labels.kind != "class":
            raise UsageError(f"{given} on {labels}", "it supports one class per image", f"build such a dataset, {fix}")
        shares = shares_of_ranks(dataset, config, config.num_workers)
        for rank, share in enumerate(shares):
            if share.num_rows < share.batch_size:
                num_groups = dataset.index("train", "parquet").num_chunks
                raise UsageError(
                    f"{given} at train.num_workers = {config.num_workers}: of {num_groups} row groups rank {rank} gets "
                    f"{share.num_rows} rows",
                    f"expected at least its {share.batch_size} of train.global_batch_size = {config.global_batch_size}",
                    f"lower train.num_workers or train.global_batch_size, {fix}",
                )

    def limits(self, config: TrainConfig, dataset: Dataset) -> str:
        epoch = PetastormEpoch(dataset, config, 0, Mesh.of(config).data_index(0))
        num_rows = dataset.manifest.splits["train"].num_rows
        return (
            f"Petastorm reads {epoch.num_rows} of {num_rows} samples an epoch, in an order that depends on the number "
            "of ranks, and verifies none; an interrupted training resumes at the start of its epoch"
        )

    def epochs(self, dataset: Dataset, config: TrainConfig, data: DataIndex) -> Callable[[int], Epoch]:
        return lambda number: PetastormEpoch(dataset, config, number, data)


def _open(dataset: Dataset, key: list[int], data: DataIndex) -> Any:
    from petastorm import make_batch_reader

    urls = sorted(Path(uri.removeprefix("file://")).as_uri() for uri in dataset.files("train", "parquet"))
    with warnings.catch_warnings():
        # Of pyarrow, about the parts of it that Petastorm uses.
        warnings.simplefilter("ignore")
        return make_batch_reader(
            urls,
            schema_fields=COLUMNS,
            num_epochs=1,
            # Its thread and process pools may end an epoch before it began: see docs/LOG.md.
            reader_pool_type="dummy",
            shuffle_row_groups=True,
            seed=int(np.random.SeedSequence(key).generate_state(1)[0]),
            cur_shard=data.index,
            shard_count=data.count,
        )


PETASTORM = Petastorm()
