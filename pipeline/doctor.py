"""`shardmill doctor`: what would stop a run on this machine, found before the run starts, each with its fix."""

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

from pipeline.choices import Chosen, chosen_entries, registries
from pipeline.config import load_pipeline
from pipeline.preflight import Check, checks
from pipeline.tree import PipelineTree
from shardmill.errors import ShardmillError
from shardmill.images.kernel import HOW_TO_INSTALL, NATIVE_ID, resolve_kernel
from shardmill.registry import Entry, install_hint

Status = Literal["ok", "warn", "fail"]

JAVA_VERSIONS = (17, 21)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    status: Status
    subject: str
    found: str
    fix: str = ""


def diagnose(config: str, overrides: tuple[str, ...], workdir: str) -> list[Finding]:
    """Check a TOML file, or the defaults if `config` is empty; one that does not load is a finding like any other."""
    try:
        tree = load_pipeline(config or None, overrides, workdir)
    except ShardmillError as error:
        return [_python(), _java(is_needed=True), _compiler(), Finding("fail", "config", _found(error), error.fix)]
    return examine(tree, workdir, has_config=bool(config))


def examine(tree: PipelineTree, workdir: str, *, has_config: bool = True) -> list[Finding]:
    """Check everything that a run with this config would need. Writes one small file to each store and removes it.

    `has_config`: whether keys that only a config file sets are missed.
    """
    chosen = list(chosen_entries(tree))
    return [
        _python(),
        *map(_entry, chosen),
        *_packages(chosen),
        _java(is_needed=any(map(_needs_spark, chosen))),
        _compiler(),
        _kernel(tree),
        *_preflight(tree, workdir, has_config=has_config),
        *_slots(tree),
        *_window_memory(tree),
    ]


def _entry(chosen: Chosen) -> Finding:
    """Whether a chosen registry entry has the packages that it needs."""
    entry = chosen.entry
    if missing := entry.missing_packages():
        found = f"{chosen.name} ({entry.help}) needs {', '.join(missing)}, which is not installed"
        return Finding("fail", chosen.key, found, install_hint(entry.extra))
    return Finding("ok", chosen.key, f"{chosen.name}: {entry.help}")


def _packages(chosen: list[Chosen]) -> Iterator[Finding]:
    """The versions of all packages that registry entries name; the missing ones that only other choices would need."""
    users: dict[str, list[tuple[str, Entry]]] = {}
    for registry in registries(PipelineTree):
        for name, entry in registry.entries.items():
            for package in entry.packages:
                users.setdefault(package, []).append((f"{registry.key} = {name}", entry))
    needed = {package for each in chosen for package in each.entry.packages}
    # One name may come from several distributions: `tensorflow` is in `tensorflow-cpu`, too.
    distributions = metadata.packages_distributions()
    for package, uses in users.items():
        if find_spec(package) is not None:
            versions = {f"{name} {metadata.version(name)}" for name in distributions.get(package, ())}
            yield Finding("ok", package, ", ".join(sorted(versions)) or "installed")
        elif package not in needed:
            # The entry with the fewest extras: `horovod` alone, not `spark,horovod`.
            extra = min((entry.extra for _, entry in uses), key=len)
            found = f"not installed; needed only by {', '.join(use for use, _ in uses)}"
            yield Finding("warn", package, found, install_hint(extra))


def _python() -> Finding:
    return Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")


def _needs_spark(chosen: Chosen) -> bool:
    return "pyspark" in chosen.entry.packages


def _java(*, is_needed: bool) -> Finding:
    """Whether Spark's Java runs; without it a run fails only if the config chooses something that needs Spark."""
    problem: Status = "fail" if is_needed else "warn"
    java = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    fix = "apt-get install -y openjdk-17-jre-headless, or set JAVA_HOME to a Java 17 or 21"
    try:
        text = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False).stderr
    except (OSError, subprocess.TimeoutExpired):
        return Finding(problem, "java", f"{java} does not run; Spark needs it", fix)
    version = re.search(r'version "(\d+)', text)
    if version is None or int(version.group(1)) not in JAVA_VERSIONS:
        return Finding(problem, "java", f"{text.splitlines()[0] if text else 'unknown'}; Spark 4 needs 17 or 21", fix)
    return Finding("ok", "java", text.splitlines()[0])


def _compiler() -> Finding:
    compiler = shutil.which("g++")
    if compiler is None:
        return Finding("warn", "g++", "not found; only building Horovod needs it", "apt-get install -y g++")
    return Finding("ok", "g++", compiler)


def _kernel(tree: PipelineTree) -> Finding:
    """Which kernel would shrink JPEGs, and how to get the faster one."""
    subject = "etl.kernel"
    try:
        kernel = resolve_kernel(tree.etl.kernel)
    except ShardmillError as error:
        return _failed(subject, error)
    if NATIVE_ID:
        return Finding("ok", subject, f"{kernel}; {NATIVE_ID} is installed")
    return Finding("warn", subject, "wheels; the faster native kernel is not installed", HOW_TO_INSTALL)


