"""The rows of `shardmill doctor` about the network: this host's name, the addresses at which ranks and executors
connect, ports fixed by the config, the Spark master, and the paths that executors must see.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from pipeline.doctor.finding import failed
from pipeline.spark_applications import applications_on_spark
from pipeline.tree import PipelineTree
from shardmill.calls.results import Finding, Status
from shardmill.errors import ShardmillError
from shardmill.jobs.config import (
    CONNECT,
    addresses_of,
    call_master,
    is_connect,
    is_local_master,
    is_loopback,
    is_under_spark_submit,
    may_have_other_hosts,
)
from shardmill.stores import scheme_of
from train.config import TrainConfig
from train.contracts.world import LOOPBACK

if TYPE_CHECKING:
    from shardmill.jobs.config import SparkConfig
    from train.planning.setup import Setup

CALL_SECONDS = 3.0
DRIVER_PORTS = ("spark.driver.port", "spark.driver.blockManager.port", "spark.blockManager.port")
SPARKS_PORT_RETRIES = 16


def network_findings(tree: PipelineTree, setup: Setup) -> Iterator[Finding]:
    """Listens for an instant, and calls itself."""
    try:
        num_ranks, launcher = len(setup.roles), setup.launcher
    except ShardmillError:
        return
    yield _host_name(is_needed=num_ranks > 1)
    yield from _nics(setup.config, is_needed=launcher.chooses_nics or setup.num_ranks_here > 0)
    if launcher.started_by_others:
        yield _gate(setup.config)
    if is_under_spark_submit():
        # Its settings hold, not these.
        return
    applications = applications_on_spark(tree)
    if applications and tree.spark.master.startswith(("spark://", CONNECT)):
        yield _master(tree.spark.master)
    yield from _local_paths(tree, applications)
    if is_connect(tree.spark):
        # Its driver listens where the server is.
        return
    for name, conf in applications.items():
        yield from _application(f"spark.{name}.conf", conf, tree.spark)


def _host_name(*, is_needed: bool) -> Finding:
    """Gloo looks up its own host's name, and PyTorch and Horovod end with a segmentation fault if that fails."""
    name = socket.gethostname()
    try:
        addresses = addresses_of(name)
    except OSError as error:
        found = f"{name} has no address ({error.strerror or error}): ranks that exchange gradients may crash"
        return Finding(
            "fail" if is_needed else "warn", "host name", found, f"add `127.0.0.1 {name}` to /etc/hosts", True
        )
    return Finding("ok", "host name", f"{name} is {', '.join(addresses)}")


def _nics(train: TrainConfig, *, is_needed: bool) -> Iterator[Finding]:
    """`is_needed`: whether this machine itself listens on them, and not only those of other ranks."""
    from train.contracts.world import ipv4_of

    if train.nics:
        try:
            found = ", ".join(f"{nic} is {ipv4_of(nic)}" for nic in train.nics)
        except ShardmillError as error:
            refusal = failed("train.nics", error)
            yield refusal if is_needed else Finding("warn", refusal.subject, f"{refusal.found}: the ranks' hosts may "
                                                    "be others", refusal.fix)  # fmt: skip
        else:
            yield Finding("ok", "train.nics", found)


def _gate(train: TrainConfig) -> Finding:
    """Check the address of rank 0, which only its own host can test."""
    from shardmill.environments import find_rank_environment
    from train.launching.attach_options import AttachOptions, host_of_rank_0, loopback_warning

    subject, started = "train.attach.port", find_rank_environment(os.environ)
    attach = train.options(AttachOptions)
    host = attach.host or (host_of_rank_0(os.environ, started[1]) if started else LOOPBACK)
    where, fix = f"{host}:{attach.port}", "set train.attach.host and train.attach.port"
    if not host:
        return Finding(
            "fail", subject, "there are several hosts, and rank 0's host is unknown", "set train.attach.host"
        )
    is_rank_0 = started is not None and started[1].rank == 0
    try:
        if started is None or is_rank_0:
            socket.create_server((host, attach.port)).close()
        else:
            addresses_of(host)
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.EADDRNOTAVAIL and not is_rank_0:
            return Finding("ok", subject, f"{where} is on another host, on which rank 0 will run")
        # Not started as one of several, and no host set: MASTER_ADDR or SLURM may name another one.
        status: Status = "fail" if started or attach.host else "warn"
        return Finding(
            status, subject, f"rank 0 cannot be reached at {where}: {why}", f"{fix}, or free that port", True
        )
    if started and (warning := loopback_warning(host, started[1])):
        found, _, fix = warning.partition("; ")
        return Finding("warn", subject, found, fix)
    return Finding("ok", subject, f"{where} is free" if started is None or is_rank_0 else f"{where} belongs to rank 0")


