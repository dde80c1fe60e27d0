"""A Spark driver that works until its parent is gone, and then ends in order."""

import time

from shardmill.jobs.process import Terminated, end_with_parent, raise_on_signals, stopping_in_order

raise_on_signals()
end_with_parent()
try:
    with stopping_in_order(60.0) as request:
        print("ready", flush=True)
        while not request.is_made:
            time.sleep(0.02)
except Terminated as ended:
    print(ended, flush=True)
