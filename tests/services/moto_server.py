"""moto's S3 server with atomic conditional writes, as Amazon's are: `python -m tests.services.moto_server PORT`.

moto looks whether a key is there and then writes it, in a thread for each request: two of eight writers may both win.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

_APPLICATION = DomainDispatcherApplication(create_backend_app)
_CONDITIONAL = threading.Lock()


def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
    """A WSGI application."""
    if "HTTP_IF_NONE_MATCH" not in environ:
        return _APPLICATION(environ, start)
    with _CONDITIONAL:
        return _APPLICATION(environ, start)


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), answer, threaded=True)
