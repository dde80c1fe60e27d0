"""Holds a writer's lease of the dataset argv[1] until it is killed."""

import sys
import time

from shardmill.dataset.leases import writing
from shardmill.stores import open_store

with writing(open_store(sys.argv[1]), "etl"):
    print("held", flush=True)
    time.sleep(600)
