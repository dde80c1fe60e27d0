"""Every order in which the requests of two writers and a collector can reach a store, breadth first.

The processes are the real functions over a store in memory. A process depends on nothing but the answers to its
requests, so it is stopped and continued by being called again with those that it has had. Besides, one of them may be
suspended for longer than its lease lives, also with a renewal under way that arrives later. Only one thing is left out:
`gc` that is suspended within a request to delete (docs/dataset-format.md).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from shardmill.dataset import leases
from shardmill.dataset import manifest as manifests
from shardmill.dataset.commit import publish
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.index import INDEXES, write_index
from shardmill.dataset.leases import LEASES, TTL_SECONDS, Clock, Collector, HeldLease, LeaseKind, list_leases, writing
from shardmill.dataset.maintenance import gc
from shardmill.dataset.maintenance.gc import Retention, collect_garbage
from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.dataset.manifest import MANIFESTS, child_of, parse_manifest
from shardmill.dataset.versions import latest_version, read_manifest
from shardmill.errors import ShardmillError
from shardmill.storage import Store, StoredFile
from shardmill.stores import open_store
from shardmill.values import ShardInfo
from tests.lab.datasets import make_dataset
from tests.lab.scale import exhaustive

pytestmark = pytest.mark.drill

NOW = 1_800_000_000.0
URI = "memory"
MAX_SUSPENDED = 1
"""Of the processes."""

Request = tuple[str, str, bytes]
"""Method, path, and data if there are any."""


@dataclass(frozen=True)
class Answer:
    value: Any


@dataclass(frozen=True)
class Suspended:
    """For longer than the lease lives."""

    is_renewing: bool
    """While a renewal was under way, which is still to arrive."""


@dataclass(frozen=True)
class Renews:
    """The renewer's turn."""


@dataclass(frozen=True)
class Arrives:
    """The renewal that was under way."""


class Stopped(BaseException):
    """Where a process waits for its next answer."""


class World(NamedTuple):
    """What the store holds, and how far the processes are."""

    files: frozenset[tuple[str, bytes]]
    lapsed: frozenset[str]
    """Leases that look as if their holders were killed."""
    places: tuple[int, ...]
    """Of each process, in the tree of its histories."""


