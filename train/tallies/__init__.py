"""What ranks add up over a split, by the kind of its labels: a registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardmill.registry import Entry, Registry

if TYPE_CHECKING:
    from train.labels import LabelSpec
    from train.tallies.tally import Tally

_NUMBERS = Entry("train.tallies.numbers:NumberTally", "mean squared and mean absolute error")

TALLIES: Registry[Callable[[LabelSpec], Tally]] = Registry(
    "the kind of labels",
    {
        "class": Entry("train.tallies.one_class:ClassTally", "accuracy, top five, which class is taken for which"),
        "multi_label": Entry("train.tallies.multi_label:MultiLabelTally", "average precision"),
        "float": _NUMBERS,
        "float_vector": _NUMBERS,
    },
)
"""`LabelKind` -> what makes an empty tally of such labels."""
