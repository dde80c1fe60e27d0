"""A user's own model: `package.module:function`, called as `function(image_shape=(H, W, C), num_classes=K)`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from shardmill.errors import UsageError


def load_factory(name: str) -> Callable[..., Any]:
    """The function that `package.module:function` names. Raises UsageError with the reason and where was looked."""
    module_name, _, function_name = name.partition(":")
    folder = os.getcwd()
    if folder not in sys.path:
        # Appended, never put first: a user's own `train.py` must not hide a package of ours.
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        # A user's module may raise anything while it is imported; its sys.exit() must not end our command.
        raise UsageError(
            f"train.model = {name!r}: cannot import {module_name!r}: {type(error).__name__}: {error}",
            f"looked in {', '.join(path for path in sys.path if path)}",
            "start shardmill in the folder that holds the module, or set PYTHONPATH (on Spark also --py-files)",
        ) from error
    factory = getattr(module, function_name, None)
    if not callable(factory):
        raise UsageError(
            f"train.model = {name!r}: {module.__file__} has no function {function_name!r}",
            "expected package.module:function",
        )
    return factory


def call_factory(name: str, image_shape_HWC: tuple[int, int, int], num_classes: int) -> Any:
    """The Keras 3 model that the factory returns. Raises UsageError where it raises or returns something else."""
    import keras

    factory = load_factory(name)
    try:
        model = factory(image_shape=image_shape_HWC, num_classes=num_classes)
    except (Exception, SystemExit) as error:
        # Likewise a user's function.
        raise UsageError(
            f"train.model = {name!r}: the factory failed: {type(error).__name__}: {error}",
            f"it was called with image_shape={image_shape_HWC}, num_classes={num_classes}",
        ) from error
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"train.model = {name!r}: the factory returned {type(model).__module__}.{type(model).__name__}",
            "expected a Keras 3 model (keras.Model, keras.Sequential or a subclass)",
        )
    return model
