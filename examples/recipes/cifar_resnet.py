"""The model for examples/recipes/cifar10.toml: ResNet-20 for 32 x 32 images (He et al., arXiv:1512.03385, section 4.2).

0.27 M weights. Shape legend: N images, C channels, H height, W width.
"""

import torch
from torch import nn
from torch.nn import functional

NUM_BLOCKS_OF_STAGE = 3
CHANNELS_OF_STAGES = (16, 32, 64)


class Block(nn.Module):
    """Two convolutions beside a shortcut without weights, which skips pixels and adds channels of zeros."""

    def __init__(self, num_in, num_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        self.stride, self.num_new = stride, num_out - num_in

    def forward(self, x_NCHW):
        y_NCHW = functional.relu(self.norm1(self.conv1(x_NCHW)))
        y_NCHW = self.norm2(self.conv2(y_NCHW))
        shortcut_NCHW = x_NCHW[:, :, :: self.stride, :: self.stride]
        shortcut_NCHW = functional.pad(shortcut_NCHW, (0, 0, 0, 0, 0, self.num_new))
        return functional.relu(y_NCHW + shortcut_NCHW)


class ResNet20(nn.Module):
    """A convolution, three stages of three blocks, the mean of each channel, a dense layer."""

    def __init__(self, num_channels, num_classes):
        super().__init__()
        num_in = CHANNELS_OF_STAGES[0]
        self.conv = nn.Conv2d(num_channels, num_in, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(num_in)
        blocks = []
        for stage, num_out in enumerate(CHANNELS_OF_STAGES):
            for block in range(NUM_BLOCKS_OF_STAGE):
                blocks.append(Block(num_in, num_out, stride=2 if stage and not block else 1))
                num_in = num_out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(num_in, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, images_NCHW):
        x_NCHW = functional.relu(self.norm(self.conv(images_NCHW)))
        return self.head(torch.mean(self.blocks(x_NCHW), dim=(2, 3)))


def resnet20(image_shape, num_classes):
    """Standardized images of at least 4 x 4 -> logits."""
    return ResNet20(image_shape[2], num_classes)
