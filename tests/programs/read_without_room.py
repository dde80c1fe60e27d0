"""Reads the dataset argv[1] while no file can be written, as on a full disk; prints a hash of all that it read.

At step argv[2], if there is one, it kills itself.
"""

import hashlib
import os
import resource
import signal
import sys

from shardmill import open_dataset
from shardmill.loader.reader import read_batches

resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
dataset = open_dataset(sys.argv[1])
spec = dataset.plan_spec("train", seed=1, global_batch_size=8, num_streams=4)
seen, num_rows = hashlib.sha256(), 0
with read_batches(dataset, dataset.plan_epoch(spec, 0)) as batches:
    for step, batch in enumerate(batches):
        if sys.argv[2:] == [str(step)]:
            os.kill(os.getpid(), signal.SIGKILL)
        seen.update(batch.sample_ids_N.tobytes() + batch.images_NHWC.tobytes())
        num_rows += int(batch.weights_N.sum())
assert num_rows == dataset.manifest.splits["train"].num_rows
print(seen.hexdigest())
