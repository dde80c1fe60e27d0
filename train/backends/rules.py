"""Rules of a model and its steps that are the same in every framework: microbatches, averages and decay of weights,
what `train.freeze` names, batch norms over the global batch, and errors about a model.

With `train.sync_batch_norm` a batch norm takes the moments of the GLOBAL batch: count, sum and sum of squares of each
channel, in float64, are added up over ranks, and so is the gradient of the moments. Rows of weight 0 (padding) do not
count. The layers are changed only while a step is computed: evaluation, exports and whatever else has the model find
them as they were.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from shardmill.errors import UsageError
from shardmill.values import Batch, Cursor
from shardmill.words import first_of
from train.contracts.activities import Activity

if TYPE_CHECKING:
    from train.api import Learner, NamedWeights
    from train.checkpoints.arrays import ArrayLike
    from train.config import TrainConfig


def microbatches_of(batch: Batch, num_microbatches: int) -> Iterator[Batch]:
    """Divide into at most `num_microbatches` of consecutive rows, not copied; their sizes differ by at most one."""
    num_rows = len(batch.labels_N)
    num_microbatches = min(num_microbatches, num_rows)
    for number in range(num_microbatches):
        yield batch.take(slice(number * num_rows // num_microbatches, (number + 1) * num_rows // num_microbatches))


def ema_decay_after(num_updates: int, limit: float) -> float:
    """The share of the old average (Polyak and Juditsky, 10.1137/0330046) that the next update keeps, after so many.

    At first less than `limit`, as `tf.train.ExponentialMovingAverage` has it: a training of a few hundred steps would
    else end with an average of its fresh weights.
    """
    return min(limit, (1 + num_updates) / (10 + num_updates))


def with_averages(named: NamedWeights, begin: Callable[[], object]) -> NamedWeights:
    """The same weights; `begin`, called after each assignment, starts their averages again."""

    def assign(arrays: Mapping[str, ArrayLike]) -> None:
        named.assign(arrays)
        begin()

    return replace(named, assign=assign)


_BIAS = re.compile(r"(^|_)bias(_|$)")
"""Biases may have any number of axes: attention has one for each head, and `vit` one for each position."""
_POSITION_OR_TOKEN = re.compile(r"pos(ition(al)?)?_?(emb|enc)|(cls|class|dist|mask|register)_?token")
_SCALES_OF_NORMS = ("gamma", "beta")


def is_decayed(name: str, num_axes: int, owner: str = "") -> bool:
    """False for biases, scales and offsets of norms, and embeddings of positions and tokens.

    `name`: as the framework has it, `block/dense/kernel` or `block.dense.weight`. `owner`: the class of its module, if
    the framework tells.
    """
    *_, last = re.split(r"[./]", name)
    of_norm = last in _SCALES_OF_NORMS or "norm" in owner.lower()
    return not (num_axes <= 1 or of_norm or _BIAS.search(last) or _POSITION_OR_TOKEN.search(name.lower()))


ALL_BUT_HEAD = "all_but_head"
MAX_NAMED = 6


def freeze(learner: Learner, config: TrainConfig, cursor: Cursor) -> None:
    """Before the steps from `cursor` on: what follows from the cursor alone is the same after a resume."""
    if cursor.epoch < config.unfreeze_epoch:
        learner.freeze()
    elif cursor.epoch == config.unfreeze_epoch > 0 and cursor.step == 0:
        learner.unfreeze()


def step_activity(config: TrainConfig, epoch: int) -> Activity:
    """Return the activity of a step of that epoch. A step with more weights is another activity: it is traced again."""
    has_more = 0 < config.unfreeze_epoch <= epoch
    return Activity("a step with what was frozen" if has_more else "a step", repeats=True)


def never_unfrozen(config: TrainConfig) -> str:
    """A warning if `train.unfreeze_epoch` lies behind the last epoch, else empty.

    No error: a short training tests a config, and a longer one may continue it.
    """
    if config.unfreeze_epoch < config.epochs:
        return ""
    return (
        f"train.unfreeze_epoch = {config.unfreeze_epoch}, counted from 0, but the training ends after train.epochs = "
        f"{config.epochs}: the weights that train.freeze names stay frozen"
    )


def frozen_names(config: TrainConfig, names: Sequence[str], head: Collection[str]) -> set[str]:
    """Return the elements of `names` that a pattern of `train.freeze` matches; `head`: the names of the last layer.

    Raises UsageError for a pattern that matches nothing, and if nothing is left to train.
    """
    frozen: set[str] = set()
    for pattern in config.freeze:
        if pattern == ALL_BUT_HEAD:
            found = set(names) - set(head)
        else:
            found = {name for name in names if fnmatchcase(name, pattern)}
        if not found:
            shown = first_of(names, MAX_NAMED)
            near = difflib.get_close_matches(pattern, [ALL_BUT_HEAD, *names], n=1, cutoff=0.6)
            raise UsageError(
                f"train.freeze = {pattern!r} matches no weight of train.model = {config.model!r}",
                f"it has {shown}",
                f"did you mean {near[0]!r}?" if near else f"give a pattern such as 'conv*', or {ALL_BUT_HEAD!r}",
            )
        frozen |= found
    if frozen >= set(names):
        raise UsageError(
            f"train.freeze = {list(config.freeze)!r} freezes all weights of train.model = {config.model!r}",
            "expected at least one weight",
            f"give fewer patterns, or {ALL_BUT_HEAD!r}",
        )
    return frozen


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


@contextmanager
def as_layers_raised_them() -> Iterator[None]:
    """Around a call or a trace of a model: a UsageError of one of its layers comes out of it untouched."""
    try:
        yield
    except Exception as error:
        innermost: BaseException | None = error
        found = None
        while innermost is not None:
            found = innermost if isinstance(innermost, UsageError) else found
            innermost = innermost.__cause__ or innermost.__context__
        if found is None or found is error:
            raise
        raise found from None


_NUM_SHOWN = 8


def no_layer(name: str, known: Sequence[str]) -> UsageError:
    """The error for a layer that is not there: the last layers are those that people mean."""
    near = difflib.get_close_matches(name, known, n=1)
    shown = ", ".join(known[-_NUM_SHOWN:])
    return UsageError(
        f"the model has no layer {name!r}",
        f"expected one of its {len(known)} layers; the last ones are {shown}",
        f"did you mean {near[0]!r}?" if near else "choose one of them for --layer",
    )


def nothing_to_recompute(model: str, expected: str) -> UsageError:
    """For activation checkpointing: of a block only its inputs are kept, and the backward pass computes the rest again.

    `model`: what `train.model` names.
    """
    return UsageError(
        f"train.memory.activation_checkpointing: train.model = {model!r} has no part that can be recomputed",
        f"expected {expected}",
        "set train.memory.activation_checkpointing = 'off'",
    )
