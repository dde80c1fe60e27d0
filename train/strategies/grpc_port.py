"""Reserves a port for a TensorFlow gRPC server, which all processes must know before the server listens on it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of this host that nobody else can get before TensorFlow, inside the `with`, listens on it.

    The kernel gives a port that is bound, on whatever address, to no other process that asks for a free one; and this
    process's server may bind it a second time, because both do so with SO_REUSEPORT. Nothing connects to the first
    socket: it never listens.
    """
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]
