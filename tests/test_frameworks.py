"""Where frameworks may be used, at any depth: backends compute, strategies exchange, models have layers, loaders hand
over batches.
"""

from __future__ import annotations

from tests.import_graph import imports_of, modules

FRAMEWORKS = {"tensorflow", "keras", "horovod", "torch", "torchvision", "jax"}
# docs/decisions/0008
ROOMS = (
    "train/backends/",
    "train/strategies/",
    "train/models/",
    "train/layers/",
    "shardmill/loader/torch.py",
    "shardmill/loader/torch_device.py",
    "shardmill/loader/tensorflow.py",
    "shardmill/loader/jax.py",
    # Asks those that are running for their processes.
    "shardmill/loader/ranks.py",
    # Of Horovod that which starts ranks.
    "train/launching/horovod_spark.py",
)


def test_frameworks_are_used_in_their_rooms_alone():
    used = {
        module.relative: names
        for module in modules().values()
        if (names := {name for name in imports_of(module, only_at_import=False) if name.split(".")[0] in FRAMEWORKS})
    }
    assert all(any(path.startswith(room) for path in used) for room in ROOMS)
    assert not {path: names for path, names in used.items() if not path.startswith(ROOMS)}
