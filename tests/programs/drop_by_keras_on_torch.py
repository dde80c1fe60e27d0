"""Prints, as packed bits, which of 4 x 3 x 5 elements a Keras layer keeps when Keras runs on PyTorch."""

import numpy as np
import torch

from train.layers.keras import SampleDropout
from train.layers.sample_bits import drawing, sample_keys

layer = SampleDropout(0.3)
layer.place = 1
with drawing(torch.from_numpy(sample_keys(5, 2, np.arange(4)))):
    print(np.packbits(layer(torch.ones(4, 3, 5), training=True).numpy() > 0).tobytes().hex())
