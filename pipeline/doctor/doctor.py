"""`shardmill doctor`: finds what would stop a run on this machine, each with its fix, before the run starts."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.choices import Chosen, chosen_entries, registries
from pipeline.cli_options import Common, command
from pipeline.config import load_pipeline
from pipeline.doctor.dataset import dataset_findings, listing_findings
from pipeline.doctor.finding import failed, found_by
from pipeline.doctor.network import network_findings
from pipeline.doctor.ranks import model_findings, rank_findings
from pipeline.output.printing import print_result
from pipeline.preflight import Check, checks, clock_difference_seconds
from pipeline.running import SUMMARY_SECTIONS
from pipeline.spark_applications import applications_on_spark
from pipeline.tree import PipelineTree
from shardmill.calls.results import Diagnosis, Finding, Status
from shardmill.errors import ShardmillError, StorageError, UsageError
from shardmill.jobs.config import is_connect
from shardmill.jobs.run_files import PARTIAL, RunState, StageRecord, failed_stage, write_stage_record, write_summary
from shardmill.kernel import HOW_TO_INSTALL, NATIVE_ID, resolve_kernel
from shardmill.registry import Entry, install_hint
from shardmill.words import size_of
from train.tree import TrainTree

if TYPE_CHECKING:
    from etl.config import EtlConfig
    from etl.listing.listing import Listing
    from train.planning.setup import Setup

JAVA_VERSIONS = (17, 21)
CLOCK_TOLERANCE_SECONDS = 30
REHEARSAL = "rehearsal"


@command()
def doctor(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file to check as well.")] = "",
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Also run one training step with all ranks on the committed dataset.")
    ] = False,
) -> None:
    common: Common = context.obj
    findings = diagnose(config, common.overrides, common.workdir)
    if rehearse:
        findings.append(rehearsed(findings, config, common.overrides, common.workdir))
    print_result(common, Diagnosis(tuple(findings)), "doctor")
    error = _error_of([each for each in findings if each.status == "fail"])
    if common.is_run_named:
        _record(common, error)
    if error is not None:
        raise typer.Exit(error.exit_code)


def _error_of(failing: Sequence[Finding]) -> ShardmillError | None:
    """What a run would end with: a fault that may pass only if all of them may."""
    if not failing:
        return None
    kind = StorageError if all(each.is_transient for each in failing) else UsageError
    found = "; ".join(f"{each.subject}: {each.found}" for each in failing)
    return kind(found, fix=failing[0].fix if len(failing) == 1 else "`shardmill doctor` shows how to fix each")


def _record(common: Common, error: ShardmillError | None) -> None:
    """For whoever named the run: a scheduler looks into its folder for the reason."""
    record = StageRecord(stage="doctor") if error is None else failed_stage("doctor", error)
    state = PARTIAL if error is None else RunState("failed", record.exit_code, record.error)
    with suppress(ShardmillError):
        write_stage_record(common.workdir, common.run_id, record)
        write_summary(common.workdir, common.run_id, state, SUMMARY_SECTIONS)


def diagnose(config: str, overrides: tuple[str, ...], workdir: str) -> list[Finding]:
    """Check a TOML file, or the defaults if `config` is empty; one that does not load is a finding like any other."""
    try:
        tree = load_pipeline(config or None, overrides, workdir)
    except ShardmillError as error:
        return [_python(), _java(is_needed=True), _compiler(), Finding("fail", "config", found_by(error), error.fix)]
    return examine(tree, workdir, has_config=bool(config))


def examine(tree: PipelineTree, workdir: str, *, has_config: bool = True) -> list[Finding]:
    """Check everything that a run with this config would need. Writes one small file to each store and removes it.

    `has_config`: whether keys that only a config file sets are missed.
    """
    chosen, setup = list(chosen_entries(tree)), _setup(tree)
    return [
        _python(),
        *map(_entry, chosen),
        *_packages(chosen),
        _java(is_needed=bool(applications_on_spark(tree)) and not is_connect(tree.spark)),
        _compiler(),
        _kernel(tree),
        *_preflight(tree, setup, workdir, has_config=has_config),
        *(rank_findings(setup) if setup else ()),
        *dataset_findings(tree),
        *(network_findings(tree, setup) if setup else ()),
    ]


def _setup(tree: PipelineTree) -> Setup | None:
    """The training as it would be set up, also where a check refuses it; None if nothing can be chosen."""
    from train.planning.setup import resolve

    try:
        return resolve(tree.train, tree.spark)
    except ShardmillError:
        # The row of `train.num_workers` says why.
        return None


def _entry(chosen: Chosen) -> Finding:
    """Whether a chosen registry entry has the packages that it needs."""
    entry = chosen.entry
    if missing := entry.missing_packages():
        found = f"{chosen.name} ({entry.help}) needs {', '.join(missing)}, which is not installed"
        return Finding("fail", chosen.key, found, install_hint(entry.extra))
    return Finding("ok", chosen.key, f"{chosen.name}: {entry.help}")


def _packages(chosen: list[Chosen]) -> Iterator[Finding]:
    """The versions of all packages that registry entries name; the missing ones that only other choices would need."""
    from pipeline.cli import COMMANDS

    users: dict[str, list[tuple[str, Entry]]] = {}
    for registry in (*registries(PipelineTree), COMMANDS):
        for name, entry in registry.entries.items():
            for package in entry.packages:
                users.setdefault(package, []).append((f"{registry.key} = {name}", entry))
    needed = {package for each in chosen for package in each.entry.packages}
    # One name may come from several distributions: `tensorflow` is in `tensorflow-cpu`, too.
    distributions = _distributions(tuple(sys.path))
    for package, uses in users.items():
        if find_spec(package) is not None:
            yield _versions(package, {name: metadata.version(name) for name in distributions.get(package, ())})
        elif package not in needed:
            # The entry with the fewest extras: `horovod` alone, not `spark,horovod`.
            extra = min((entry.extra for _, entry in uses), key=len)
            found = f"not installed; only needed by {', '.join(use for use, _ in uses)}"
            yield Finding("ok", package, found, install_hint(extra))


def _versions(package: str, of_each: Mapping[str, str]) -> Finding:
    """Of the distributions whose files are in the package's folder: those of the last one that was installed won."""
    found = ", ".join(f"{name} {version}" for name, version in sorted(of_each.items()))
    if len(set(of_each.values())) < 2:
        return Finding("ok", package, found or "installed")
    name = package if package in of_each else min(of_each)
    exact = f"{name}=={of_each[name]}"
    fix = f"install {name} last (`pip install --force-reinstall --no-deps {exact}`), or the others in its version"
    return Finding("warn", package, f"{found}: different releases in one folder", fix)


