"""A run at an MLflow tracking server (`train.mlflow_uri`): the curves of a training, and its settings as parameters.

Five requests of the server's REST API; no client is installed for them. A thread sends them, so that a server that is
away or slow costs the training a warning and nothing else.
"""

from __future__ import annotations

import base64
import json
import math
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from shardmill.jobs.observer import WARNING, FieldValue
from shardmill.storage import Store
from train.config import TrainConfig
from train.reporting.observer import GlobalStep
from train.reporting.scalars import Scalars, of_event, of_step
from train.settings import values_of_settings

EXPERIMENT = "shardmill"
"""Unless MLFLOW_EXPERIMENT_NAME names another."""
REQUEST_SECONDS = 10.0
FLUSH_SECONDS = 2.0
MAX_PAUSE_SECONDS = 60.0
CLOSE_SECONDS = 15.0
MAX_WAITING = 200_000
"""Metrics that are kept for a server that is away: some 40 MB."""
# Of one request, by the API's documentation.
MAX_METRICS, MAX_PARAMS = 1000, 100
MAX_PARAM_CHARS = 500

# What no repetition cures.
_REFUSED = (400, 413, 422)


class TrackingError(Exception):
    """A request that was not answered, or not with a success."""

    def __init__(self, problem: str, status: int = 0) -> None:
        super().__init__(problem)
        self.status = status


class TrackingServer:
    """MLflow's REST API; the variables of MLflow's own client say who asks."""

    def __init__(self, uri: str) -> None:
        self._root = f"{uri.rstrip('/')}/api/2.0/mlflow"
        self._headers = {"Content-Type": "application/json"}
        user, token = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_TOKEN")
        if user:
            pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        elif token:
            self._headers["Authorization"] = f"Bearer {token}"

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """POST `body`, or GET without one. Raises TrackingError."""
        data = None if body is None else json.dumps(body).encode()
        # The config's validator lets http and https pass alone.
        request = urllib.request.Request(f"{self._root}/{path}", data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            text = error.read(500).decode(errors="replace")
            raise TrackingError(f"{path.partition('?')[0]}: HTTP {error.code} {text}", error.code) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise TrackingError(f"{type(reason).__name__}: {reason}") from None

    def experiment_id(self, name: str) -> str:
        """Of the experiment of that name, made if there is none."""
        by_name = f"experiments/get-by-name?{urllib.parse.urlencode({'experiment_name': name})}"
        try:
            return self.ask(by_name)["experiment"]["experiment_id"]
        except TrackingError as error:
            if error.status != 404:
                raise
        return self.ask("experiments/create", {"name": name})["experiment_id"]


class MlflowLog:
    """A sink of `RunLog`. All attempts of a run are one run there: its id is in a file of the run."""

    def __init__(
        self, config: TrainConfig, run_name: str, store: Store, path: str,
        warn: Callable[[str, Mapping[str, FieldValue]], None],
    ) -> None:  # fmt: skip
        """`path`: of that file in `store`."""
        self.run_id = ""
        """At the server; empty as long as it has not answered."""
        self._uri, self._server = config.mlflow_uri, TrackingServer(config.mlflow_uri)
        self._params = _params(config)
        self._run_name = run_name
        self._store, self._path = store, path
        self._warn = warn
        self._status = "FAILED"
        self._lock = threading.Lock()
        self._waiting: list[dict[str, Any]] = []
        self._num_lost = 0
        self._problem = ""
        self._is_reported = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def step(self, step: GlobalStep) -> None:
        if self._thread is None:
            # Not before there is something to tell: a training that is found done makes no run.
            self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
            self._thread.start()
        self._put(of_step(step))

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if scalars := of_event(name, fields):
            self._put(scalars)

    def finish(self) -> None:
        """The training has ended well."""
        self._status = "FINISHED"

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            # What was ended should end.
            self._thread.join(CLOSE_SECONDS if self._status == "FINISHED" else CLOSE_SECONDS / 3)
            self._report_problem()
            if num_left := len(self._waiting) + self._num_lost:
                self._say(f"{num_left} values of metrics did not get there: {self._problem or 'it is slow'}")

    def _put(self, scalars: Scalars) -> None:
        now = int(time.time() * 1000)
        metrics = [
            {"key": name, "value": _number(value), "timestamp": now, "step": scalars.at}
            for name, value in scalars.values.items()
        ]
        with self._lock:
            self._waiting += metrics
            if (too_many := len(self._waiting) - MAX_WAITING) > 0:
                del self._waiting[:too_many]
                self._num_lost += too_many
        self._report_problem()

    def _report_problem(self) -> None:
        """Observers are called by the training's thread alone."""
        if self._problem and not self._is_reported:
            self._is_reported = True
            self._say(f"{self._problem}; the training continues, and it is tried again")

    def _say(self, what: str) -> None:
        self._warn("train.mlflow", {"rank": 0, WARNING: f"train.mlflow_uri = {self._uri!r}: {what}"})

    def _send_all(self) -> None:
        pause = FLUSH_SECONDS
        while True:
            is_closing = self._closing.wait(pause)
            try:
                self._open()
                while self._send_some():
                    pass
                if is_closing:
                    ended = {"run_id": self.run_id, "status": self._status, "end_time": int(time.time() * 1000)}
                    self._server.ask("runs/update", ended)
                    return
                pause = FLUSH_SECONDS
            except Exception as error:  # whatever it is: not the training's concern
                self._problem = str(error)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                if is_closing:
                    if not self.run_id:
                        return
                    # It was there before: as long as `close` waits for it.
                    time.sleep(FLUSH_SECONDS)

    def _open(self) -> None:
        """The run that an earlier attempt began, or a new one."""
        if self.run_id:
            return
        try:
            run_id = self._store.read(self._path).decode()
            self._server.ask("runs/update", {"run_id": run_id, "status": "RUNNING"})
        except FileNotFoundError:
            run_id = self._create()
        except TrackingError as error:
            if error.status != 404:
                raise
            run_id = self._create()
        self.run_id = run_id

    def _create(self) -> str:
        experiment_id = self._server.experiment_id(os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT)
        run = {"experiment_id": experiment_id, "run_name": self._run_name, "start_time": int(time.time() * 1000)}
        run_id = self._server.ask("runs/create", run)["run"]["info"]["run_id"]
        for first in range(0, len(self._params), MAX_PARAMS):
            some = self._params[first : first + MAX_PARAMS]
            self._server.ask("runs/log-batch", {"run_id": run_id, "params": some})
        self._store.put(self._path, run_id.encode())
        return run_id

    def _send_some(self) -> bool:
        """-> whether there was anything. What was not sent waits."""
        with self._lock:
            metrics = self._waiting[:MAX_METRICS]
        if not metrics:
            return False
        try:
            self._server.ask("runs/log-batch", {"run_id": self.run_id, "metrics": metrics})
        except TrackingError as error:
            if error.status not in _REFUSED:
                raise
            self._num_lost += len(metrics)
            self._problem = str(error)
        sent = set(map(id, metrics))
        with self._lock:
            # Some may have been dropped meanwhile, because too many were waiting.
            self._waiting = [each for each in self._waiting if id(each) not in sent]
        return True


def _params(config: TrainConfig) -> list[dict[str, str]]:
    """The section `train`; parameters cannot be changed later, and are cut to what every server takes."""
    values = values_of_settings(config)
    del values["mlflow_uri"]
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return [{"key": f"train.{name}", "value": text[:MAX_PARAM_CHARS]} for name, text in texts.items()]


def _number(value: float) -> float | str:
    """JSON has no other numbers; protocol buffers read them as text."""
    return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
