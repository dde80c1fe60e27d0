"""Waits; SIGTERM ends it with exit code 7, or not at all if argv[1] is "deaf"."""

import signal
import sys
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(600)
