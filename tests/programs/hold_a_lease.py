"""Holds a writer's lease of the dataset argv[1], for argv[2] seconds after each renewal, until it is killed."""

import sys
import time

from shardmill.dataset.leases import writing
from shardmill.stores import open_store

with writing(open_store(sys.argv[1]), "etl", ttl_seconds=float(sys.argv[2])):
    print("held", flush=True)
    time.sleep(600)
