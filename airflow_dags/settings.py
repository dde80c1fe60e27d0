"""What the environment of Airflow's DAG processor and workers decides about the DAGs, with its defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

_PREFIX = "SHARDMILL_"


@dataclass(frozen=True, slots=True)
class DagSettings:
    """Each field is the variable SHARDMILL_<FIELD>; one that is unset or empty has the default here."""

    config_dir: str = ""
    """The folder of config files; without it there are no DAGs."""
    workdir: str = ""
    """Where run records go, below it one folder for each config; empty: `work` in the config folder."""
    command: str = "shardmill"
    """How to call the command line; split as a shell would."""
    schedule: str = ""
    """Cron expression or preset; empty: only when triggered."""
    train_on_asset: str = "false"
    """`true`: training is a DAG of its own, which each new version of the dataset's asset starts."""
    reports_url: str = ""
    """Where a web server shows `workdir`; empty: reports are linked by their own URI."""
    retries: str = "2"
    """How often a task is tried again."""
    retry_delay_seconds: str = "60"
    """Before the first retry; it doubles with each one."""
    execution_timeout_seconds: str = "86400"
    """One try of a task is ended after this long. A training goes on from its last checkpoint in the next."""

    def workdir_of(self, config_file: Path) -> str:
        """Path or URI of a config's run records."""
        return os.path.join(self.workdir or str(config_file.parent / "work"), config_file.stem)

    def report_url(self, workdir: str, run_id: str) -> str:
        """Where a run's report is, for a browser as far as `reports_url` tells."""
        if self.reports_url:
            # Below the served folder, each config has one.
            workdir = f"{self.reports_url.rstrip('/')}/{workdir.rstrip('/').rpartition('/')[2]}"
        return f"{workdir}/runs/{run_id}/report.html"

    def has_own_training_dag(self) -> bool:
        """Raises ValueError if `train_on_asset` is neither true nor false."""
        if self.train_on_asset.lower() not in ("true", "false"):
            raise ValueError(f"{_PREFIX}TRAIN_ON_ASSET={self.train_on_asset!r}: expected true or false")
        return self.train_on_asset.lower() == "true"

    def of_each_task(self) -> dict[str, Any]:
        """Arguments of every task. Raises ValueError for a number that is none."""
        return {
            "retries": self._number("retries", at_least=0),
            "retry_delay": timedelta(seconds=self._number("retry_delay_seconds", at_least=1)),
            "retry_exponential_backoff": True,
            "execution_timeout": timedelta(seconds=self._number("execution_timeout_seconds", at_least=1)),
        }

    def _number(self, name: str, *, at_least: int) -> int:
        text = getattr(self, name)
        if not text.isdecimal() or int(text) < at_least:
            raise ValueError(f"{_PREFIX}{name.upper()}={text!r}: expected a whole number from {at_least}")
        return int(text)


def dag_settings() -> DagSettings:
    """As the environment says."""
    given = {field.name: os.environ.get(_PREFIX + field.name.upper(), "") for field in fields(DagSettings)}
    return DagSettings(**{name: value for name, value in given.items() if value})
