"""Fixtures for all tests."""

from __future__ import annotations

import signal
from collections import Counter

import pytest
from hypothesis import settings

from tests.demo import demo
from tests.services.s3 import s3_bucket, s3_server

__all__ = ["demo", "s3_bucket", "s3_server"]

# A failing example prints the blob that reproduces it; no deadline, because these machines are noisy.
settings.register_profile("shardmill", deadline=None, print_blob=True)
settings.load_profile("shardmill")

# Whoever starts the tests in the background passes on that Ctrl-C is ignored; then the commands that tests interrupt
# would ignore it too. A terminal does not.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `pytest -n`: tests of a file share its fixtures, those of the demo its one run; long files start first."""
    groups = {item: "demo" if "demo" in getattr(item, "fixturenames", ()) else item.path.name for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    seconds: Counter[str] = Counter()
    for item, group in groups.items():
        seconds[group] += _SECONDS_OF_A_TEST.get(item.path.parent.name, 0.1)
    # Stable: inside a group the order stays as written.
    items.sort(key=lambda item: (groups[item] != "demo", -seconds[groups[item]], groups[item]))


# Roughly, on two cores; only the order in which files start depends on it.
_SECONDS_OF_A_TEST = {"train": 4.0, "etl": 3.0, "pipeline": 2.0, "airflow_dags": 10.0, "tests": 5.0}
