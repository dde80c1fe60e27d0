"""A watchdog whose process runs out of file descriptors as somebody calls it: with them free again, it answers."""

import os
import resource
import socket
import time

from shardmill.jobs.observer import SilentObserver
from tests.train.launch_workers import watched_task
from train.launching.connection import ADDRESS_VARIABLE, Connection
from train.launching.messages import Challenge
from train.launching.watchdog import Watchdog
from train.reporting.run_log import RunLog

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
with Watchdog(watched_task(2), "none:none", RunLog(SilentObserver()), "127.0.0.1") as watchdog:
    caller, fillers = socket.socket(), []
    try:
        while True:
            fillers.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        assert error.errno == 24, error
    host, port = watchdog.environment()[ADDRESS_VARIABLE].split(":")
    caller.connect((host, int(port)))
    # Long enough to fail to accept it, and to try again.
    time.sleep(0.5)
    for filler in fillers:
        os.close(filler)
    caller.settimeout(30)
    assert isinstance(Connection(caller).receive(), Challenge)
