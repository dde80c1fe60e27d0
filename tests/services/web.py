"""A web server on loopback for tests: aiohttp's own static files, which know ranges, in a thread of the test."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from tests.services.marked import free_ports

_END_SECONDS = 30.0


@contextmanager
def serving(folder: Path, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The address of a server that gives the files below a folder, by name alone."""
    [port] = free_ports(1)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start() -> web.AppRunner:
        application = web.Application()
        application.router.add_static("/", folder)
        runner = web.AppRunner(application, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(_END_SECONDS), "no web server starts"
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_SECONDS)
