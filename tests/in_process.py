"""`make test-fast`: tests that run in pytest's own process. One that starts another is skipped at that very moment.

So it needs no server, JVM, rank or command, and no list of such tests has to be kept.
"""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

_OPTION = "--in-process"
# https://docs.python.org/3/library/audit_events.html
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"})
_is_testing = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_OPTION, action="store_true", help="skip each test that starts a process")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(_OPTION):
        sys.addaudithook(_skip_what_starts_a_process)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Pytest and its plugins may start processes."""
    global _is_testing
    _is_testing = True
    try:
        return (yield)
    finally:
        _is_testing = False


def _skip_what_starts_a_process(event: str, arguments: tuple[object, ...]) -> None:
    if event in _STARTS and _is_testing:
        pytest.skip(f"it starts a process: not with {_OPTION}")
