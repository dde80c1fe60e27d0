"""Builds and checks the PyTorch module that `train.model` names: an `nn.Module`, or a Keras 3 model on torch.

Shape legend: N batch, H height, W width, C channels, K classes. A module gets images_NCHW, a Keras model images_NHWC;
both float32, standardized unless `train.standardize` is false.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.registry import with_line_of_user
from train.backends.backend import ModelSpec
from train.backends.batch_norms import largest_momentum
from train.backends.model_errors import as_layers_raised_them
from train.backends.output_form import Probe, are_logits
from train.backends.torch.batch_norms import limit_momentum
from train.backends.torch.freeze import Frozen, freeze
from train.backends.torch.meta import built_without_numbers
from train.backends.torch.runtime import device, import_torch
from train.config import TrainConfig
from train.labels import check_labels
from train.models import MODELS
from train.models.modules import no_module
from train.models.user import build_named, imported_packages

# Of a single image there are no statistics.
NUM_TRIED_IMAGES = 2


@dataclass(frozen=True, slots=True)
class BuiltModule:
    """A module on its device, whose output fits the dataset's labels."""

    classifier: Any
    """An `nn.Module`: uint8 images_NHWC -> outputs_NK float32; standardization is inside."""
    model: Any
    """The model that the factory returned."""
    is_keras: bool
    outputs_are_logits: bool
    frozen: Frozen
    """The weights that `train.freeze` names."""
    config_sha256: str
    why_whole: str = ""
    """Why it has numbers of its own, though rank 0's were to be given to it; empty if it has none, or was to have
    them."""

    def parts_of_state(self) -> tuple[list[Any], list[Any]]:
        """The tensors of `StatePart.WEIGHTS` and, but for generators, of `StatePart.OWN`."""
        model = self.model
        if self.is_keras:
            weights, own = model.trainable_variables, model.non_trainable_variables
            return [each.value for each in weights], [each.value for each in own]
        weights = [each for each in model.parameters() if each.requires_grad]
        return weights, [*(each for each in model.parameters() if not each.requires_grad), *model.buffers()]


def build_module(config: TrainConfig, spec: ModelSpec, *, has_numbers: bool = True) -> BuiltModule:
    """Build what `train.model` names, with fresh weights. Raises UsageError if it does not fit.

    `has_numbers`: false on a rank that is given those of rank 0, which also tries the model.
    """
    check_labels(config, spec.labels)
    start_keras_if_imported(config)
    make, why_whole = partial(build_named, config, spec.image_shape_HWC, spec.labels.num_outputs), ""
    if not has_numbers:
        model, why_whole = built_without_numbers(make)
        if model is not None:
            frozen, identity = freeze(config, model, is_keras=False), _identity(model, is_keras=False)
            _limit_momentum(config, model, spec, is_keras=False)
            classifier = classifier_of(model, is_keras=False, spec=spec)
            return BuiltModule(classifier, model, False, True, frozen, identity)
    model = make()
    is_keras = _is_keras(model)
    if not isinstance(model, import_torch().nn.Module):
        raise UsageError(
            f"train.model = {config.model!r}: the factory returned {type(model).__module__}.{type(model).__name__}",
            "expected an nn.Module, or a Keras 3 model on Keras's torch backend",
            "return the model itself from the factory; unset KERAS_BACKEND",
        )
    if is_keras:
        if config.needs_module:
            raise no_module(config)
        from train.backends.keras.build import check_pixels

        check_pixels(config, model)
    classifier = classifier_of(model.to(device()), is_keras=is_keras, spec=spec)
    _check_outputs(config.model, classifier, spec)
    if is_keras:
        _refuse_compiled(config, model)
    outputs_are_logits = are_logits(config, spec.labels.kind, spec.image_shape_HWC, _probe(classifier))
    frozen, identity = freeze(config, model, is_keras), _identity(model, is_keras)
    _limit_momentum(config, model, spec, is_keras)
    return BuiltModule(classifier, model, is_keras, outputs_are_logits, frozen, identity, why_whole)


def _limit_momentum(config: TrainConfig, model: Any, spec: ModelSpec, is_keras: bool) -> None:
    """By how long the training is, which is no part of what the model is."""
    if not MODELS.is_own(config.model):
        limit_momentum(model, is_keras, largest_momentum(spec.steps_per_epoch))


