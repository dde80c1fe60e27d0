"""Profiles some steps with PyTorch, as a trace for Perfetto and Chrome."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from train.backends.torch.runtime import import_torch

TRACE = "trace.pt.trace.json.gz"
"""File name that TensorBoard's plugin and Holistic Trace Analysis expect."""


class TorchRecording:
    """`train.backends.backend.Recording`, by Kineto."""

    def __init__(self, folder: Path) -> None:
        torch = import_torch()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._file = folder / TRACE
        # It is one cycle; without this PyTorch warns that others would be lost.
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)
        self._profile.start()

    def step(self, global_step: int) -> AbstractContextManager[None]:
        # What the tools take for a step.
        return import_torch().profiler.record_function(f"ProfilerStep#{global_step}")

    def stop(self) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._file))
