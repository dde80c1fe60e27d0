"""The weights of a PyTorch module by name, and PyTorch's files of them: for `train.init_from`."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from train.backends.backend import NamedWeights
from train.backends.torch.freeze import head_of
from train.backends.torch.runtime import import_torch
from train.backends.weight_files import check_expansion, read_arrays

# Training scripts wrap what they save.
WRAPPERS = ("state_dict", "model_state_dict", "model")


def read_weights(data: bytes, suffix: str, where: str) -> dict[str, np.ndarray]:
    """Name -> array of a `.pt` file, of which nothing but tensors is unpickled, or of a `.safetensors` file.

    Raises UsageError for a file that does not read so; entries that are not tensors are skipped.
    """
    if suffix == ".safetensors":
        return read_arrays(data, suffix, where)
    torch = import_torch()
    try:
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                check_expansion(sum(entry.file_size for entry in archive.infolist()), len(data))
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for wrapper in WRAPPERS:
            if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
                found = found[wrapper]
        tensors = {str(name): each for name, each in found.items() if isinstance(each, torch.Tensor)}
        # NumPy has no bfloat16.
        typed = {name: each.float() if each.dtype == torch.bfloat16 else each for name, each in tensors.items()}
        return {name: each.detach().numpy() for name, each in typed.items()}
    except Exception as error:
        # Damage shows as anything. Of what is refused for safety PyTorch's own text recommends to load it all the same.
        what = f"cannot be read as {suffix}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if type(error).__name__ == "UnpicklingError":
            asked = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = f"holds more than tensors{f': {asked[1]}' if asked else ''}"
        raise UsageError(
            f"{where} {what}",
            "expected a state_dict, saved by torch.save: nothing else is unpickled",
            "save model.state_dict(), or convert it to .safetensors",
        ) from None


def named_weights(model: Any) -> NamedWeights:
    """Weights by their names in the state_dict."""
    torch = import_torch()
    tensors = model.state_dict()
    last = head_of(model)

    def assign(arrays: Mapping[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, array in arrays.items():
                tensors[name].copy_(torch.from_numpy(array))

    return NamedWeights(
        arrays={name: tensor.detach().cpu().numpy().copy() for name, tensor in tensors.items()},
        head=tuple(name for name in tensors if name.rpartition(".")[0] == last),
        assign=assign,
    )
