"""Sends a training's curves to an MLflow tracking server with MLflow's client, and its settings as parameters."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from train.reporting.mlflow_client import connect, experiment_id
from train.reporting.observer import Scalars
from train.reporting.trackers.sent import Refusal, SentTracker
from train.reporting.trackers.tracker import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Of one request, by the API's documentation.
MAX_METRICS, MAX_PARAMS = 1000, 100
MAX_PARAM_CHARS = 500
# What no repetition cures.
_REFUSED = (400, 413, 422)


class MlflowTracker(SentTracker):
    """All attempts at a run are one run there: its id is in a file of the run."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self._path = f"{run.folder}/mlflow.run"
        self._client: MlflowClient | None = None

    def begin(self) -> None:
        client = self._connected()
        try:
            run_id = self.run.store.read(self._path).decode()
            client.update_run(run_id, status="RUNNING")
        except FileNotFoundError:
            run_id = self._create(client)
        except Exception as error:  # mlflow's own, which this module does not import
            if _status(error) != 404:
                raise
            run_id = self._create(client)
        self.run_id = run_id

    def send(self, scalars: Sequence[Scalars]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, each.at) for each in scalars for name, value in each.values.items()]
        try:
            for first in range(0, len(metrics), MAX_METRICS):
                self._connected().log_batch(self.run_id, metrics=metrics[first : first + MAX_METRICS])
        except Exception as error:
            if _status(error) in _REFUSED:
                raise Refusal(str(error)) from error
            raise

    def end(self, *, is_finished: bool) -> None:
        self._connected().set_terminated(self.run_id, "FINISHED" if is_finished else "FAILED")

    def _connected(self) -> MlflowClient:
        if self._client is None:
            # Our thread retries what fails.
            self._client = connect(self.run.settings["log.mlflow_uri"])
        return self._client

    def _create(self, client: MlflowClient) -> str:
        from mlflow.entities import Param

        run_id = client.create_run(experiment_id(client), run_name=self.run.run_id).info.run_id
        params = [Param(key, value) for key, value in _params(self.run.settings).items()]
        for first in range(0, len(params), MAX_PARAMS):
            client.log_batch(run_id, params=params[first : first + MAX_PARAMS])
        self.run.store.put(self._path, run_id.encode())
        return run_id


def _params(settings: Mapping[str, Any]) -> dict[str, str]:
    """The section `train`; parameters cannot be changed later, and are cut to what every server takes."""
    shown = {name: value for name, value in settings.items() if name != "log.mlflow_uri"}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in shown.items()}
    return {f"train.{name}": text[:MAX_PARAM_CHARS] for name, text in texts.items()}


def _status(error: Exception) -> int:
    """The HTTP status of an error of MLflow's client; 0 for any other error."""
    status = getattr(error, "get_http_status_code", None)
    return status() if status else 0