class Process:
    """A function and its store, which answers from a history and then from `live`, until this gives no answer."""

    uri, local_root, deadline_seconds = URI, None, 0.0

    def __init__(self, name: str, function: Callable[[Store], object]) -> None:
        self.name = name
        self.function = function
        # The tree of histories: of each place the one before, the last event, all that were no answers, and the request
        # that waits there.
        self.before: list[tuple[int, object]] = [(0, None)]
        self.after: dict[tuple[int, object], int] = {}
        self.suffered: list[tuple[object, ...]] = [()]
        self.requests: dict[int, Request | None] = {}
        self.num_renewals: dict[int, int] = {}
        """Requests that the renewer sends when it is its turn at a place."""
        self.lease: HeldLease | None = None
        self.lease_file: tuple[str, bytes] | None = None

    def place_after(self, place: int, event: object) -> int:
        if (place, event) not in self.after:
            self.after[place, event] = len(self.before)
            self.before.append((place, event))
            mine = () if isinstance(event, Answer) else (event,)
            self.suffered.append((*self.suffered[place], *mine))
        return self.after[place, event]

    def run(self, place: int, live: Callable[[Request], Answer | None]) -> None:
        """Call the function again, and let it go on. `requests` learns what waits at each place."""
        history: deque[Any] = deque()
        while place:
            place, event = self.before[place]
            history.appendleft(event)
        self._history, self._place, self._live = history, 0, live
        self._is_stopped, self._renews, self.skew_seconds = False, 0, 0.0
        try:
            self.function(self)  # pyright: ignore[reportArgumentType]
        except ShardmillError:
            pass
        except Stopped:
            return
        self.requests[self._place] = None

    def _ask(self, method: str, path: str, data: bytes = b"") -> Any:
        if self._renews:
            return self._of_renewer(method)
        while not self._is_stopped and self._history and not isinstance(self._history[0], Answer):
            self._happen()
        if self._is_stopped:
            # What hears of the stop asks for more: a lease is given back.
            raise Stopped
        if method == "put" and path.startswith(LEASES):
            self.lease_file = (path, data)
        request = (method, path, data)
        if self._history:
            event = self._history.popleft()
        else:
            self.requests[self._place] = request
            event = self._live(request)
        if event is None:
            self._is_stopped = True
            raise Stopped
        self._place = self.place_after(self._place, event)
        if event.value is FileNotFoundError:
            raise FileNotFoundError(path)
        return event.value

    def _happen(self) -> None:
        event = self._history.popleft()
        self._place = self.place_after(self._place, event)
        if event == Suspended(is_renewing=False):
            self.skew_seconds += 2 * TTL_SECONDS
        elif not isinstance(event, Arrives):
            assert self.lease is not None
            # One round of the renewer's loop.
            self._renews, self._is_late = 1, isinstance(event, Suspended)
            self.num_renewals[self._place] = 0
            self.lease._renew_until_ended()
            self._renews = 0

    def _of_renewer(self, method: str) -> None:
        if method == "put":
            self.num_renewals[self._place] += 1
            self.skew_seconds += 2 * TTL_SECONDS * self._is_late

    def now(self) -> float:
        return NOW + self.skew_seconds

    def wait(self, *_: object) -> bool:
        """For the renewer's next turn: after one, the round is over."""
        self._renews += 1
        return self._renews > 2

    def read(self, path: str) -> bytes:
        return self._ask("read", path)

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        return self._ask("read", path)[start : start + num_bytes]

    def put(self, path: str, data: bytes) -> None:
        self._ask("put", path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        return self._ask("put_if_absent", path, data)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        return iter(self._ask("list", prefix) or ())

    def list_unpublished(self, prefix: str) -> Iterator[StoredFile]:
        return iter(())

    def stat(self, path: str) -> StoredFile | None:
        return self._ask("stat", path)

    def delete(self, path: str) -> None:
        self._ask("delete", path)


class Search:
    """The worlds that a store and its processes can come to."""

    def __init__(
        self, base: dict[str, bytes], functions: dict[str, Callable[[Store], object]], *, is_atomic: bool
    ) -> None:
        self.base = base
        self.is_atomic = is_atomic
        self.processes = [Process(name, function) for name, function in functions.items()]
        self.running = self.processes[0]
        self.num_worlds = 0
        self._named: dict[bytes, tuple[int, frozenset[str], frozenset[int]]] = {}

    def first_loss(self) -> list[str] | None:
        """-> what led to the first world in which a version names a file that is gone; None if there is none."""
        start = World(frozenset(), frozenset(), (0,) * len(self.processes))
        came_from: dict[World, tuple[World, str] | None] = {start: None}
        waiting = deque([start])
        while waiting:
            world = waiting.popleft()
            for what, after in self._next_worlds(world):
                if after not in came_from:
                    came_from[after] = (world, what)
                    waiting.append(after)
                    if after.files != world.files and self._is_lossy(dict(after.files)):
                        return self._way_to(after, came_from)
        self.num_worlds = len(came_from)
        return None

    def _way_to(self, world: World, came_from: dict[World, tuple[World, str] | None]) -> list[str]:
        way = []
        while (step := came_from[world]) is not None:
            world, what = step
            way.append(what)
        return way[::-1]

    def _next_worlds(self, world: World) -> Iterator[tuple[str, World]]:
        for number in range(len(self.processes)):
            yield from self._next_of(world, number)

    def _next_of(self, world: World, number: int) -> Iterator[tuple[str, World]]:
        process, place = self.processes[number], world.places[number]
        lease, suffered = process.lease_file, process.suffered[place]

        def come(event: object, files: frozenset[tuple[str, bytes]], lapsed: frozenset[str]) -> tuple[str, World]:
            after = process.place_after(place, event)
            places = (*world.places[:number], after, *world.places[number + 1 :])
            process.requests[after] = process.requests[place]
            return f"{process.name}: {event}", World(files, lapsed, places)

        if suffered == (Suspended(True),):
            assert lease is not None
            yield come(Arrives(), _with(world.files, *lease), world.lapsed - {lease[0]})
            return
        if process.requests.get(place, ...) is None:
            return
        yield self._step(world, number)
        if place == 0 or lease is None:
            return
        if not suffered and lease in world.files and self._num_suspended(world) < MAX_SUSPENDED:
            for is_renewing in (False, True):
                yield come(Suspended(is_renewing), world.files, world.lapsed | {lease[0]})
        elif suffered == (Suspended(False),):
            after = process.place_after(place, Renews())
            if after not in process.num_renewals:
                self._run(process, after, lambda request: None)
            if process.num_renewals[after]:
                yield come(Renews(), _with(world.files, *lease), world.lapsed - {lease[0]})

    def _num_suspended(self, world: World) -> int:
        return sum(bool(process.suffered[place]) for process, place in zip(self.processes, world.places, strict=True))

    def _step(self, world: World, number: int) -> tuple[str, World]:
        """The request that waits, and what follows up to the next one that another process could notice."""
        process, place, files = self.processes[number], world.places[number], dict(world.files)
        lapsed, asked = set(world.lapsed), list[Request]()

        def answer(request: Request) -> Answer | None:
            if asked and _is_seen(request, process):
                return None
            asked.append(request)
            return self._answer(request, files, lapsed)

        while (request := process.requests.get(place)) is not None:
            if (event := answer(request)) is None:
                break
            place = process.place_after(place, event)
        if place not in process.requests:
            self._run(process, place, answer)
            place = process._place
        places = (*world.places[:number], place, *world.places[number + 1 :])
        what = f"{process.name}: {' '.join(asked[0][:2])}"
        return what, World(frozenset(files.items()), frozenset(lapsed & files.keys()), places)

    def _run(self, process: Process, place: int, live: Callable[[Request], Answer | None]) -> None:
        self.running = process
        process.run(place, live)

    def _answer(self, request: Request, files: dict[str, bytes], lapsed: set[str]) -> Answer:
        method, path, data = request
        if method == "read":
            return Answer(files.get(path, self.base.get(path)) or FileNotFoundError)
        if method == "list":
            names = sorted(
                name for name in {**self.base, **files} if name.startswith(f"{path}/") and self._has(name, files)
            )
            return Answer(tuple(self._stat(name, files, lapsed) for name in names))
        if method == "stat":
            return Answer(self._stat(path, files, lapsed) if self._has(path, files) else None)
        if method == "delete":
            files[path] = b""
            if path not in self.base:
                del files[path]
        elif method == "put" or not (self.is_atomic and self._has(path, files)):
            files[path] = data
            lapsed.discard(path)
            return Answer(True)
        return Answer(False)

    def _has(self, path: str, files: dict[str, bytes]) -> bool:
        """Deleted files of the base are there without a byte."""
        return bool(files.get(path, self.base.get(path)))

    def _stat(self, path: str, files: dict[str, bytes], lapsed: set[str]) -> StoredFile:
        age_seconds = 0.0 if path.startswith(LEASES) else 10.0
        if path in lapsed:
            age_seconds = 2 * TTL_SECONDS
        return StoredFile(path, len(files.get(path, self.base.get(path, b""))), int((NOW - age_seconds) * 1e9))

    def _is_lossy(self, files: dict[str, bytes]) -> bool:
        versions = [
            self._names(path, data) for path, data in {**self.base, **files}.items() if path.startswith(MANIFESTS)
        ]
        _, _, expired = max(versions)
        return any(
            version not in expired and not all(self._has(path, files) for path in named)
            for version, named, _ in versions
        )

    def _names(self, path: str, data: bytes) -> tuple[int, frozenset[str], frozenset[int]]:
        if data not in self._named:
            version = int(path[-13:-5])
            manifest = parse_manifest(data, version, URI)
            segments = (*manifest.index_segments, *manifest.ledger_segments)
            expired = frozenset(v for v in range(1, version) if manifest.has_expired(v))
            self._named[data] = version, frozenset(segment.path for segment in segments), expired
        return self._named[data]


def _with(files: frozenset[tuple[str, bytes]], path: str, data: bytes) -> frozenset[tuple[str, bytes]]:
    return frozenset({**dict(files), path: data}.items())


def _is_seen(request: Request, process: Process) -> bool:
    """Whether a step ends before it: that others come between it and the one before matters."""
    method, path, _ = request
    if method == "put":
        return path.startswith(INDEXES)
    if method == "list":
        return path in (LEASES, INDEXES) or (path == MANIFESTS and process.name == "two")
    return method == "put_if_absent"


# What a rule is without it.


class NoCheck(HeldLease):
    """A writer that does not look at its lease before the PUT, or a `gc` that does not before it deletes."""

    of_kind = LeaseKind.WRITER

    def check(self) -> None:
        if self._kind is not self.of_kind:
            super().check()


class NoCheckOfGc(NoCheck):
    of_kind = LeaseKind.GC


class LooksAgain(Collector):
    """At the second look it has forgotten the first one, and refuses nobody."""

    def look(self) -> float:
        if not hasattr(self, "has_looked"):
            self.has_looked = True
            return super().look()
        now = self.lease.renew()
        self.fenced = leases.lapsed_writers(list_leases(self._store, now))
        return now


def refuses_none_beside(kind: LeaseKind) -> Callable[..., None]:
    real = leases._refuse_beside

    def refuse_beside(store: Store, own: HeldLease, found: list, kinds: set[LeaseKind]) -> None:
        if own._kind is not kind:
            real(store, own, found, kinds)

    return refuse_beside


CHECK = "a writer checks its lease before the PUT"
RULES: dict[str, dict[str, object]] = {
    "all": {},
    CHECK: {"HeldLease": NoCheck},
    "gc checks its lease before it commits and deletes": {"HeldLease": NoCheckOfGc},
    "gc refuses to begin beside a writer": {"_refuse_beside": refuses_none_beside(LeaseKind.GC)},
    "a writer refuses to begin beside gc": {"_refuse_beside": refuses_none_beside(LeaseKind.WRITER)},
    "gc commits if a writer's lease has lapsed": {"lapsed_writers": lambda found: frozenset()},
    "gc looks twice, and remembers": {"Collector": LooksAgain},
    "of two manifests of one number one appears": {},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], tuple[ShardInfo, ...]]:
    """The files of a dataset of two versions, and their shards."""
    root = Path(make_dataset(tmp_path_factory.mktemp("base"), num_images=12, formats=("parquet",)))
    store, dataset = open_store(root), open_dataset(str(root))
    index = write_index(store, dataset.shards[1:] + dataset.shards[:1])
    publish(store, child_of(dataset.manifest, "compact", "base", content=dataset.manifest, index_segments=index))
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }, dataset.shards