@functools.cache
def _distributions(path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Those of each importable name. It reads the file lists of all that is installed: half a second."""
    return metadata.packages_distributions()


def _python() -> Finding:
    return Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")


def _java(*, is_needed: bool) -> Finding:
    """Whether Spark's Java runs; without it a run fails only if the config chooses something that needs Spark."""
    problem: Status = "fail" if is_needed else "ok"
    java = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else "java"
    fix = "apt-get install -y openjdk-17-jre-headless, or set JAVA_HOME to a Java 17 or 21"
    try:
        text = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20, check=False).stderr
    except (OSError, subprocess.TimeoutExpired):
        return Finding(problem, "java", f"{java} does not run; only Spark needs it", fix)
    version = re.search(r'version "(\d+)', text)
    if version is None or int(version.group(1)) not in JAVA_VERSIONS:
        return Finding(problem, "java", f"{text.splitlines()[0] if text else 'unknown'}; Spark 4 needs 17 or 21", fix)
    return Finding("ok", "java", text.splitlines()[0])


def _compiler() -> Finding:
    compiler = shutil.which("g++")
    if compiler is None:
        return Finding("ok", "g++", "not found; only building Horovod needs it", "apt-get install -y g++")
    return Finding("ok", "g++", compiler)


def _kernel(tree: PipelineTree) -> Finding:
    """Report the kernel that would downscale JPEGs, and how to get the faster one."""
    subject = "etl.kernel"
    try:
        kernel = resolve_kernel(tree.etl.kernel)
    except ShardmillError as error:
        return failed(subject, error)
    if NATIVE_ID:
        return Finding("ok", subject, f"{kernel}; {NATIVE_ID} is installed")
    return Finding("warn", subject, "wheels; the faster native kernel is not installed", HOW_TO_INSTALL)


def _preflight(tree: PipelineTree, setup: Setup | None, workdir: str, *, has_config: bool) -> Iterator[Finding]:
    """Report what would stop a run, or a training alone; if nothing does, report the source's listing, and whether the
    model builds.
    """
    uris = {**tree.source.uris(), "dataset.uri": tree.dataset.uri, "models.uri": tree.models.uri}
    unset = [subject for subject, uri in uris.items() if not uri]
    if has_config:
        yield from (_unset(subject, tree) for subject in unset)
    found = [_run_check(check) for check in checks(tree, workdir) if check.subject not in unset]
    yield from found
    if any(each.status == "fail" for each in found):
        return
    if unset:
        yield from model_findings(tree, setup)
    else:
        for subject in ("dataset.uri", "models.uri"):
            yield _clock(f"clock of {subject}", uris[subject])
        try:
            yield from _listing_findings(tree, setup)
        except ShardmillError as error:
            yield failed("source", error)


