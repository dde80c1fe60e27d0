"""`URI COORDINATOR NUM_PROCESSES PROCESS MESH`: what a process gets of an epoch of `jax_loader`, as JSON.

MESH: `batch`, the batch axis over all devices; `model`, over those of each process alone, as for model parallelism.
"""

from __future__ import annotations

import hashlib
import json
import sys

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardmill import open_dataset
from shardmill.errors import UsageError

uri, coordinator, num_processes, process, mesh = sys.argv[1:]
if int(num_processes) > 1:
    jax.distributed.initialize(coordinator, int(num_processes), int(process))
devices = np.array(jax.devices()).reshape(int(num_processes), -1)
places = {
    "batch": NamedSharding(Mesh(devices, ("process", "device")), PartitionSpec(("process", "device"))),
    "model": NamedSharding(Mesh(devices.T, ("batch", "model")), PartitionSpec("batch")),
}
loader = open_dataset(uri).jax_loader("train", global_batch_size=24, seed=3, sharding=places[mesh])
found = []
for batch in loader:
    assert batch.images.sharding.is_equivalent_to(places[mesh], 4) and batch.images.shape[0] == 24
    images, labels, weights = (
        np.asarray(process_allgather(each, tiled=True)) for each in (batch.images, batch.labels, batch.weights)
    )
    found.append(
        {
            "images": hashlib.sha256(images.tobytes()).hexdigest(),
            "labels": labels.tolist(),
            "weights": weights.tolist(),
            "ids": batch.sample_ids.tolist(),
            "types": [str(each.dtype) for each in (batch.images, batch.labels, batch.weights)],
        }
    )
refused = []
for given in ({"seed": 3}, {"seed": int(process)}):
    latest = open_dataset(uri.partition("@")[0])
    for make, place in ((latest.jax_loader, {"sharding": places[mesh]}), (latest.batches, {})):
        try:
            make("train", global_batch_size=24, **given, **place)
        except UsageError as error:
            refused.append(str(error))
local = NamedSharding(Mesh(np.array(jax.local_devices()), ("batch",)), PartitionSpec("batch"))
alone = open_dataset(uri).jax_loader("train", global_batch_size=24, seed=int(process), sharding=local)
assert len(list(alone)) == len(found), "nobody else makes this one"
print(json.dumps({"batches": found, "state": loader.state_dict(), "refused": refused}))
