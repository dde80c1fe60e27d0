"""A command that prints the id of the script that has started it, and in the end whether it was told to end.

EXPECTED, of the environment: "ends", or else two seconds are given to a request that may not come.
"""

import os
import time

from shardmill.jobs.process import Terminated, end_with_script, raise_on_signals, stopping_in_order

raise_on_signals()
end_with_script()
before = os.getppid()
try:
    with stopping_in_order(60.0) as request:
        print(before, flush=True)
        deadline = time.monotonic() + (60.0 if os.environ["EXPECTED"] == "ends" else 2.0)
        while not request.is_made and time.monotonic() < deadline:
            time.sleep(0.02)
    print("goes on", "orphaned" if os.getppid() != before else "not orphaned", flush=True)
except Terminated as ended:
    print(ended, flush=True)
