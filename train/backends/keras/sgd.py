"""Stochastic gradient descent for Keras with PyTorch's update rule; imported only when it is built."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


class Sgd(keras.optimizers.SGD):
    """Momentum sums gradients, and each step multiplies the sum by its own learning rate; decay is L2.

    Keras's own multiplies each gradient by the learning rate of its step before it is summed: after a fall of the rate
    old gradients go on at the old one. And its `weight_decay` is decoupled from momentum.
    """

    def __init__(self, learning_rate: float, momentum: float, l2: float, global_clipnorm: float | None) -> None:
        super().__init__(learning_rate, momentum=float(momentum), global_clipnorm=global_clipnorm)
        self._l2 = l2

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        change: Any = ops.cast(gradient, variable.dtype)
        rate: Any = ops.cast(learning_rate, variable.dtype)
        if self._l2 and self._use_weight_decay(variable):
            change = change + self._l2 * variable
        if self.momentum:
            summed: Any = self.momentums[self._get_variable_index(variable)]
            change = self.momentum * summed + change
            self.assign(summed, change)
        self.assign_sub(variable, rate * change)
