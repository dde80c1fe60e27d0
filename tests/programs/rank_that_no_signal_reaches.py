"""A driver whose only rank, in its own process, stands still and hears no signal."""

from tests.train.inline_workers import HERE, inline_task, launch_watched
from tests.train.training import DriverRecorder
from train.launching import inline

inline.GRACE_SECONDS = 0.5
launch_watched(inline_task(), DriverRecorder(), f"{HERE}:holds_on")
