"""Verifies and reads the dataset at argv[1] in an interpreter that refuses to unpickle, and shows that it would."""

import sys


def refuse(event: str, arguments: tuple) -> None:
    """The interpreter raises this audit event for every class that a pickle names."""
    if event == "pickle.find_class":
        raise RuntimeError(f"unpickles {arguments}")


sys.addaudithook(refuse)

from shardmill import open_dataset, verify_dataset  # noqa: E402
from shardmill.loader.reader import read_batches  # noqa: E402

dataset = open_dataset(sys.argv[1])
verify_dataset(dataset, deep=True).raise_if_failed()
plan = dataset.plan_epoch(dataset.plan_spec("train", seed=0, global_batch_size=8, num_streams=4), epoch=0)
with read_batches(dataset, plan) as batches:
    assert sum(1 for _ in batches) == plan.num_steps

import pickle  # noqa: E402

try:
    pickle.loads(pickle.dumps(dataset.pin))  # noqa: S301
except RuntimeError:
    print("the hook works")
