"""Waits for a message on a network that goes away; run in a network of its own, whose loopback it switches off."""

from __future__ import annotations

import socket
import subprocess

from train.launching.connection import Connection

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
listener = socket.create_server(("127.0.0.1", 0))
own = socket.create_connection(listener.getsockname())
connection, other_side = Connection(own), listener.accept()[0]
# Sooner than a job wants it.
for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT):
    own.setsockopt(socket.IPPROTO_TCP, option, 1)
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
assert connection.receive() is None
