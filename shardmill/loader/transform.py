"""The last step in a loader's threads: a batch becomes the framework's arrays, and the user's transform changes it, or
each of its samples, which then draws from a generator of its own, whichever rank and batch it is in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardmill.errors import UsageError
from shardmill.ids import format_sample_id
from shardmill.loader.batch import NAMES, BatchDevice, InMemory, LoaderBatch
from shardmill.mix import mix64
from shardmill.words import name_some

if TYPE_CHECKING:
    from shardmill.loader.row_source import Origins
    from shardmill.values import Batch


Transform = Callable[[LoaderBatch, np.random.Generator], "LoaderBatch | Mapping[str, Any]"]
"""A batch of the loader -> the batch that it hands out, or what of it is new by name (other names: extra columns)."""

_BATCH_DRAWS = 4
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
    device: BatchDevice = field(default_factory=InMemory)
    """Gets the batch behind the transform: JAX allows no computation on global arrays in several threads, for its
    processes might begin them in different orders."""

    def __call__(self, batch: Batch, origins: Origins) -> Any:
        """What `device.take` makes the batch of. Raises UsageError, from its cause, if the transform fails or gives no
        such batch.
        """
        return self.device.put(self._transformed(batch, origins))

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
        rng = np.random.default_rng(mix64(_BATCH_DRAWS, self.seed, batch.epoch, batch.step, self.first_stream))
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
    named = [f"{format_sample_id(int(batch.sample_ids_N[row]))} ({sources[row]!r})" for row in real]
    return f"epoch {batch.epoch}, step {batch.step}, in samples {name_some(named, _NAMED)}"


_SAMPLE_DRAWS = 5
"""First word of its key: no other draw has the same one."""
OWN_NAMES = {"image": "images", "label": "labels"}
"""What a transform may change, and its name in the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class RowOfBatch(Mapping[str, Any]):
    """One row of a batch, as a transform gets it; also a mapping of `image`, `label`, `sample_id` and extra columns."""

    image: Any
    """In the layout of the loader's images: (H, W, C); by default (C, H, W) in a `torch_loader`."""
    label: Any
    sample_id: int
    weight: float
    """0 for padding, whose extra columns are None."""
    epoch: int
    extra: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name) if name in ("image", "label", "sample_id") else self.extra[name]

    def __iter__(self) -> Iterator[str]:
        yield from ("image", "label", "sample_id")
        yield from self.extra

    def __len__(self) -> int:
        return 3 + len(self.extra)


SampleTransform = Callable[[RowOfBatch, np.random.Generator], Any]
"""A row -> its new image, or a dict of what is new in it: `image`, `label`, other names become extra columns."""


def change_samples(
    batch: LoaderBatch, transform: SampleTransform, seed: int, occurrences_N: np.ndarray, name: Callable[[int], str]
) -> dict[str, Any]:
    """What is new in a batch. `name` gives the name of a row for messages.

    Raises UsageError, from its cause, at the sample at which the transform fails or gives another shape than before.
    """
    changed: dict[str, list[Any]] = {}
    for place, occurrence in enumerate(occurrences_N.tolist()):
        extra = {column: values[place] for column, values in batch.extra.items()}
        sample_id = int(batch.sample_ids[place])
        row = RowOfBatch(
            batch.images[place], batch.labels[place], sample_id, float(batch.weights[place]), batch.epoch, extra
        )
        key = mix64(_SAMPLE_DRAWS, seed, batch.epoch, sample_id, occurrence)
        try:
            with _framework_draws(batch.images, key):
                new = transform(row, np.random.default_rng(key))
        except Exception as error:
            raise UsageError(
                f"the transform raised {type(error).__name__} at {name(place)}: {error}",
                "expected it to change every sample",
                "the cause is above; `loader.seek(epoch, step)` gives its batch again",
            ) from error
        new = new if isinstance(new, Mapping) else {"image": new}
        _check_names(new, list(changed) if place else None, partial(name, place))
        for what, value in new.items():
            values = changed.setdefault(what, [])
            if what in OWN_NAMES and np.shape(value) != np.shape(values[0] if values else value):
                raise UsageError(
                    f"the transform gave the {what} the shape {tuple(np.shape(value))} at {name(place)}",
                    f"expected {tuple(np.shape(values[0]))}, as for the samples before it",
                    "resize or crop to one size",
                )
            values.append(value)
    return {
        OWN_NAMES.get(what, what): _stacked(values, batch.images) if what in OWN_NAMES else values
        for what, values in changed.items()
    }


def _check_names(new: Mapping[str, Any], before: list[str] | None, name: Callable[[], str]) -> None:
    """`before`: what the transform gave for the samples before this one; None at the first."""
    if nothing := [each for each in new if each in OWN_NAMES and new[each] is None]:
        raise UsageError(
            f"the transform gave no {' and no '.join(nothing)} at {name()}",
            "expected a new one: None is what a function without `return` gives",
            "return what is new, also if it was changed in place",
        )
    # A batch's names: a list of rows would take the place of its array.
    if of_batch := [each for each in new if each in NAMES]:
        near = [own for own, each in OWN_NAMES.items() if each in of_batch]
        raise UsageError(
            f"the transform gave {', '.join(of_batch)} at {name()}",
            "expected image, label and extra columns, because per_sample = True changes one sample at a time",
            f"did you mean {' and '.join(near)}?" if near else "leave it out",
        )
    if before is not None and new.keys() != set(before):
        raise UsageError(
            f"the transform gave {', '.join(new)} at {name()}",
            f"expected {', '.join(before)}, as for the samples before it",
            "give the same names for every sample",
        )


def _stacked(values: list[Any], images: Any) -> Any:
    """As a tensor, if there are tensors among them or in the batch."""
    torch = sys.modules.get("torch")
    if torch is not None and any(map(torch.is_tensor, values)):
        return torch.stack([torch.as_tensor(value) for value in values])
    rows = np.stack(values)
    return rows if isinstance(images, np.ndarray) or torch is None else torch.from_numpy(rows)


def _framework_draws(images: Any, key: int) -> AbstractContextManager[object]:
    """In a `torch_loader`, PyTorch's random functions draw for this row alone, too."""
    if isinstance(images, np.ndarray):
        return nullcontext()
    from shardmill.loader.torch import draws_of

    return draws_of(key)
