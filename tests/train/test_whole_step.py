"""The Keras backend's step as one compiled function with a sum over ranks inside: as two halves, and announced."""

# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.train.learners import CLIFF, LINEAR, SHAPE, STATEFUL, batch_of, learner, state
from train.backends.backend import StatePart
from train.contracts.activities import Activity, during
from train.contracts.values import StepReport
from train.contracts.world import World
from train.strategies.collective import AnnouncedCollective, AnnouncedSum, SingleCollective


class Reported:
    """A rank's reporter that keeps what the rank did."""

    def __init__(self) -> None:
        self.done = [Activity()]

    def step(self, report: StepReport) -> None:
        return

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        return

    def doing(self, activity: Activity) -> Activity:
        self.done.append(activity)
        return self.done[-2]


class Twice(SingleCollective):
    """As if another rank had the same rows; an operation that TensorFlow cannot look into, as Horovod's is."""

    def __init__(self, is_lost: bool = False) -> None:
        self.now, self._is_lost = 0.0, is_lost

    def sum_tensors(self, tensors):
        import tensorflow as tf

        def meet(*arrays):
            self.now += 3.0
            if self._is_lost:
                raise ConnectionError("the other rank is gone")
            return [2 * each for each in arrays]

        return tf.numpy_function(meet, tensors, [each.dtype for each in tensors])


def announced(collective, reporter=None):
    return AnnouncedCollective(lambda world: collective, World(), reporter or Reported()).sum_inside()


@pytest.mark.parametrize(
    "config",
    [{}, {"accumulation_steps": 3}, {"ema_decay": 0.5}, {"mixed_precision": "float16"}],
    ids=str,
)
def test_one_function_does_what_two_halves_do(config):
    batch = batch_of(SHAPE, num_rows=7)
    # Adam would make steps of the rounding errors that the gradient of a bias below a batch norm is.
    halves, whole = (learner("keras", STATEFUL["keras"], optimizer="sgd", **config) for _ in range(2))
    whole.sum_by(announced(Twice()))
    for _ in range(3):
        expected = halves.apply(Twice().sum_tensors(halves.gradients(batch, 14, 0.5)), 0.1)
        found = whole.whole_step(batch, 14, 0.5, 0.1)
        assert (found.is_applied, found.overflowed) == (expected.is_applied, expected.overflowed) == (True, False)
        np.testing.assert_allclose(
            (found.loss, found.num_correct, found.gradient_norm),
            (expected.loss, expected.num_correct, expected.gradient_norm),
            rtol=1e-6,
        )
    for part in StatePart:
        for one, other in zip(whole.arrays(part), halves.arrays(part), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("model", [CLIFF, LINEAR], ids=["gradient", "loss"])
def test_what_is_not_finite_changes_nothing(model):
    one = learner("keras", model["keras"])
    one.sum_by(announced(SingleCollective()))
    if model is LINEAR:
        infinite = [np.full_like(each, np.inf) for each in one.arrays(StatePart.WEIGHTS)]
        one.assign(StatePart.WEIGHTS, infinite, "the test")
    before = state(one)
    assert not one.whole_step(batch_of(SHAPE), 4, 1.0, None).is_applied
    assert state(one) == before


def test_waiting_for_the_sum_is_announced_and_timed():
    one, reporter, late, batch = learner("keras", LINEAR["keras"]), Reported(), Twice(), batch_of(SHAPE)
    summed = AnnouncedSum(late, reporter, lambda: late.now)
    one.sum_by(summed)
    for _ in range(2):
        reporter.done = [Activity()]
        with during(reporter, Activity("a step")):
            one.whole_step(batch, 4, 1.0, 0.1)
        assert [(each.what, each.waits) for each in reporter.done[1:]] == [
            ("a step", False), ("an allreduce", True), ("a step", False), ("its own work", False),
        ]  # fmt: skip
        assert summed.seconds == 3.0


def test_with_other_sums_in_front_the_time_before_it_may_be_waiting_and_the_update_is_not():
    one, reporter = learner("keras", LINEAR["keras"]), Reported()
    summed = announced(Twice(), reporter)
    one.sum_by(summed)
    for _ in range(2):
        reporter.done = [Activity()]
        with during(reporter, Activity("a step")):
            summed.expect_others()
            one.whole_step(batch_of(SHAPE), 4, 1.0, 0.1)
        assert [(each.what, each.waits) for each in reporter.done[1:]] == [
            ("a step", False), ("an allreduce in its step", True), ("an allreduce", True), ("a step", False),
            ("its own work", False),
        ]  # fmt: skip


def test_a_sum_that_fails_leaves_the_weights_and_what_the_rank_waited_for():
    one, reporter = learner("keras", LINEAR["keras"]), Reported()
    one.sum_by(announced(Twice(is_lost=True), reporter))
    before = one.weights_sha256()
    with pytest.raises(Exception, match="the other rank is gone"):
        one.whole_step(batch_of(SHAPE), 4, 1.0, 0.1)
    assert one.weights_sha256() == before
    assert reporter.done[-1].waits
