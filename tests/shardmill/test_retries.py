"""How long a request to a server that does not answer is repeated, and who knows that it has answered before."""

from __future__ import annotations

import pytest
from botocore.exceptions import EndpointConnectionError

from shardmill.applications import OnExecutor
from shardmill.stores import retries, s3_requests


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch):
    """This process has none before a test and after it; no pause is long."""
    monkeypatch.setattr(retries, "_has_driver", False)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(s3_requests, "CONNECT_SECONDS", 0.0)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


class _Away:
    """A server that cannot be connected to for three requests."""

    def __init__(self) -> None:
        self.num_asked = 0

    def answer(self, deadline: float) -> str:
        self.num_asked += 1
        if self.num_asked <= 3:
            raise EndpointConnectionError(endpoint_url="http://127.0.0.1:1")
        return "data"


def test_a_driver_gives_up_an_address_that_never_answered_and_waits_for_one_that_did():
    requests, away = s3_requests.S3Requests(), _Away()
    with pytest.raises(EndpointConnectionError):
        requests._patiently(away.answer)
    assert away.num_asked == 1
    away.num_asked = 3
    assert requests._patiently(away.answer) == "data"
    away.num_asked = 0
    assert requests._patiently(away.answer) == "data"


def test_a_task_waits_for_a_server_that_its_driver_has_reached():
    assert OnExecutor(lambda: s3_requests.S3Requests()._patiently(_Away().answer))() == "data"
