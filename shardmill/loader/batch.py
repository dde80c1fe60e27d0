"""One batch of a loader, with the arrays of the training loop's framework; and the device on which the loop gets it,
with the memory that batches are decoded into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from shardmill.memory import pageable

if TYPE_CHECKING:
    import numpy as np

    from shardmill.values import Batch

Array = TypeVar("Array")
"""What a loader hands out: `np.ndarray`, `torch.Tensor`, `jax.Array`."""

NAMES = ("images", "labels", "weights", "sample_ids")


@dataclass(frozen=True, slots=True, eq=False)
class LoaderBatch(Mapping[str, Any], Generic[Array]):
    """One rank's rows of one step; also a mapping of these four names and of the dataset's extra columns.

    Rows of padding have weight 0: multiply the loss of each row by `weights`.
    """

    images: Array
    """uint8 from 0 to 255, shape (N, H, W, C), or (N, C, H, W) where a loader says so."""
    labels: Array
    """Class numbers, int64, shape (N,); with mixup or cutmix shares, float32, shape (N, classes).
    Labels of other kinds are float32 (`shardmill.values.Batch`)."""
    weights: Array
    """float32, shape (N,): 1 for a row of the dataset, 0 for padding."""
    sample_ids: Array
    """int64, shape (N,)."""
    epoch: int
    step: int
    extra: Mapping[str, Any]
    """Values of each extra column, one per row; None for null and padding. `boxes` is a
    `shardmill.loader.annotations.BatchBoxes`, `mask` an array, uint8 (N, H, W)."""

    def to(self, *device: Any, **options: Any) -> LoaderBatch[Array]:
        """The batch with its tensors on another device, by `Tensor.to`; Lightning and Accelerate call it."""

        def moved(values: Any) -> Any:
            return values.to(*device, **options) if hasattr(values, "to") else values

        own = {name: moved(getattr(self, name)) for name in NAMES}
        return replace(self, **own, extra={name: moved(values) for name, values in self.extra.items()})

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name) if name in NAMES else self.extra[name]

    def __iter__(self) -> Iterator[str]:
        yield from NAMES
        yield from self.extra

    def __len__(self) -> int:
        """Of the mapping: how many names it has. The number of rows is `len(batch.weights)`."""
        return len(NAMES) + len(self.extra)


def as_arrays(batch: Batch) -> LoaderBatch[np.ndarray]:
    """NumPy arrays, not copied."""
    return LoaderBatch(
        batch.images_NHWC, batch.labels_N, batch.weights_N, batch.sample_ids_N, batch.epoch, batch.step, batch.extra
    )


class BatchDevice(Protocol):
    """Where the loop gets a batch: takes it there from the threads."""

    def allocate(self, shape: tuple[int, ...]) -> np.ndarray:
        """Memory of uint8 for the pixels of a batch, with any content; as NumPy takes it, by default."""
        return pageable(shape)

    def put(self, batch: LoaderBatch) -> Any:
        """Begin to move a batch, in a reader's thread: of several batches at a time, in any order."""
        ...

    def take(self, put: Any) -> LoaderBatch:
        """The moved batch, in the loop's thread, when it is handed out; `put` is what `put` returned."""
        ...


class InMemory(BatchDevice):
    """Batches stay in the memory of this process."""

    def put(self, batch: LoaderBatch) -> LoaderBatch:
        """The batch as it is."""
        return batch

    def take(self, put: LoaderBatch) -> LoaderBatch:
        """The batch as it is."""
        return put
