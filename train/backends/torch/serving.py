"""Exports a trained PyTorch module for serving: uint8 images in, predictions out, as one program of `torch.export`.

Loaded with the output of a named module beside them, it gives what `predict --layer` stores as an embedding.

Shape legend: N batch, H height, W width, C channels, K outputs, D length of a module's output.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.values import LabelKind
from train.api import LayerOutput, Predict, PredictWithLayer, ServedModel
from train.backends.model_spec import ModelSpec
from train.backends.rules import no_layer
from train.backends.torch.passes import predictions_of
from train.backends.torch.runtime import device, import_torch

PROGRAM = "model.pt2"
# Extra files of a program.
CLASS_NAMES = "class_names.json"
ARE_LOGITS = "outputs_are_logits.json"


def served_module(classifier: Any, kind: LabelKind, are_logits: bool) -> Any:
    """An `nn.Module`: uint8 images_NHWC -> predictions_NK."""
    torch = import_torch()

    class Served(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = classifier
            self.outputs_are_logits = are_logits

        def forward(self, images_NHWC: Any) -> Any:
            return predictions_of(kind, are_logits, self.classifier(images_NHWC))

    return Served()


def program_of(served: Any, spec: ModelSpec, model: str) -> Any:
    """Export the module in its current state with `torch.export`. Raises UsageError if that is not possible."""
    torch = import_torch()
    # On the CPU, which every machine has: a program remembers its device, and is moved when it is loaded. What lies
    # there is not copied: a model may take half of a host's memory.
    there = {id(each): each for each in served.parameters() if each.device.type == "cpu"}
    served = copy.deepcopy(served, there).cpu().eval()
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
    """Into a new folder. Extra files: the names of the classes, and whether the last operation takes logits."""
    folder.mkdir()
    said = {CLASS_NAMES: spec.labels.class_names, ARE_LOGITS: served.outputs_are_logits}
    extra_files = {name: json.dumps(value) for name, value in said.items()}
    import_torch().export.save(program_of(served, spec, model), folder / PROGRAM, extra_files=extra_files)


def load_program(folder: Path) -> ServedModel:
    """The functions inside, on this process's device. Loading can run code: the file must be verified against a record
    first.
    """
    torch = import_torch()
    from torch.export.passes import move_to_device_pass

    extra_files = {ARE_LOGITS: ""}
    with warnings.catch_warnings():
        # That the file's bytes, which nothing writes to, are read-only.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        program = torch.export.load(folder / PROGRAM, extra_files=extra_files)
    # `to` alone would leave the device that the program asserts.
    program, are_logits = move_to_device_pass(program, device()), bool(json.loads(extra_files[ARE_LOGITS]))
    predictions = _on_arrays(program.module())
    outputs = _on_arrays(_without_last_operation(program.module())) if are_logits else predictions
    return ServedModel(predictions, outputs, are_logits)


def _on_arrays(module: Any) -> Predict:
    torch = import_torch()

    def predict(images_NHWC: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return module(torch.from_numpy(np.ascontiguousarray(images_NHWC)).to(device())).cpu().numpy()

    return predict


def _without_last_operation(module: Any) -> Any:
    """The module of a program, but for the softmax or sigmoid of `predictions_of`: it gives that one's argument.

    A program that gave both would no longer be called as a model that gives probabilities.
    """
    result = module.graph.output_node()
    ((predictions,),) = result.args
    result.args = ((predictions.args[0],),)
    module.graph.erase_node(predictions)
    module.recompile()
    return module


def write_state(model: Any, file: Path) -> None:
    """The weights of `model` alone, as any PyTorch loads them."""
    torch = import_torch()
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    torch.save(state, file)
    loaded = torch.load(file, weights_only=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


SERVED = "torch_export"


STATE_FILE = "state_dict.pt"


# The user's module inside ours (`served_module` of a `classifier_of`).
_INSIDE = "classifier.model."


def load_layer(folder: Path, layer: str) -> PredictWithLayer:
    """Load a program of ours. Raises UsageError, which names the modules that there are, if it has no such one."""
    torch = import_torch()
    from torch.export.passes import move_to_device_pass

    with warnings.catch_warnings():
        # That the file's bytes, which nothing writes to, are read-only.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        program = torch.export.load(folder / PROGRAM)
    module = move_to_device_pass(program, device()).module()
    last = _last_nodes(module)
    if layer not in last:
        raise no_layer(layer, list(last))
    num_predictions = _append(module, last[layer])

    def predict(images_NHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            both_NX = module(torch.from_numpy(np.ascontiguousarray(images_NHWC)).to(device())).cpu().numpy()
        return both_NX[:, :num_predictions], both_NX[:, num_predictions:]

    return predict


LAYER_OUTPUT = LayerOutput(SERVED, load_layer)


def _last_nodes(module: Any) -> dict[str, Any]:
    """Each module of the user's, by its path in the model, and the operation that gives its output."""
    found: dict[str, Any] = {}
    for node in module.graph.nodes:
        # Paths from the outermost module to the one whose operation it is, each with its class.
        for path, _ in (node.meta.get("nn_module_stack") or {}).values():
            _, is_inside, name = path.partition(_INSIDE)
            if is_inside:
                # Behind what it had: the order of the graph is that of the last operations.
                found.pop(name, None)
                found[name] = node
    return found


def _append(module: Any, node: Any) -> int:
    """Let a program give the output of an operation behind its predictions, as one tensor; returns their number."""
    torch = import_torch()
    result = module.graph.output_node()
    ((predictions,),) = result.args
    with module.graph.inserting_before(result):
        flat = module.graph.call_function(torch.flatten, (node, 1))
        number = module.graph.call_method("float", (flat,))
        both = module.graph.call_function(torch.cat, ([predictions, number], 1))
    result.args = ((both,),)
    module.recompile()
    return predictions.meta["val"].shape[1]
