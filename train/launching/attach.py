"""The launcher for processes that already exist: torchrun, SLURM, MPI or Kubernetes started this command N times.

Rank 0's process is the driver; the others wait at its gate for their ranks to begin (`attached`). Each runs its rank as
a child: a rank can end, or be killed, without the process that tells why. All end with the job's exit code. A process
at the gate has proved the job's token, which all of them got by their environment (connection.py).
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

from shardmill.environments import find_rank_environment
from shardmill.environments.rank_environment import RankEnvironment
from shardmill.errors import TrainingError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.process import (
    cause_of_end,
    error_line,
    exit_code_of,
    one_of_a_job,
    print_error,
    python_path,
    request_stop,
)
from train.api import Launcher
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import TrainResult
from train.launching.attach_options import AttachOptions, host_of_rank_0, loopback_warning
from train.launching.connection import (
    ADDRESS_VARIABLE,
    HANDSHAKE_TIMEOUT_SECONDS,
    MAX_HANDSHAKE_BYTES,
    TOKEN_VARIABLE,
    Connection,
    ProtocolError,
    RankListener,
    Received,
    answer_caller,
    is_proof,
    proof_of,
)
from train.launching.devices import device_environment
from train.launching.messages import Admitted, Begin, Challenge, Ended, Hello, Stop
from train.launching.processes import keep_rank, rank_processes
from train.launching.rank import DEFAULT_WORKER
from train.launching.watchdog import Watchdog
from train.reporting.observer import TrainObserver

# At its end rank 0 waits so long for processes that have not come yet, to tell them; they start when it does.
LATE_SECONDS = 20.0
# Without a word so long, a process that waits for rank 0 looks like one that hangs.
PATIENCE_SECONDS = 10.0


class Gate:
    """Listens from its construction; every process that comes receives what has been sent so far."""

    def __init__(self, host: str, port: int, token: str, world_size: int) -> None:
        """Raises OSError if it cannot listen there."""
        self._world_size = world_size
        self._changed = threading.Condition()
        self._begin: Begin | None = None
        self._present: dict[int, str] = {}
        """Rank -> host of the processes that are connected."""
        self._seen: set[int] = set()
        """The ranks of all that have been."""
        self._on_lost: Callable[[str], None] | None = None
        answer = partial(answer_caller, token=token, ranks=range(1, world_size), welcome=Admitted)
        self._listener = RankListener(host, answer, world_size, self._on_received, port)

    def begin(self, address: str, nonce: str, on_lost: Callable[[str], None]) -> None:
        """Let every process start its rank. `on_lost` is called, from any thread, for each lost one."""
        with self._changed:
            self._begin, self._on_lost = Begin(address, nonce), on_lost
        self._listener.send_to_all(self._begin)

    def end(self, exit_code: int, line: str) -> None:
        """Tell every process how the job ended, also those that are a little late, and close."""
        with self._changed:
            self._begin, self._on_lost = None, None
            self._changed.wait_for(lambda: len(self._seen) == self._world_size - 1, LATE_SECONDS)
        self._listener.send_to_all(Ended(exit_code, line))
        self._listener.close()

    def _on_received(self, received: Received) -> None:
        """Runs in the connection's thread."""
        message = received.message
        if isinstance(message, Hello):
            with self._changed:
                self._present[received.rank] = message.host
                self._seen.add(received.rank)
                self._changed.notify_all()
                begin = self._begin
            if begin is not None:
                # Whoever was there already has received it: a process that receives it twice starts one rank.
                self._listener.send_to_all(begin)
        elif isinstance(message, Stop) and message.why:
            self._lost(message.why)
        elif isinstance(message, Stop):
            # Whichever process a scheduler asks to end: the job ends as if it had asked rank 0's.
            request_stop()
        elif message is None:
            with self._changed:
                host = self._present.pop(received.rank, "")
            self._lost(f"the process of rank {received.rank} on host {host} has ended")

    def _lost(self, why: str) -> None:
        with self._changed:
            on_lost = self._on_lost
        if on_lost is not None:
            on_lost(why)


def call_gate(address: str, token: str, rank: int, until_seconds: float) -> Connection:
    """Wait for rank 0 at `host:port` and introduce this process. Raises OSError or ProtocolError at `until_seconds`."""
    report_seconds = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return _call_gate(address, token, rank, until_seconds)
        except (OSError, ProtocolError) as error:
            # Rank 0 may start a little later; another job may still hold the port.
            now = time.monotonic()
            if now > until_seconds:
                raise
            if now > report_seconds:
                left = f"for {until_seconds - now:.0f} s more"
                sys.stderr.write(f"shardmill: rank {rank} waits {left} for rank 0 at {address}: {error}\n")
                sys.stderr.flush()
                report_seconds = now + PATIENCE_SECONDS * 6
            time.sleep(0.2)


