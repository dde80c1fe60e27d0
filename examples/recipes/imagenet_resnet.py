"""The model for examples/recipes/imagenet_resnet50.toml: torchvision's ResNet-50 as Goyal et al. begin it."""

from torchvision import models


def resnet50(image_shape, num_classes):
    """Standardized images of three channels, 224 x 224 -> logits."""
    # The last batch norm of each block begins with scale 0 (arXiv:1706.02677, section 5.1).
    return models.resnet50(num_classes=num_classes, zero_init_residual=True)
