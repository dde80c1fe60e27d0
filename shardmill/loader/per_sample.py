"""A transform of single samples: each draws from a generator of its own, whichever rank and batch it is in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.loader.batch import NAMES, LoaderBatch
from shardmill.mix import mix64

_DRAWS = 5
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
        key = mix64(_DRAWS, seed, batch.epoch, sample_id, occurrence)
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