def classifier_of(model: Any, *, is_keras: bool, spec: ModelSpec) -> Any:
    """`model` behind the standardization of pixels, as an `nn.Module`."""
    torch = import_torch()

    class Classifier(torch.nn.Module):
        """uint8 images_NHWC -> the model's outputs_NK."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.still: tuple[Any, ...] = ()
            """Modules that compute as in inference, also in training."""
            # Not part of the state: they are the dataset's. For a whole row of pixels: along three channels alone
            # PyTorch takes four times as long.
            self.pixels_WC = spec.image_shape_HWC[1:]
            for name, values in (("mean", spec.scale.mean), ("std", spec.scale.std)):
                of_row = torch.tensor(values, dtype=torch.float32, device=device()).repeat(self.pixels_WC[0])
                self.register_buffer(name, of_row, persistent=False)

        def forward(self, images_NHWC: Any) -> Any:
            if is_keras:
                with as_layers_raised_them():
                    return self.model(self._standardized(images_NHWC), training=self.training).float()
            return self.model(self.inputs_of(images_NHWC)).float()

        def inputs_of(self, images_NHWC: Any) -> Any:
            """What a module is given: images_NCHW."""
            return self._standardized(images_NHWC).permute(0, 3, 1, 2)

        def _standardized(self, images_NHWC: Any) -> Any:
            rows = images_NHWC.to(torch.float32).flatten(2)
            return ((rows - self.mean) / self.std).unflatten(2, self.pixels_WC)

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            for module in self.still:
                module.training = False
            return self

    return Classifier()


def start_keras_if_imported(config: TrainConfig) -> None:
    """Import Keras with PyTorch as its backend, before the factory of `train.model` imports it with another one.

    Raises UsageError if it already runs on another backend.
    """
    if "keras" not in imported_packages(config):
        return
    # A driver that has imported TensorFlow leaves its own choice in the environment of its ranks.
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    if keras.backend.backend() != "torch":
        raise UsageError(
            f"Keras runs on {keras.backend.backend()!r} here",
            "expected the backend 'torch'",
            "start the ranks in separate processes: train.launcher = 'local'",
        )
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(config.seed)


def _is_keras(model: Any) -> bool:
    return any(kind.__module__.startswith("keras.") for kind in type(model).__mro__)


def _refuse_compiled(config: TrainConfig, model: Any) -> None:
    if getattr(model, "compiled", False):
        raise UsageError(
            f"train.model = {config.model!r} is a compiled Keras model, but train.backend is 'torch'",
            "expected one without loss and optimizer: PyTorch's are set in section train",
            "remove compile(), or set train.backend = 'keras'",
        )


def _probe(classifier: Any) -> Probe:
    torch = import_torch()
    weights = [each for each in classifier.parameters() if each.requires_grad]

    def outputs(images_NHWC: np.ndarray) -> np.ndarray:
        classifier.eval()
        with torch.no_grad():
            return classifier(torch.from_numpy(images_NHWC).to(device())).cpu().numpy()

    def assign(arrays: Sequence[np.ndarray]) -> None:
        with torch.no_grad():
            for weight, array in zip(weights, arrays, strict=True):
                weight.copy_(torch.from_numpy(array))

    return Probe(outputs, lambda: [each.detach().cpu().numpy().copy() for each in weights], assign)


def _identity(model: Any, is_keras: bool) -> str:
    """Of a module over its structure, as PyTorch prints it, and the shapes of its state."""
    if is_keras:
        from train.backends.keras.runtime import config_sha256

        return config_sha256(model)
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
    return hashlib.sha256(f"{model!r}{shapes}".encode()).hexdigest()


def _check_outputs(name: str, classifier: Any, spec: ModelSpec) -> None:
    """Call it on black images: builds lazy layers, and shows the output's shape."""
    torch = import_torch()
    height, width, channels = spec.image_shape_HWC
    images_NHWC = torch.zeros((NUM_TRIED_IMAGES, height, width, channels), dtype=torch.uint8, device=device())
    classifier.eval()
    given: list[Any] = []
    watching = classifier.model.register_forward_hook(lambda module, inputs, output: given.append(output))
    try:
        with torch.no_grad():
            outputs = classifier(images_NHWC)
    except (Exception, SystemExit) as error:
        if given and not isinstance(given[0], torch.Tensor):
            raise UsageError(
                f"train.model = {name!r} returns a {type(given[0]).__name__}",
                f"expected one tensor of shape (N, {spec.labels.num_outputs})",
                "return only the outputs from forward()",
            ) from None
        # A user's own layers may raise anything.
        raise UsageError(
            f"train.model = {name!r}: calling the model failed: {with_line_of_user(error)}",
            f"a module gets float32 images of shape (N, {channels}, {height}, {width})",
            "build it for the image_shape that the factory is called with, which is (height, width, channels)",
        ) from error
    finally:
        watching.remove()
    if tuple(outputs.shape) != (NUM_TRIED_IMAGES, spec.labels.num_outputs):
        raise UsageError(
            f"train.model = {name!r} returns an output of shape {tuple(outputs.shape)} for {NUM_TRIED_IMAGES} images",
            f"expected {spec.labels.num_outputs} outputs: the dataset has {spec.labels}",
            "use the num_classes that the factory is called with in the last layer",
        )
    if not any(parameter.requires_grad for parameter in classifier.parameters()):
        raise UsageError(
            f"train.model = {name!r} has no trainable variables", "expected at least one", "unfreeze a layer"
        )
