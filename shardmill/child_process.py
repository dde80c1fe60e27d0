"""A Python that this process starts and exchanges messages with: all that a parent and its child process here share.

The parent starts one that answers messages by `start_child`, and any other by `start_python`. The main program of the
child calls `begin_child`, or `end_with_parent` if it has a session of its own, and then `own_pipes`. A message is two
lengths, a JSON header and raw bytes: nothing is unpickled. Linux ends the child with its parent, also one that is
stopped, which a closed pipe cannot end. Light: each Python worker of Spark's imports it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any, TypeAlias

END_SECONDS = 10.0
"""A child whose pipe is closed is about to end, or dumps its core first; after this it is killed."""

Wait: TypeAlias = "Callable[[select.poll], object]"
"""Returns when a pipe is ready; raises whatever says that its time is over."""


def _for_ever(pipe: select.poll) -> None:
    pipe.poll()


class ChildDied(Exception):
    """It ended before it answered: `status` as `subprocess` gives it; None if only its pipe was closed."""

    def __init__(self, status: int | None) -> None:
        self.status = status
        super().__init__("closes its pipe" if status is None else f"exit status {status}")


def start_python(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int | IO[bytes],
    stdout: int | IO[bytes] | None,
    stderr: int | IO[bytes] | None = None,
    own_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start this interpreter with these arguments, and behind them this process's id, with which the child ends.

    `own_session`: Ctrl-C at the terminal does not reach it, and `kill_session` ends all that it starts. Without it,
    Ctrl-C waits until the child has called `begin_child`: in the middle of its imports it would print a traceback.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, () if own_session else (signal.SIGINT,))
    try:
        return subprocess.Popen(
            [sys.executable, *arguments, str(os.getpid())],
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=own_session,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def calling(main: str, folder: str) -> tuple[str, ...]:
    """Arguments of Python to call `module:function`; modules are looked for in `folder` last.

    The working directory is in none of the paths, and ours come behind the interpreter's own. Imports make no garbage,
    and to look for it among what they made takes a sixth of their time.
    """
    module, _, function = main.partition(":")
    lines = (
        "import gc, sys",
        "gc.disable()",
        "sys.path.append(sys.argv[1])",
        f"from {module} import {function}",
        "gc.enable()",
        f"{function}()",
    )
    return "-P", "-c", "; ".join(lines), folder


@contextmanager
def pipes() -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Our ends and a child's of two pipes, in both the one for requests first.

    Inside, the child is started; on exit its ends are closed here, and ours as well if it did not start.
    """
    with ExitStack() as ours, ExitStack() as theirs:
        (their_requests, requests), (answers, their_answers) = os.pipe(), os.pipe()
        for stack, descriptors in ((ours, (requests, answers)), (theirs, (their_requests, their_answers))):
            for descriptor in descriptors:
                stack.callback(os.close, descriptor)
        yield (requests, answers), (their_requests, their_answers)
        ours.pop_all()


def start_child(arguments: Sequence[str], environment: Mapping[str, str]) -> ChildProcess:
    """Start this interpreter with these arguments as a child that answers messages."""
    with pipes() as ((requests, answers), (their_requests, their_answers)):
        process = start_python(arguments, environment, stdin=their_requests, stdout=their_answers)
    return ChildProcess(process.pid, requests, answers, lambda seconds: ended(process, seconds))


class ChildProcess:
    """The parent's ends of a child's two pipes. Not for several threads at once."""

    def __init__(self, process_id: int, requests: int, answers: int, end: Callable[[float], int | None]) -> None:
        """`end` gives it so many seconds to end by itself; -> its exit status, or None if it had to be killed."""
        self.process_id, self.requests, self.answers = process_id, requests, answers
        self._end: Callable[[float], int | None] | None = end
        # Most messages pass without a wait.
        os.set_blocking(requests, False)
        os.set_blocking(answers, False)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(answers, select.POLLIN)
        self._writable.register(requests, select.POLLOUT)

    def send(self, header: dict[str, Any], body: bytes = b"", wait: Wait = _for_ever) -> None:
        """Send a message. A child that has ended is noticed by `receive`."""
        try:
            for part in pack_message(header, body):
                left = memoryview(part)
                while left:
                    try:
                        left = left[os.write(self.requests, left) :]
                    except BlockingIOError:
                        wait(self._writable)
        except BrokenPipeError:
            pass

    def receive(self, wait: Wait = _for_ever) -> tuple[dict[str, Any], bytes]:
        """The next message: no byte beyond it is read, so that a pipe with another one stays readable.

        Raises ChildDied, and then the child is gone.
        """
        header_bytes, body_bytes = LENGTHS.unpack(self._read(LENGTHS.size, wait))
        message = self._read(header_bytes + body_bytes, wait)
        return json.loads(bytes(message[:header_bytes])), bytes(message[header_bytes:])

    def end(self) -> None:
        """End it now, unless it has ended."""
        self._ended(0.0)

    def _ended(self, seconds: float) -> int | None:
        if self._end is None:
            return None
        end, self._end = self._end, None
        status = end(seconds)
        os.close(self.requests)
        os.close(self.answers)
        # Their numbers will be those of other files.
        self.requests = self.answers = -1
        return status

    def _read(self, num_bytes: int, wait: Wait) -> memoryview:
        buffer = memoryview(bytearray(num_bytes))
        start = 0
        while start < num_bytes:
            try:
                num_read = os.readv(self.answers, [buffer[start:]])
            except BlockingIOError:
                wait(self._readable)
                continue
            if num_read == 0:
                raise ChildDied(self._ended(END_SECONDS))
            start += num_read
        return buffer


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit status if it ends within that time; else it is killed, and the answer None."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a child with a session of its own, and what it has started there, by SIGKILL: it ends stopped ones too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def begin_child() -> None:
    """In a child of its parent's session: the parent alone decides when it ends, and it ends with the parent.

    Ctrl-C and a scheduler's SIGTERM go to the whole group.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    end_with_parent()


def end_with_parent(exit_code: int = 1) -> None:
    """In a child: a closed pipe is seen between two messages only; the kernel's signal also ends one that hangs."""
    die_with_parent(int(sys.argv[-1]), exit_code)


def own_pipes() -> tuple[int, int]:
    """In a child: requests and answers; what a library prints on stdout goes to stderr, and not into an answer."""
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    return requests, answers


LENGTHS = struct.Struct("<IQ")
"""Bytes of the header and of the body, before both."""


def pack_message(header: dict[str, Any], body: bytes) -> tuple[bytes, bytes]:
    """Header and body, to be written one after the other: a large body is not copied."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(body)) + text, body


def read_message(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """The next message, or None if the other side closed its end, or died in the middle of one."""
    lengths = _read(pipe, LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header_bytes, body_bytes = LENGTHS.unpack(lengths)
    header, body = _read(pipe, header_bytes), _read(pipe, body_bytes)
    return (json.loads(header), body) if len(header) + len(body) == header_bytes + body_bytes else None


def _read(pipe: IO[bytes], num_bytes: int) -> bytes:
    """Fewer at the end; a pipe without a buffer gives what is there, time after time."""
    data = pipe.read(num_bytes)
    while len(data) < num_bytes and (more := pipe.read(num_bytes - len(data))):
        data += more
    return data


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent: int, exit_code: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the process `parent`, which started it, ends (prctl(2)).

    If it has ended already, this process ends at once, with `exit_code`.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it died before we asked
        os._exit(exit_code)


def adopt_orphans() -> None:
    """From now on, a process below this one whose parent ends becomes this one's own child (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
