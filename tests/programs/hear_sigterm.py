"""Waits; SIGTERM ends it with exit code 7, or not at all if argv[1] is "deaf"."""

import signal
import sys
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else lambda *_: sys.exit(7))
print("ready", flush=True)
# In short sleeps: one that begins just behind a signal is not cut short by it.
for _ in range(6000):
    time.sleep(0.1)
