"""A user's own model whose steps leave time to kill somebody; executors get this file beside our bundle."""

import time

from torch import nn


class Slow(nn.Sequential):
    def forward(self, images):
        time.sleep(0.3)
        return super().forward(images)


def net(image_shape, num_classes):
    height, width, channels = image_shape
    return Slow(nn.Flatten(), nn.Linear(height * width * channels, 16), nn.GELU(), nn.Linear(16, num_classes))
