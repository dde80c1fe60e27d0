"""The PyTorch module that `train.model` names: built, checked, partly frozen, and with weights that files know by name.

It is an `nn.Module`, or a Keras 3 model on torch, of which Keras says what it trains; it tells PyTorch.

Shape legend: N batch, H height, W width, C channels, K classes. A module gets images_NCHW, a Keras model images_NHWC;
both float32, standardized unless `train.standardize` is false.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.registry import with_line_of_user
from train.api import NamedWeights
from train.backends.model_spec import ModelSpec
from train.backends.output_form import Probe, are_logits
from train.backends.rules import as_layers_raised_them, frozen_names, largest_momentum
from train.backends.torch.batch_norms import limit_momentum
from train.backends.torch.layout import NamedSlice, TensorLayout, rows_by_name
from train.backends.torch.runtime import device, import_torch
from train.backends.weight_files import check_expansion, stored_safetensors
from train.checkpoints.arrays import ArrayLike, StoredArray, WeightFile
from train.config import TrainConfig
from train.labels import check_labels
from train.models import MODELS
from train.models.user import build_named, imported_packages, no_module

if TYPE_CHECKING:
    from train.backends.keras.build import Frozen as FrozenOfKeras


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
    whole_model_reason: str = ""
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


def build_module(config: TrainConfig, spec: ModelSpec, *, materialized: bool = True) -> BuiltModule:
    """Build what `train.model` names, with fresh weights. Raises UsageError if it does not fit.

    `materialized`: false on a rank that is given those of rank 0, which also tries the model.
    """
    check_labels(config, spec.labels)
    start_keras_if_imported(config)
    make, whole_model_reason = partial(build_named, config, spec.image_shape_HWC, spec.labels.num_outputs), ""
    if not materialized:
        model, whole_model_reason = built_on_meta(make)
        if model is not None:
            frozen, identity = freeze(config, model, is_keras=False), _identity(model, is_keras=False)
            _limit_momentum(config, model, spec, is_keras=False)
            classifier = classifier_of(model, is_keras=False, spec=spec)
            return BuiltModule(classifier, model, False, True, frozen, identity)
    model = make()
    is_keras = any(kind.__module__.startswith("keras.") for kind in type(model).__mro__)
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
    return BuiltModule(classifier, model, is_keras, outputs_are_logits, frozen, identity, whole_model_reason)


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


# Attributes of every module.
_STATE = frozenset({"_parameters", "_buffers", "_modules"})


def built_on_meta(make: Callable[[], Any]) -> tuple[Any, str]:
    """-> (the module that `make` makes, on `meta`; ""), or (None; why it cannot be made there)."""
    torch = import_torch()
    try:
        with torch.device("meta"):
            module = make()
    except (Exception, SystemExit) as error:
        # What computes with values while it is built has none there; a user's own code may raise anything.
        return None, f"it computes while it is built: {with_line_of_user(error)}"
    if not isinstance(module, torch.nn.Module):
        return None, f"it is a {type(module).__name__}"
    if any(map(torch.nn.parameter.is_lazy, [*module.parameters(), *module.buffers()])):
        return None, "the shapes of its lazy layers follow from numbers"
    loose = next(_loose_tensors(module), "")
    return (None, f"{loose} is a tensor, and no parameter or buffer") if loose else (module, "")


def _loose_tensors(module: Any) -> Iterator[str]:
    """Attributes of a module and its parts that PyTorch does not know as parts of its state."""
    torch = import_torch()
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            if name not in _STATE and any(isinstance(one, torch.Tensor) for one in values):
                yield f"{path}.{name}".lstrip(".")


@dataclass(frozen=True, slots=True)
class Frozen:
    """The weights that `train.freeze` names; none if it is empty."""

    names: frozenset[str] = frozenset()
    parameters: tuple[Any, ...] = ()
    modules: tuple[Any, ...] = ()
    """Modules without other trainable parameters: they compute as in inference, so that batch norms keep their
    statistics.
    """
    of_keras: FrozenOfKeras | None = None

    def placed(self, model: Any) -> Frozen:
        """The same of a module whose parameters were exchanged for this rank's."""
        rows_of = rows_by_name(model)
        parameters = tuple(each for name, each in model.named_parameters() if rows_of[name].name in self.names)
        return replace(self, parameters=parameters)

    def set_trainable(self, is_trainable: bool) -> None:
        """Whether gradients of them are computed. The modules are put to inference by who puts all to training."""
        if self.of_keras is not None:
            self.of_keras.set_trainable(is_trainable)
        for parameter in self.parameters:
            parameter.requires_grad_(is_trainable)


def freeze(config: TrainConfig, model: Any, is_keras: bool) -> Frozen:
    """Freeze what `train.freeze` names; with `train.unfreeze_epoch` only name it.

    Raises UsageError for a pattern that matches nothing.
    """
    if not config.freeze:
        return Frozen()
    if is_keras:
        from train.backends.keras.build import freeze as freeze_keras

        return Frozen(of_keras=freeze_keras(config, model))
    frozen = _of_module(config, model)
    if not config.unfreeze_epoch:
        frozen.set_trainable(False)
    return frozen


def head_of(model: Any) -> str:
    """The path of the last module with parameters of its own."""
    return [path for path, each in model.named_modules() if list(each.parameters(recurse=False))][-1]


def _of_module(config: TrainConfig, model: Any) -> Frozen:
    trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}
    last = head_of(model)
    names = frozen_names(config, list(trainable), [name for name in trainable if name.rpartition(".")[0] == last])
    modules = []
    for path, module in model.named_modules():
        own = [f"{path}.{name}".lstrip(".") for name, each in module.named_parameters() if each.requires_grad]
        # What has parts may hold some that are trained in training's own way.
        if own and not list(module.children()) and all(name in names for name in own):
            modules.append(module)
    frozen = tuple(trainable[name] for name in trainable if name in names)
    return Frozen(frozenset(names), frozen, tuple(modules))