def _call_gate(address: str, token: str, rank: int, until_seconds: float) -> Connection:
    host, _, port = address.rpartition(":")
    connection = Connection(socket.create_connection((host, int(port)), timeout=HANDSHAKE_TIMEOUT_SECONDS))
    until_seconds = min(until_seconds, time.monotonic() + HANDSHAKE_TIMEOUT_SECONDS)
    try:
        challenge = connection.receive(MAX_HANDSHAKE_BYTES, until_seconds)
        if not isinstance(challenge, Challenge):
            raise ProtocolError(f"{address} is not a process of this job")
        nonce = secrets.token_hex(16)
        proof = proof_of(token, "attached", challenge.nonce)
        connection.send(Hello("attached", rank, socket.gethostname(), os.getpid(), nonce, proof))
        admitted = connection.receive(MAX_HANDSHAKE_BYTES, until_seconds)
        if not isinstance(admitted, Admitted) or not is_proof(token, "driver", nonce, admitted.proof):
            raise ProtocolError(f"{address} does not know this job's token, or refused rank {rank}")
        connection.set_timeout(None)
    except BaseException:
        connection.close()
        raise
    return connection


JOB_TOKEN_VARIABLE = "SHARDMILL_JOB_TOKEN"
MIN_TOKEN_CHARACTERS = 16
# After the job's end a rank's process may take this long to end.
RANK_EXIT_SECONDS = 10.0

_gate: Gate | None = None


class EndedWithJob(SystemExit):
    """Raised in the processes of other ranks than 0 when the job has ended; `code` is its exit code."""


def launch_attach(
    task: WorkerTask, spark: SparkConfig, observer: TrainObserver, worker: str = DEFAULT_WORKER
) -> TrainResult:
    """Run rank 0 here, and every other rank where its process waits. Raises the first failing rank's own error."""
    place = _place(task.config)
    with attached(task.config):
        assert _gate is not None
        nonce = secrets.token_hex(16)
        bind_host = _address(task.config, place).rpartition(":")[0]
        with Watchdog(task, worker, observer, bind_host, token=proof_of(_job_token(), "watchdog", nonce)) as watchdog:
            own = {**watchdog.environment(), **place.environment(), **device_environment(place, task.config)}
            _gate.begin(own[ADDRESS_VARIABLE], nonce, watchdog.report_launcher_failure)
            with rank_processes({0: _environment() | own}, watchdog.report_output, watchdog.report_exit):
                return watchdog.watch()


@contextmanager
def attached(config: TrainConfig) -> Iterator[None]:
    """Under this launcher only rank 0 does what is inside, with the others at its gate; they end here, as it does.

    A block inside of another is part of it. Raises EndedWithJob in the processes of other ranks;
    UsageError if nothing has started this process as one of `train.num_workers`, or there is no token.
    """
    global _gate
    if config.launcher != "attach" or _gate is not None:
        yield
        return
    place, token = _place(config), _job_token()
    address = _address(config, place)
    if warning := loopback_warning(address.rpartition(":")[0], place):
        sys.stderr.write(f"WARNING: {warning}\n")
        sys.stderr.flush()
    if place.rank:
        raise EndedWithJob(_follow(config, place, address, token))
    _gate = _open_gate(address, token, place.world_size)
    code, line = 0, ""
    with one_of_a_job():
        try:
            yield
        except BaseException as error:
            # A rank may fail while all are being stopped: all processes end with the one code that this one ends with.
            code, line = exit_code_of(cause_of_end(error)), error_line(error)
            raise
        finally:
            _gate.end(code, line)
            _gate = None


def check_world_size(world_size: int, spark: SparkConfig) -> None:
    """Raises UsageError if something has started this command, but not so many times."""
    found = find_rank_environment(os.environ)
    if found and found[1].world_size != world_size:
        starter, place = found
        raise UsageError(
            f"train.num_workers = {world_size}, but {starter} started {place.world_size} process(es)",
            "expected a process for each rank",
            f"set train.num_workers = {place.world_size}, or remove it; {starter.if_left}",
        )


def _ranks_here(world_size: int, spark: SparkConfig) -> int:
    found = find_rank_environment(os.environ)
    return found[1].ranks_per_node if found else 0


def _place(config: TrainConfig) -> RankEnvironment:
    if config.num_workers:
        check_world_size(config.num_workers, SparkConfig())
    found = find_rank_environment(os.environ)
    if found is None:
        raise UsageError(
            "train.launcher = 'attach', but no launcher has started this process as one of several",
            "expected variables of torchrun, SLURM (srun) or MPI (mpirun); or SHARDMILL_RANK, SHARDMILL_WORLD_SIZE",
            "start the command by one of them (docs/training/launchers.md), or set train.launcher = 'local'",
        )
    return found[1]


