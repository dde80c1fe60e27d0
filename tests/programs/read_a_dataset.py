"""Reads the dataset argv[1] in all its formats, as a user's script does with the base wheel alone; prints versions."""

import sys

import numpy
import pyarrow

from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.ledger import read_rejections
from shardmill.loader.reader import read_batches
from shardmill.loader.row_source import ReaderOptions

dataset = open_dataset(sys.argv[1])
spec = dataset.plan_spec("train", seed=1, global_batch_size=16, num_streams=4)
seen = {}
for name in dataset.manifest.formats:
    with read_batches(dataset, dataset.plan_epoch(spec, 0), options=ReaderOptions(format=name)) as batches:
        seen[name] = [(batch.sample_ids_N.tolist(), batch.images_NHWC.tobytes()) for batch in batches]
first, *others = seen.values()
assert others and all(other == first for other in others)
ids = [sample_id for batch, _ in first for sample_id in batch if sample_id]
assert len(ids) == len(set(ids)) == dataset.manifest.splits["train"].num_rows
read_rejections(dataset.store, dataset.manifest)
heavy = {"pyspark", "tensorflow", "keras", "horovod", "torch", "airflow"} & set(sys.modules)
assert not heavy, heavy
print(sys.version_info[:2], numpy.__version__, pyarrow.__version__)
