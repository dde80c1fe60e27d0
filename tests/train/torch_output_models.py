"""PyTorch modules whose outputs are logits or probabilities in ways that their last module does not tell."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class _Model(nn.Module):
    def __init__(self, image_shape, num_classes, last):
        super().__init__()
        height, width, channels = image_shape
        self.out = nn.Linear(height * width * channels, num_classes)
        self.last = last

    def forward(self, images_NCHW):
        return self.last(self.out(images_NCHW.flatten(1)))


def _zeroed(model, bias=0.0):
    nn.init.zeros_(model.out.weight)
    nn.init.constant_(model.out.bias, bias)
    return model


def nested_softmax(image_shape, num_classes):
    return nn.Sequential(nn.Sequential(_Model(image_shape, num_classes, lambda x: x), nn.Softmax(dim=1)), nn.Identity())


def ops_softmax(image_shape, num_classes):
    return _Model(image_shape, num_classes, lambda x: functional.softmax(x, dim=1))


def softmax_of_zeros(image_shape, num_classes):
    return _zeroed(ops_softmax(image_shape, num_classes))


def softmax_then_identity(image_shape, num_classes):
    return nn.Sequential(ops_softmax(image_shape, num_classes), nn.Dropout(0.0), nn.Identity())


def own_softmax_layer(image_shape, num_classes):
    return _Model(image_shape, num_classes, lambda x: (x - x.logsumexp(dim=1, keepdim=True)).exp())


def nested_sigmoid(image_shape, num_classes):
    return nn.Sequential(nn.Sequential(_Model(image_shape, num_classes, lambda x: x), nn.Sigmoid()), nn.Identity())


def ops_sigmoid(image_shape, num_classes):
    return _Model(image_shape, num_classes, torch.sigmoid)


def logits(image_shape, num_classes):
    return _Model(image_shape, num_classes, lambda x: x)


def zeros(image_shape, num_classes):
    return _zeroed(logits(image_shape, num_classes))


def constant_distribution(image_shape, num_classes):
    return _zeroed(logits(image_shape, num_classes), bias=1 / num_classes)


def small_relu(image_shape, num_classes):
    model = _Model(image_shape, num_classes, functional.relu)
    nn.init.normal_(model.out.weight, std=1e-4)
    return model


def log_softmax(image_shape, num_classes):
    return _Model(image_shape, num_classes, lambda x: functional.log_softmax(x, dim=1))


def tanh(image_shape, num_classes):
    return _Model(image_shape, num_classes, torch.tanh)