def _clock(subject: str, uri: str) -> Finding:
    """`gc`, leases and what removes left-overs go by a file's age."""
    try:
        seconds = clock_difference_seconds(uri)
    except ShardmillError as error:
        return failed(subject, error)
    if seconds > CLOCK_TOLERANCE_SECONDS:
        fix = "synchronize both by NTP; until then, do not run `gc` with an age in hours"
        return Finding(
            "warn", subject, f"differs from this machine's by {seconds:,.0f} s: files seem older or younger", fix
        )
    return Finding("ok", subject, f"within {CLOCK_TOLERANCE_SECONDS} s of this machine's")


def _unset(subject: str, tree: PipelineTree) -> Finding:
    """A run needs all of them; training needs no source if there is a version to train on."""
    from shardmill.dataset.dataset import has_version

    fix = f"set {subject} in the config"
    try:
        is_built = subject != "dataset.uri" and has_version(tree.dataset.uri)
    except ShardmillError:
        is_built = False
    if is_built:
        return Finding(
            "warn", subject, (f"not set; training on {tree.dataset.uri} does not need it, but a whole run does"), fix
        )
    return Finding("fail", subject, "not set", fix)


def _listing_findings(tree: PipelineTree, setup: Setup | None) -> Iterator[Finding]:
    """Report what the ETL would infer from the listing, whether the model builds for it, and the disk space of a build;
    reads names and sizes, and only the few images that decide the size of stored ones.

    Raises what the ETL and the training would raise for this listing.
    """
    from etl.checks.limits import check_limits
    from etl.checks.listing import check_classes, inferred_facts, inferred_warnings
    from etl.config import EtlTree
    from etl.plan import plan_build
    from train.planning.checks import check_schema

    plan = plan_build(tree.part(EtlTree), run_id="preflight")
    check_limits(plan, plan.build.list_rejections)
    check_classes(plan)
    check_schema(tree.train, tree.gate, plan.row_schema)
    facts = inferred_facts(plan)
    for name in ("classes", "splits", "image"):
        yield Finding("ok", f"source: {name}", str(facts[name]))
    for message in inferred_warnings(plan):
        yield Finding("warn", "source: warning", message)
    yield from listing_findings(tree, setup, plan)
    yield from model_findings(tree, setup, plan.row_schema)
    if plan.store.local_root is not None:
        yield _room(plan.store.local_root, plan.listing, plan.task.config)


def _room(root: Path, listing: Listing, etl: EtlConfig) -> Finding:
    """Report the free space at the dataset's location, and the size that a full build may take."""
    from etl.units.units import stored_image_bytes

    num_images = listing.num_images
    needed_bytes = num_images * stored_image_bytes(listing, etl) * len(etl.formats)
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free_bytes = shutil.disk_usage(there).free
    needed = f"a build of all {num_images:,} images takes about {size_of(needed_bytes)}"
    found = f"{size_of(free_bytes)} free; {needed}"
    if needed_bytes > free_bytes:
        # A guess, and of a full build: a later run adds what has changed.
        return Finding(
            "warn", "room for dataset.uri", found, "free space, or choose another location or a smaller size"
        )
    return Finding("ok", "room for dataset.uri", found)


def _run_check(check: Check) -> Finding:
    try:
        return Finding("ok", check.subject, check.look())
    except ShardmillError as error:
        return failed(check.subject, error)


def rehearsed(findings: Sequence[Finding], config: str, overrides: tuple[str, ...], workdir: str) -> Finding:
    """Return the rehearsal's row; it is skipped if an earlier row shows that the ranks could not run, or without a
    dataset.
    """
    if failing := [each.subject for each in findings if each.status == "fail"]:
        return Finding("warn", REHEARSAL, f"not run: {', '.join(failing)} must pass first", "fix that first")
    from shardmill.dataset.dataset import has_version
    from train.planning.rehearsal import rehearse

    try:
        tree = load_pipeline(config or None, overrides, workdir)
        if not has_version(tree.dataset.uri):
            where = tree.dataset.uri or "dataset.uri, which is not set,"
            return Finding("warn", REHEARSAL, f"not run: {where} has no version", "run `shardmill etl` first")
        return Finding("ok", REHEARSAL, rehearse(tree.part(TrainTree)))
    except ShardmillError as error:
        return failed(REHEARSAL, error)
