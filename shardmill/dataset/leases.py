"""Leases record who works with a dataset: small files that their holder renews and that expire if it dies.

Two rules stand on them. `gc` deletes nothing while a writer works, because no manifest names a writer's files yet; and
it keeps the files of a version that a reader has leased. Each side first writes its own lease and then looks for the
other's, so of two that start at once at least one sees the other. A writer whose lease has lapsed may be suspended and
continue at any time: the commit keeps it out (see `shardmill.dataset.commit.publish`). It renews its lease no more, but
a request that it had sent may arrive late: a lease that lapsed once and looks live proves nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from shardmill.errors import CommitConflict, ShardmillError, StorageError
from shardmill.storage import Store

LEASES = "leases"
TTL_SECONDS = 900.0
"""A lease that was not renewed for so long has lapsed: its holder was killed, or is suspended."""

_RENEWALS_PER_TTL = 4
_PATIENCE_SECONDS = 10.0


class LeaseKind(StrEnum):
    """The activity of a lease's holder."""

    WRITER = "writer"
    READER = "reader"
    GC = "gc"


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as another process finds it."""

    path: str
    kind: LeaseKind
    holder: str
    """The command, its run, host and process, for people."""
    version: int | None
    """The version that a reader needs; None for the other kinds."""
    age_seconds: float
    """Since it was last renewed."""
    ttl_seconds: float
    """Lifetime set by the holder: the lease expires so long after its last renewal."""
    host: str
    process: int
    """The holder's; empty and 0 if they are not known."""

    @property
    def is_live(self) -> bool:
        return self.age_seconds <= self.ttl_seconds


def _wall_clock() -> float:
    """A monotonic clock stops while a machine is suspended."""
    return time.time()


@dataclass(frozen=True, slots=True)
class Clock:
    """What tells a holder the time, and lets it wait."""

    now: Callable[[], float] = _wall_clock
    wait: Callable[[threading.Event, float], bool] = threading.Event.wait


class HeldLease:
    """This process's own lease; a thread renews it."""

    def __init__(self, store: Store, kind: LeaseKind, body: bytes, ttl_seconds: float, clock: Clock) -> None:
        self.path = f"{LEASES}/{kind}-{secrets.token_hex(8)}.json"
        self._store = store
        self._kind = kind
        self._body = body
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._renewed: float | None = None
        self._longest_gap_seconds = 0.0
        self._ended = threading.Event()
        self.renew()
        self._renewer = threading.Thread(target=self._renew_until_ended, name="shardmill-lease", daemon=True)
        self._renewer.start()

    def check(self) -> None:
        """Raise CommitConflict (exit 6) if the lease may have lapsed at any time: what it protected may be gone.

        A renewal does not make up for that: `gc` may have worked between the two.
        """
        self._note_gap()
        if self._longest_gap_seconds > self._ttl_seconds:
            raise CommitConflict(
                f"the lease {self.path} of {self._store.uri} was not renewed for {self._longest_gap_seconds:.0f} s",
                f"expected a renewal within {self._ttl_seconds:.0f} s; nothing was published",
                "this process was suspended or lost its storage; run it again: finished work is kept",
            )

    def renew(self) -> float:
        """Write the lease again; returns the time by the store's clock, in seconds since the epoch.

        Raises CommitConflict if it has lapsed, unless it is a reader's: that keeps what has not expired meanwhile.
        """
        if self._kind is not LeaseKind.READER:
            self.check()
        began = self._clock.now()
        self._store.put(self.path, self._body)
        self._note_gap()
        self._renewed = began
        stored = self._store.stat(self.path)
        return stored.mtime_ns / 1e9 if stored is not None else began

    def release(self) -> None:
        """Take the lease away; a store that refuses leaves it to lapse."""
        self._ended.set()
        # A renewal under way would bring the file back.
        self._renewer.join(_PATIENCE_SECONDS)
        with suppress(ShardmillError):
            self._store.delete(self.path)

    def _note_gap(self) -> None:
        if self._renewed is not None:
            self._longest_gap_seconds = max(self._longest_gap_seconds, self._clock.now() - self._renewed)

    def _renew_until_ended(self) -> None:
        while not self._clock.wait(self._ended, self._ttl_seconds / _RENEWALS_PER_TTL):
            try:
                self.renew()
            except CommitConflict:
                return
            except ShardmillError:
                # A store that fails for a moment is asked again; one that fails for longer is noticed by `check`.
                continue


@contextmanager
def writing(
    store: Store, purpose: str, *, ttl_seconds: float = TTL_SECONDS, clock: Clock | None = None
) -> Iterator[HeldLease]:
    """A writer's lease around units and their commit, which is given its `check`.

    Raises CommitConflict (exit 6) if `gc` is deleting.
    """
    with _held(store, LeaseKind.WRITER, purpose, ttl_seconds, clock=clock) as lease:
        _refuse_beside(store, lease, list_leases(store, lease.renew()), {LeaseKind.GC})
        yield lease


@contextmanager
def reading(
    store: Store, version: int, purpose: str, *, ttl_seconds: float = TTL_SECONDS
) -> Iterator[HeldLease | None]:
    """A reader's lease on one version: `gc` keeps its files. Check inside that they are there, for it may have expired.

    None if the store cannot be written to: such a reader has no more than the versions' retention.
    """
    with ExitStack() as stack:
        lease = None
        with suppress(StorageError):
            lease = stack.enter_context(_held(store, LeaseKind.READER, purpose, ttl_seconds, version))
        yield lease


