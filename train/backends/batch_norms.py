"""Checks of `train.sync_batch_norm` that all backends share, and the exchange of layers for one step.

A batch norm then takes the moments of the GLOBAL batch: count, sum and sum of squares of each channel, in float64, are
added up over ranks, and so is the gradient of the moments. Rows of weight 0 (padding) do not count. The layers are
changed only while a step is computed: evaluation, exports and whatever else has the model find them as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from shardmill.errors import UsageError

# Of the moving statistics after an epoch, what their initial values may still count; and the least that a batch's
# statistics are averaged, because a few steps are better than one.
INITIAL_SHARE = 0.05
SMALLEST_MOMENTUM = 0.5


def largest_momentum(steps_per_epoch: int) -> float:
    """Return the largest momentum of moving statistics for models chosen by name: a library's default may need more
    steps than a training has.

    Keras's 0.99 forgets its initial values in 300 steps, MobileNetV2's 0.999 in 3000; until then a model is evaluated
    with statistics that are not those of its activations. Users choose the momentum of their own models.
    """
    if not steps_per_epoch:
        return 1.0
    return max(SMALLEST_MOMENTUM, INITIAL_SHARE ** (1 / steps_per_epoch))


def alone(tensor: Any, name: str) -> Any:
    """`SumInStep` of a world of one."""
    return tensor


def checked(model: str, found: Iterable[Any], methods: Iterable[str], stock: type) -> tuple[Any, ...]:
    """Batch norms of the model `train.model` names. Raises UsageError for none, and for one with methods of its own.

    `methods`: those of `stock`, its framework's class, on which synchronizing it stands.
    """
    layers = tuple(found)
    if not layers:
        raise UsageError(
            f"train.sync_batch_norm = true, but train.model = {model!r} has no batch normalization",
            f"expected at least one {stock.__name__.lstrip('_')} layer",
            "remove train.sync_batch_norm",
        )
    for layer in layers:
        own = [name for name in methods if getattr(type(layer), name) is not getattr(stock, name)]
        if own and not type(layer).__module__.startswith("torch.nn."):
            raise UsageError(
                f"train.sync_batch_norm = true, but {type(layer).__qualname__} of train.model = {model!r} has its own "
                f"{own[0]}()",
                f"expected {stock.__name__.lstrip('_')} as its framework defines it",
                "use that, or remove train.sync_batch_norm",
            )
    return layers


def check_rows(layer: object, num_rows: int | None, num_samples: int | None) -> None:
    """Raises UsageError if a batch norm sees other rows than the samples of the batch. None: not known."""
    if num_rows != num_samples and num_rows is not None and num_samples is not None:
        raise UsageError(
            f"train.sync_batch_norm = true, but {layer} normalizes {num_rows} rows of a batch of {num_samples}",
            "expected one row for each sample, because padding must not count",
            "give it inputs whose first axis is the batch, or remove train.sync_batch_norm",
        )


@contextmanager
def replaced(method: str, replacements: Iterable[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Inside it each object has another function as its method. Past what frameworks do when an attribute is set."""
    replacements = tuple(replacements)
    for each, function in replacements:
        vars(each)[method] = function
    try:
        yield
    finally:
        for each, _ in replacements:
            vars(each).pop(method, None)
