"""A user's model that waits, in ranks that a DAG's task has started, until the test lets it go on."""

import os
import sys
import time
from pathlib import Path

from torch import nn


def build(image_shape, num_classes):
    height, width, channels = image_shape
    folder = os.environ.get("TEST_GATE")
    if folder and "train.launching.rank" in sys.orig_argv:
        gate = Path(folder)
        (gate / f"try-{os.environ['AIRFLOW_CTX_TRY_NUMBER']}-rank-{os.environ['SHARDMILL_RANK']}").touch()
        while not (gate / "open").exists():
            time.sleep(0.05)
    return nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, num_classes))
