"""Messages between the driver, its ranks and their agents: one frozen value per message.

`train.launching.connection` sends them, one line of JSON each, and tells them apart by `kind`. Driver, agents and ranks
run the same code, so a message may change with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardmill.errors import ERROR_BY_EXIT_CODE, ShardmillError
from shardmill.jobs.observer import FieldValue
from train.contracts.activities import Activity
from train.contracts.values import StepReport, TrainResult

Lane = Literal["main", "aside"]
"""Exchanges have the same order on all ranks in each of them; each is used by one thread of a rank."""


# The handshake, before either side knows who the other is.


@dataclass(frozen=True, slots=True)
class Challenge:
    """Driver to a peer that has just connected."""

    nonce: str
    kind: Literal["challenge"] = "challenge"


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a rank, of its agent (it started the rank and sees its exit), or to the gate of rank 0."""

    role: Literal["rank", "agent", "attached"]
    rank: int
    host: str
    pid: int
    nonce: str
    proof: str
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, slots=True)
class Welcome:
    """The driver's answer: its own proof, and what to do."""

    proof: str
    task_json: str
    """A `train.contracts.task.WorkerTask`; the wire does not look into it."""
    worker: str
    """Dotted name `package.module:function` of the function that does it."""
    kind: Literal["welcome"] = "welcome"


# A rank to its driver.


@dataclass(frozen=True, slots=True)
class Timed:
    """An activity of one rank that repeats, so far; the first `UNTIMED` ones are left out."""

    what: str
    num_finished: int = 0
    longest_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Still alive, and what the rank's main thread does: `Reporter.doing`."""

    num_calls: int = 0
    """Number of `Reporter.doing` calls so far: a rank makes progress only if it grows."""
    activity: Activity = field(default_factory=Activity)
    timed: tuple[Timed, ...] = ()
    """Durations of this rank's repeated activities."""
    kind: Literal["heartbeat"] = "heartbeat"


@dataclass(frozen=True, slots=True)
class Step:
    """`Reporter.step`."""

    report: StepReport
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class Event:
    """`Reporter.event`."""

    name: str
    fields: dict[str, FieldValue] = field(default_factory=dict)
    kind: Literal["event"] = "event"


@dataclass(frozen=True, slots=True)
class Finished:
    """The rank's function returned. It is the last message before the connection closes."""

    result: TrainResult
    kind: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True)
class Failure:
    """The rank's function raised."""

    error_type: str
    what: str
    """The message; of a ShardmillError its first part, the others follow."""
    expected: str
    fix: str
    exit_code: int
    """Exit code of a ShardmillError; 5 for other errors."""
    collective: bool
    """True if the error only says that another rank went away."""
    traceback: str
    """The tail of it, oldest call first."""
    place: str = ""
    """`file:line` of the user's own code that was being run, else of what raised."""
    kind: Literal["failure"] = "failure"

    @property
    def is_ours(self) -> bool:
        """Whether it contains all that the user needs."""
        return self.error_type in {kind.__name__ for kind in ERROR_BY_EXIT_CODE.values()}

    def as_raised(self, where: str = "") -> ShardmillError:
        """One of ours once more, in this process."""
        return ERROR_BY_EXIT_CODE[self.exit_code](f"{self.what}{where}", self.expected, self.fix)

    def __str__(self) -> str:
        return f"{self.error_type}: {self.what}{f' ({self.place})' if self.place else ''}"


# Ranks to each other, by way of the driver.


@dataclass(frozen=True, slots=True)
class Exchange:
    """The contribution of this rank."""

    data_hex: str
    lane: Lane = "main"
    kind: Literal["exchange"] = "exchange"


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The driver's answer to every rank, once all have given theirs."""

    data_hex_of_ranks: tuple[str, ...]
    lane: Lane = "main"
    kind: Literal["exchanged"] = "exchanged"


# The end: agreed after SIGTERM, or at once.


@dataclass(frozen=True, slots=True)
class Hold:
    """Driver to rank: SIGTERM has come; begin no other step, and say which one was begun last."""

    kind: Literal["hold"] = "hold"


@dataclass(frozen=True, slots=True)
class Begun:
    """The rank's answer to `Hold`."""

    global_step: int
    """-1 for none."""
    kind: Literal["begun"] = "begun"


@dataclass(frozen=True, slots=True)
class StopAfter:
    """Driver to every rank, once all have answered: the last step that any of them has begun."""

    global_step: int
    kind: Literal["stop_after"] = "stop_after"


@dataclass(frozen=True, slots=True)
class Stopped:
    """The rank has stopped, together with all others. Like `Finished` its last message."""

    what: str
    """Progress of the rank, for people."""
    kind: Literal["stopped"] = "stopped"


@dataclass(frozen=True, slots=True)
class Abort:
    """Driver to rank or agent: end at once."""

    kind: Literal["abort"] = "abort"


# An agent, which started the rank's process, to the driver.


@dataclass(frozen=True, slots=True)
class Output:
    """An agent read whole lines of what its rank's process printed."""

    text: str
    kind: Literal["output"] = "output"


@dataclass(frozen=True, slots=True)
class RankExit:
    """An agent saw its rank's process end."""

    returncode: int
    """Return code as in `subprocess`: minus the signal's number if a signal ended it."""
    output_tail: str
    """The last lines that the process wrote to stdout and stderr."""
    kind: Literal["rank_exit"] = "rank_exit"


# The processes of an attached job and the gate of rank 0.


@dataclass(frozen=True, slots=True)
class Admitted:
    """Rank 0's answer to a process that has proved the job's token: its own proof."""

    proof: str
    kind: Literal["admitted"] = "admitted"


@dataclass(frozen=True, slots=True)
class Begin:
    """Start your rank: the watchdog listens. Its token follows from the job's token and `nonce`."""

    address: str
    nonce: str
    kind: Literal["begin"] = "begin"


@dataclass(frozen=True, slots=True)
class Stop:
    """A process to rank 0's: what has ended it, or will; that ends the whole job."""

    why: str = ""
    """Empty if a signal has asked it to end."""
    kind: Literal["stop"] = "stop"


@dataclass(frozen=True, slots=True)
class Ended:
    """Rank 0's command has ended, and so do all others."""

    exit_code: int
    line: str
    """Why, for people; empty with exit code 0."""
    kind: Literal["ended"] = "ended"


Message = (
    Challenge
    | Hello
    | Welcome
    | Heartbeat
    | Step
    | Event
    | Finished
    | Failure
    | Exchange
    | Exchanged
    | Hold
    | Begun
    | StopAfter
    | Stopped
    | Abort
    | Output
    | RankExit
    | Admitted
    | Begin
    | Stop
    | Ended
)
