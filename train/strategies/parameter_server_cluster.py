"""Forms the TensorFlow cluster of the strategy `parameter_server`: each process reports its address to the chief."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

from shardmill.errors import TrainingError
from train.contracts.world import Role

# Operations that wait for other processes must not take the only thread there is.
NUM_WAITING_THREADS = 4


@dataclass(frozen=True, slots=True)
class ClusterTask:
    """A worker or server, as the chief knows it."""

    role: Role
    address: str
    reads: str = ""
    """For a worker: the name of its TensorFlow function `(epoch, step) -> the rows`."""
    image_shape_HWC: tuple[int, ...] = ()
    label_dtype: str = "int64"
    label_shape: tuple[int, ...] = ()
    """Shape of one label."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read the output of `to_json`. Raises TrainingError for anything else."""
        try:
            given: dict[str, Any] = json.loads(data)
            shapes: dict[str, Any] = {name: tuple(given.pop(name)) for name in ("image_shape_HWC", "label_shape")}
            return cls(Role(given.pop("role")), **given, **shapes)
        except (ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"a process did not report its address: {error}",
                "expected a worker or server",
                "start all processes with one launcher",
            ) from error


def start_threads() -> None:
    """More than one thread for operations that wait; before TensorFlow runs."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(NUM_WAITING_THREADS)
