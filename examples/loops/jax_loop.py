"""A loop of JAX over all devices of all processes; it resumes at the step after its last checkpoint.

    python examples/loops/jax_loop.py DATASET@1
    python examples/loops/jax_loop.py DATASET@1 --coordinator HOST:PORT --num-processes 2 --process 0    # and 1

Each process reads the rows of its own devices. Rows of padding have weight 0, so shapes are equal at every step, and
nothing is compiled twice.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shardmill

parser = argparse.ArgumentParser()
parser.add_argument("dataset", help="DATASET@1, or DATASET: the processes compare what they open")
parser.add_argument("--coordinator")
parser.add_argument("--num-processes", type=int)
parser.add_argument("--process", type=int)
parser.add_argument("--checkpoint", type=Path, default=Path("loop.npz"))
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--stop-after", type=int, help="end after so many steps, to try how it resumes")
args = parser.parse_args()

if args.coordinator:
    jax.distributed.initialize(args.coordinator, args.num_processes, args.process)
mesh = Mesh(np.array(jax.devices()), ("batch",))
replicated = NamedSharding(mesh, PartitionSpec())

dataset = shardmill.open_dataset(args.dataset)
loader = dataset.jax_loader("train", global_batch_size=32, seed=0, sharding=NamedSharding(mesh, PartitionSpec("batch")))


def apply(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    rows = (images / 255).reshape(len(images), -1)
    return jax.nn.relu(rows @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_of(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(apply(params, images))
    losses = -jnp.take_along_axis(logs, labels[:, None], axis=1)[:, 0]
    # The mean over the real rows of all processes.
    return (losses * weights).sum() / weights.sum()


@jax.jit
def train_step(params, images, labels, weights):
    loss, gradients = jax.value_and_grad(loss_of)(params, images, labels, weights)
    return jax.tree.map(lambda param, gradient: param - 0.1 * gradient, params, gradients), loss


rng = np.random.default_rng(0)
num_values, num_classes = int(np.prod(dataset.manifest.normalize.image_shape_HWC)), len(dataset.class_names)
params = {
    "w1": rng.normal(0, num_values**-0.5, (num_values, 32)).astype(np.float32), "b1": np.zeros(32, np.float32),
    "w2": rng.normal(0, 32**-0.5, (32, num_classes)).astype(np.float32), "b2": np.zeros(num_classes, np.float32),
}  # fmt: skip
if args.checkpoint.exists():
    with np.load(args.checkpoint) as saved:
        params = {name: saved[name] for name in params}
        loader.load_state_dict(json.loads(str(saved["loader"])))
params = jax.device_put(params, replicated)

steps_done = 0
while loader.epoch < args.epochs and steps_done != args.stop_after:
    for batch in loader:
        params, loss = train_step(params, batch.images, batch.labels, batch.weights)
        steps_done += 1
        if jax.process_index() == 0:
            print(f"epoch {batch.epoch} step {batch.step} loss {loss:.4f}", flush=True)
            # The loader's state is the same in every process.
            state = json.dumps(loader.state_dict())
            np.savez(args.checkpoint, loader=state, **{name: np.asarray(each) for name, each in params.items()})
        if steps_done == args.stop_after:
            break
