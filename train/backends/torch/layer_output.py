"""Gives the output of a named module of an export beside its answers: what `predict --layer` stores as an embedding.

Shape legend: N batch, H height, W width, C channels, K outputs, D length of a module's output.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from train.backends.backend import LayerOutput, PredictWithLayer
from train.backends.model_errors import no_layer
from train.backends.torch.backend import SERVED
from train.backends.torch.runtime import device, import_torch
from train.backends.torch.serving import PROGRAM

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
    num_answers = _append(module, last[layer])

    def predict(images_NHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            both_NX = module(torch.from_numpy(np.ascontiguousarray(images_NHWC)).to(device())).cpu().numpy()
        return both_NX[:, :num_answers], both_NX[:, num_answers:]

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
    """Let a program give the output of an operation behind its answers, as one tensor; returns the number of those."""
    torch = import_torch()
    result = module.graph.output_node()
    ((answers,),) = result.args
    with module.graph.inserting_before(result):
        flat = module.graph.call_function(torch.flatten, (node, 1))
        number = module.graph.call_method("float", (flat,))
        both = module.graph.call_function(torch.cat, ([answers, number], 1))
    result.args = ((both,),)
    module.recompile()
    return answers.meta["val"].shape[1]
