"""A loader: one rank's batches of a split, epoch after epoch, with a state that resumes at any step.

The order is that of the epoch plan (`shardmill.epoch_plan`), so its whole state is (epoch, step): equal on every rank,
and valid at every world size.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NoReturn, SupportsInt

from shardmill.epoch_plan import EpochPlan, plan_epoch
from shardmill.errors import UsageError
from shardmill.loader.batch import Array, LoaderBatch
from shardmill.loader.reader import BatchReader, OneProcess, ReaderSeconds
from shardmill.loader.row_source import ReaderOptions, RowOptions, RowSource, check_windows
from shardmill.memory import free_bytes
from shardmill.stores.retries import num_retried

if TYPE_CHECKING:
    from shardmill.dataset.chunk_cache import CacheCounts
    from shardmill.dataset.dataset import Dataset
    from shardmill.epoch_plan import PlanSpec
    from shardmill.loader.selection import DatasetRows
    from shardmill.loader.transform import HandOver


STATE_VERSION = 1


class Loader(Generic[Array]):
    """An iterable of `LoaderBatch`, one epoch for each iteration; `len(loader)` steps on every rank.

    It is no `torch.utils.data.DataLoader`, and none may be put around it: it has threads of its own, and frameworks
    that share out a DataLoader's rows would share them out twice.
    """

    def __init__(
        self, dataset: Dataset, spec: PlanSpec, streams: range, *, options: ReaderOptions, rows: RowOptions,
        hand_over: HandOver,
    ) -> None:  # fmt: skip
        self._dataset = dataset
        self.streams = streams
        self._options = options
        self._rows = rows
        self._hand_over = hand_over
        self._plan_by(spec)
        index = dataset.index(spec.split)
        self._chunk_rows = index.chunk_rows if rows.selection is None else rows.selection.chunk_rows
        self._num_rows = int(self._chunk_rows.sum())
        self._num_steps = spec.num_steps(self._num_rows)
        self._epoch, self._step = 0, 0
        self._reader: BatchReader[Any] | None = None
        self._is_broken_off = False
        """An iteration has begun and not come to its last batch."""
        self._is_placed = False
        """Its position was set, or it has handed out a batch."""
        self._process = OneProcess()
        self._steps = self._rows_seen = 0
        self._wait_seconds = 0.0
        self._seconds = ReaderSeconds()
        self._retries_before = num_retried()

    def _plan_by(self, spec: PlanSpec) -> None:
        self.spec = spec
        # A transform may take long: each step is then work for one thread.
        options = replace(self._options, max_steps_together=1) if self.is_transformed else self._options
        self._source = RowSource(self._dataset, spec, self.streams, options=options, rows=self._rows)

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

    @property
    def steps_per_epoch(self) -> int:
        """The same on every rank, and as `len` says."""
        return self._num_steps

    @property
    def is_transformed(self) -> bool:
        """Whether its batches are those of a user's transform."""
        return self._hand_over.transform is not None

    @property
    def samples_per_epoch(self) -> int:
        """Rows of an epoch of all ranks without padding; a repeated row as often as it is used."""
        return self._num_rows

    @property
    def num_padding(self) -> int:
        """Rows of weight 0 in an epoch of all ranks."""
        return self._num_steps * self.spec.global_batch_size - self._num_rows

    def __iter__(self) -> Iterator[LoaderBatch[Array]]:
        """The rest of the current epoch: all of it, unless `load_state_dict` or `seek` has set a later step.

        After an iteration that was left by `break`, the next epoch. Raises UsageError in a worker of a DataLoader and
        in a fork of the process that has iterated; iterating raises IntegrityError and StorageError at the batch that
        cannot be read.
        """
        _refuse_workers()
        self._process.check()
        self._end_iteration()
        if self._is_broken_off:
            self._epoch, self._step = self._epoch + 1, 0
        plan = plan_epoch(self.spec, self._chunk_rows, self._epoch)
        self._reader = self._open(plan, self._step)
        return self._iterate(self._reader, plan)

    def __getitem__(self, which: object) -> NoReturn:
        """Refuses what asks for rows by number, as a DataLoader around a loader does. Raises UsageError."""
        raise UsageError(
            f"{which!r}, a row of a loader",
            "expected an iteration, and no DataLoader around it: a loader gives whole batches, in an order of its own",
            f"iterate the loader itself; dataset.samples({self.spec.split!r}) has single rows, also for a DataLoader",
        )

    def _open(self, plan: EpochPlan, first_step: int) -> BatchReader[Any]:
        return BatchReader(self._source, plan, first_step=first_step, finish=self._hand_over)

    def _iterate(self, reader: BatchReader[Any], plan: EpochPlan) -> Iterator[LoaderBatch[Array]]:
        if (state := unused_state(self, is_placed=self._is_placed)) is not None:
            self.load_state_dict(state)
            plan = plan_epoch(self.spec, self._chunk_rows, self._epoch)
            reader = self._reader = self._open(plan, self._step)
        self._is_placed = True
        with reader:
            batches = iter(reader)
            for step in range(self._step, self._num_steps):
                if reader is not self._reader:
                    raise UsageError(
                        "an iteration of a loader continued after the loader was closed or another iteration began",
                        "expected one iteration at a time, because they share one position",
                        "create a loader for each",
                    )
                asked = time.perf_counter()
                batch = self._hand_over.device.take(next(batches))
                self._wait_seconds += time.perf_counter() - asked
                self._steps += 1
                self._rows_seen += plan.num_rows_of_step(step, self.streams)
                # What was handed out counts, not what was read ahead. The last batch ends the epoch before it is
                # handed out: a loop that knows `len` does not ask for the end, and Lightning never does.
                self._is_broken_off = step + 1 < self._num_steps
                self._epoch, self._step = (self._epoch, step + 1) if self._is_broken_off else (self._epoch + 1, 0)
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch as JSON, the same on every rank between two steps, for
        `load_state_dict`.
        """
        place = {"epoch": self._epoch, "step": self._step}
        return {"version": STATE_VERSION, **place, "plan": self.spec.fingerprint, "window": self.spec.window_chunks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, at any number of ranks, with the shuffle window that it had there.

        Raises UsageError for the state of another dataset, split, seed, batch size or number of streams, and for
        windows that are too large for the memory of this machine.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != STATE_VERSION:
            raise UsageError(
                f"a loader state of version {version!r}" if version else f"{str(state)[:60]!r} is no loader state",
                f"expected version {STATE_VERSION}",
                "load what `state_dict` of this version of shardmill gave",
            )
        spec = replace(
            self.spec, window_chunks=whole_number("window", state.get("window", self.spec.window_chunks), least=1)
        )
        if state.get("plan") != spec.fingerprint:
            raise UsageError(
                "the loader state belongs to another plan",
                f"expected that of split {self.spec.split!r}, seed {self.spec.seed}, global_batch_size "
                f"{self.spec.global_batch_size}, num_streams {self.spec.num_streams}, of this dataset version",
                "give the same datasets, split, global_batch_size, seed, num_streams, shuffle, where, sample and mix",
            )
        if spec != self.spec:
            index = self._dataset.index(spec.split, self._options.format)
            check_windows(index, spec, len(self.streams), free_bytes())
            self.close()
            self._plan_by(spec)
        self.seek(state.get("epoch", ""), state.get("step", ""))

    def seek(self, epoch: SupportsInt, step: SupportsInt = 0) -> None:
        """The next iteration begins at `step` of `epoch`. Raises UsageError for a step that no epoch has."""
        epoch, step = whole_number("epoch", epoch), whole_number("step", step)
        if epoch < 0 or not 0 <= step < self._num_steps:
            raise UsageError(
                f"epoch = {epoch}, step = {step}",
                f"expected an epoch from 0 and a step from 0 to {self._num_steps - 1}",
                "after a finished epoch, continue at step 0 of the next one",
            )
        self._end_iteration()
        self._epoch, self._step, self._is_broken_off, self._is_placed = epoch, step, False, True

    def seek_to_step(self, num_steps: SupportsInt) -> None:
        """The next iteration begins where so many steps are done over all epochs, as an optimizer counts them."""
        self.seek(*divmod(whole_number("num_steps", num_steps), self._num_steps))

    def set_epoch(self, epoch: SupportsInt) -> None:
        """The next iteration is of `epoch`, for loops that count epochs themselves; the same epoch has the same order.

        A step that was loaded for this epoch is kept.
        """
        is_resumed = epoch == self._epoch and not self._is_broken_off
        self.seek(epoch, self._step if is_resumed else 0)

    def cached(self, num_batches: int) -> CachedBatches:
        """The next batches again and again, epochs as long as the loader's: how fast a loop is if input costs nothing.

        The loader stays where it is. Raises UsageError for less than one batch.
        """
        num_batches = whole_number("num_batches", num_batches, least=1)
        with self._open(plan_epoch(self.spec, self._chunk_rows, self._epoch), self._step) as reader:
            return CachedBatches(tuple(map(self._hand_over.device.take, islice(reader, num_batches))), self._num_steps)

    def report(self) -> LoaderReport:
        """What this rank has handed out, and where the time went."""
        self._take_seconds()
        selection = self._rows.selection
        num_distinct = self._num_rows if selection is None else selection.num_distinct
        counts = [cache.counts for cache in self._options.caches if cache is not None]
        mixed = () if self._rows.mix is None else self._rows.mix.rows
        num_left_out = self._dataset.manifest.splits[self.spec.split].num_rows - num_distinct
        return LoaderReport(
            steps=self._steps,
            rows_seen=self._rows_seen,
            rows_padded=self._steps * len(self.streams) * self.spec.rows_per_stream - self._rows_seen,
            rows_dropped=0,
            epoch_rows=self._num_rows,
            epoch_rows_repeated=self._num_rows - num_distinct,
            epoch_rows_left_out=sum(each.rows_left_out for each in mixed) if mixed else num_left_out,
            wait_seconds=self._wait_seconds,
            fetch_seconds=self._seconds.fetch,
            decode_seconds=self._seconds.decode,
            retries=num_retried() - self._retries_before,
            cache=sum(counts[1:], counts[0]) if counts else None,
            datasets=mixed,
        )

    def _take_seconds(self) -> None:
        if self._reader is not None:
            self._seconds += self._reader.take_seconds()

    def close(self) -> None:
        """End an iteration, join its threads, and give up the memory that is kept for the next epoch."""
        self._end_iteration()
        self._source.clear()

    def _end_iteration(self) -> None:
        self._take_seconds()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __enter__(self) -> Loader[Array]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class CachedBatches:
    """An iterable of as many steps as an epoch has, over some batches in memory."""

    batches: tuple[LoaderBatch, ...]
    num_steps: int

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[LoaderBatch]:
        return (self.batches[step % len(self.batches)] for step in range(self.num_steps))


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


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """Of one rank since its loader was made; the rows of an epoch are those of all ranks."""

    steps: int
    rows_seen: int
    """Handed out, without padding; a repeated row as often as it was."""
    rows_padded: int
    rows_dropped: int
    """0: a loader drops none."""
    epoch_rows: int
    epoch_rows_repeated: int
    """Of `epoch_rows`: uses of a row after its first one."""
    epoch_rows_left_out: int
    """Rows of the split that `where` or a weight of 0 leave out."""
    wait_seconds: float
    """That the loop waited for batches."""
    fetch_seconds: float
    """That threads read and verified chunks, summed over them."""
    decode_seconds: float
    """That threads decoded and changed images, summed over them."""
    retries: int
    """Requests to storages that this process repeated."""
    cache: CacheCounts | None = None
    """What the cache gave; None without one."""
    datasets: tuple[DatasetRows, ...] = ()
    """Of a mix: its datasets in order, the loader's own first."""

    def __str__(self) -> str:
        cached = "" if self.cache is None else f"; {self.cache}"
        mixed = "".join(f"; {each.rows} rows an epoch of {each.dataset}" for each in self.datasets)
        return (
            f"{self.steps} steps: {self.rows_seen} rows seen, {self.rows_padded} padded, {self.rows_dropped} dropped; "
            f"an epoch has {self.epoch_rows} rows, {self.epoch_rows_repeated} of them repeated, "
            f"{self.epoch_rows_left_out} left out; waited {self.wait_seconds:.2f} s (threads: "
            f"{self.fetch_seconds:.2f} s fetched, {self.decode_seconds:.2f} s decoded, {self.retries} retries)"
            f"{cached}{mixed}"
        )


