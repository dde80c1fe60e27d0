"""Architectures of installed libraries as `train.model`: `keras.applications:MobileNetV2`, for example.

Weights are fresh; nothing is downloaded (`train.init_from` takes trained ones). What the installed release has is read
from its source, because importing a framework takes seconds and a config is checked often.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.errors import UsageError
from shardmill.registry import find_below

Factory = Callable[[tuple[int, int, int], int], Any]


@dataclass(frozen=True, slots=True)
class Architectures:
    """`shardmill.registry.Library` of one package of architectures."""

    module: str
    find_names: Callable[[Path], Iterator[str]]
    """Finds names in the module's own file."""
    build: Callable[[str, tuple[int, int, int], int], Any]
    """(name, image_shape_HWC, num_classes) -> a model that gives logits."""

    def names(self) -> tuple[str, ...]:
        """The architectures of the installed release, sorted."""
        return _names(self)

    def __getitem__(self, name: str) -> Factory:
        """The factory of one, as `train.models.MODELS` describes factories."""
        return functools.partial(self.build, name)


@functools.cache
def _names(architectures: Architectures) -> tuple[str, ...]:
    spec = importlib.util.find_spec(architectures.module.partition(".")[0])
    assert spec is not None and spec.submodule_search_locations
    found = find_below(str(Path(spec.submodule_search_locations[0]).parent), architectures.module)
    assert found is not None and found.origin is not None
    return tuple(sorted(architectures.find_names(Path(found.origin))))


def _keras_names(file: Path) -> Iterator[str]:
    """The classes' functions are written in capitals; modules and helpers are not."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.name[0].isupper())


def _torchvision_names(file: Path) -> Iterator[str]:
    """Yield the builders that the package imports with whole modules; builders are written in lower case."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module and node.names[0].name == "*":
            yield from (name for name in _exported(file.parent / f"{node.module}.py") if name.islower())


def _exported(file: Path) -> Iterator[str]:
    """`__all__` of a module; if it is put together, those of the modules that it imports whole."""
    tree = ast.parse(file.read_bytes())
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            if isinstance(statement.value, ast.List):
                yield from ast.literal_eval(statement.value)
        elif isinstance(statement, ast.ImportFrom) and statement.level == 1 and statement.names[0].name == "*":
            yield from _exported(file.parent / f"{statement.module}.py")


def _build_keras(name: str, image_shape_HWC: tuple[int, int, int], num_classes: int) -> Any:
    """Raises UsageError for images that are too small."""
    import inspect

    import keras

    factory = getattr(keras.applications, name)
    options: dict[str, Any] = {"weights": None, "input_shape": image_shape_HWC}
    if "include_preprocessing" in inspect.signature(factory).parameters:
        # Pixels come standardized.
        options["include_preprocessing"] = False
    try:
        backbone = factory(include_top=False, pooling="avg", **options)
    except ValueError as error:
        smallest = re.search(r"at least (\d+)x(\d+)", str(error))
        raise _unfit(
            f"keras.applications:{name}", image_shape_HWC, smallest[1] if smallest else "", str(error)
        ) from error
    # Its own top ends in a softmax of the compute precision; logits in float32 are what training wants.
    outputs = keras.layers.Dense(num_classes, dtype="float32")(backbone.outputs[0])
    return keras.Model(backbone.inputs, outputs, name=name.lower())


def _build_torchvision(name: str, image_shape_HWC: tuple[int, int, int], num_classes: int) -> Any:
    """Raises UsageError for images that it does not take."""
    import torchvision

    height, width, num_channels = image_shape_HWC
    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        if height != width:
            raise _unfit(f"torchvision.models:{name}", image_shape_HWC, "", "it accepts only square images")
        options["image_size"] = height
    elif name == "maxvit_t":
        options["input_size"] = (height, width)
    elif name in ("googlenet", "inception_v3"):
        # Their second output counts in their own training recipes alone.
        options |= {"aux_logits": False, "init_weights": True}
    try:
        model = getattr(torchvision.models, name)(weights=None, num_classes=num_classes, **options)
        if num_channels != 3:
            model = _three_channels(model)
        _try(model, image_shape_HWC)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise _unfit(f"torchvision.models:{name}", image_shape_HWC, "", str(error)) from error
    return model


def _three_channels(model: Any) -> Any:
    import torch

    class ThreeChannels(torch.nn.Module):
        """Gray images, taken as equal red, green and blue."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, images_NCHW: Any) -> Any:
            return self.model(images_NCHW.expand(-1, 3, -1, -1))

    return ThreeChannels()


def _try(model: Any, image_shape_HWC: tuple[int, int, int]) -> None:
    """Call it once: torchvision states no smallest size, and what is too small fails inside."""
    import torch

    height, width, num_channels = image_shape_HWC
    with torch.no_grad():
        model.eval()(torch.zeros((2, num_channels, height, width)))


def _unfit(model: str, image_shape_HWC: tuple[int, int, int], smallest: str, problem: str) -> UsageError:
    height, width, _ = image_shape_HWC
    expected = f"expected at least {smallest} x {smallest}" if smallest else " ".join(problem.split())[:200]
    return UsageError(
        f'train.model = "{model}" with images of {height} x {width}',
        expected,
        f"set etl.image_size{f' >= {smallest}' if smallest else ' higher'}, or choose another model",
    )


KERAS_APPLICATIONS = Architectures("keras.applications", _keras_names, _build_keras)
TORCHVISION_MODELS = Architectures("torchvision.models", _torchvision_names, _build_torchvision)
