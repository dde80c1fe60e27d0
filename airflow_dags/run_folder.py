"""Reads a stage's record for its task: why the stage failed, and the ids and digests of its results."""

from __future__ import annotations

import json
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from shardmill.errors import is_worth_retrying


class RunFolder:
    """`<workdir>/runs/<run_id>/` of one DAG run, as far as tasks read it."""

    def __init__(self, workdir: str, run_id: str) -> None:
        # At parse time this file must stay light.
        from shardmill.jobs.run_files import run_folder
        from shardmill.stores import open_store

        self._store = open_store(workdir)
        self._folder = run_folder(run_id)

    def remove_summary(self) -> None:
        """Remove an earlier attempt's summary, so that a summary after a failure was written by this attempt."""
        self._store.delete(f"{self._folder}/summary.json")

    def summary(self) -> dict[str, Any]:
        """The run's summary; empty if there is none yet."""
        try:
            return json.loads(self._store.read(f"{self._folder}/summary.json"))
        except FileNotFoundError:
            return {}

    def record_of(self, stage: str) -> dict[str, Any]:
        """Return the record of a stage; empty if there is none. Raises IntegrityError if it was altered."""
        from shardmill.checksummed import verified_body

        path = f"{self._folder}/{stage}.json"
        try:
            return json.loads(verified_body(self._store.read(path), path))
        except FileNotFoundError:
            return {}

    def failure(self, stage: str, ended: str, exit_code: int = 0) -> AirflowException:
        """The exception that says why the stage failed, and by its type whether another try makes sense.

        `exit_code`: the command's own, for one that could write no summary; 0 where Spark's may stand for it.
        """
        summary = self.summary()
        code = summary.get("exit_code")
        if not code:
            # Killed or never started: nothing is known against another try.
            line = f"{stage} {ended} and left no reason in summary.json; see the log above"
            return _failure(line, exit_code)
        return _failure(f"{stage} failed with exit code {code}: {summary.get('error')}", code)

    def result_of(self, stage: str) -> tuple[dict[str, Any], bool]:
        """Ids, digests and drift, for XCom; and whether this run has published something that was not there before."""
        sections = self.record_of(stage).get("sections", {})
        made = sections.get("predictions") or {}
        dataset, promotion = made or sections.get("dataset") or {}, sections.get("promotion") or {}
        found = {
            "version": dataset.get("version"),
            "content_digest": dataset.get("content_digest"),
            "drift": (sections.get("drift") or {}).get("amount"),
            "weights_sha256": (sections.get("train") or {}).get("weights_sha256"),
            "decision": promotion.get("decision"),
            "current": promotion.get("current"),
        }
        # About the run, not the try: one that died after its commit is followed by one that only finds it.
        builds = (sections.get("etl") or {}, made, promotion)
        is_published = any(section.get("published") for section in builds)
        return {name: value for name, value in found.items() if value is not None}, is_published


def _failure(line: str, exit_code: int) -> AirflowException:
    return AirflowException(line) if is_worth_retrying(exit_code) else AirflowFailException(line)
