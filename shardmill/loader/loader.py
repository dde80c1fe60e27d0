"""A loader: one rank's batches of a split, epoch after epoch, with a state that resumes at any step.

The order is that of the epoch plan (`shardmill.epoch_plan`), so its whole state is (epoch, step): equal on every rank,
and valid at every world size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardmill.errors import UsageError
from shardmill.loader.batch import LoaderBatch, as_arrays
from shardmill.loader.reader import BatchReader, OneProcess, ReaderOptions, read_batches

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.epoch_plan import PlanSpec
    from shardmill.options import AugmentOptions
    from shardmill.values import Batch

STATE_VERSION = 1


class Loader:
    """An iterable of `LoaderBatch`, one epoch for each iteration; `len(loader)` steps on every rank.

    It is no `torch.utils.data.DataLoader`, and none may be put around it: it has threads of its own, and frameworks
    that share out a DataLoader's rows would share them out twice.
    """

    def __init__(
        self, dataset: Dataset, spec: PlanSpec, streams: range, *, options: ReaderOptions | None = None,
        augment: AugmentOptions | None = None, hand_over: Callable[[Batch], LoaderBatch] = as_arrays,
    ) -> None:  # fmt: skip
        self.spec = spec
        self._dataset = dataset
        self.streams = streams
        self._options = options or ReaderOptions()
        self._augment = augment
        self._hand_over = hand_over
        self._num_steps = spec.num_steps(dataset.manifest.splits[spec.split].num_rows)
        self._epoch, self._step = 0, 0
        self._reader: BatchReader | None = None
        self._is_broken_off = False
        """An iteration has begun and not come to its last batch."""
        self._process = OneProcess()

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return self._epoch

    @property
    def step(self) -> int:
        """Step of the next batch, within its epoch."""
        return self._step

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[LoaderBatch]:
        """The rest of the current epoch: all of it, unless `load_state_dict` or `seek` has set a later step.

        After an iteration that was left by `break`, the next epoch. Raises UsageError in a worker of a DataLoader and
        in a fork of the process that has iterated; iterating raises IntegrityError and StorageError at the batch that
        cannot be read.
        """
        _refuse_workers()
        self._process.check()
        self.close()
        if self._is_broken_off:
            self._epoch, self._step = self._epoch + 1, 0
        plan = self._dataset.plan_epoch(self.spec, self._epoch)
        self._reader = read_batches(
            self._dataset, plan, streams=self.streams, first_step=self._step, options=self._options,
            augment=self._augment,
        )  # fmt: skip
        return self._iterate(self._reader)

    def _iterate(self, reader: BatchReader) -> Iterator[LoaderBatch]:
        with reader:
            batches = iter(reader)
            for step in range(self._step, self._num_steps):
                if reader is not self._reader:
                    raise UsageError(
                        "an iteration of a loader continued after the loader was closed or another iteration began",
                        "expected one iteration at a time, because they share one position",
                        "create a loader for each",
                    )
                batch = next(batches)
                # What was handed out counts, not what was read ahead. The last batch ends the epoch before it is
                # handed out: a loop that knows `len` does not ask for the end, and Lightning never does.
                self._is_broken_off = step + 1 < self._num_steps
                self._epoch, self._step = (self._epoch, step + 1) if self._is_broken_off else (self._epoch + 1, 0)
                yield self._hand_over(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch as JSON, the same on every rank between two steps, for
        `load_state_dict`.
        """
        return {"version": STATE_VERSION, "epoch": self._epoch, "step": self._step, "plan": self.spec.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, at any number of ranks.

        Raises UsageError for the state of another dataset, split, seed, batch size, number of streams or window.
        """
        if state.get("version") != STATE_VERSION:
            raise UsageError(
                f"a loader state of version {state.get('version')!r}",
                f"expected version {STATE_VERSION}",
                "load what `state_dict` of this version of shardmill gave",
            )
        if state.get("plan") != self.spec.fingerprint:
            raise UsageError(
                "the loader state belongs to another plan",
                f"expected the plan of {self.spec}",
                "open the same dataset version with the same split, global_batch_size, seed and num_streams",
            )
        self.seek(state["epoch"], state["step"])

    def seek(self, epoch: int, step: int = 0) -> None:
        """The next iteration begins at `step` of `epoch`. Raises UsageError for a step that no epoch has."""
        if epoch < 0 or not 0 <= step < self._num_steps:
            raise UsageError(
                f"epoch = {epoch}, step = {step}",
                f"expected an epoch from 0 and a step from 0 to {self._num_steps - 1}",
                "after a finished epoch, continue at step 0 of the next one",
            )
        self.close()
        self._epoch, self._step, self._is_broken_off = epoch, step, False

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of `epoch`, for loops that count epochs themselves; the same epoch has the same order.

        A step that was loaded for this epoch is kept.
        """
        is_resumed = epoch == self._epoch and not self._is_broken_off
        self.seek(epoch, self._step if is_resumed else 0)

    def close(self) -> None:
        """End an iteration and join its threads."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _refuse_workers() -> None:
    """Each worker of a DataLoader would read all rows again. Looks only if torch is here already."""
    data = sys.modules.get("torch.utils.data")
    worker = data.get_worker_info() if data is not None else None
    if worker is not None:
        raise UsageError(
            f"a shardmill loader in worker {worker.id} of a DataLoader with num_workers = {worker.num_workers}",
            "expected no worker, because each would read every row of the rank again",
            "iterate the loader itself: it reads and decodes in threads of its own (num_threads)",
        )
