"""A trained PyTorch module as a service runs it: uint8 images in, answers out, as one program of `torch.export`."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.values import LabelKind
from train.backends.backend import ModelSpec, Predict
from train.backends.torch.losses import answers_of
from train.backends.torch.runtime import device, import_torch

PROGRAM = "model.pt2"


def served_module(classifier: Any, kind: LabelKind, are_logits: bool) -> Any:
    """An `nn.Module`: uint8 images_NHWC -> answers_NK."""
    torch = import_torch()

    class Served(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = classifier

        def forward(self, images_NHWC: Any) -> Any:
            return answers_of(kind, are_logits, self.classifier(images_NHWC))

    return Served()


def program_of(served: Any, spec: ModelSpec, model: str) -> Any:
    """What `torch.export` makes of the module as it is now. Raises UsageError if it cannot follow it."""
    torch = import_torch()
    # On the CPU, which every machine has: a program remembers its device, and is moved when it is loaded.
    served = copy.deepcopy(served).cpu().eval()
    images_NHWC = torch.zeros((2, *spec.image_shape_HWC), dtype=torch.uint8)
    try:
        return torch.export.export(served, (images_NHWC,), dynamic_shapes=({0: torch.export.Dim("N")},))
    except Exception as error:
        # A user's forward may do anything; what torch.export cannot follow, it says in errors of many kinds.
        raise UsageError(
            f"torch.export cannot follow train.model = {model!r}: "
            f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}",
            "expected a forward without branches on the values of tensors",
            "rewrite it (torch.where, torch.cond)",
        ) from error


def write_program(served: Any, spec: ModelSpec, model: str, folder: Path) -> None:
    """Into a new folder; the names of the classes are among its extra files."""
    folder.mkdir()
    names = json.dumps(spec.labels.class_names)
    program = program_of(served, spec, model)
    import_torch().export.save(program, folder / PROGRAM, extra_files={"class_names.json": names})


def load_program(folder: Path) -> Predict:
    """The function inside, on this process's device. Loading can run code: a record must vouch for the file."""
    torch = import_torch()
    from torch.export.passes import move_to_device_pass

    with warnings.catch_warnings():
        # That the file's bytes, which nothing writes to, are read-only.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        program = torch.export.load(folder / PROGRAM)
    # `to` alone would leave the device that the program asserts.
    module = move_to_device_pass(program, device()).module()

    def predict(images_NHWC: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(np.ascontiguousarray(images_NHWC)).to(device())).cpu().numpy()

    return predict


def write_state(model: Any, file: Path) -> None:
    """The weights of `model` alone, as any PyTorch loads them."""
    torch = import_torch()
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    torch.save(state, file)
    loaded = torch.load(file, weights_only=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
