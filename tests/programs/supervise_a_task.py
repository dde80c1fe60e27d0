"""Airflow's worker, which forks its task's process; that starts the module argv[1] and ends it when asked to end.

The task's stdin is a socket between the two, and the worker lets nobody look into its own /proc.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

from airflow_dags.processes import end_in_order, end_with_worker, tied_to_this_process

PR_SET_DUMPABLE = 4

ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
requests, ours = socket.socketpair()
if os.fork():
    time.sleep(600)
os.dup2(requests.fileno(), 0)
end_with_worker()
command = [sys.executable, "-m", sys.argv[1]]
process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **tied_to_this_process())
signal.signal(signal.SIGTERM, lambda *_: end_in_order(process))
assert process.stdout is not None
for line in process.stdout:
    print(line, end="", flush=True)
sys.exit(process.wait())