_PACKAGES = ("pytorch_lightning", "lightning")


def unused_state(loader: object, *, is_placed: bool) -> Mapping[str, Any] | None:
    """The state that a trainer has read for this loader and not loaded; None if there is none, or no trainer.

    Raises UsageError if the trainer has done steps before, and nothing has placed the loader.
    """
    trainer = _trainer() if any(name in sys.modules for name in _PACKAGES) else None
    if trainer is None:
        return None
    states = getattr(trainer.fit_loop, "_combined_loader_states_to_load", None) or []
    loaders = getattr(getattr(trainer.fit_loop, "_combined_loader", None), "flattened", None) or []
    stateful = [each for each in loaders if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")]
    for place, (each, state) in enumerate(zip(stateful, states, strict=False)):
        if each is loader and state is not None:
            left = [*states[:place], None, *states[place + 1 :]]
            trainer.fit_loop._combined_loader_states_to_load = left if any(left) else []
            return state
    if trainer.global_step > 0 and not is_placed:
        raise UsageError(
            f"a new loader in a Lightning trainer that has done {trainer.global_step} steps",
            "expected its position, or batches that were trained on come again",
            "return the same loader from train_dataloader each time, or call loader.seek(epoch, step)",
        )
    return None


def _trainer() -> Any:
    """The trainer whose training asks for a batch in this thread; None if there is none, or for an evaluation."""
    frame = sys._getframe(2)
    while frame is not None:
        loop: Any = frame.f_locals.get("self")
        name = type(loop).__name__
        if name in ("_TrainingEpochLoop", "_EvaluationLoop") and type(loop).__module__.startswith(_PACKAGES):
            return loop.trainer if name == "_TrainingEpochLoop" else None
        frame = frame.f_back
    return None


def whole_number(name: str, given: Any, *, least: int | None = None) -> int:
    """`given` as an `int`: also a number of NumPy, or a framework's counter of steps. Raises UsageError for others."""
    try:
        number = int(given)
        is_whole = bool(number == given)
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole or (least is not None and number < least):
        raise UsageError(
            f"{name} = {given!r}",
            "expected a whole number" + ("" if least is None else f" from {least} on"),
            f"pass, for example, {max(1, least or 0)}",
        )
    return number
