"""`shardmill doctor`: what would stop a run on this machine, found before it starts, each with its fix."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

from pipeline.config import PipelineTree
from pipeline.preflight import Check, checks, listing_facts
from shardmill.errors import ShardmillError
from shardmill.registry import install_hint

Status = Literal["ok", "warn", "fail"]

JAVA_VERSIONS = (17, 21)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    status: Status
    subject: str
    found: str
    fix: str = ""


def examine(tree: PipelineTree, workdir: str) -> list[Finding]:
    """Look at everything that a run with this config would need. Writes one small file to each store and removes it."""
    return [
        Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}"),
        *_packages(tree),
        _java(),
        _compiler(),
        *_preflight(tree, workdir),
        _slots(tree),
    ]


def _packages(tree: PipelineTree) -> Iterator[Finding]:
    uses_s3 = any(uri.startswith("s3://") for uri in (tree.source.uri, tree.dataset.uri, tree.models.uri))
    # Importable name, extra that brings it, what it is for, and whether this config needs it.
    packages = (
        ("pyspark", "spark", "etl.engine = spark, launcher horovod_spark", True),
        ("pandas", "spark", "Spark, which asks for it wherever Arrow carries rows into Python", True),
        ("tensorflow", "tensorflow", "training", True),
        ("keras", "tensorflow", "training", True),
        ("horovod", "horovod", "strategy horovod", tree.train.strategy == "horovod"),
        ("s3fs", "s3", "s3:// URIs", uses_s3),
    )
    # One name may come from several distributions: `tensorflow` is in `tensorflow-cpu`, too.
    distributions = metadata.packages_distributions()
    for package, extra, purpose, is_needed in packages:
        if find_spec(package) is not None:
            versions = {f"{name} {metadata.version(name)}" for name in distributions.get(package, ())}
            yield Finding("ok", package, ", ".join(sorted(versions)) or "installed")
        else:
            status: Status = "fail" if is_needed else "warn"
            yield Finding(status, package, f"not installed; it is for {purpose}", install_hint(extra))


def _java() -> Finding:
    java = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    fix = "apt-get install -y openjdk-17-jre-headless, or set JAVA_HOME to a Java 17 or 21"
    try:
        text = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False).stderr
    except (OSError, subprocess.TimeoutExpired):
        return Finding("fail", "java", f"{java} does not run; Spark needs it", fix)
    version = re.search(r'version "(\d+)', text)
    if version is None or int(version.group(1)) not in JAVA_VERSIONS:
        return Finding("fail", "java", f"{text.splitlines()[0] if text else 'unknown'}; Spark 4 needs 17 or 21", fix)
    return Finding("ok", "java", text.splitlines()[0])


def _compiler() -> Finding:
    compiler = shutil.which("g++")
    if compiler is None:
        return Finding("warn", "g++", "not found; only building Horovod needs it", "apt-get install -y g++")
    return Finding("ok", "g++", compiler)


def _preflight(tree: PipelineTree, workdir: str) -> Iterator[Finding]:
    """What a run would be refused for; then, if nothing is, what the listing of the source says."""
    uris = {"source.uri": tree.source.uri, "dataset.uri": tree.dataset.uri, "models.uri": tree.models.uri}
    unset = [subject for subject, uri in uris.items() if not uri]
    yield from (Finding("warn", subject, "not set", f"set {subject} in the config") for subject in unset)
    is_refused = bool(unset)
    for check in checks(tree, workdir):
        if check.subject not in unset:
            finding = _looked(check)
            is_refused |= finding.status == "fail"
            yield finding
    if not is_refused:
        try:
            for subject, found in listing_facts(tree):
                yield Finding("warn" if subject == "warning" else "ok", f"source: {subject}", found)
        except ShardmillError as error:
            yield _failed("source", error)


def _looked(check: Check) -> Finding:
    try:
        return Finding("ok", check.subject, check.look())
    except ShardmillError as error:
        return _failed(check.subject, error)


def _failed(subject: str, error: ShardmillError) -> Finding:
    found = "; ".join(part for part in (error.what, error.expected) if part)
    return Finding("fail", subject, found, error.fix or "check the path, its permissions and the AWS_* environment")


def _slots(tree: PipelineTree) -> Finding:
    cores = os.cpu_count() or 1
    needed = tree.train.num_workers
    if tree.train.launcher in ("local", "horovod_spark") and tree.spark.master.startswith("local") and needed > cores:
        found = f"train.num_workers = {needed} on {cores} cores: ranks will share them"
        return Finding("warn", "slots", found, "fewer workers, or a cluster")
    return Finding("ok", "slots", f"{needed} rank(s) by launcher {tree.train.launcher}, {cores} cores here")
