"""The last step in a loader's threads: a batch becomes the framework's arrays, and the user's transform changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardmill.errors import UsageError
from shardmill.ids import format_sample_id
from shardmill.loader.batch import NAMES, LoaderBatch
from shardmill.loader.per_sample import OWN_NAMES, SampleTransform, change_samples
from shardmill.loader.place import InMemory, Place
from shardmill.mix import mix64

if TYPE_CHECKING:
    from shardmill.loader.live_rows import Origins
    from shardmill.values import Batch

Transform = Callable[[LoaderBatch, np.random.Generator], "LoaderBatch | Mapping[str, Any]"]
"""A batch of the loader -> the batch that it hands out, or what of it is new by name (other names: extra columns)."""

_DRAWS = 4
"""First word of its key: no other draw has the same one."""
_NAMED = 3
"""Samples of a batch that a message names."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """`Finish` of a reader: runs in its threads, several batches at a time."""

    convert: Callable[[Batch], LoaderBatch]
    transform: Transform | SampleTransform | None
    is_per_sample: bool
    seed: int
    first_stream: int
    """Ranks draw differently, unless each sample draws for itself."""
    place: Place = field(default_factory=InMemory)
    """Gets the batch behind the transform: JAX allows no computation on global arrays in several threads, for its
    processes might begin them in different orders."""

    def __call__(self, batch: Batch, origins: Origins) -> Any:
        """What `place.take` makes the batch of. Raises UsageError, from its cause, if the transform fails or gives no
        such batch.
        """
        return self.place.put(self._transformed(batch, origins))

    def _transformed(self, batch: Batch, origins: Origins) -> LoaderBatch:
        before, sources = self.convert(batch), origins.sources
        if self.transform is None:
            return before
        if self.is_per_sample:
            changed = change_samples(
                before, cast("SampleTransform", self.transform), self.seed, origins.occurrences_N,
                lambda row: _named_row(batch, row, sources()[row]),
            )  # fmt: skip
            return _checked(before, changed, len(batch.weights_N), lambda: _named_rows(batch, sources()))
        rng = np.random.default_rng(mix64(_DRAWS, self.seed, batch.epoch, batch.step, self.first_stream))
        try:
            changed = cast("Transform", self.transform)(before, rng)
        except Exception as error:
            raise UsageError(
                f"the transform raised {type(error).__name__} at {_named_rows(batch, sources())}: {error}",
                "expected it to change every batch",
                "the cause is above; `loader.seek(epoch, step)` gives this batch again",
            ) from error
        return _checked(before, changed, len(batch.weights_N), lambda: _named_rows(batch, sources()))


def check_transform(transform: object, *, is_per_sample: bool) -> None:
    """Raises UsageError for what is no function, and for `per_sample` without one."""
    if transform is not None and not callable(transform):
        raise UsageError(f"transform = {transform!r}", "expected a function of a batch and a NumPy generator")
    if is_per_sample and transform is None:
        raise UsageError("per_sample = True without a transform", "expected a function of a sample", "give both")


def _checked(before: LoaderBatch, changed: object, num_rows: int, name_rows: Callable[[], str]) -> LoaderBatch:
    if isinstance(changed, Mapping) and not isinstance(changed, LoaderBatch):
        extra = {name: value for name, value in changed.items() if name not in NAMES}
        own = {name: value for name, value in changed.items() if name in NAMES}
        if alone := [name for name in extra if name in OWN_NAMES and name not in before.extra]:
            raise UsageError(
                f"the transform gave {', '.join(alone)} at {name_rows()}",
                f"expected {', '.join(NAMES)} or extra columns, because it changes a whole batch",
                f"did you mean {' and '.join(OWN_NAMES[name] for name in alone)}? (per_sample = True changes samples)",
            )
        changed = replace(before, **own, extra={**before.extra, **extra})
    if not isinstance(changed, LoaderBatch):
        raise UsageError(
            f"the transform returned {type(changed).__name__} at {name_rows()}",
            "expected a batch, or a dict of what is new in it",
            'return, for example, {"images": images}',
        )
    for name, values in changed.items():
        if not hasattr(values, "__len__") or len(values) != num_rows:
            found = f"{len(values)} rows" if hasattr(values, "__len__") else f"as {type(values).__name__}"
            raise UsageError(
                f"the transform gave {name} {found} at {name_rows()}",
                f"expected {num_rows}, as the batch had, because all ranks take equal steps",
                "give rows that do not count weight 0 instead of removing them",
            )
    return changed


def _named_row(batch: Batch, row: int, source: str) -> str:
    named = f"sample {format_sample_id(int(batch.sample_ids_N[row]))}" if batch.weights_N[row] else "padding of"
    return f"epoch {batch.epoch}, step {batch.step}, {named} ({source!r})"


def _named_rows(batch: Batch, sources: list[str]) -> str:
    real = [row for row, weight in enumerate(batch.weights_N.tolist()) if weight]
    named = [f"{format_sample_id(int(batch.sample_ids_N[row]))} ({sources[row]!r})" for row in real[:_NAMED]]
    more = f" and {len(real) - _NAMED} more" if len(real) > _NAMED else ""
    return f"epoch {batch.epoch}, step {batch.step}, in samples {', '.join(named)}{more}"