@pytest.fixture
def search(
    base: tuple[dict[str, bytes], tuple[ShardInfo, ...]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, int | None], Search]:
    def make(rule: str, names: str, keep: int | None) -> Search:
        files, shards = base

        def rewrite(store: Store) -> None:
            """What every writer does that writes files."""
            with writing(store, "etl") as lease:
                latest = read_manifest(store, latest_version(store))
                index = write_index(store, tuple(reversed(shards)))
                publish(store, child_of(latest, "compact", "one", content=latest, index_segments=index), lease.check)

        functions: dict[str, Callable[[Store], object]] = {
            "one": rewrite,
            "two": lambda store: roll_back(store, 1, "two"),
            "gc": lambda store: collect_garbage(store, Retention(keep, 0.0), "gc"),
        }
        functions = {name: functions[name] for name in names.split()}
        search = Search(files, functions, is_atomic="of two manifests" not in rule)

        def held(*arguments: Any) -> HeldLease:
            """Known to its process while it is made."""
            lease = search.running.lease = lease_type.__new__(lease_type)
            lease.__init__(*arguments)
            return lease

        # The renewer's turns are events.
        no_thread = lambda **_: SimpleNamespace(start=lambda: None, join=lambda _: None)  # noqa: E731
        for name, value in RULES[rule].items():
            monkeypatch.setattr(leases, name, value)
        lease_type = leases.HeldLease
        monkeypatch.setattr(leases, "HeldLease", held)
        monkeypatch.setattr(leases, "Clock", lambda: Clock(search.running.now, search.running.wait))
        monkeypatch.setattr(leases, "threading", SimpleNamespace(Event=threading.Event, Thread=no_thread))
        monkeypatch.setattr(leases, "secrets", SimpleNamespace(token_hex=lambda _: search.running.name))
        monkeypatch.setattr(manifests, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=search.running.name)))
        monkeypatch.setattr(manifests, "datetime", SimpleNamespace(now=lambda _: datetime(2027, 1, 1, tzinfo=UTC)))
        monkeypatch.setattr(gc, "lapsed_writers", leases.lapsed_writers)
        monkeypatch.setattr(gc, "_NUM_DELETERS", 1)
        return search

    return make


MakeSearch = Callable[..., Search]


@pytest.mark.parametrize(
    ("names", "keep"),
    [("one gc", None), ("one gc", 1), ("two gc", 1), ("one two gc", 1), exhaustive("one two gc", None)],
)
def test_no_order_of_requests_leaves_a_version_without_its_files(search: MakeSearch, names: str, keep: int | None):
    """`one` writes files, `two` rolls back to a version that `gc` may expire."""
    found = search("all", names, keep)
    assert found.first_loss() is None
    assert found.num_worlds > 500


@pytest.mark.parametrize("rule", list(RULES)[1:])
def test_without_any_one_rule_some_order_does(search: MakeSearch, rule: str):
    # The check matters to who looks for the newest version late, as a rollback does.
    way = search(rule, *(("two gc", 1) if rule == CHECK else ("one gc", None))).first_loss()
    assert way is not None
    print("\n".join(way))