def _master(master: str) -> Finding:
    try:
        return Finding("ok", "spark.master", f"{call_master(master)} accepts connections")
    except ShardmillError as error:
        return failed("spark.master", error)


def _local_paths(tree: PipelineTree, applications: Collection[str]) -> Iterator[Finding]:
    """Of this machine, where tasks or ranks on others would look for them: the same text, and another folder there."""
    if not may_have_other_hosts(tree.spark.master):
        return
    uris = dict(tree.source.uris()) if "etl" in applications else {}
    uris |= {"dataset.uri": tree.dataset.uri} if applications else {}
    uris |= {"models.uri": tree.models.uri} if "train" in applications else {}
    for key, uri in uris.items():
        if uri and scheme_of(uri) == "file":
            fix = "mount it on all hosts, or use a bucket (s3://, gs://, az://) or hdfs://"
            yield Finding("warn", f"{key} on executors", f"executors on other hosts need access to {uri}", fix)


def _application(section: str, conf: dict[str, str], spark: SparkConfig) -> Iterator[Finding]:
    """Check the address at which the application's driver listens, which executors and ranks use, and the ports that
    its settings fix.
    """
    default = LOOPBACK if is_local_master(spark.master) else os.environ.get("SPARK_LOCAL_IP") or socket.gethostname()
    told = conf.get("spark.driver.host", default)
    bind = conf.get("spark.driver.bindAddress", LOOPBACK if is_local_master(spark.master) else told)
    address = _driver_address(f"{section}: driver", bind, told)
    is_set = address.status == "ok" and "spark.driver.host" in conf
    if is_set and is_loopback(told) and may_have_other_hosts(spark.master):
        found = f"executors would connect to {told}, which on another host is that host itself"
        address = Finding("warn", address.subject, found, "set spark.driver.host to this host's address")
    yield address
    if address.status != "fail":
        retries = conf.get("spark.port.maxRetries", "")
        num_ports = 1 + (int(retries) if retries.isdecimal() else SPARKS_PORT_RETRIES)
        for name in DRIVER_PORTS:
            if conf.get(name, "0").isdecimal() and (port := int(conf.get(name, "0"))):
                yield _port(f"{section}: {name}", bind, port, num_ports)


def _driver_address(subject: str, bind: str, told: str) -> Finding:
    fix = "set spark.driver.host to an address of this host; behind NAT, also spark.driver.bindAddress to its own one"
    try:
        addresses = addresses_of(told)
    except OSError as error:
        return Finding(
            "fail", subject, f"{told}, to which ranks connect, has no address: {error.strerror or error}", fix, True
        )
    try:
        server = socket.create_server((bind, 0))
    except OSError as error:
        return Finding("fail", subject, f"it cannot listen on {bind}: {error.strerror or error}", fix, True)
    with server:
        try:
            socket.create_connection((told, server.getsockname()[1]), CALL_SECONDS).close()
        except OSError as error:
            # Where addresses are translated, only others can reach this one.
            found = f"it listens on {bind}, but cannot be reached from here at {told}: {error.strerror or error}"
            return Finding("warn", subject, found, fix)
    return Finding("ok", subject, f"listens on {bind} and is reachable at {told} ({', '.join(addresses)})")


def _port(subject: str, bind: str, port: int, num_ports: int) -> Finding:
    """Spark takes the next free port, unless its settings forbid this."""
    if not 1024 <= port <= 65535:
        return Finding("fail", subject, f"{port}, but Spark accepts 1024 to 65535", "set such a port, or 0 for any")
    taken = 0
    for each in range(port, min(port + num_ports, 65536)):
        with suppress(OSError):
            socket.create_server((bind, each)).close()
            break
        taken += 1
    else:
        found = f"{port} of {bind} is taken" + (f", and so are the next {taken - 1}" if taken > 1 else "")
        return Finding("fail", subject, found, "set another port, 0 for any, or a higher spark.port.maxRetries", True)
    if taken:
        found = f"{port} of {bind} is taken: Spark would listen on {port + taken}, which a firewall may block"
        return Finding("warn", subject, found, "set another port, or end the process that uses it")
    return Finding("ok", subject, f"{port} of {bind} is free")
