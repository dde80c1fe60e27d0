"""The weights of a PyTorch module by name, and PyTorch's files of them: for `train.init_from`."""

from __future__ import annotations

import io
import re
import sys
import zipfile
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import UsageError
from train.backends.backend import NamedWeights
from train.backends.torch.boxes import NamedBox, rows_by_name
from train.backends.torch.freeze import head_of
from train.backends.torch.layout import TensorLayout
from train.backends.torch.runtime import import_torch
from train.backends.weight_files import check_expansion, stored_safetensors
from train.checkpoints.stored_arrays import ArrayLike, StoredArray, WeightFile

if TYPE_CHECKING:
    from train.backends.torch.model import BuiltModule

# Training scripts wrap what they save.
WRAPPERS = ("state_dict", "model_state_dict", "model")


def read_weights(file: WeightFile, is_keras: bool) -> Mapping[str, ArrayLike]:
    """`Learner.read_weights`."""
    if is_keras:
        from train.backends.keras.names import read_weights as read_weights_of_keras

        return read_weights_of_keras(file)
    return _read_weights(file)


def weights_of(built: BuiltModule, layout: TensorLayout, like: Collection[str]) -> NamedWeights:
    """`Learner.named_weights`; of a model that ranks hold together, those of this rank."""
    if built.is_keras:
        from train.backends.keras.names import named_weights as named_weights_of_keras

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
    boxes: list[tuple[NamedBox, Any]] = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        box = layout.box(tensor)
        boxes.append((rows_of[name].of(box) if name in rows_of else NamedBox(name, box), layout.local(tensor)))

    def assign(arrays: Mapping[str, ArrayLike]) -> None:
        with torch.no_grad():
            for named, tensor in boxes:
                if named.name in arrays:
                    tensor.copy_(torch.from_numpy(np.array(arrays[named.name][named.box.slices])))

    shapes = {named.name: named.box.global_shape for named, _ in boxes}
    return NamedWeights(
        shapes=shapes,
        head=tuple(name for name in shapes if name.rpartition(".")[0] == last),
        arrays=lambda: {named.name: tensor.cpu().numpy().copy() for named, tensor in boxes},
        assign=assign,
    )
