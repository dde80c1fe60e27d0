"""Settings of the DAGs from the environment of Airflow's DAG processor and workers, with their defaults."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

_PREFIX = "SHARDMILL_"
# Airflow's database keeps them as 32-bit integers.
_LARGEST_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DagSettings:
    """Each field is the variable SHARDMILL_<FIELD>; one that is unset or empty has the default here."""

    config_dir: str = ""
    """The folder of config files; without it there are no DAGs."""
    workdir: str = ""
    """Folder of run records, with one subfolder per config; empty: `work` in the config folder."""
    command: str = "shardmill"
    """Command line that runs shardmill, split as a shell would."""
    schedule: str = ""
    """Cron expression or preset; empty: only when triggered."""
    maintenance_schedule: str = ""
    """When a DAG of its own runs `compact` and `gc`; empty: there is no such DAG."""
    train_on_asset: str = "false"
    """`true`: training is a DAG of its own, which each new version of the dataset's asset starts."""
    reports_url: str = ""
    """Address at which a web server shows `workdir`; empty: reports are linked by their own URI."""
    mlflow_url: str = ""
    """Address of the MLflow server's pages, for links to its runs."""
    retries: str = "2"
    """Number of retries of a task."""
    retry_delay_seconds: str = "60"
    """Before the first retry; it doubles with each one."""
    execution_timeout_seconds: str = "86400"
    """One try of a task is ended after this long. The next try resumes a training from its last checkpoint."""

    def workdir_of(self, config_file: Path) -> str:
        """Path or URI of a config's run records."""
        return os.path.join(self.workdir or str(config_file.parent / "work"), config_file.stem)

    def report_url(self, workdir: str, run_id: str) -> str:
        """Return a browser's link to a run's report, as far as `reports_url` allows."""
        if self.reports_url:
            # Below the served folder, each config has one.
            workdir = f"{self.reports_url.rstrip('/')}/{workdir.rstrip('/').rpartition('/')[2]}"
        return f"{workdir}/runs/{run_id}/report.html"

    def check(self) -> None:
        """Raises ValueError for a variable that no DAG could work with, and says which."""
        self.schedule_of("schedule")
        self.schedule_of("maintenance_schedule")
        self.command_line()
        self.has_own_training_dag()
        self.of_each_task()
        for name in ("reports_url", "mlflow_url"):
            if not (getattr(self, name) or "http://").startswith(("http://", "https://")):
                raise self._wrong(name, "expected the http:// or https:// address of a web server")
        self._check_workdir()

    def schedule_of(self, name: str) -> str | None:
        """A field's schedule in Airflow's form. Raises ValueError for a schedule that is invalid or never occurs."""
        schedule = getattr(self, name) or None
        try:
            check_schedule(schedule)
        except ValueError as error:
            raise self._wrong(name, str(error)) from error
        return schedule

    def command_line(self) -> list[str]:
        """The program and its first arguments. Raises ValueError for a text that no shell could split."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise self._wrong("command", f"expected a command line ({error})") from error
        if not words:
            raise self._wrong("command", "expected a command line, such as shardmill")
        return words

    def has_own_training_dag(self) -> bool:
        """Raises ValueError if `train_on_asset` is neither true nor false."""
        if self.train_on_asset.lower() not in ("true", "false"):
            raise self._wrong("train_on_asset", "expected true or false")
        return self.train_on_asset.lower() == "true"

    def of_each_task(self) -> dict[str, Any]:
        """Arguments of every task. Raises ValueError for an invalid number."""
        return {
            "retries": self._number("retries", at_least=0),
            "retry_delay": timedelta(seconds=self._number("retry_delay_seconds", at_least=1)),
            "retry_exponential_backoff": True,
            "execution_timeout": timedelta(seconds=self._number("execution_timeout_seconds", at_least=1)),
        }

    def _number(self, name: str, *, at_least: int) -> int:
        text = getattr(self, name)
        # Ten digits are more than enough; Python refuses to convert thousands of them.
        if not text.isdecimal() or len(text) > 10 or not at_least <= int(text) <= _LARGEST_NUMBER:
            raise self._wrong(name, f"expected a whole number from {at_least} to {_LARGEST_NUMBER}")
        return int(text)

    def _check_workdir(self) -> None:
        from shardmill.errors import UsageError
        from shardmill.stores import checked_uri

        try:
            checked_uri(self.workdir)
        except UsageError as error:
            raise self._wrong(
                "workdir", f"expected a folder, or the URI of one that can be written ({error})"
            ) from error

    def _wrong(self, name: str, expected: str) -> ValueError:
        return ValueError(f"{_PREFIX}{name.upper()}={getattr(self, name)!r}: {expected}")


def check_schedule(schedule: Any) -> None:
    """Raises ValueError for a DAG's schedule that is invalid or never occurs."""
    from airflow.sdk import DAG
    from croniter import croniter

    try:
        probe = DAG("schedule", schedule=schedule, max_active_runs=1, auto_register=False)
        probe.validate()
        # Airflow itself looks for the next date only later, when it is too late for an error of this DAG alone.
        if cron := getattr(probe.timetable, "expression", ""):
            croniter(cron).get_next()
    except Exception as error:  # Airflow and croniter share no type of error
        raise ValueError(f"expected a cron expression or a preset such as @daily ({error})") from error


def dag_settings() -> DagSettings:
    """Return the settings of the environment."""
    given = {field.name: os.environ.get(_PREFIX + field.name.upper(), "") for field in fields(DagSettings)}
    return DagSettings(**{name: value for name, value in given.items() if value})
