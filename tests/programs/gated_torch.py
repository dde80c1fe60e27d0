"""A user's own model whose ranks, once far enough, wait until a test has killed one; executors get this file beside
our bundle.
"""

import os
import time
from pathlib import Path

from torch import nn

_STEPS = 11


class Gated(nn.Sequential):
    num_begun = 0

    def forward(self, images):
        self.num_begun += self.training
        while "TEST_GATE" in os.environ and self.num_begun > _STEPS and not Path(os.environ["TEST_GATE"]).exists():
            time.sleep(0.05)
        return super().forward(images)


def net(image_shape, num_classes):
    height, width, channels = image_shape
    return Gated(nn.Flatten(), nn.Linear(height * width * channels, 16), nn.GELU(), nn.Linear(16, num_classes))
