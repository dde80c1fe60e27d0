"""The last row of `shardmill doctor --rehearse`: one step by the ranks themselves."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config import load_pipeline
from pipeline.doctor_ranks import has_version
from pipeline.finding import Finding, failed
from shardmill.errors import ShardmillError
from train.rehearsal import rehearse
from train.tree import TrainTree

SUBJECT = "rehearsal"


def rehearsed(findings: Sequence[Finding], config: str, overrides: tuple[str, ...], workdir: str) -> Finding:
    """Not tried if an earlier row says already that the ranks could not run, or no dataset is there."""
    if failing := [each.subject for each in findings if each.status == "fail"]:
        return Finding("warn", SUBJECT, f"not tried: {', '.join(failing)} would stop it", "fix that first")
    try:
        tree = load_pipeline(config or None, overrides, workdir)
        if not tree.dataset.uri or not has_version(tree.dataset.uri):
            where = tree.dataset.uri or "dataset.uri, which is not set,"
            return Finding("warn", SUBJECT, f"not tried: {where} has no version", "run `shardmill etl` first")
        return Finding("ok", SUBJECT, rehearse(tree.part(TrainTree)))
    except ShardmillError as error:
        return failed(SUBJECT, error)
