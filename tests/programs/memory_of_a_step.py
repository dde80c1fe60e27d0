"""Prints the MiB of a step of the backend argv[1] with the model argv[2]: its images one by one, then at once."""

import sys
from pathlib import Path

from tests.train.learners import THREE, batch_of
from train.backends import BACKENDS
from train.backends.model_spec import InputScale, ModelSpec
from train.config import TrainConfig
from train.contracts.world import World

NUM_IMAGES = 48


def own_kib(name: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])


backend, model = BACKENDS[sys.argv[1]], sys.argv[2]
spec = ModelSpec((128, 128, 3), THREE, InputScale((120.0,) * 3, (60.0,) * 3))
backend.start(World(), 0)
batch = batch_of((128, 128, 3), NUM_IMAGES)
for parts in (NUM_IMAGES, 1):
    config = TrainConfig(model=model, global_batch_size=NUM_IMAGES, accumulation_steps=parts, num_streams=1)
    learner = backend.build(config, spec)
    # The kernel forgets the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    before = own_kib("VmRSS")
    learner.apply(learner.gradients(batch, NUM_IMAGES, 1.0), 0.1)
    print((own_kib("VmHWM") - before) // 1024)
