"""Runs gc over the dataset argv[1], however young its files are; keeps the newest argv[2] versions."""

import sys

from shardmill.dataset.maintenance.gc import Retention, collect_garbage
from shardmill.stores import open_store

collect_garbage(open_store(sys.argv[1]), Retention(int(sys.argv[2]), older_than_seconds=0.0), "gc")
