"""Batches as global `jax.Array`s: each process reads the rows of its own devices, in equal shapes at every step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.epoch_plan import num_streams_choices, num_streams_for
from shardmill.errors import UsageError
from shardmill.loader.batch import BatchDevice, LoaderBatch
from shardmill.loader.ranks import Ranks, gather_by_jax

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class DevicePlacement(BatchDevice):
    """Where the rows of a global batch lie."""

    sharding: Any
    """A `jax.sharding.Sharding` of the batch axis."""
    global_batch_size: int
    ranks: Ranks
    """Processes that hold the same rows, as those of one model-parallel group do, are one rank."""

    @classmethod
    def of(cls, sharding: Any, global_batch_size: int) -> DevicePlacement:
        """`sharding`: None for the batch axis over all devices.

        Raises UsageError if JAX is not installed, or the batch cannot be shared out evenly.
        """
        try:
            import jax
        except ImportError as error:
            raise UsageError(
                f"a jax_loader needs JAX: {error}", "not installed here", "`pip install jax`, or use dataset.batches"
            ) from None
        if sharding is None:
            mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
            sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
        if not isinstance(sharding, jax.sharding.Sharding):
            raise UsageError(
                f"sharding = {sharding!r}", "expected a jax.sharding.Sharding", "leave it out, for example"
            )
        try:
            rows_of_device = sharding.devices_indices_map((global_batch_size,))
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"global_batch_size = {global_batch_size} with {sharding}",
                "expected a sharding of the batch axis alone, whose parts divide the batch",
                f"change one of them; JAX says: {str(error).splitlines()[0]}",
            ) from None
        ranks = _ranks(rows_of_device, global_batch_size, jax.process_index())
        if 1 < jax.process_count() == len({device.process_index for device in rows_of_device}):
            # A process that has no device of the sharding makes no loader: to wait for it would have no end.
            ranks = replace(ranks, gather=gather_by_jax)
        return cls(sharding, global_batch_size, ranks)

    def num_streams(self, given: int | None) -> int:
        """A number of streams of which every rank gets as many. Raises UsageError if `given` is none."""
        world_size = self.ranks.world_size
        usual = given or num_streams_for(self.global_batch_size, world_size)
        if usual % world_size == 0:
            return usual
        # The whole batch is among them.
        fitting = next(each for each in num_streams_choices(self.global_batch_size) if each % world_size == 0)
        if given:
            raise UsageError(
                f"num_streams = {given} on {world_size} processes",
                "expected a multiple of their number, because JAX needs equal shapes in all of them",
                f"set num_streams to {fitting}, or leave it out",
            )
        return fitting

    def put(self, batch: LoaderBatch) -> LoaderBatch:
        """Images, labels and weights on the devices. Sample ids and extra columns stay those of this process."""
        labels = np.asarray(batch.labels)
        # By default JAX disables 64-bit types, and would log a warning at each batch.
        labels = labels.astype(np.int32) if labels.dtype == np.int64 else labels
        images, labels, weights = self._global((np.asarray(batch.images), labels, np.asarray(batch.weights)))
        return replace(batch, images=images, labels=labels, weights=weights)

    def take(self, put: LoaderBatch) -> LoaderBatch:
        """The batch as it is: JAX waits for its copies itself."""
        return put

    def _global(self, arrays: tuple[np.ndarray, ...]) -> Any:
        import jax

        if self.sharding.is_fully_addressable:
            # All rows are here: one call for all arrays costs half of it.
            return jax.device_put(arrays, self.sharding)
        shape = (self.global_batch_size,)
        make = jax.make_array_from_process_local_data
        return [make(self.sharding, local, shape + local.shape[1:]) for local in arrays]


def _ranks(rows_of_device: Mapping[Any, tuple[slice, ...]], global_batch_size: int, process: int) -> Ranks:
    """The rank of a process among the processes with distinct rows."""
    rows_of_process: dict[int, set[int]] = {}
    for device, (rows,) in rows_of_device.items():
        rows_of_process.setdefault(device.process_index, set()).update(range(*rows.indices(global_batch_size)))
    shares = sorted({tuple(sorted(rows)) for rows in rows_of_process.values()})
    if sum(map(len, shares)) != global_batch_size or len({len(share) for share in shares}) != 1:
        raise UsageError(
            f"the processes hold {', '.join(str(len(share)) for share in shares)} of {global_batch_size} rows",
            "expected equal shares, each row in one of them or in all",
            "order the devices of the mesh so that the batch axis runs over whole processes",
        )
    if process not in rows_of_process:
        raise UsageError(
            f"process {process} has no device of the sharding", "expected one in every process that makes the loader"
        )
    return Ranks(shares.index(tuple(sorted(rows_of_process[process]))), len(shares))
