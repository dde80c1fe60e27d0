"""Where the batches of a loader go when a reader's thread has made them, and the memory that they are decoded into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from shardmill.recycled_memory import pageable

if TYPE_CHECKING:
    import numpy as np

    from shardmill.loader.batch import LoaderBatch


class Place(Protocol):
    """Takes a batch from the threads to the loop."""

    def allocate(self, shape: tuple[int, ...]) -> np.ndarray:
        """Memory of uint8 for the pixels of a batch, with any content; as NumPy takes it, by default."""
        return pageable(shape)

    def put(self, batch: LoaderBatch) -> Any:
        """Begin to move a batch, in a reader's thread: of several batches at a time, in any order."""
        ...

    def take(self, put: Any) -> LoaderBatch:
        """The moved batch, in the loop's thread, when it is handed out; `put` is what `put` returned."""
        ...


class InMemory(Place):
    """The place of batches that stay in the memory of this process."""

    def put(self, batch: LoaderBatch) -> LoaderBatch:
        """The batch as it is."""
        return batch

    def take(self, put: LoaderBatch) -> LoaderBatch:
        """The batch as it is."""
        return put
