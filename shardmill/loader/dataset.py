"""The dataset version that `shardmill.open_dataset` returns, with its loaders."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Required, TypedDict, Unpack, cast

import numpy as np

from shardmill.augment.mixing import check_mixing, check_streams
from shardmill.augment.options import augment_options
from shardmill.dataset.chunk_cache import open_caches
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.dataset import open_dataset as open_version
from shardmill.dataset.versions import split_version
from shardmill.epoch_plan import WINDOW_BUDGET_BYTES, num_streams_for, streams_of_rank, window_bytes_within
from shardmill.errors import UsageError
from shardmill.loader.annotations import check_annotations, delivered
from shardmill.loader.batch import BatchDevice, InMemory, as_arrays
from shardmill.loader.jax import DevicePlacement
from shardmill.loader.loader import Loader, whole_number
from shardmill.loader.metadata import check_names, read_metadata, require_pandas
from shardmill.loader.pictures import contact_sheet
from shardmill.loader.ranks import Ranks, find_ranks
from shardmill.loader.row_source import ReaderOptions, RowOptions
from shardmill.loader.samples import Samples
from shardmill.loader.selection import ONCE, Sample, mix_datasets, select_rows
from shardmill.loader.torch import Layout, as_tensors, batch_device
from shardmill.loader.transform import HandOver, check_transform
from shardmill.registry import install_hint
from shardmill.typed_columns import label_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import jax
    import pandas as pd
    import pyarrow as pa
    import torch
    from PIL.Image import Image
    from pyarrow.compute import Expression

    from shardmill.augment.options import AugmentOptions, Preset
    from shardmill.epoch_plan import PlanSpec
    from shardmill.loader.batch import LoaderBatch
    from shardmill.loader.selection import Mix
    from shardmill.loader.transform import SampleTransform, Transform
    from shardmill.values import Batch, DatasetPin


def check_same_plan(ranks: Ranks, spec: PlanSpec, pins: Mapping[DatasetPin, bool]) -> None:
    """Compare the plans through the process group, if there is one; every process of it makes the loader then, those
    that read the same rows, too.

    `pins`: the datasets, each with whether it was opened as `URI@N`. Without a group, all must be: each rank has looked
    up a latest version on its own.
    Ranks that were passed to the loader are not checked. Raises UsageError, on every rank.
    """
    if ranks.are_given or (ranks.world_size == 1 and ranks.gather is None):
        return
    versions = [f"{pin.uri}@{pin.version}" for pin in pins]
    if ranks.gather is None:
        for (pin, names_version), version in zip(pins.items(), versions, strict=True):
            if names_version:
                continue
            raise UsageError(
                f"{pin.uri} without a version, on rank {ranks.rank} of {ranks.world_size}",
                "expected the same version on every rank, and each would look up the latest one for itself",
                f"open {version}, or pass rank and world_size, or initialise the process group before",
            )
        return
    mine = (
        f"{', '.join(versions)}, split {spec.split!r}, seed {spec.seed}, global_batch_size {spec.global_batch_size}, "
        f"num_streams {spec.num_streams}, plan {spec.fingerprint[:8]}"
    )
    plans = ranks.gather(mine)
    other = next((rank for rank, plan in enumerate(plans) if plan != plans[0]), None)
    if other is not None:
        raise UsageError(
            f"the ranks have different plans: rank 0 {plans[0]}; rank {other} {plans[other]}",
            "expected the same dataset version and the same arguments on every rank",
            f"open {next(iter(pins)).uri}@N; for a loader on one rank only, pass rank = 0 and world_size = 1, or to "
            "jax_loader a sharding over that rank's devices",
        )


_LEAST = {"global_batch_size": 1, "num_threads": 1, "num_streams": 1, "world_size": 1, "cache_limit_bytes": 1}
_WHOLE = ("global_batch_size", "num_threads", "seed", "num_streams", "rank", "world_size", "cache_limit_bytes")


def require_framework(loader: str, framework: str, package: str) -> None:
    """Raises UsageError if `package` cannot be imported: before the first batch, which a thread reads."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise UsageError(f"{loader} needs {framework}: {error}", "not installed here", install_hint(package)) from None


def _check_known(given: Collection[str], known: Collection[str]) -> None:
    """Raises UsageError, with the nearest name, for an argument that no loader has."""
    if unknown := sorted(set(given).difference(known)):
        if unknown == ["epoch"]:
            raise UsageError("a loader with epoch", "expected it of `batches` alone", "call loader.seek(epoch)")
        near = [each for name in unknown for each in difflib.get_close_matches(name, known, n=1)]
        raise UsageError(
            f"a loader with {', '.join(unknown)}",
            f"expected some of {', '.join(known)}",
            f"did you mean {' and '.join(near)}?" if near else "correct the name of the argument",
        )


