"""Trains model argv[1] on dataset argv[2] into folder argv[3]; prints which of TensorFlow and Keras it has."""

import json
import sys
from pathlib import Path

from tests.train.training import train_here

model, dataset_uri, folder = sys.argv[1:]
train_here(dataset_uri, Path(folder), model=model, epochs=1)
print(json.dumps([name for name in ("tensorflow", "keras") if name in sys.modules]))
