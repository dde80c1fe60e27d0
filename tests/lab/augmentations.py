"""Augmentations under which boxes and masks must follow the pixels."""

from __future__ import annotations

from shardmill.augment.options import AugmentOptions

AUGMENTATIONS = {
    "none": AugmentOptions(preset="none"),
    "crops": AugmentOptions(images="photographs", random_crop_padding=6),
    "size": AugmentOptions(preset="none", size=40, random_vertical_flip=True),
    "imagenet": AugmentOptions(preset="imagenet", random_vertical_flip=True),
}