def checked(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Raises UsageError for an argument that no loader has, for what is no whole number, for a batch or threads below
    1, and for a choice but True and False."""
    _check_known(given, known)
    if given.get("global_batch_size") is None:
        raise UsageError(
            "a loader without global_batch_size", "expected the rows of a step, over all ranks", "pass, for example, 64"
        )
    whole = dict(given)
    for name in _WHOLE:
        if whole.get(name) is not None:
            whole[name] = whole_number(name, whole[name], least=_LEAST.get(name))
    for name in ("shuffle", "per_sample"):
        # "no" would count as True.
        if not isinstance(whole.get(name, True), bool | np.bool_):
            raise UsageError(f"{name} = {whole[name]!r}", "expected True or False", f"leave {name} out, for example")
    return whole


class Reading(TypedDict, total=False):
    """The keyword arguments of every loader."""

    global_batch_size: Required[int]
    """Samples of a step over all ranks; a rank gets its share."""
    seed: int
    """Decides the order and the augmentation; 0 if it is left out."""
    num_streams: int | None
    """The largest world size that may share these epochs; it decides their order, too. If it is left out: the smallest
    divisor of the batch that is at least 8 and the world size."""
    rank: int | None
    world_size: int | None
    """Taken from the environment if they are left out (`shardmill.loader.ranks`)."""
    format: str
    """`parquet` or `tfrecord`; by default Parquet if the dataset has it."""
    num_threads: int
    """Number of threads that read, verify and decode; 2 by default. It changes no batch."""
    shuffle: bool
    """False: each stream in stored order."""
    augment: AugmentOptions | Preset | None
    """Random changes of the images, or a preset of them, "imagenet" or "cifar"; none by default. Mixup and cutmix make
    labels of classes shares: float32, shape (N, classes)."""
    cache_dir: str | Path | None
    """Folder on a local disk where chunks of a remote dataset are kept for later epochs, loaders and processes."""
    cache_limit_bytes: int | None
    """Bytes that this folder may take, at least one shuffle window; by default half of what the disk has free."""
    columns: Sequence[str] | None
    """The extra columns that batches have; all by default."""
    where: str | Expression | None
    """Only rows for which this is true: `"label in (1, 2) and caption is not None"`, in Python's syntax, or a pyarrow
    expression, over the columns of `dataset.metadata`."""
    sample: Sample
    """How often an epoch uses each row: `"once"`; `"balanced"`, every class as often as the largest one; a number for
    some classes, `{"rare": 5, "common": 0.5}`; or a metadata column of such numbers. In whole repeats, always the same
    ones (`shardmill.loader.selection`)."""
    mix: Mix | None
    """Other datasets whose rows come into the same epochs: `[(dataset, amount), ...]`. An amount is a share of an
    epoch's rows (0.3; this dataset has the rest, all of its rows), `("repeat", times)` or `("choose", rows)`. `where`
    and `sample` hold for each dataset. The extra column `dataset` numbers the dataset of each row, 0 for this one
    (`shardmill.loader.selection`)."""
    transform: Transform | SampleTransform | None
    """`f(batch, rng)` in the loader's threads, on batches as the loader hands them out -> the new batch, or a dict of
    what is new in it. The NumPy generator is the same for the same seed, epoch, step and rank."""
    per_sample: bool
    """True: `transform` is `f(sample, rng)` -> the new image, or a dict of what is new in the sample. The generator is
    the same for the same seed, epoch, sample and use of it, at any world size (`shardmill.loader.transform`)."""


class LoadableDataset(Dataset):
    """One version of a dataset, to be read by anyone's training loop. All loaders take the keywords of `Reading`.

    They raise UsageError for a split, format, batch or world size that cannot be.
    """

    names_version = True
    """Whether it was opened as `URI@N`, and not at its latest version."""

    def batches(self, split: str, *, epoch: int = 0, **reading: Unpack[Reading]) -> Loader[np.ndarray]:
        """One rank's batches of NumPy arrays, images NHWC. Iterate it once for `epoch`, again for the next ones."""
        loader = self._loader(split, as_arrays, reading)
        if epoch != 0:
            loader.seek(epoch)
        return loader

    def torch_loader(
        self, split: str, *, layout: Layout = "NCHW", device: Any = None, **reading: Unpack[Reading]
    ) -> Loader[torch.Tensor]:
        """One rank's batches of CPU tensors that share the memory of what was read, or of tensors on `device`.

        `layout`: "NCHW", as a view in channels-last memory format, or "NHWC". `device`: for example "cuda"; batches are
        copied to it once, from pinned memory, on a stream of their own, behind a transform.
        """
        if layout not in ("NCHW", "NHWC"):
            raise UsageError(f"layout = {layout!r}", "expected 'NCHW' or 'NHWC'", "omit it for 'NCHW'")
        require_framework("a torch_loader", "PyTorch", "torch")
        return self._loader(split, partial(as_tensors, layout=layout), reading, batch_device(device))

    def tf_dataset(self, split: str, *, annotations: bool = False, **reading: Unpack[Reading]) -> Any:
        """A `tf.data.Dataset` of one rank's (images NHWC, labels, weights), for `keras.Model.fit`.

        `annotations`: in place of labels a dict of `labels`, of `boxes` and `box_labels` as `tf.RaggedTensor`, and of
        `mask`, those that the dataset has. Each iteration is the next epoch, counted from 0.
        """
        from shardmill.loader.tensorflow import TfTypes, as_tf_dataset

        require_framework("a tf_dataset", "TensorFlow", "tensorflow")
        schema, augment = self.manifest.row_schema, augment_options(reading.get("augment"))
        found = delivered(schema, reading.get("columns")) if annotations else ()
        if annotations and not found:
            raise UsageError(
                f"annotations = True, but batches of {self.pin.uri}@{self.pin.version} have neither boxes nor masks",
                "expected a dataset with a column boxes or mask, which columns does not leave out",
                "omit annotations for (images, labels, weights)",
            )
        if not annotations and reading.get("transform") is None:
            # Nobody sees them.
            reading["columns"] = reading.get("columns") or []
        num_classes = len(schema.class_names)
        types = TfTypes(
            augment.shape_of(self.manifest.normalize.image_shape_HWC),
            (num_classes,) if augment.mixes else label_shape(schema.label_type, num_classes),
            is_class=schema.has_class and not augment.mixes,
            annotations=found,
            has_box_labels=schema.has_box_labels,
        )
        return as_tf_dataset(self._loader(split, as_arrays, reading), types)

    def jax_loader(self, split: str, *, sharding: Any = None, **reading: Unpack[Reading]) -> Loader[jax.Array]:
        """Batches of global `jax.Array`s, images NHWC, labels int32; `sample_ids` and extra columns are those of this
        process, as NumPy has them.

        `sharding`: how the batch axis lies on the devices, over all of them by default. It decides which rows a process
        reads, in place of `rank` and `world_size`. A transform gets this process's NumPy batch, before it is placed.
        """
        if reading.get("rank") is not None or reading.get("world_size") is not None:
            raise UsageError("a jax_loader with rank or world_size", "expected neither", "the sharding says it")
        reading = cast("Reading", checked(reading, Reading.__annotations__))
        placement = DevicePlacement.of(sharding, reading["global_batch_size"])
        reading["num_streams"] = placement.num_streams(reading.get("num_streams"))
        return self._loader(split, as_arrays, reading, placement, placement.ranks)

    def samples(self, split: str, *, format: str = "auto") -> Samples:
        """The verified, decoded rows by their number in stored order: `samples[3]`, `samples[[3, 7]]`, `len(samples)`.

        A map-style dataset for PyTorch, too. The order is that of `metadata` and `to_pandas`.
        """
        return Samples(self, split, format)

    def metadata(self, split: str, columns: Collection[str] | None = None) -> pa.Table:
        """An Arrow table of every column but the pixels, one row per sample in stored order; no shard is read.

        Raises UsageError for a column that the dataset does not have.
        """
        return read_metadata(self, split, columns)

    def to_pandas(self, split: str, columns: Collection[str] | None = None, *, images: bool = False) -> pd.DataFrame:
        """`metadata` as a DataFrame; with `images` also the column `image`: arrays (H, W, C), all in memory."""
        require_pandas("dataset.metadata")
        frame = self.metadata(split, columns).to_pandas()
        if images:
            frame["image"] = [sample.image_HWC for sample in self.samples(split)]
        return frame

    def show(self, num_samples: int = 12, split: str | None = None) -> Image:
        """A contact sheet: samples from all over a split (`train` by default), as a PIL image."""
        if isinstance(num_samples, str) or num_samples < 1:
            fix = f"show(split={num_samples!r})" if isinstance(num_samples, str) else "omit it for 12"
            raise UsageError(f"num_samples = {num_samples!r}", "expected at least one", fix)
        splits = list(self.manifest.splits)
        samples = self.samples(split or ("train" if "train" in splits else splits[0]))
        # Equal distances; all of a split that is smaller.
        count = min(num_samples, len(samples))
        return contact_sheet(samples[[place * len(samples) // count for place in range(count)]], self.class_names)

    def _repr_html_(self) -> str:
        from shardmill.loader.pictures import dataset_html

        return dataset_html(self, self.show)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes: a label is a position in them. Empty in a dataset without classes."""
        return tuple(self.manifest.class_names)

    def _loader(
        self, split: str, convert: Callable[[Batch], LoaderBatch], reading: Reading,
        device: BatchDevice | None = None, ranks: Ranks | None = None,
    ) -> Loader[Any]:  # fmt: skip
        reading = cast("Reading", checked(reading, Reading.__annotations__))
        options = ReaderOptions(reading.get("format", "auto"), reading.get("num_threads", 2))
        rows = self._row_options(split, reading)
        datasets = (self,) if rows.mix is None else rows.mix.datasets
        for dataset in datasets:
            dataset.index(split, options.format)
        ranks = ranks or find_ranks(reading.get("rank"), reading.get("world_size"))
        spec = _spec_of(datasets, split, reading, rows, ranks)
        check_same_plan(ranks, spec, {each.pin: getattr(each, "names_version", False) for each in datasets})
        folder, limit_bytes = reading.get("cache_dir"), reading.get("cache_limit_bytes")
        caches = open_caches(datasets, spec, options.format, folder, limit_bytes)
        device = device or InMemory()
        options = replace(options, caches=caches, allocate=device.allocate)
        streams = streams_of_rank(ranks.rank, ranks.world_size, spec.num_streams)
        transform, is_per_sample = reading.get("transform"), reading.get("per_sample", False)
        check_transform(transform, is_per_sample=is_per_sample)
        finish = HandOver(convert, transform, is_per_sample, spec.seed, streams.start, device)
        return Loader(self, spec, streams, options=options, rows=rows, hand_over=finish)

    def _row_options(self, split: str, reading: Reading) -> RowOptions:
        columns, known = reading.get("columns"), [column.name for column in self.manifest.row_schema.extra]
        check_names("columns", columns)
        if unknown := sorted(set(columns or ()).difference(known)):
            raise UsageError(
                f"columns = {list(columns or ())!r}: there is no extra column {', '.join(unknown)}",
                f"expected some of {', '.join(known)}" if known else "this dataset has none",
                "omit columns for all of them",
            )
        where, sample, mixed = reading.get("where"), reading.get("sample", ONCE), None
        if (mix := reading.get("mix")) is not None:
            mixed = mix_datasets(self, split, mix, where=where, sample=sample, columns=columns)
        selection = select_rows(self, split, where, sample) if mixed is None else mixed.selection
        augment, schema = augment_options(reading.get("augment")), self.manifest.row_schema
        augment.shape_of(self.manifest.normalize.image_shape_HWC)
        check_mixing(augment, schema.label_kind, len(schema.class_names))
        check_annotations(augment, schema, columns)
        return RowOptions(augment, None if columns is None else tuple(columns), selection, mixed)


def _spec_of(datasets: Sequence[Dataset], split: str, reading: Reading, rows: RowOptions, ranks: Ranks) -> PlanSpec:
    """What the epochs of some datasets are a function of. Raises UsageError if the ranks cannot share a batch."""
    global_batch_size = reading["global_batch_size"]
    if ranks.world_size > global_batch_size:
        raise UsageError(
            f"global_batch_size = {global_batch_size} on {ranks.world_size} ranks",
            "expected a sample for each rank in every step",
            f"use {ranks.world_size} or more",
        )
    num_streams = reading.get("num_streams") or num_streams_for(global_batch_size, ranks.world_size)
    seed, shuffle = reading.get("seed", 0), reading.get("shuffle", True)
    streams_of_ranks = [streams_of_rank(rank, ranks.world_size, num_streams) for rank in range(ranks.world_size)]
    options = {"seed": seed, "shuffle": shuffle, "global_batch_size": global_batch_size, "num_streams": num_streams}
    window_bytes = window_bytes_within(WINDOW_BUDGET_BYTES, streams_of_ranks)
    specs = [dataset.plan_spec(split, window_bytes=window_bytes, **options) for dataset in datasets]
    # A window of the largest chunks fits the budget.
    spec = replace(
        specs[0],
        window_chunks=min(each.window_chunks for each in specs),
        selection="" if rows.selection is None else rows.selection.digest,
    )
    check_streams(rows.augment, spec.rows_per_stream)
    return spec


def open_dataset(uri: str | os.PathLike[str]) -> LoadableDataset:
    """Open the path or `URI` at its latest version, or `URI@N` at version N.

    Raises UsageError if there is no such dataset or version, or it has expired; IntegrityError for what was not
    committed or was altered.
    """
    uri = os.fspath(uri)
    found = open_version(uri)
    dataset = LoadableDataset(found.store, found.pin, found.manifest)
    dataset.names_version = split_version(uri)[1] is not None
    return dataset