class Collector:
    """`gc` at work: its lease, and what it has seen of the others'."""

    def __init__(self, store: Store, lease: HeldLease) -> None:
        self.lease = lease
        self._store = store
        self.leased_versions: frozenset[int] = frozenset()
        """Versions that readers need, at the last look."""
        self.fenced: frozenset[str] = frozenset()
        """Leases of writers that were killed, or are suspended: `gc` must commit before it deletes."""

    def look(self) -> float:
        """Look for the others; returns the time by the store's clock. Raises CommitConflict (exit 6) if one is at work.

        A writer that was found lapsed once is fenced, whatever its lease looks like at the next look: the renewal may
        have been sent before the writer was suspended. If it looks live then, the writer is back, and goes first.
        """
        leases = list_leases(self._store, now := self.lease.renew())
        _refuse_beside(self._store, self.lease, leases, {LeaseKind.WRITER, LeaseKind.GC})
        self.fenced |= lapsed_writers(leases)
        self.leased_versions = leased_versions(leases)
        return now


@contextmanager
def collecting(store: Store, purpose: str) -> Iterator[Collector]:
    """The lease of `gc`. Raises CommitConflict (exit 6) naming a writer or another `gc` that is at work."""
    with _held(store, LeaseKind.GC, purpose, TTL_SECONDS) as lease:
        collector = Collector(store, lease)
        collector.look()
        yield collector


@contextmanager
def alone(
    store: Store, purpose: str, *, ttl_seconds: float, on_wait: Callable[[str], object], clock: Clock | None = None
) -> Iterator[None]:
    """For the one process that may write below the root of `store`. Raises CommitConflict (exit 6) naming another.

    One of another host may have been killed: its lease is waited for until it lapses, or is renewed.
    """
    clock = clock or Clock()
    with _held(store, LeaseKind.WRITER, purpose, ttl_seconds, clock=clock) as lease:
        first_renewed: dict[str, float] = {}
        while others := _that_may_live(list_leases(store, now := lease.renew()), lease):
            for other in others:
                renewed = now - other.age_seconds
                if _lives_here(other) or renewed > first_renewed.get(other.path, renewed):
                    _refuse_beside(store, lease, [other], {LeaseKind.WRITER})
                if not first_renewed:
                    on_wait(f"{other.holder} may be at work: its lease is watched for {ttl_seconds:g} s at most")
                first_renewed.setdefault(other.path, renewed)
            clock.wait(threading.Event(), 1.0)
        yield


def _that_may_live(leases: Iterable[Lease], own: HeldLease) -> list[Lease]:
    return [each for each in leases if each.is_live and each.path != own.path and _lives_here(each) is not False]


def _lives_here(lease: Lease) -> bool | None:
    """Whether its holder, a process of this host, runs; None for one of another host."""
    return os.path.exists(f"/proc/{lease.process}") if lease.host == socket.gethostname() else None


def leased_versions(leases: Iterable[Lease]) -> frozenset[int]:
    """The versions that readers need."""
    return frozenset(each.version for each in leases if each.is_live and each.version is not None)


def lapsed_writers(leases: Iterable[Lease]) -> frozenset[str]:
    """Leases of writers that were killed, or are suspended."""
    return frozenset(each.path for each in leases if each.kind is LeaseKind.WRITER and not each.is_live)


def list_leases(store: Store, now: float) -> list[Lease]:
    """Every lease of a dataset, at the time `now` of the store's clock. A damaged one counts as a writer's."""
    found = []
    for file in store.list(LEASES):
        try:
            body = json.loads(store.read(file.path))
            kind, holder, version = LeaseKind(body["kind"]), str(body["holder"]), body["version"]
            ttl_seconds = float(body["ttl_seconds"])
            host, process = str(body.get("host", "")), int(body.get("process", 0))
        except FileNotFoundError:
            continue  # released meanwhile
        except (ValueError, KeyError, TypeError):
            kind, holder, version, ttl_seconds = LeaseKind.WRITER, "an unknown process", None, TTL_SECONDS
            host, process = "", 0
        age_seconds = now - file.mtime_ns / 1e9
        found.append(Lease(file.path, kind, holder, version, age_seconds, ttl_seconds, host, process))
    return found


@contextmanager
def _held(
    store: Store, kind: LeaseKind, purpose: str, ttl_seconds: float, version: int | None = None,
    clock: Clock | None = None,
) -> Iterator[HeldLease]:  # fmt: skip
    host, process = socket.gethostname(), os.getpid()
    holder = f"{purpose} on {host}, process {process}"
    body = {
        "kind": kind, "holder": holder, "version": version, "ttl_seconds": ttl_seconds, "host": host, "process": process
    }  # fmt: skip
    lease = HeldLease(store, kind, json.dumps(body).encode(), ttl_seconds, clock or Clock())
    try:
        yield lease
    finally:
        lease.release()


def _refuse_beside(store: Store, own: HeldLease, leases: Iterable[Lease], kinds: set[LeaseKind]) -> None:
    for other in leases:
        if other.is_live and other.kind in kinds and other.path != own.path:
            raise CommitConflict(
                f"{other.holder} is at work in {store.uri} ({other.kind})",
                "expected no other process; nothing was changed",
                f"run this again when it has ended; if it was killed, its lease {other.path} lapses "
                f"{other.ttl_seconds:g} s after its last renewal, {other.age_seconds:.0f} s ago",
            )
