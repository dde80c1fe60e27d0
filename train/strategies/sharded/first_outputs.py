"""Compares what a module computes whose layers a user has divided with what it computed as a whole, on real ranks.

Only outputs are kept of the whole module: no rank has it beside its shards.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import UsageError
from train.backends.torch.chain import ANOTHER, TOLERANCE
from train.checkpoints.state import dump_arrays, load_arrays
from train.config import TrainConfig
from train.strategies.member import Member

if TYPE_CHECKING:
    from train.backends.torch.backend import TorchLearner

# bfloat16 has 8 bits, and rounds in every layer.
TOLERANCE_OF_BFLOAT16 = 0.05


def outputs_of_whole(learner: TorchLearner) -> bytes:
    """For `check_outputs`, on rank 0, whose module has numbers and is not divided yet."""
    once_NK, again_NK = _outputs(learner), _outputs(learner)
    # One that draws also in inference computes nothing that can be compared.
    return dump_arrays([once_NK] if np.allclose(once_NK, again_NK, rtol=0, atol=TOLERANCE) else [])


def check_outputs(config: TrainConfig, member: Member, learner: TorchLearner, of_whole: bytes, *, rounds: bool) -> None:
    """Raises UsageError on every rank if one computes other outputs than the whole module; all ranks call it.

    `of_whole`: rank 0's. `rounds`: whether it computes in bfloat16.
    """
    expected = load_arrays(member.broadcast_bytes(of_whole))
    # Moving statistics, and what is frozen, are rank 0's; whoever begins a training or resumes one assigns them anew.
    member.start({}, member.world_size, "")
    if not expected:
        return
    [expected_NK] = expected
    found_NK = _outputs(learner)
    mine = float(np.abs(found_NK - expected_NK).max()) if found_NK.shape == expected_NK.shape else math.inf
    differences = [float(each) for each in member.gather_bytes(str(mine).encode())]
    tolerance = (TOLERANCE_OF_BFLOAT16 if rounds else TOLERANCE) * (1 + float(np.abs(expected_NK).max()))
    wrong = [difference for difference in differences if not difference <= tolerance]
    if wrong:
        raise UsageError(
            f"train.model = {config.model!r}: with its layers divided by parallelize(mesh), {len(wrong)} of "
            f"{len(differences)} ranks compute outputs that differ by up to {max(wrong):.3g} from those of the "
            "undivided module",
            f"expected the same outputs on every rank, within {tolerance:.1g}: ColwiseParallel leaves a part of what a "
            "layer computes on each",
            "pass that part on to a RowwiseParallel layer, gather it by ColwiseParallel(output_layouts=Replicate()), "
            f"leave the layer out of parallelize, {ANOTHER}",
        )


def _outputs(learner: TorchLearner) -> Any:
    """Of two images, in inference and in float32."""
    import torch

    from train.backends.torch.chain import tried_images
    from train.backends.torch.passes import on_device

    parts = learner.parts
    parts.classifier.eval()
    with torch.no_grad():
        outputs_NK = parts.classifier(on_device(tried_images(parts.image_shape_HWC))).cpu().numpy()
    learner.layout.forget(learner.module)
    return outputs_NK
