"""Profiles some steps with TensorFlow, for TensorBoard's profile plugin and XProf."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path


class TensorFlowRecording:
    """`train.backends.backend.Recording`: `plugins/profile/<time>/<host>.xplane.pb`."""

    def __init__(self, folder: Path) -> None:
        import tensorflow as tf

        # Python's own calls are too many to record: they would slow a step down, and hide its operations.
        tf.profiler.experimental.start(str(folder), tf.profiler.experimental.ProfilerOptions(python_tracer_level=0))

    def step(self, global_step: int) -> AbstractContextManager[None]:
        import tensorflow as tf

        # `_r`: the root of a step, by which the tools tell steps apart.
        return tf.profiler.experimental.Trace("train", step_num=global_step, _r=1)

    def stop(self) -> None:
        import tensorflow as tf

        tf.profiler.experimental.stop()
