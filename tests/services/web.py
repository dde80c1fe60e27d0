"""A web server on loopback for tests: Starlette's own static files, which know ranges, in a thread of the test."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

_START_SECONDS = _END_SECONDS = 120.0


@contextmanager
def serving(folder: Path, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a server that gives the files below a folder, by name alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    application = Starlette(routes=[Mount("/", StaticFiles(directory=folder, follow_symlink=True))])
    # Its own config of logging would close the handlers of others, and absl's closes the stream that pytest captures.
    config = uvicorn.Config(application, log_config=None, log_level="error", timeout_graceful_shutdown=1)
    config.load()
    config.ssl = tls
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    deadline_seconds = time.monotonic() + _START_SECONDS
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline_seconds, "no web server starts"
        time.sleep(0.01)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(_END_SECONDS)
