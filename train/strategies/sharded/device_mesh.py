"""The ranks of a mesh as PyTorch has them: process groups along axes, in the order of train/contracts/mesh_shape.py."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from train.contracts.mesh_shape import AXES, MeshShape


def device_mesh_of(shape: MeshShape, axes: Collection[str]) -> Any:
    """A `DeviceMesh` of all ranks with these axes by name; the others have one rank. All ranks call it."""
    from torch.distributed.device_mesh import init_device_mesh

    from train.backends.torch.runtime import device

    names = tuple(axis for axis in AXES if axis in axes)
    return init_device_mesh(device().type, tuple(shape.sizes[axis] for axis in names), mesh_dim_names=names)