def _job_token() -> str:
    token = os.environ.get(JOB_TOKEN_VARIABLE, "")
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise UsageError(
            f"train.launcher = 'attach' without {JOB_TOKEN_VARIABLE}"
            if not token
            else f"{JOB_TOKEN_VARIABLE} has {len(token)} characters",
            f"expected the same secret of at least {MIN_TOKEN_CHARACTERS} characters for all processes of the job",
            f"run `openssl rand -hex 32` once, and set {JOB_TOKEN_VARIABLE} to its output for all processes",
        )
    return token


def _address(config: TrainConfig, place: RankEnvironment) -> str:
    """`host:port` of rank 0's gate."""
    host = config.options(AttachOptions).host or host_of_rank_0(os.environ, place)
    if not host:
        raise UsageError(
            f"train.launcher = 'attach', {place.world_size} ranks on several hosts, but rank 0's host is not known",
            "expected MASTER_ADDR, SLURM's node list, or train.attach.host",
            "set train.attach.host to the name of the host that runs rank 0",
        )
    return f"{host}:{config.options(AttachOptions).port}"


def _open_gate(address: str, token: str, world_size: int) -> Gate:
    host, _, port = address.rpartition(":")
    try:
        return Gate(host, int(port), token, world_size)
    except OSError as error:
        raise UsageError(
            f"rank 0 cannot listen on {address} of host {socket.gethostname()}: {error.strerror or error}",
            "expected an address of this host and a free port",
            "set train.attach.host and train.attach.port; another job here may have the port",
        ) from None


def _environment() -> dict[str, str]:
    """Return the variables of this process for a rank's process: user code may print them, so they contain
    no secret.
    """
    kept = {name: value for name, value in os.environ.items() if name != JOB_TOKEN_VARIABLE}
    return {**kept, "PYTHONPATH": python_path()}


def _follow(config: TrainConfig, place: RankEnvironment, address: str, token: str) -> int:
    """The whole life of a process that is not rank 0's. -> the job's exit code."""
    until_seconds = time.monotonic() + config.watch.start_timeout_seconds
    try:
        connection = call_gate(address, token, place.rank, until_seconds)
    except (OSError, ProtocolError) as error:
        what = f"rank {place.rank} on host {socket.gethostname()} found no rank 0 at {address} within "
        limit = f"train.watch.start_timeout_seconds = {config.watch.start_timeout_seconds:g}"
        line = (
            f"{what}{limit}: {error}; start rank 0, let this host reach that port, or set train.attach.host and "
            "train.attach.port"
        )
        return print_error(TrainingError.exit_code, line)
    _pass_signals_on(connection)
    keeping: threading.Thread | None = None
    begun = ""
    while isinstance(message := connection.receive(), Begin | Ended):
        if isinstance(message, Ended):
            _join(keeping)
            return print_error(message.exit_code, message.line) if message.exit_code else 0
        if message.nonce != begun:
            begun = message.nonce
            _join(keeping)
            watchdog = {ADDRESS_VARIABLE: message.address, TOKEN_VARIABLE: proof_of(token, "watchdog", begun)}
            # Its children are killed with the thread that started them: it lives until its rank has ended.
            arguments = (connection, place, _environment() | watchdog)
            keeping = threading.Thread(target=_keep, args=arguments, name="attached-rank", daemon=True)
            keeping.start()
    _join(keeping)
    return print_error(TrainingError.exit_code, f"the process of rank 0 at {address} has ended, so the job has ended")


def _keep(connection: Connection, place: RankEnvironment, environment: dict[str, str]) -> None:
    try:
        keep_rank(place, environment)
    except (OSError, ProtocolError) as error:
        host, address = socket.gethostname(), environment[ADDRESS_VARIABLE]
        with suppress(OSError):
            connection.send(Stop(f"rank {place.rank} on host {host} cannot call its driver at {address}: {error}"))


def _join(keeping: threading.Thread | None) -> None:
    # The rank learns of the end from the watchdog, or that its connection is closed. Past this it is killed with us.
    if keeping is not None:
        keeping.join(RANK_EXIT_SECONDS)


def _pass_signals_on(connection: Connection) -> None:
    """A scheduler may ask any of the processes to end: rank 0's decides how, and the answer comes by the gate."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            connection.send(Stop())

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)


ATTACH = Launcher(
    launch_attach,
    check=check_world_size,
    ranks_here=_ranks_here,
    starts_again=False,
    started_by_others=True,
    starts_helpers=False,
)
