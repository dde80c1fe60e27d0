"""From `train.model` to a checked PyTorch module: a user's `nn.Module`, or a Keras 3 model on Keras's torch backend.

Shape legend: N batch, H height, W width, C channels, K classes. A module gets images_NCHW, a Keras model images_NHWC;
both float32, standardized unless `train.standardize` is false.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

from shardmill.errors import UsageError
from train.backends.backend import ModelSpec
from train.backends.torch.runtime import device, import_torch
from train.config import TrainConfig
from train.models import MODELS
from train.models.user import call_factory, imported_packages

# As in train/backends/keras/build.py.
SMALLEST_PROBABILITY = 1e-7


@dataclass(frozen=True, slots=True)
class BuiltModule:
    """A module on its device, whose output fits the dataset's classes."""

    classifier: Any
    """An `nn.Module`: uint8 images_NHWC -> outputs_NK float32; standardization is inside."""
    model: Any
    """What the factory returned."""
    is_keras: bool
    outputs_are_logits: bool
    config_sha256: str


def build_module(config: TrainConfig, spec: ModelSpec) -> BuiltModule:
    """Build what `train.model` names, with fresh weights from PyTorch's seed. Raises UsageError if it does not fit."""
    torch = import_torch()
    num_classes = len(spec.class_names)
    if num_classes < 2:
        raise UsageError(
            f"the dataset has {num_classes} class(es)",
            "expected at least 2 to train a classifier",
            "add images of another",
        )
    if "keras" in imported_packages(config.model):
        _start_keras(config)
    if MODELS.is_own(config.model):
        model = call_factory(config.model, spec.image_shape_HWC, num_classes)
    else:
        model = MODELS[config.model](spec.image_shape_HWC, num_classes)
    is_keras = _is_keras(model)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"train.model = {config.model!r}: the factory returned {type(model).__module__}.{type(model).__name__}",
            "expected an nn.Module, or a Keras 3 model on Keras's torch backend",
            "return the model itself from the factory; unset KERAS_BACKEND",
        )
    if is_keras:
        from train.backends.keras.build import check_pixels

        check_pixels(config, model)
    classifier = _classifier(model.to(device()), is_keras, spec).to(device())
    are_logits = _are_logits(config, model, is_keras)
    _check_outputs(config.model, classifier, spec, are_logits)
    if is_keras:
        from train.backends.keras.runtime import config_sha256

        _refuse_compiled(config, model)
        return BuiltModule(classifier, model, True, are_logits, config_sha256(model))
    return BuiltModule(classifier, model, False, are_logits, _structure_sha256(model))


def per_sample_losses(outputs_NK: Any, labels_N: Any, are_logits: bool, label_smoothing: float) -> Any:
    """Softmax cross-entropy of each sample."""
    torch = import_torch()
    if not are_logits:
        outputs_NK = outputs_NK.clamp(SMALLEST_PROBABILITY, 1.0).log()
    functional = torch.nn.functional
    if are_logits:
        return functional.cross_entropy(outputs_NK, labels_N, reduction="none", label_smoothing=label_smoothing)
    targets_NK = functional.one_hot(labels_N, outputs_NK.shape[1]) * (1.0 - label_smoothing)
    return -((targets_NK + label_smoothing / outputs_NK.shape[1]) * outputs_NK).sum(dim=1)


def _classifier(model: Any, is_keras: bool, spec: ModelSpec) -> Any:
    torch = import_torch()

    class Classifier(torch.nn.Module):
        """uint8 images_NHWC -> the model's outputs_NK."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            # Not part of the state: they are the dataset's.
            self.register_buffer("mean", torch.tensor(spec.scale.mean, dtype=torch.float32), persistent=False)
            self.register_buffer("std", torch.tensor(spec.scale.std, dtype=torch.float32), persistent=False)

        def forward(self, images_NHWC: Any) -> Any:
            images_NHWC = (images_NHWC.to(torch.float32) - self.mean) / self.std
            if is_keras:
                return self.model(images_NHWC, training=self.training).float()
            return self.model(images_NHWC.permute(0, 3, 1, 2)).float()

    return Classifier()


def _start_keras(config: TrainConfig) -> None:
    """On PyTorch, if it is not running yet; Keras reads the variable once."""
    # A driver that has imported TensorFlow leaves its own choice in the environment of its ranks.
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    if keras.backend.backend() != "torch":
        raise UsageError(
            f"Keras runs on {keras.backend.backend()!r} here",
            "expected the backend 'torch'",
            "start the ranks in processes of their own: train.launcher = 'local'",
        )
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(config.seed)


def _is_keras(model: Any) -> bool:
    return any(kind.__module__.startswith("keras.") for kind in type(model).__mro__)


def _refuse_compiled(config: TrainConfig, model: Any) -> None:
    if getattr(model, "compiled", False):
        raise UsageError(
            f"train.model = {config.model!r} is a compiled Keras model, and train.backend is 'torch'",
            "expected one without loss and optimizer: PyTorch's come from section train",
            "leave out compile(), or set train.backend = 'keras'",
        )


def _are_logits(config: TrainConfig, model: Any, is_keras: bool) -> bool:
    """What the config says; under `auto` whether the last layer or module is no softmax."""
    torch = import_torch()
    if is_keras:
        from train.backends.keras.build import are_outputs_logits

        return are_outputs_logits(config, model)
    if config.model_outputs != "auto":
        return config.model_outputs == "logits"
    return not isinstance(list(model.modules())[-1], torch.nn.Softmax)


def _structure_sha256(model: Any) -> str:
    """Over the module's structure, as PyTorch prints it, and the shapes of its state."""
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
    return hashlib.sha256(f"{model!r}{shapes}".encode()).hexdigest()


def _check_outputs(name: str, classifier: Any, spec: ModelSpec, are_logits: bool) -> None:
    """Call it on two black images: builds lazy layers, and shows the output's shape."""
    torch = import_torch()
    height, width, channels = spec.image_shape_HWC
    images_NHWC = torch.zeros((2, height, width, channels), dtype=torch.uint8, device=device())
    classifier.eval()
    try:
        with torch.no_grad():
            outputs = classifier(images_NHWC)
    except (Exception, SystemExit) as error:
        # A user's own layers may raise anything.
        raise UsageError(
            f"train.model = {name!r}: calling the model failed: {type(error).__name__}: {error}",
            f"a module gets float32 images of shape (N, {channels}, {height}, {width})",
        ) from error
    if tuple(outputs.shape) != (2, len(spec.class_names)):
        raise UsageError(
            f"train.model = {name!r} gives an output of shape {tuple(outputs.shape)} for 2 images",
            f"expected {len(spec.class_names)} outputs: the dataset has {len(spec.class_names)} classes",
            "use the num_classes that the factory is called with in the last layer",
        )
    is_distribution = bool((outputs >= 0).all()) and bool(((outputs.sum(dim=1) - 1).abs() < 1e-3).all())
    if not are_logits and not is_distribution:
        # A softmax that is built but used elsewhere looks like the last layer.
        raise UsageError(
            f"train.model = {name!r} is taken to give probabilities, and its outputs do not add up to 1",
            "expected a softmax at its end, or logits",
            'set train.model_outputs = "logits"',
        )
    if not any(parameter.requires_grad for parameter in classifier.parameters()):
        raise UsageError(
            f"train.model = {name!r} has no trainable variables", "expected at least one", "unfreeze a layer"
        )