def _preflight(tree: PipelineTree, workdir: str, *, has_config: bool) -> Iterator[Finding]:
    """What a run would be refused for; then, if nothing is, what the listing of the source says."""
    uris = {**tree.source.uris(), "dataset.uri": tree.dataset.uri, "models.uri": tree.models.uri}
    unset = [subject for subject, uri in uris.items() if not uri]
    if has_config:
        yield from (_unset(subject, tree) for subject in unset)
    is_refused = bool(unset)
    for check in checks(tree, workdir):
        if check.subject not in unset:
            finding = _run_check(check)
            is_refused |= finding.status == "fail"
            yield finding
    if not is_refused:
        try:
            for subject, found in _listing_facts(tree):
                yield Finding("warn" if subject == "warning" else "ok", f"source: {subject}", found)
        except ShardmillError as error:
            yield _failed("source", error)


def _unset(subject: str, tree: PipelineTree) -> Finding:
    """A run needs all of them; training needs no source if there is a version to train on."""
    fix = f"set {subject} in the config"
    try:
        is_built = subject != "dataset.uri" and bool(tree.dataset.uri) and _has_version(tree.dataset.uri)
    except ShardmillError:
        is_built = False
    if is_built:
        return Finding("warn", subject, f"not set; training on {tree.dataset.uri} needs none, a whole run does", fix)
    return Finding("fail", subject, "not set", fix)


def _has_version(uri: str) -> bool:
    from shardmill.dataset.versions import latest_version, split_version
    from shardmill.stores import open_store

    return latest_version(open_store(split_version(uri)[0])) > 0


def _listing_facts(tree: PipelineTree) -> Iterator[tuple[str, str]]:
    """What the ETL would infer from the listing, as (subject, found); reads names and sizes, and no image.

    Raises what the ETL and the training would raise for this listing.
    """
    from etl.checks import check_classes, inferred_facts, inferred_warnings
    from etl.config import EtlTree
    from etl.limits import check_limits
    from etl.plan import plan_build
    from train.preflight import check_schema

    plan = plan_build(tree.part(EtlTree), run_id="preflight")
    check_limits(plan, plan.build.list_rejections)
    check_classes(plan)
    check_schema(tree.train, tree.gate, plan.row_schema)
    facts = inferred_facts(plan)
    yield from ((name, str(facts[name])) for name in ("classes", "splits", "image"))
    yield from (("warning", message) for message in inferred_warnings(plan))


def _run_check(check: Check) -> Finding:
    try:
        return Finding("ok", check.subject, check.look())
    except ShardmillError as error:
        return _failed(check.subject, error)


def _failed(subject: str, error: ShardmillError) -> Finding:
    fix = error.fix or "check the path, its permissions and the AWS_* environment"
    return Finding("fail", subject, _found(error), fix)


def _found(error: ShardmillError) -> str:
    return "; ".join(part for part in (error.what, error.expected) if part)


def _slots(tree: PipelineTree) -> Iterator[Finding]:
    """Whether each rank that starts here has a core of its own; nothing of a launcher that cannot be loaded."""
    from train.auto import resolve
    from train.launching import LAUNCHERS
    from train.strategies import roles_of

    cores = os.cpu_count() or 1
    try:
        train = resolve(tree.train, tree.spark).config
        num_ranks = len(roles_of(train))
        num_ranks_here = LAUNCHERS[train.launcher].ranks_here(num_ranks, tree.spark)
    except ShardmillError:
        return
    if num_ranks_here > cores:
        found = (
            f"{num_ranks_here} ranks (train.num_workers = {train.num_workers}) on {cores} cores: they will share them"
        )
        yield Finding("warn", "slots", found, "fewer workers, or a cluster")
    else:
        found = f"{num_ranks} rank(s) by launcher {train.launcher}, {cores} cores here"
        yield Finding("ok", "slots", found)


def _window_memory(tree: PipelineTree) -> Iterator[Finding]:
    """What the shuffle windows of one rank need on the committed dataset, if there is one."""
    from shardmill.dataset.open import open_dataset
    from train.preflight import check_trainable, window_memory

    subject = "train.window_budget_bytes"
    try:
        if not tree.dataset.uri or not _has_version(tree.dataset.uri):
            return
        dataset = open_dataset(tree.dataset.uri)
        check_trainable(tree.train, dataset, tree.gate)
        memory = window_memory(tree.train, dataset)
    except ShardmillError as error:
        # No failure: the ETL of a run with this config may commit another version first.
        yield Finding("warn", subject, f"the committed dataset as it is: {error.what}; {error.expected}", error.fix)
        return
    found = f"{memory.bytes_per_rank:,} of {memory.budget_bytes:,} bytes on each rank for {dataset.pin.uri}"
    yield Finding("ok", subject, f"{found}@{dataset.pin.version}")
