"""A command that prints the id of the script that has started it, and in the end whether it was told to end.

EXPECTED, of the environment: what it prints in the end. If that is "goes on orphaned", it waits for the end of its
script first; if it goes on, two seconds are given to a request that may not come.
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
        most = time.monotonic() + 600.0
        while os.environ["EXPECTED"] == "goes on orphaned" and os.getppid() == before and time.monotonic() < most:
            time.sleep(0.02)
        deadline = time.monotonic() + (2.0 if os.environ["EXPECTED"].startswith("goes on") else 60.0)
        while not request.is_made and time.monotonic() < deadline:
            time.sleep(0.02)
    print("goes on", "orphaned" if os.getppid() != before else "not orphaned", flush=True)
except Terminated as ended:
    print(ended, flush=True)
