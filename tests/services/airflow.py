"""A real Airflow on loopback for tests, over a DAG folder of its own: API server, scheduler, DAG processor, and the
triggerer where tasks are deferred.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tenacity import retry, retry_if_exception, stop_after_delay, wait_fixed

from tests.lab.commands import BIN, ENVIRONMENT
from tests.services.marked import MARK, free_ports, marked
from tests.services.servers import CACHE, fetching, start_server, wait_until_up

_START_SECONDS = 400.0
_END_SECONDS = 200.0
_WAIT_SECONDS = 900.0
_SHOWN_CHARACTERS = 6000


def _is_rolled_back(error: BaseException) -> bool:
    """Whether the API server has undone a request, which one may then repeat.

    Over SQLite it does that at any time: if the scheduler has written since a request's transaction began to read, that
    transaction cannot write, however long it waits ("database is locked", https://sqlite.org/wal.html#concurrency).
    """
    return isinstance(error, urllib.error.HTTPError) and error.code in (500, 503)


@dataclass(frozen=True, slots=True)
class Airflow:
    """A running scheduler with its DAG folder, and its API."""

    url: str
    home: Path
    mark: str
    """In the environment of all its processes, and of all that tasks start."""

    @property
    def dags(self) -> Path:
        """The DAG folder."""
        return self.home / "dags"

    @retry(retry=retry_if_exception(_is_rolled_back), stop=stop_after_delay(60), wait=wait_fixed(0.5), reraise=True)
    def api(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """An answer of the REST API. `path`: below /api/v2/."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.url}/api/v2/{path}", data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as refused:
            refused.add_note(refused.read().decode(errors="replace")[:_SHOWN_CHARACTERS])
            raise

    def set_paused(self, dag_id: str, paused: bool) -> None:
        self.api("PATCH", f"dags/{dag_id}", {"is_paused": paused})

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        """The runs of a DAG, in the order of their dates."""
        return self.api("GET", f"dags/{dag_id}/dagRuns?order_by=logical_date&limit=100")["dag_runs"]

    def tasks(self, dag_id: str, run_id: str) -> dict[str, dict[str, Any]]:
        """The task instances of a run, by task id."""
        found = self.api("GET", f"dags/{dag_id}/dagRuns/{quote(run_id)}/taskInstances?limit=100")
        return {task["task_id"]: task for task in found["task_instances"]}

    def trigger(self, dag_id: str) -> str:
        """What the button does. -> the run's id"""
        run_id = f"manual__{secrets.token_hex(8)}"
        return self.api("POST", f"dags/{dag_id}/dagRuns", {"logical_date": None, "dag_run_id": run_id})["dag_run_id"]

    def mark_failed(self, dag_id: str, run_id: str, task_id: str) -> None:
        """What the button does, whether the task runs or not; returns once that has ended its run.

        Until then the scheduler changes the run's tasks. One that is cleared at that moment has another id, for which a
        scheduler over SQLite, where nobody can lock a row, ends ("expected to update 1 row(s); 0 were matched").
        """
        self.api("PATCH", f"dags/{dag_id}/dagRuns/{quote(run_id)}/taskInstances/{task_id}", {"new_state": "failed"})
        run = {"dag_run_id": run_id, "state": "failed"}
        self.wait_for(f"the end of {run_id}", lambda: any(run.items() <= each.items() for each in self.runs(dag_id)))

    def clear(self, dag_id: str, run_id: str, *task_ids: str) -> None:
        """What the button does: these tasks and those that follow, or all of a run's, are done again."""
        which = {"task_ids": task_ids, "include_downstream": True} if task_ids else {}
        options = {"dry_run": False, "dag_run_id": run_id, "only_failed": False, **which}
        self.api("POST", f"dags/{dag_id}/clearTaskInstances", options)

    def processes_of(self, dag_id: str, task_id: str, try_number: int) -> dict[int, list[str]]:
        """The arguments of all processes that one try of a task has started, by process id."""
        context = {"DAG_ID": dag_id, "TASK_ID": task_id, "TRY_NUMBER": try_number}
        found = marked(self.mark)
        for name, value in context.items():
            of_it = marked(f"AIRFLOW_CTX_{name}={value}\0")
            found = {pid: found[pid] for pid in found.keys() & of_it.keys()}
        return found

    def wait_for(self, what: str, is_so: Callable[[], Any], seconds: float = _WAIT_SECONDS) -> Any:
        """What `is_so` returns, as soon as that is true; fails with the state of all runs and the end of the logs."""
        deadline, error = time.monotonic() + seconds, None
        while True:
            try:
                if found := is_so():
                    return found
            except OSError as refused:  # of the API: a busy machine, a database that another process has locked
                error = refused
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}; {error}\n{self.state_and_logs()}"
            time.sleep(0.3)

    def wait_for_end(self, dag_id: str, run_id: str) -> None:
        """Of a run that ends well."""

        def ended() -> bool:
            state = next(run["state"] for run in self.runs(dag_id) if run["dag_run_id"] == run_id)
            assert state != "failed", self.state_and_logs()
            return state == "success"

        self.wait_for(f"the end of {run_id}", ended)

    def state_and_logs(self) -> str:
        states = []
        for run in self.runs("~"):
            tasks = self.tasks(run["dag_id"], run["dag_run_id"]).items()
            each = ", ".join(f"{name} {task['state']} ({task['try_number']})" for name, task in tasks)
            states.append(f"{run['dag_id']} {run['dag_run_id']}: {run['state']}; {each}")
        tries = sorted(self.home.glob("logs/dag_id=*/**/*.log"), key=lambda log: log.stat().st_mtime)[-2:]
        logs = [f"--- {log}\n{log.read_text()[-_SHOWN_CHARACTERS:]}" for log in [*self.home.glob("*.log"), *tries]]
        return "\n".join([*states, *logs])


