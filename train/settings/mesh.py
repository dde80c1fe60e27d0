"""Settings of how ranks divide one model (section `train.mesh`), for the strategies that shard it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardmill.section import Section
from train.settings.kinds import EXECUTION


class MeshConfig(Section):
    """Numbers of ranks along the axes of the mesh; their product is `train.num_workers`."""

    data: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Copies of the model, which exchange gradients; 0: as many as the other axes leave."""
    fsdp: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Ranks that share the weights of a copy, each with rows of its own; 0: chosen by the strategy."""
    tensor: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Ranks that share each layer; 0: chosen by the strategy."""
    pipeline: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Ranks that compute one stage of the model each; 0: chosen by the strategy."""

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its size as it was set; 0 if it is left open."""
        return {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor, "pipeline": self.pipeline}
