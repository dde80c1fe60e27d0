"""The optimizers of ours, each in every framework that has it."""

from __future__ import annotations

import train.backends.keras.optimizers as in_keras
import train.backends.torch.optimizers as in_torch
from train.optimizers import Optimizer

SGD = Optimizer(keras=in_keras.sgd, torch=in_torch.sgd)
ADAM = Optimizer(keras=in_keras.adam, torch=in_torch.adam)
ADAMW = Optimizer(keras=in_keras.adamw, torch=in_torch.adamw)