@contextmanager
def running_airflow(
    home: Path, dag_id: str, settings: Mapping[str, str], *, has_triggerer: bool = False
) -> Iterator[Airflow]:
    """Airflow with the DAG folder `home`/dags, once it knows the DAG. It runs two tasks at a time.

    `settings`: more of its environment. `has_triggerer`: tasks can be deferred.
    """
    [port] = free_ports(1)
    airflow = Airflow(f"http://127.0.0.1:{port}", home, f"airflow-{secrets.token_hex(8)}")
    environment = {**ENVIRONMENT, **_settings(airflow, port), **settings, MARK: airflow.mark}
    servers: list[subprocess.Popen[bytes]] = []
    try:
        put_database(environment)
        triggerer = [["triggerer", "--skip-serve-logs"]] if has_triggerer else []
        for command in (["api-server"], ["scheduler", "--skip-serve-logs"], ["dag-processor"], *triggerer):
            kept = [sys.executable, "-m", "tests.services.reaper", BIN / "airflow", *command]
            servers.append(start_server(kept, home / f"{command[0]}.log", environment))
        wait_until_up("Airflow", lambda: _knows(airflow, dag_id), servers, home, _START_SECONDS)
        yield airflow
    finally:
        for server in servers:
            server.terminate()
        for server in servers:
            server.wait(_END_SECONDS)


def put_database(environment: Mapping[str, str]) -> None:
    """The empty database of the AIRFLOW_HOME in `environment`, which `airflow db migrate` makes once on a machine."""
    home, kept = Path(environment["AIRFLOW_HOME"]), CACHE / f"airflow-{version('apache-airflow')}.db"
    with fetching("airflow"):
        if not kept.exists():
            command = [BIN / "airflow", "db", "migrate"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_START_SECONDS)
            assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
            unfinished = kept.with_suffix(".unfinished")
            shutil.copy(home / "airflow.db", unfinished)
            unfinished.rename(kept)
            return
    home.mkdir(exist_ok=True)
    shutil.copy(kept, home / "airflow.db")


def _knows(airflow: Airflow, dag_id: str) -> bool:
    """Whether it has the DAG, a scheduler for it, and answers for its tasks."""
    urllib.request.urlopen(f"{airflow.url}/execution/health", timeout=60).close()
    health = airflow.api("GET", "monitor/health")
    return health["scheduler"]["status"] == "healthy" and bool(airflow.api("GET", f"dags/{dag_id}"))


def _settings(airflow: Airflow, port: int) -> dict[str, str]:
    settings = {
        "CORE__LOAD_EXAMPLES": "False",
        "CORE__DAGS_FOLDER": str(airflow.dags),
        "CORE__EXECUTOR": "LocalExecutor",
        "CORE__PARALLELISM": "2",
        "CORE__EXECUTION_API_SERVER_URL": f"{airflow.url}/execution/",
        "CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        # One for all of its processes; each would make up its own.
        "API_AUTH__JWT_SECRET": secrets.token_hex(32),
        "API__SECRET_KEY": secrets.token_hex(32),
        "API__HOST": "127.0.0.1",
        "API__PORT": str(port),
        "API__BASE_URL": airflow.url,
        "API__WORKERS": "1",
        # Its first answer to a task takes long on a busy machine; a try that is given up would be another try.
        "WORKERS__EXECUTION_API_TIMEOUT": "300",
        # A task learns that it was cleared when it next says that it lives.
        "WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
    }
    return {"AIRFLOW_HOME": str(airflow.home), **{f"AIRFLOW__{name}": value for name, value in settings.items()}}