# Training scripts wrap what they save.
WRAPPERS = ("state_dict", "model_state_dict", "model")


def read_weights(file: WeightFile, is_keras: bool) -> Mapping[str, ArrayLike]:
    """`Learner.read_weights`."""
    if is_keras:
        from train.backends.keras.build import read_weights as read_weights_of_keras

        return read_weights_of_keras(file)
    return _read_weights(file)


def weights_of(built: BuiltModule, layout: TensorLayout, like: Collection[str]) -> NamedWeights:
    """`Learner.named_weights`; of a model that ranks hold together, those of this rank."""
    if built.is_keras:
        from train.backends.keras.build import named_weights as named_weights_of_keras

        return named_weights_of_keras(built.model, like)
    return _named_weights(built.model, layout)


def shapes_and_head(model: Any) -> tuple[dict[str, tuple[int, ...]], tuple[str, ...]]:
    """Shapes of a module's weights by their names in the state_dict, and the names of the last layer's."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    last = head_of(model)
    return shapes, tuple(name for name in shapes if name.rpartition(".")[0] == last)


def _read_weights(file: WeightFile) -> Mapping[str, ArrayLike]:
    """Name -> array of a `.pt` file, of which nothing but tensors is unpickled, or of a `.safetensors` file.

    Arrays are read slice by slice when they are needed; older kinds of `.pt` files at once. Raises UsageError for a
    file that does not read so; entries that are not tensors are skipped.
    """
    try:
        if file.suffix == ".safetensors":
            return stored_safetensors(file)
        if not zipfile.is_zipfile(file.opened()):
            return {name: _array(each) for name, each in _tensors_of(io.BytesIO(file.read()), "cpu").items()}
        with zipfile.ZipFile(file.opened()) as archive:
            check_expansion(sum(entry.file_size for entry in archive.infolist()), file.size_bytes)
        return _stored_tensors(file)
    except Exception as error:
        # Damage shows as anything. Of what is refused for safety PyTorch's own text recommends to load it all the same.
        what = f"cannot be read as {file.suffix}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        expected, fix = "expected a complete file of weights", "save or download it again"
        if file.suffix != ".safetensors":
            if type(error).__name__ == "UnpicklingError":
                asked = re.search(r"GLOBAL ([\w.]+)", str(error))
                what = f"holds more than tensors{f': {asked[1]}' if asked else ''}"
            expected = "expected a state_dict, saved by torch.save: nothing else is unpickled"
            fix = "save model.state_dict(), or convert it to .safetensors"
        raise UsageError(f"{file.where} {what}", expected, fix) from None


def _stored_tensors(file: WeightFile) -> dict[str, ArrayLike]:
    """Of a file that lists where the bytes of each tensor lie; what lies otherwise than row by row is read at once."""
    torch = import_torch()
    listed = _tensors_of(file.opened(), "meta")
    starts = {name: getattr(each.untyped_storage(), "_checkpoint_offset", None) for name, each in listed.items()}
    is_plain = all(each.is_contiguous() for each in listed.values()) and None not in starts.values()
    if not is_plain or _is_of_another_byte_order(file):
        return {name: _array(each) for name, each in _tensors_of(io.BytesIO(file.read()), "cpu").items()}
    arrays: dict[str, ArrayLike] = {}
    for name, each in listed.items():
        is_bfloat16 = each.dtype == torch.bfloat16
        dtype = np.dtype("<u2") if is_bfloat16 else torch.empty(0, dtype=each.dtype).numpy().dtype
        start = starts[name] + each.storage_offset() * dtype.itemsize
        arrays[name] = StoredArray(file, start, dtype, tuple(each.shape), is_bfloat16)
    return arrays


def _tensors_of(file: Any, device: str) -> dict[str, Any]:
    torch = import_torch()
    found = torch.load(file, map_location=device, weights_only=True)
    for wrapper in WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
            found = found[wrapper]
    return {str(name): each for name, each in found.items() if isinstance(each, torch.Tensor)}


def _array(tensor: Any) -> np.ndarray:
    # NumPy has no bfloat16.
    is_bfloat16 = tensor.dtype == import_torch().bfloat16
    return (tensor.float() if is_bfloat16 else tensor).detach().numpy()


def _is_of_another_byte_order(file: WeightFile) -> bool:
    with zipfile.ZipFile(file.opened()) as archive:
        order = next((name for name in archive.namelist() if name.endswith("/byteorder")), None)
        return order is not None and archive.read(order).decode() != sys.byteorder


def _named_weights(model: Any, layout: TensorLayout) -> NamedWeights:
    """Weights by their names in the state_dict of the model as it was built; of each this rank's elements."""
    torch, rows_of = import_torch(), rows_by_name(model)
    last = head_of(model)
    slices: list[tuple[NamedSlice, Any]] = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        elements = layout.slice_of(tensor)
        slices.append(
            (rows_of[name].of(elements) if name in rows_of else NamedSlice(name, elements), layout.local(tensor))
        )

    def assign(arrays: Mapping[str, ArrayLike]) -> None:
        with torch.no_grad():
            for named, tensor in slices:
                if named.name in arrays:
                    tensor.copy_(torch.from_numpy(np.array(arrays[named.name][named.elements.slices])))

    shapes = {named.name: named.elements.global_shape for named, _ in slices}
    return NamedWeights(
        shapes=shapes,
        head=tuple(name for name in shapes if name.rpartition(".")[0] == last),
        arrays=lambda: {named.name: tensor.cpu().numpy().copy() for named, tensor in slices},
        assign=assign,
    )
